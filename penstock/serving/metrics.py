"""Metrics of one model, as plain arrays that the hot path updates once per batch.

Names and meanings are Triton's where it has them (nv_inference_*). Every phase also has a
histogram, and time in the queue is split by cause. `expose` renders Prometheus text at scrape time
only. docs/observability.md lists all metrics.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import penstock
from penstock.errors import Overloaded, PenstockError

if TYPE_CHECKING:
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
# Seconds of waiting for a batch and for an instance.
Waits = tuple[float, float]
# Seconds; about 2.5 steps a decade from 50 µs to 30 s.
BUCKETS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# The lower edge of each bucket, and the upper edge of the last.
EDGES = (-math.inf, *BUCKETS, math.inf)


class PhaseHistogram:
    """Counts per bucket and the sum, in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum_s = 0.0

    def add(self, value_s: float, count: int = 1) -> None:
        self.counts[bisect_left(BUCKETS, value_s)] += count
        self.sum_s += value_s * count

    @property
    def count(self) -> int:
        return sum(self.counts)


class BatchTokens:
    """Tokens per batch, for models with a token budget."""

    __slots__ = ("counts", "num_tokens")

    def __init__(self) -> None:
        self.counts = [0] * (len(TOKEN_BUCKETS) + 1)
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        self.counts[bisect_left(TOKEN_BUCKETS, num_tokens)] += 1
        self.num_tokens += num_tokens


class BatchStatistics:
    """Total cost of batches of one size."""

    __slots__ = ("count", "infer_s", "input_s", "output_s")

    def __init__(self) -> None:
        self.count = 0
        self.input_s = 0.0
        self.infer_s = 0.0
        self.output_s = 0.0

    def add(self, timings: Timings) -> None:
        self.count += 1
        self.input_s += timings.compute_input_s
        self.infer_s += timings.compute_infer_s
        self.output_s += timings.compute_output_s


@dataclass(frozen=True, slots=True)
class ScrapeLines:
    """One metric of one model, as lines of a scrape."""

    name: str
    text: str
    kind: str
    lines: Sequence[str]


