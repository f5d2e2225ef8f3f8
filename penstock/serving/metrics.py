"""Metrics of one model, as plain arrays that the hot path updates once per batch.

Names and meanings are Triton's where it has them (nv_inference_*). Every phase also has a
histogram, and time in the queue is split by cause. `expose` renders Prometheus text at scrape time
only. docs/observability.md lists all metrics.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import Overloaded, PenstockError

if TYPE_CHECKING:
    from penstock.serving.served import ModelProcess
    from penstock.system.devices import GpuUse
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
# Rows of a batch.
BATCH_BUCKETS = tuple(1 << power for power in range(11))
# Tokens of a batch.
TOKEN_BUCKETS = tuple(64 << power for power in range(13))
# Labels of a sample, and a sample.
Labels = Mapping[str, str]
Sample = tuple[Labels, object]
# Seconds of waiting for a batch and for an instance.
Waits = tuple[float, float]
# Seconds; about 2.5 steps a decade from 50 µs to 30 s.
BUCKETS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# The lower edge of each bucket, and the upper edge of the last.
EDGES = (-math.inf, *BUCKETS, math.inf)


class Histogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class BatchStatistics:
    """Total cost of batches of one size."""

    count: int = 0
    input_s: float = 0.0
    infer_s: float = 0.0
    output_s: float = 0.0

    def add(self, timings: Timings) -> None:
        self.count += 1
        self.input_s += timings.compute_input_s
        self.infer_s += timings.compute_infer_s
        self.output_s += timings.compute_output_s


@dataclass(frozen=True, slots=True)
class ScrapeLines:
    """One metric, as lines of a scrape."""

    name: str
    text: str
    kind: str
    lines: Sequence[str]

    @classmethod
    def of(cls, name: str, text: str, kind: str, samples: Iterable[Sample]) -> ScrapeLines:
        lines = [f"{name}{label_text(labels)} {value}" for labels, value in samples]
        return cls(name, text, kind, lines)

    @classmethod
    def of_histograms(
        cls, name: str, text: str, histograms: Iterable[tuple[Labels, Histogram]]
    ) -> ScrapeLines:
        lines: list[str] = []
        for labels, each in histograms:
            totals = list(accumulate(each.counts))
            lines += [
                f"{name}_bucket{label_text({**labels, 'le': bound})} {total}"
                for bound, total in zip((*map(str, each.bounds), "+Inf"), totals, strict=True)
            ]
            lines.append(f"{name}_sum{label_text(labels)} {each.total!r}")
            lines.append(f"{name}_count{label_text(labels)} {totals[-1]}")
        return cls(name, text, "histogram", lines)


class ModelMetrics:
    """Owned by the core's loop; `num_pending` is read from the model at scrape time."""

    def __init__(self, name: str, version: str, tags: Mapping[str, str] | None = None) -> None:
        """`tags` are additional labels of its metrics."""
        self.name = name
        self.version = version
        self.tags = dict(tags or {})
        self.num_success = 0
        self.num_inferences = 0
        self.num_executions = 0
        self.num_failures = dict.fromkeys(REASONS, 0)
        self.num_refused = dict.fromkeys((*REFUSED_AT_ARRIVAL, *REFUSED_LATER), 0)
        self.num_deaths = dict.fromkeys(DEATHS, 0)
        self.phases = {phase: Histogram() for phase in (*PHASES, *WAITS)}
        # Phases measured per request, and phases measured per batch.
        self._spans = tuple(self.phases[phase] for phase in ("request", "queue", *WAITS))
        self._computes = tuple(self.phases[phase] for phase in PHASES[2:])
        self.batches: dict[int, BatchStatistics] = {}
        self.batch_tokens = Histogram(TOKEN_BUCKETS)
        # Total time of failed requests until they failed.
        self.fail_s = 0.0
        # Unix time of the last batch.
        self.last_inference = 0.0
        self.num_restarts = 0
        # For padded requests: all bytes, and those that are padding.
        self.padded_bytes = 0
        self.padding_bytes = 0
        self.load_s = 0.0
        # Returns the metrics that only models of its kind have.
        self.others: Callable[[], Sequence[ScrapeLines]] = tuple

    def fold(self, answered: Sequence[Request], num_rows: int, timings: Timings) -> Waits:
        """Count one executed batch; only the requests that were answered (`answered`) count in the
        phases. `timings` is that of any request of the batch. Returns their mean waits."""
        self.num_executions += 1
        self.num_inferences += num_rows
        self.last_inference = time.time()
        statistics = self.batches.get(num_rows)
        if statistics is None:
            statistics = self.batches[num_rows] = BatchStatistics()
        statistics.add(timings)
        count = len(answered)
        if count == 0:
            return 0.0, 0.0
        self.num_success += count
        for_input, for_infer, for_output = self._computes
        for_input.add(timings.compute_input_s, count)
        for_infer.add(timings.compute_infer_s, count)
        for_output.add(timings.compute_output_s, count)
        return self._fold_spans(answered)

    def _fold_spans(self, answered: Sequence[Request]) -> Waits:
        """Add each request's times to the histograms; return their mean waits. Neighbouring
        requests mostly share a bucket, so the last bucket is tried first."""
        totals, queues, for_batch, for_instance = self._spans
        total, queue = totals.counts, queues.counts
        batch, instance = for_batch.counts, for_instance.counts
        total_s = queue_s = instance_s = 0.0
        at = index = 0
        for request in answered:
            timings = request.timings
            span = timings.completed - timings.received
            if not EDGES[at] < span <= EDGES[at + 1]:
                at = bisect_left(BUCKETS, span)
            total[at] += 1
            total_s += span
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
        count = len(answered)
        return (queue_s - instance_s) / count, instance_s / count

    def passed(self, request: Request) -> None:
        """Count one answered request of a model of several stages; their batches count apart."""
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
        self.phases["request"].add(total_s)
        self.phases["compute_infer"].add(infer_s)
        batch = self.batches.setdefault(1, BatchStatistics())
        batch.count += 1
        batch.infer_s += infer_s

    def failed(self, reason: str, count: int = 1) -> None:
        self.num_failures[reason] += count

    def refused(self, error: PenstockError, reason: str = "") -> None:
        """Count a request that never ran; `reason` overrides the error's own."""
        self.num_failures["REJECTED" if isinstance(error, Overloaded) else "OTHER"] += 1
        reason = reason or error.reason
        self.num_refused[reason] = self.num_refused.get(reason, 0) + 1

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
                    for phase in ("queue", *WAITS, *PHASES[2:])
                },
                "cache_hit": _duration(0, 0.0),
                "cache_miss": _duration(0, 0.0),
            },
            "response_stats": {},
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


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}


