"""Metrics of one model, as plain arrays that the hot path updates once per batch.

Names and meanings are Triton's where it has them (nv_inference_*). Every phase also has a
histogram, and time in the queue is split by cause. `scrape` renders them; docs/observability.md
lists them.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import slo
from penstock.config import SLO_OFF
from penstock.errors import (
    BackendFailed,
    Cancelled,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    PenstockError,
    QuotaExceeded,
)
from penstock.serving.custom_metrics import CustomMetrics
from penstock.serving.histogram import Histogram
from penstock.serving.model_gauges import NO_GAUGES, ModelGauges
from penstock.serving.response_counts import ResponseCounts

if TYPE_CHECKING:
    from penstock.config import ModelConfig
    from penstock.serving.latency_metrics import LatencyMetrics, LatencyRecord
    from penstock.serving.scrape import ScrapeLines
    from penstock.types import Request, Timings

PHASES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
# The two parts of `queue`: waiting for a full batch with an instance idle, and for an instance.
WAITS = ("queue_batch", "queue_instance")
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
# Why requests were refused: at arrival, and after queueing.
REFUSED_AT_ARRIVAL = (
    "queue_full", "predicted_late", "quota", "quarantined", "not_ready", "invalid", "too_large",
    "unsupported", "other",
)  # fmt: skip
REFUSED_LATER = ("queue_timeout", "dropped_late", "gave_up")
DEATHS = ("crash", "hang")
# Errors that are the server's fault, besides quotas: a client with a good request got no answer.
SERVER_FAULTS = (Overloaded, NotReady, BackendFailed, DeadlineExceeded)
# Tokens of a batch.
TOKEN_BUCKETS = tuple(64 << power for power in range(13))
# Labels of a sample.
Labels = Mapping[str, str]
# Seconds of waiting for a batch and for an instance.
Waits = tuple[float, float]
# Seconds; about 2.5 steps a decade from 50 µs to 30 s.
BUCKETS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# The lower edge of each bucket, and the upper edge of the last.
EDGES = (-math.inf, *BUCKETS, math.inf)


@dataclass(slots=True)
class BatchStatistics:
    """Total cost of batches of one size."""

    count: int = 0
    input_s: float = 0.0
    infer_s: float = 0.0
    output_s: float = 0.0

    def add(self, input_s: float, infer_s: float, output_s: float) -> None:
        self.count += 1
        self.input_s += input_s
        self.infer_s += infer_s
        self.output_s += output_s


@dataclass(frozen=True, slots=True)
class SloCount:
    """Requests that count for an objective of the SLO, and those that missed it."""

    objective: slo.Objective
    num_requests: int
    num_bad: int


class ModelMetrics:
    """Owned by the core's loop; `num_pending` is read from the model at scrape time."""

    def __init__(
        self,
        name: str,
        version: str,
        tags: Mapping[str, str] | None = None,
        slo_latency_s: float | None = None,
        objectives: Sequence[slo.Objective] = (),
    ) -> None:
        """`tags` are additional labels of its metrics; a slower answer than `slo_latency_s` is
        late. `objectives` are those of the SLO."""
        self.name = name
        self.version = version
        self.tags = dict(tags or {})
        self.slo_latency_s = slo_latency_s
        self.objectives = tuple(objectives)
        self._late_after_s = math.inf if slo_latency_s is None else slo_latency_s
        self.num_success = 0
        # Of `num_success`, answers after the latency limit of the SLO.
        self.num_late = 0
        # Answered texts that missed another limit of the SLO.
        self.num_slow = {"ttft": 0, "tpot": 0}
        # Requests without an answer that are the server's fault, or whose client left after a limit
        # of the SLO had passed.
        self.num_unserved = 0
        # Seconds that instances computed.
        self.busy_s = 0.0
        self.num_inferences = 0
        self.num_executions = 0
        self.num_failures = dict.fromkeys(REASONS, 0)
        self.num_refused = dict.fromkeys((*REFUSED_AT_ARRIVAL, *REFUSED_LATER), 0)
        self.num_deaths = dict.fromkeys(DEATHS, 0)
        self.phases = {phase: Histogram(BUCKETS) for phase in (*PHASES, *WAITS)}
        # Phases measured per request, and phases measured per batch.
        self._spans = tuple(self.phases[phase] for phase in ("request", "queue", *WAITS))
        self._computes = tuple(self.phases[phase] for phase in PHASES[2:])
        self.batches: dict[int, BatchStatistics] = {}
        self.batch_tokens = Histogram(TOKEN_BUCKETS)
        # Of a decoupled model.
        self.responses = ResponseCounts()
        # Total time of failed requests until they failed.
        self.fail_s = 0.0
        # Unix time of the last batch.
        self.last_inference = 0.0
        self.num_restarts = 0
        # For padded requests: all bytes, and those that are padding.
        self.padded_bytes = 0
        self.padding_bytes = 0
        self.load_s = 0.0
        # Whether requests may be mirrors, which count as batches and rows only.
        self.has_mirrors = False
        # Requests that were written to a recording, and sampled ones that were not, by reason; the
        # table is empty if nothing is recorded. In how many shards recording has stopped.
        self.num_recorded = 0
        self.num_unrecorded: dict[str, int] = {}
        self.num_record_stopped = 0
        # Answers from the response cache and requests that it did not have, with the time to look
        # them up and to store answers. In how many shards a cache is open.
        self.num_cache_hits = self.num_cache_misses = 0
        self.cache_hit_s = self.cache_miss_s = 0.0
        self.num_caches = 0
        # Sequences that have ended, by how; empty for models without sequences.
        self.num_sequences_ended: dict[str, int] = {}
        # Further latencies, if the operator wants them; or what the shards have counted of them.
        self.latencies: LatencyMetrics | None = None
        self.counted_latencies: LatencyRecord | None = None
        # Reads what the model holds here; what the shards hold of it.
        self.read_gauges: Callable[[], ModelGauges] = ModelGauges
        self.counted_gauges = NO_GAUGES
        # Metrics of the model's own code.
        self.custom = CustomMetrics()
        # Metrics that only models of its kind have, and what makes families of a scrape of them.
        self.of_kind: object = None
        self.others: Callable[[], Sequence[ScrapeLines]] = tuple
        # Returns them for another process, which adds them up.
        self.record_others: Callable[[], bytes] = bytes

    @classmethod
    def from_config(cls, config: ModelConfig, name: str = "") -> ModelMetrics:
        """Create the metrics of a version, or of its stage `name`, which has no SLO of its own."""
        if name:
            return cls(name, config.version, config.metric_tags)
        has_slo = config.slo not in ("", SLO_OFF)
        objectives = slo.parse(config.slo).objectives if has_slo else ()
        limit_s = config.batching.slo_latency_s
        for each in objectives:
            if each.metric == "latency" and limit_s is None and each.limit_s < math.inf:
                limit_s = each.limit_s
        return cls(config.name, config.version, config.metric_tags, limit_s, objectives)

    def blank(self) -> ModelMetrics:
        """Return metrics of the same version that have counted nothing."""
        return ModelMetrics(self.name, self.version, self.tags, self.slo_latency_s, self.objectives)

    def fold(
        self,
        answered: Sequence[Request],
        num_rows: int,
        timings: Timings,
        num_executed: int | None = None,
    ) -> Waits:
        """Count one executed batch; only the requests that were answered (`answered`) count in the
        phases. `timings` is that of any request of the batch. It had `num_executed` rows in all (0:
        another shard counts the execution), if not `num_rows`. Returns their mean waits."""
        self.num_inferences += num_rows
        self.last_inference = time.time()
        size = num_rows if num_executed is None else num_executed
        if size:
            self.num_executions += 1
            statistics = self.batches.get(size)
            if statistics is None:
                statistics = self.batches[size] = BatchStatistics()
            statistics.add(*timings.compute_s)
            self.busy_s += sum(timings.compute_s)
        if self.has_mirrors:
            answered = [request for request in answered if not request.is_mirror]
        count = len(answered)
        if count == 0:
            return 0.0, 0.0
        self.num_success += count
        for phase, span_s in zip(self._computes, timings.compute_s, strict=True):
            phase.add(span_s, count)
        return self._fold_spans(answered)

    def _fold_spans(self, answered: Sequence[Request]) -> Waits:
        """Add each request's times to the histograms; return their mean waits. Neighbouring
        requests mostly share a bucket, so the last bucket is tried first."""
        totals, queues, for_batch, for_instance = self._spans
        total, queue = totals.counts, queues.counts
        batch, instance = for_batch.counts, for_instance.counts
        total_s = queue_s = instance_s = 0.0
        at = index = 0
        late_after_s = self._late_after_s
        for request in answered:
            timings = request.timings
            span = timings.completed - timings.received
            if not EDGES[at] < span <= EDGES[at + 1]:
                at = bisect_left(BUCKETS, span)
            total[at] += 1
            total_s += span
            if span > late_after_s:
                self.num_late += 1
            span = timings.dispatched - timings.queued
            if not EDGES[index] < span <= EDGES[index + 1]:
                index = bisect_left(BUCKETS, span)
            queue[index] += 1
            queue_s += span
            waited = timings.instance_wait_s
            if waited <= 0.0:
                batch[index] += 1
                instance[0] += 1
                continue
            instance_s += waited
            # One of the two waits is usually nearly all of it.
            instance[index if EDGES[index] < waited else bisect_left(BUCKETS, waited)] += 1
            span -= waited
            batch[0 if span <= BUCKETS[0] else bisect_left(BUCKETS, span)] += 1
        totals.total += total_s
        queues.total += queue_s
        for_batch.total += queue_s - instance_s
        for_instance.total += instance_s
        if self.latencies is not None:
            for request in answered:
                self.latencies.add(request.timings)
        count = len(answered)
        return (queue_s - instance_s) / count, instance_s / count

    def passed(self, request: Request) -> None:
        """Count one answered request of a model of several stages; their batches count apart."""
        if request.is_mirror:
            return
        self.last_inference = time.time()
        self.num_success += 1
        for phase, span_s in zip(self._computes, request.timings.compute_s, strict=True):
            phase.add(span_s)
        self._fold_spans([request])

    def answered(self, total_s: float, infer_s: float) -> None:
        """Count one request that ran outside a batch; the model took `infer_s`."""
        self.last_inference = time.time()
        self.num_success += 1
        self.num_inferences += 1
        self.num_executions += 1
        self.num_late += total_s > self._late_after_s
        self.phases["request"].add(total_s)
        self.phases["compute_infer"].add(infer_s)
        if self.latencies is not None:
            self.latencies.observe("request", total_s)
            self.latencies.observe("compute_infer", infer_s)
        self.batches.setdefault(1, BatchStatistics()).add(0.0, infer_s, 0.0)

    def found_in_cache(self, request: Request, took_s: float) -> None:
        """Count a request that the response cache answered after `took_s`."""
        self.last_inference = time.time()
        self.num_success += 1
        self.num_cache_hits += 1
        self.cache_hit_s += took_s
        timings = request.timings
        span_s = timings.completed - timings.received
        self.phases["request"].add(span_s)
        for phase in ("queue", *WAITS):
            self.phases[phase].add(0.0)
        self.num_late += self.is_late(span_s)
        if self.latencies is not None:
            self.latencies.add_first(span_s)
            self.latencies.observe("cache_hit", took_s)

    def missed_cache(self, took_s: float) -> None:
        """Count a computed request that the response cache did not have; looking it up and storing
        the answer took this time."""
        self.num_cache_misses += 1
        self.cache_miss_s += took_s
        if self.latencies is not None:
            self.latencies.observe("cache_miss", took_s)

    def failed(self, reason: str, error: PenstockError, is_late: bool = False) -> None:
        """Count an admitted request that gets an error; `is_late`: after a limit of the SLO."""
        self.num_failures[reason] += 1
        self.num_unserved += _is_unserved(error, is_late)

    def refused(self, error: PenstockError, reason: str = "", is_late: bool = False) -> None:
        """Count a request that never ran; `reason` overrides the error's own."""
        self.num_failures["REJECTED" if isinstance(error, Overloaded) else "OTHER"] += 1
        self.num_unserved += _is_unserved(error, is_late)
        reason = reason or error.reason
        self.num_refused[reason] = self.num_refused.get(reason, 0) + 1

    @property
    def gauges(self) -> ModelGauges:
        return self.read_gauges().plus(self.counted_gauges)

    def latency_record(self) -> LatencyRecord | None:
        """Return the further latencies that were counted here or in the shards."""
        return self.counted_latencies if self.latencies is None else self.latencies.record()

    def is_late(self, seconds: float) -> bool:
        """Whether an answer after this time misses the latency limit of the SLO."""
        return seconds > self._late_after_s

    @property
    def slo_counts(self) -> list[SloCount]:
        """Requests and bad requests by objective. Errors of clients, and clients that leave in
        time, do not count."""
        late = {"latency": self.num_late, **self.num_slow}
        num_requests = self.num_success + self.num_unserved
        return [
            SloCount(each, num_requests, self.num_unserved + late[each.metric])
            for each in self.objectives
        ]

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Number of batches by size."""
        return {size: statistics.count for size, statistics in self.batches.items()}

    @property
    def labels(self) -> Labels:
        """Labels of its samples in a scrape."""
        return {"model": self.name, "version": self.version, **self.tags}

    def statistics(self) -> dict[str, Any]:
        """Return one entry of v2's statistics: numbers of requests, and their total nanoseconds."""
        num_failed = sum(self.num_failures.values())
        num_computed = self.num_success - self.num_cache_hits
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": round(self.last_inference * 1e3),
            "inference_count": self.num_inferences,
            "execution_count": self.num_executions,
            "inference_stats": {
                "success": _duration(self.num_success, self.phases["request"].total),
                "fail": _duration(num_failed, self.fail_s),
                **{
                    phase: _duration(self.num_success, self.phases[phase].total)
                    for phase in ("queue", *WAITS)
                },
                **{
                    phase: _duration(num_computed, self.phases[phase].total) for phase in PHASES[2:]
                },
                "cache_hit": _duration(self.num_cache_hits, self.cache_hit_s),
                "cache_miss": _duration(self.num_cache_misses, self.cache_miss_s),
            },
            "response_stats": self.responses.statistics(),
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(batch.count, batch.input_s),
                    "compute_infer": _duration(batch.count, batch.infer_s),
                    "compute_output": _duration(batch.count, batch.output_s),
                }
                for size, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


def _is_unserved(error: PenstockError, is_late: bool) -> bool:
    if isinstance(error, Cancelled):
        return is_late
    return isinstance(error, SERVER_FAULTS) and not isinstance(error, QuotaExceeded)


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}