class Exposed(Protocol):
    def families(self) -> Sequence[ScrapeLines]: ...


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
        self.phases = {phase: PhaseHistogram() for phase in (*PHASES, *WAITS)}
        # Phases measured per request, and phases measured per batch.
        self._spans = tuple(self.phases[phase] for phase in ("request", "queue", *WAITS))
        self._computes = tuple(self.phases[phase] for phase in PHASES[2:])
        self.batches: dict[int, BatchStatistics] = {}
        self.batch_tokens = BatchTokens()
        # Total time of failed requests until they failed.
        self.fail_s = 0.0
        # Unix time of the last batch.
        self.last_inference = 0.0
        self.num_restarts = 0
        # For padded requests: all bytes, and those that are padding.
        self.padded_bytes = 0
        self.padding_bytes = 0
        self.load_s = 0.0
        # Metrics that only models of its kind have.
        self.others: Exposed | None = None

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
        totals.sum_s += total_s
        queues.sum_s += queue_s
        for_batch.sum_s += queue_s - instance_s
        for_instance.sum_s += instance_s
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

    def statistics(self) -> dict[str, Any]:
        """Return one entry of v2's statistics: numbers of requests, and their total nanoseconds."""
        phases = self.phases
        count = self.num_success

        def entry(count: int, seconds: float) -> dict[str, int]:
            return {"count": count, "ns": round(seconds * 1e9)}

        return {
            "name": self.name,
            "version": self.version,
            "last_inference": round(self.last_inference * 1e3),
            "inference_count": self.num_inferences,
            "execution_count": self.num_executions,
            "inference_stats": {
                "success": entry(count, phases["request"].sum_s),
                "fail": entry(sum(self.num_failures.values()), self.fail_s),
                "queue": entry(count, phases["queue"].sum_s),
                "queue_batch": entry(count, phases["queue_batch"].sum_s),
                "queue_instance": entry(count, phases["queue_instance"].sum_s),
                "compute_input": entry(count, phases["compute_input"].sum_s),
                "compute_infer": entry(count, phases["compute_infer"].sum_s),
                "compute_output": entry(count, phases["compute_output"].sum_s),
                "cache_hit": entry(0, 0.0),
                "cache_miss": entry(0, 0.0),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": entry(batch.count, batch.input_s),
                    "compute_infer": entry(batch.count, batch.infer_s),
                    "compute_output": entry(batch.count, batch.output_s),
                }
                for size, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """GPU memory that an instance measured after its warm-up."""

    instance: int
    device: str
    num_bytes: int


class Pending:
    """A model's metrics together with state of the live model."""

    __slots__ = ("gpu_memory", "metrics", "num_pending", "num_ready")

    def __init__(
        self,
        metrics: ModelMetrics,
        num_pending: int,
        num_ready: int,
        gpu_memory: Sequence[GpuMemory] = (),
    ) -> None:
        self.metrics = metrics
        self.num_pending = num_pending
        self.num_ready = num_ready
        self.gpu_memory = gpu_memory


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Resource use of one process of the server; `role` is core, worker, grpc_front or http_front.
    A worker is identified by its model, version and instance, an HTTP front by `instance` alone."""

    role: str
    resident_bytes: int
    cpu_s: float
    model: str = ""
    version: str = ""
    instance: str = ""


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


def expose(
    models: Iterable[Pending], host: HostUse | None = None, fronts: Sequence[FrontUse] = ()
) -> bytes:
    """Render the text of a Prometheus scrape. Written here because Triton's counters do not end in
    `_total`, which client libraries require."""
    items = list(models)
    lines = _counters(items)
    for phase in PHASES:
        lines += _duration(phase, items) + _histogram(phase, items)
    for wait in WAITS:
        lines += _histogram(wait, items)
    lines += _batch_sizes(items) + _batch_tokens(items) + _gauges(items) + _others(items)
    if fronts:
        lines += _fronts(fronts)
    if host is not None:
        lines += _host(host)
    lines += _head("penstock_build_info", "The version that runs; always 1", "gauge")
    lines.append(f"penstock_build_info{label_text(version=penstock.__version__)} 1")
    return ("\n".join(lines) + "\n").encode()


def _counters(items: Sequence[Pending]) -> list[str]:
    lines: list[str] = []
    for name, text, attribute in (
        ("nv_inference_request_success", "Requests answered", "num_success"),
        ("nv_inference_count", "Inferences (rows) done", "num_inferences"),
        ("nv_inference_exec_count", "Batches executed", "num_executions"),
        ("penstock_worker_restarts", "Workers started again after a death", "num_restarts"),
        ("penstock_padded_bytes", "Inputs of padded requests, with their filling", "padded_bytes"),
        ("penstock_padding_bytes", "The filling of padded requests", "padding_bytes"),
    ):
        lines += _head(name, text, "counter")
        lines += [f"{name}{_of(item)} {getattr(item.metrics, attribute)}" for item in items]
    for name, text, label, attribute in (
        ("nv_inference_request_failure", "Requests failed", "reason", "num_failures"),
        ("penstock_rejections", "Requests refused before they ran", "reason", "num_refused"),
        ("penstock_worker_deaths", "Workers that died while serving", "cause", "num_deaths"),
    ):
        lines += _head(name, f"{text}, by {label}", "counter")
        for item in items:
            for value, count in getattr(item.metrics, attribute).items():
                lines.append(f"{name}{_of(item, **{label: value})} {count}")
    return lines


def _duration(phase: str, items: Sequence[Pending]) -> list[str]:
    """Render Triton's counter of microseconds."""
    name = f"nv_inference_{phase}_duration_us"
    lines = _head(name, f"Microseconds in {phase}, all requests", "counter")
    for item in items:
        lines.append(f"{name}{_of(item)} {round(item.metrics.phases[phase].sum_s * 1e6)}")
    return lines


def _histogram(phase: str, items: Sequence[Pending]) -> list[str]:
    name = f"penstock_{phase}_seconds"
    lines = _head(name, f"Seconds in {phase}, answered requests", "histogram")
    for item in items:
        data = item.metrics.phases[phase]
        lines += _series(name, item, BUCKETS, data.counts, f"{data.sum_s:.9f}")
    return lines


def _batch_sizes(items: Sequence[Pending]) -> list[str]:
    name = "penstock_batch_size"
    lines = _head(name, "Rows of each executed batch", "histogram")
    for item in items:
        counts = [0] * (len(BATCH_BUCKETS) + 1)
        for size, count in item.metrics.batch_sizes.items():
            counts[bisect_left(BATCH_BUCKETS, size)] += count
        lines += _series(name, item, BATCH_BUCKETS, counts, str(item.metrics.num_inferences))
    return lines


def _batch_tokens(items: Sequence[Pending]) -> list[str]:
    """Render the histogram for models with a token budget."""
    name = "penstock_batch_tokens"
    lines: list[str] = []
    for item in items:
        found = item.metrics.batch_tokens
        if found.num_tokens:
            lines += _series(name, item, TOKEN_BUCKETS, found.counts, str(found.num_tokens))
    return _head(name, "Tokens of each executed batch", "histogram") + lines if lines else []


def _series(
    name: str, item: Pending, bounds: Sequence[float], counts: Sequence[int], total_sum: str
) -> list[str]:
    metrics = item.metrics
    labels = {"model": metrics.name, "version": metrics.version, **metrics.tags}
    return histogram_lines(name, labels, bounds, counts, total_sum)


def histogram_lines(
    name: str,
    labels: Mapping[str, str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total_sum: str,
) -> list[str]:
    """Render a histogram; `counts` are per bucket, not cumulative, and end with the overflow."""
    totals = list(accumulate(counts))
    lines = [
        f"{name}_bucket{label_text(**labels, le=bound)} {total}"
        for bound, total in zip((*map(str, bounds), "+Inf"), totals, strict=True)
    ]
    lines.append(f"{name}_sum{label_text(**labels)} {total_sum}")
    lines.append(f"{name}_count{label_text(**labels)} {totals[-1]}")
    return lines


def _others(items: Sequence[Pending]) -> list[str]:
    """Render the models' own families; one shared by several models is written once."""
    found: dict[str, list[ScrapeLines]] = {}
    for item in items:
        if item.metrics.others is not None:
            for family in item.metrics.others.families():
                found.setdefault(family.name, []).append(family)
    lines: list[str] = []
    for name, families in found.items():
        lines += _head(name, families[0].text, families[0].kind)
        for family in families:
            lines += family.lines
    return lines


def _gauges(items: Sequence[Pending]) -> list[str]:
    lines: list[str] = []
    for name, text, attribute in (
        ("nv_inference_pending_request_count", "Requests waiting for an instance", "num_pending"),
        ("penstock_ready_instances", "Instances that can run a batch", "num_ready"),
    ):
        lines += _head(name, text, "gauge")
        lines += [f"{name}{_of(item)} {getattr(item, attribute)}" for item in items]
    lines += _head("nv_model_load_duration_secs", "Seconds the model took to load", "gauge")
    lines += [f"nv_model_load_duration_secs{_of(i)} {i.metrics.load_s:.6f}" for i in items]
    return lines + _gpu_memory(items)


def _gpu_memory(items: Sequence[Pending]) -> list[str]:
    name = "penstock_instance_gpu_memory_bytes"
    lines = [
        f"{name}{_of(item, instance=str(each.instance), device=each.device)} {each.num_bytes}"
        for item in items
        for each in item.gpu_memory
    ]
    text = "GPU memory that an instance took for loading and warming up"
    return _head(name, text, "gauge") + lines if lines else []


def _fronts(fronts: Sequence[FrontUse]) -> list[str]:
    name = "penstock_front_restarts"
    lines = _head(name, "Protocol processes started again after a death", "counter")
    lines += [f"{name}{_front(each)} {each.num_restarts}" for each in fronts]
    counted = [each for each in fronts if each.num_connections is not None]
    if counted:
        name = "penstock_front_connections"
        lines += _head(name, "Clients connected to each protocol process", "gauge")
        lines += [f"{name}{_front(each)} {each.num_connections}" for each in counted]
    return lines


def _host(host: HostUse) -> list[str]:
    lines: list[str] = []
    for name, text, value in (
        ("nv_cpu_utilization", "Share of all cores in use (0 to 1)", f"{host.cpu_utilization:.6f}"),
        ("nv_cpu_memory_total_bytes", "Memory of the machine", str(host.memory_total_bytes)),
        ("nv_cpu_memory_used_bytes", "Memory in use", str(host.memory_used_bytes)),
    ):
        lines += [*_head(name, text, "gauge"), f"{name} {value}"]
    name = "penstock_process_resident_bytes"
    lines += _head(name, "Resident memory of each process; shared pages count in each", "gauge")
    lines += [f"{name}{_process(each)} {each.resident_bytes}" for each in host.processes]
    name = "penstock_process_cpu_seconds"
    lines += _head(name, "CPU time of each process, user and system", "counter")
    lines += [f"{name}{_process(each)} {each.cpu_s:.2f}" for each in host.processes]
    return lines + _gpus(host.gpus)


def _gpus(gpus: Sequence[GpuUse]) -> list[str]:
    """Render GPU metrics with Triton's names, units and label; empty metrics are left out."""
    lines: list[str] = []
    for name, kind, text, attribute in (
        ("nv_gpu_utilization", "gauge", "GPU utilization (0 to 1)", "utilization"),
        ("nv_gpu_memory_total_bytes", "gauge", "Memory of the GPU", "memory_total_bytes"),
        ("nv_gpu_memory_used_bytes", "gauge", "GPU memory in use", "memory_used_bytes"),
        ("nv_gpu_power_usage", "gauge", "Watts that the GPU draws", "power_watts"),
        ("nv_gpu_power_limit", "gauge", "Watts that the GPU may draw", "power_limit_watts"),
        ("nv_energy_consumption", "counter", "Joules since the start", "energy_joules"),
    ):
        values = [(gpu.uuid, getattr(gpu, attribute)) for gpu in gpus]
        told = [
            f"{name}{label_text(gpu_uuid=uuid)} {value}"
            for uuid, value in values
            if value is not None
        ]
        lines += _head(name, text, kind) + told if told else []
    return lines


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _of(item: Pending, **more: str) -> str:
    metrics = item.metrics
    return label_text(model=metrics.name, version=metrics.version, **metrics.tags, **more)


def _front(front: FrontUse) -> str:
    if not front.front:
        return label_text(protocol=front.protocol)
    return label_text(protocol=front.protocol, front=front.front)


def _process(process: ProcessUse) -> str:
    if not process.model and process.instance:
        return label_text(process=process.role, front=process.instance)
    if not process.model:
        return label_text(process=process.role)
    return label_text(
        process=process.role,
        model=process.model,
        version=process.version,
        instance=process.instance,
    )


def label_text(**labels: str) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