@dataclass(frozen=True, slots=True)
class Pending:
    """A model's metrics together with state of the live model. `processes` are those whose GPU
    memory is shown."""

    metrics: ModelMetrics
    num_pending: int
    num_ready: int
    processes: Sequence[ModelProcess] = ()


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Resource use of one process of the server. Its `process` label is core, worker, grpc_front or
    http_front."""

    labels: Labels
    resident_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class HostUse:
    """Use of the machine and of our processes. `cpu_utilization` is a share of all cores since the
    last scrape."""

    cpu_utilization: float
    memory_total_bytes: int
    memory_used_bytes: int
    processes: Sequence[ProcessUse] = ()
    gpus: Sequence[GpuUse] = ()


@dataclass(frozen=True, slots=True)
class FrontUse:
    """A front process. `front` numbers it if there are several; `num_connections` None: unknown."""

    protocol: str
    num_restarts: int
    front: str = ""
    num_connections: int | None = None
    # In the log.
    name: str = ""
    # 0 while no process runs.
    pid: int = 0

    @property
    def labels(self) -> Labels:
        return {"protocol": self.protocol, **({"front": self.front} if self.front else {})}


LabelledModel = tuple[Labels, Pending]
# Metrics of each model: name, help, type and attribute of `Pending`.
NUMBERS = (
    ("nv_inference_request_success", "Requests answered", "counter", "metrics.num_success"),
    ("nv_inference_count", "Inferences (rows) done", "counter", "metrics.num_inferences"),
    ("nv_inference_exec_count", "Batches executed", "counter", "metrics.num_executions"),
    ("penstock_worker_restarts", "Workers started again", "counter", "metrics.num_restarts"),
    ("penstock_padded_bytes", "Padded inputs, with the padding", "counter", "metrics.padded_bytes"),
    ("penstock_padding_bytes", "Padding of padded inputs", "counter", "metrics.padding_bytes"),
    ("nv_inference_pending_request_count", "Requests that are queued", "gauge", "num_pending"),
    ("penstock_ready_instances", "Instances that can run a batch", "gauge", "num_ready"),
    ("nv_model_load_duration_secs", "Seconds the model took to load", "gauge", "metrics.load_s"),
)
# The same for tables of counters, with their label.
TABLES = (
    ("nv_inference_request_failure", "Requests failed", "num_failures", "reason"),
    ("penstock_rejections", "Requests refused before they ran", "num_refused", "reason"),
    ("penstock_worker_deaths", "Workers that died while serving", "num_deaths", "cause"),
)
# Metrics of each GPU: Triton's names, units and types; attribute of `GpuUse`.
GPU_METRICS = (
    ("nv_gpu_utilization", "GPU utilization (0 to 1)", "gauge", "utilization"),
    ("nv_gpu_memory_total_bytes", "Memory of the GPU", "gauge", "memory_total_bytes"),
    ("nv_gpu_memory_used_bytes", "GPU memory in use", "gauge", "memory_used_bytes"),
    ("nv_gpu_power_usage", "Watts that the GPU draws", "gauge", "power_watts"),
    ("nv_gpu_power_limit", "Watts that the GPU may draw", "gauge", "power_limit_watts"),
    ("nv_energy_consumption", "Joules since the start", "counter", "energy_joules"),
)


def expose(
    models: Iterable[Pending], host: HostUse | None = None, fronts: Sequence[FrontUse] = ()
) -> bytes:
    """Render the text of a Prometheus scrape. Written here because Triton's counters do not end in
    `_total`, which client libraries require."""
    items = [(model.metrics.labels, model) for model in models]
    optional = [*_optional(items), *_fronts(fronts), *([] if host is None else _host(host))]
    families = [*_of_every_model(items), *(family for family in optional if family.lines)]
    version = [({"version": penstock.__version__}, 1)]
    families.append(
        ScrapeLines.of("penstock_build_info", "The version that runs; always 1", "gauge", version)
    )
    return "".join(
        f"{line}\n"
        for family in families
        for line in (
            f"# HELP {family.name} {family.text}",
            f"# TYPE {family.name} {family.kind}",
            *family.lines,
        )
    ).encode()


def _of_every_model(items: Sequence[LabelledModel]) -> Iterator[ScrapeLines]:
    """Yield the families that are shown even if no model is loaded."""
    for name, text, kind, attribute in NUMBERS:
        read = attrgetter(attribute)
        yield ScrapeLines.of(name, text, kind, [(labels, read(item)) for labels, item in items])
    for name, text, attribute, label in TABLES:
        samples = [
            ({**labels, label: value}, count)
            for labels, item in items
            for value, count in getattr(item.metrics, attribute).items()
        ]
        yield ScrapeLines.of(name, f"{text}, by {label}", "counter", samples)
    for phase in PHASES:
        totals = [(labels, round(i.metrics.phases[phase].total * 1e6)) for labels, i in items]
        text = f"Microseconds in {phase}, all requests"
        yield ScrapeLines.of(f"nv_inference_{phase}_duration_us", text, "counter", totals)
    for phase in (*PHASES, *WAITS):
        spans = [(labels, item.metrics.phases[phase]) for labels, item in items]
        text = f"Seconds in {phase}, answered requests"
        yield ScrapeLines.of_histograms(f"penstock_{phase}_seconds", text, spans)
    sizes = [(labels, _batch_sizes(item.metrics)) for labels, item in items]
    yield ScrapeLines.of_histograms("penstock_batch_size", "Rows of each executed batch", sizes)


def _batch_sizes(metrics: ModelMetrics) -> Histogram:
    found = Histogram(BATCH_BUCKETS)
    for size, count in metrics.batch_sizes.items():
        found.add(size, count)
    return found


def _optional(items: Sequence[LabelledModel]) -> Iterator[ScrapeLines]:
    """Yield families that only some models have: with a token budget, or with their own."""
    tokens = [(labels, item.metrics.batch_tokens) for labels, item in items]
    tokens = [(labels, found) for labels, found in tokens if found.total]
    text = "Tokens of each executed batch"
    yield ScrapeLines.of_histograms("penstock_batch_tokens", text, tokens)
    memory = [
        ({**labels, "instance": str(each.index), "device": each.device}, each.gpu_memory_bytes)
        for labels, item in items
        for each in item.processes
        if each.gpu_memory_bytes
    ]
    text = "GPU memory that an instance took for loading and warming up"
    yield ScrapeLines.of("penstock_instance_gpu_memory_bytes", text, "gauge", memory)
    # A family that several models share is written once.
    shared: dict[str, ScrapeLines] = {}
    for _, item in items:
        for family in item.metrics.others():
            known = shared.setdefault(family.name, replace(family, lines=()))
            shared[family.name] = replace(known, lines=[*known.lines, *family.lines])
    yield from shared.values()


def _fronts(fronts: Sequence[FrontUse]) -> Iterator[ScrapeLines]:
    restarts = [(front.labels, front.num_restarts) for front in fronts]
    text = "Protocol processes started again after a death"
    yield ScrapeLines.of("penstock_front_restarts", text, "counter", restarts)
    counts = [(each.labels, each.num_connections) for each in fronts]
    known = [sample for sample in counts if sample[1] is not None]
    text = "Clients connected to each protocol process"
    yield ScrapeLines.of("penstock_front_connections", text, "gauge", known)


def _host(host: HostUse) -> Iterator[ScrapeLines]:
    for name, text, value in (
        ("nv_cpu_utilization", "Share of all cores in use (0 to 1)", f"{host.cpu_utilization:.6f}"),
        ("nv_cpu_memory_total_bytes", "Memory of the machine", str(host.memory_total_bytes)),
        ("nv_cpu_memory_used_bytes", "Memory in use", str(host.memory_used_bytes)),
    ):
        yield ScrapeLines(name, text, "gauge", [f"{name} {value}"])
    resident = [(each.labels, each.resident_bytes) for each in host.processes]
    text = "Resident memory of each process; shared pages count in each"
    yield ScrapeLines.of("penstock_process_resident_bytes", text, "gauge", resident)
    cpu = [(each.labels, f"{each.cpu_s:.2f}") for each in host.processes]
    text = "CPU time of each process, user and system"
    yield ScrapeLines.of("penstock_process_cpu_seconds", text, "counter", cpu)
    for name, text, kind, attribute in GPU_METRICS:
        values = [({"gpu_uuid": gpu.uuid}, getattr(gpu, attribute)) for gpu in host.gpus]
        known = [sample for sample in values if sample[1] is not None]
        yield ScrapeLines.of(name, text, kind, known)


def label_text(labels: Labels) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
