"""A Prometheus scrape: metrics of models, and the use of processes, the machine and its GPUs.

The use is read at the scrape, metrics are counted before. The text is written here because
Triton's counters do not end in `_total`, which client libraries require.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter

import psutil

import penstock
from penstock.backends import GPU_FALLBACK
from penstock.serving.custom_metrics import CustomMetric, merge
from penstock.serving.drift import InputDrift
from penstock.serving.histogram import Histogram
from penstock.serving.metrics import PHASES, WAITS, Labels, ModelMetrics, SloCount
from penstock.serving.served import ModelProcess
from penstock.system.devices import GpuUse, Watch

# Rows of a batch.
BATCH_BUCKETS = tuple(1 << power for power in range(11))
Sample = tuple[Labels, object]


@dataclass(frozen=True, slots=True)
class ScrapeLines:
    """One metric, as lines of a scrape."""

    name: str
    text: str
    kind: str
    lines: Sequence[str]

    @classmethod
    def of(cls, name: str, text: str, kind: str, samples: Iterable[Sample]) -> ScrapeLines:
        """Unknown values, None, are left out."""
        known = [(labels, value) for labels, value in samples if value is not None]
        return cls(name, text, kind, [f"{name}{label_text(labels)} {v}" for labels, v in known])

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


@dataclass(frozen=True, slots=True)
class Pending:
    """Metrics and live state of a model, and the processes whose GPU memory is shown."""

    metrics: ModelMetrics
    num_pending: int
    num_ready: int
    processes: Sequence[ModelProcess] = ()
    # Its stages have metrics of their own, and compute for it.
    is_staged: bool = False
    drift: Sequence[InputDrift] = ()
    # Of the model or stage itself, by state.
    instances: Mapping[str, int] = field(default_factory=dict)

    @property
    def busy_s(self) -> str | None:
        """Seconds that its instances computed; None if its stages show theirs."""
        return None if self.is_staged else f"{self.metrics.busy_s:.6f}"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Use of one process. Its `process` label: core, worker or shard."""

    labels: Labels
    resident_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class HostUse:
    """Use of machine and processes; `cpu_utilization` of all cores since the last scrape."""

    cpu_utilization: float
    memory_total_bytes: int
    memory_used_bytes: int
    processes: Sequence[ProcessUse] = ()
    gpus: Sequence[GpuUse] = ()


@dataclass(frozen=True, slots=True)
class ShardUse:
    """The process of a shard, by its number from 1."""

    shard: str
    num_restarts: int
    num_connections: int
    # In the log.
    name: str = ""
    # 0 while no process runs.
    pid: int = 0
    # Whether it accepts new connections.
    accepts: bool = True

    @property
    def labels(self) -> Labels:
        return {"shard": self.shard}


LabelledModel = tuple[Labels, Pending]
# Metrics of each model: name, help, type and attribute of `Pending`.
NUMBERS = (
    ("nv_inference_request_success", "Requests answered", "counter", "metrics.num_success"),
    ("nv_inference_count", "Inferences (rows) done", "counter", "metrics.num_inferences"),
    ("nv_inference_exec_count", "Batches executed", "counter", "metrics.num_executions"),
    ("penstock_worker_restarts", "Workers started again", "counter", "metrics.num_restarts"),
    ("penstock_padded_bytes", "Padded inputs, with the padding", "counter", "metrics.padded_bytes"),
    ("penstock_padding_bytes", "Padding of padded inputs", "counter", "metrics.padding_bytes"),
    ("penstock_busy_seconds", "Seconds that instances computed", "counter", "busy_s"),
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
# Metrics of each objective of an SLO: name, help, type and value.
SLO_METRICS: tuple[tuple[str, str, str, Callable[[SloCount], object]], ...] = (
    ("penstock_slo_requests", "Requests that count for the SLO", "counter",
     lambda each: each.num_requests),
    ("penstock_slo_bad_requests", "Requests that missed it: late, failed or refused", "counter",
     lambda each: each.num_bad),
    ("penstock_slo_objective", "Share of requests that must keep it (0 to 1)", "gauge",
     lambda each: each.objective.share),
    ("penstock_slo_latency_seconds", "Limit of a request", "gauge",
     lambda each: each.objective.limit_s if each.objective.limit_s < math.inf else None),
)  # fmt: skip
# Metrics of each input of a version with evidence; attribute of `InputDrift`.
DRIFT_METRICS = (
    ("penstock_drift_rows", "Rows compared with the evidence", "counter", "num_rows"),
    (
        "penstock_drift_out_of_range_share",
        "Share of rows outside of the evidence's range",
        "gauge",
        "outside_share",
    ),
    ("penstock_drift_distance", "Distance from the evidence's data", "gauge", "distance"),
    ("penstock_drift_alarm", "1: inputs are not like the evidence's", "gauge", "is_alarm"),
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
    models: Iterable[Pending],
    host: HostUse | None = None,
    shards: Sequence[ShardUse] = (),
    regions: Mapping[str, tuple[int, int]] | None = None,
    others: Iterable[ScrapeLines] = (),
    hidden: frozenset[str] = frozenset(),
) -> bytes:
    """Render the text of a scrape. `regions` are the number and bytes of clients' shared memory, by
    kind; `others` are families that other parts of the server make; those in `hidden` are left
    out."""
    items = [(model.metrics.labels, model) for model in models]
    optional = [*_slos(items), *_optional(items), *_shards(shards), *_regions(regions or {})]
    optional += others
    optional += [] if host is None else _host(host)
    families = [*_of_every_model(items), *(family for family in optional if family.lines)]
    text, version = "The version that runs; always 1", {"version": penstock.__version__}
    families.append(ScrapeLines.of("penstock_build_info", text, "gauge", [(version, 1)]))
    names = {family.name for family in families} | hidden
    custom = map(_custom, merge(item.metrics.custom for _, item in items))
    # A family that is there twice would make the whole scrape invalid.
    families += [family for family in custom if family.name not in names]
    return "".join(
        f"{line}\n"
        for family in families
        if family.name not in hidden
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
    states = [
        ({**labels, "state": state}, count)
        for labels, item in items
        for state, count in item.instances.items()
    ]
    yield ScrapeLines.of("penstock_instances", "Instances, by state", "gauge", states)
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


def _slos(items: Sequence[LabelledModel]) -> Iterator[ScrapeLines]:
    """Yield the families of versions with an SLO, by metric of the SLO."""
    counts = [
        ({**labels, "metric": each.objective.metric}, each)
        for labels, item in items
        for each in item.metrics.slo_counts
    ]
    for name, text, kind, read in SLO_METRICS:
        yield ScrapeLines.of(name, text, kind, [(labels, read(each)) for labels, each in counts])


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
    fallen = [
        ({**labels, "instance": str(each.index)}, 1)
        for labels, item in items
        for each in item.processes
        if GPU_FALLBACK in each.built
    ]
    text = "1: the instance runs on the CPU, as the engine for GPUs cannot read its model"
    yield ScrapeLines.of("penstock_gpu_fallback", text, "gauge", fallen)
    yield from _recordings(items)
    yield from _sequences(items)
    yield from _drift(items)
    # A family that several models share is written once.
    shared: dict[str, ScrapeLines] = {}
    for _, item in items:
        for family in item.metrics.others():
            known = shared.setdefault(family.name, replace(family, lines=()))
            shared[family.name] = replace(known, lines=[*known.lines, *family.lines])
    yield from shared.values()


def _sequences(items: Sequence[LabelledModel]) -> Iterator[ScrapeLines]:
    models = [(labels, item.metrics) for labels, item in items if item.metrics.num_sequences_ended]
    held = [(labels, metrics.gauges.num_sequences) for labels, metrics in models]
    yield ScrapeLines.of("penstock_sequences", "Sequences that hold a slot", "gauge", held)
    waiting = [(labels, metrics.gauges.num_waiting_sequences) for labels, metrics in models]
    text = "Sequences that wait for a slot"
    yield ScrapeLines.of("penstock_waiting_sequences", text, "gauge", waiting)
    ended = [
        ({**labels, "reason": reason}, count)
        for labels, metrics in models
        for reason, count in metrics.num_sequences_ended.items()
    ]
    yield ScrapeLines.of("penstock_ended_sequences", "Sequences that ended", "counter", ended)


def _recordings(items: Sequence[LabelledModel]) -> Iterator[ScrapeLines]:
    recorded = [(labels, item.metrics) for labels, item in items if item.metrics.num_unrecorded]
    counts = [(labels, metrics.num_recorded) for labels, metrics in recorded]
    text = "Requests written to the recording"
    yield ScrapeLines.of("penstock_recorded_requests", text, "counter", counts)
    dropped = [
        ({**labels, "reason": reason}, count)
        for labels, metrics in recorded
        for reason, count in metrics.num_unrecorded.items()
    ]
    text = "Sampled requests that are not in the recording, by reason"
    yield ScrapeLines.of("penstock_record_dropped", text, "counter", dropped)
    stopped = [(labels, metrics.num_record_stopped) for labels, metrics in recorded]
    text = "Shards that cannot write the recording"
    yield ScrapeLines.of("penstock_record_stopped", text, "gauge", stopped)


def _drift(items: Sequence[LabelledModel]) -> Iterator[ScrapeLines]:
    states = [
        ({**labels, "tensor": each.tensor, "quantity": each.quantity}, each)
        for labels, item in items
        for each in item.drift
    ]
    for name, text, kind, attribute in DRIFT_METRICS:
        samples = [(labels, getattr(each, attribute)) for labels, each in states]
        known = [(labels, int(v) if isinstance(v, bool) else v) for labels, v in samples]
        yield ScrapeLines.of(name, text, kind, known)


def _custom(metrics: Sequence[CustomMetric]) -> ScrapeLines:
    """Render a family of models' own."""
    first = metrics[0]
    text = first.text.replace("\\", r"\\").replace("\n", r"\n")
    if first.kind != "histogram":
        samples = [(each.labels, _number(each.total)) for each in metrics]
        return ScrapeLines.of(first.family, text, first.kind, samples)
    histograms = []
    for each in metrics:
        histogram = Histogram([_whole(bound) for bound in each.bounds])
        histogram.counts, histogram.total = each.counts, _whole(each.value)
        histograms.append((each.labels, histogram))
    return ScrapeLines.of_histograms(first.family, text, histograms)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(_whole(value))


def _whole(value: float) -> float:
    """Return whole numbers without a fraction, as Triton writes them."""
    return int(value) if value.is_integer() else value


def _shards(shards: Sequence[ShardUse]) -> Iterator[ScrapeLines]:
    restarts = [(each.labels, each.num_restarts) for each in shards]
    text = "Shards started again after a death"
    yield ScrapeLines.of("penstock_shard_restarts", text, "counter", restarts)
    counts = [(each.labels, each.num_connections) for each in shards]
    text = "Clients connected to each shard"
    yield ScrapeLines.of("penstock_shard_connections", text, "gauge", counts)
    accepts = [(each.labels, int(each.accepts)) for each in shards]
    text = "Whether a shard accepts new connections (0 or 1)"
    yield ScrapeLines.of("penstock_shard_accepts", text, "gauge", accepts)


def _regions(regions: Mapping[str, tuple[int, int]]) -> Iterator[ScrapeLines]:
    counts = [({"kind": kind}, count) for kind, (count, _) in regions.items()]
    text = "Regions of shared memory that clients have registered"
    yield ScrapeLines.of("penstock_shared_memory_regions", text, "gauge", counts)
    sizes = [({"kind": kind}, nbytes) for kind, (_, nbytes) in regions.items()]
    text = "Bytes of these regions"
    yield ScrapeLines.of("penstock_shared_memory_bytes", text, "gauge", sizes)


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
        yield ScrapeLines.of(name, text, kind, values)


def label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class ProcessUsage:
    """Reads resource use. Utilisation is since the last `read`, so use one per server."""

    def __init__(self, gpus: Watch | None = None) -> None:
        self.gpus = gpus or Watch()
        psutil.cpu_percent(None)

    def begin(self) -> None:
        """Start counting the GPUs' energy. Opens their driver: not for the event loop."""
        self.gpus.uses()

    def read(self, members: Iterable[tuple[int, Labels]] = ()) -> HostUse:
        """Read the use of this process and of `members`; one that has just exited is left out."""
        processes = []
        for pid, labels in ((os.getpid(), {"process": "core"}), *members):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                with process.oneshot():
                    times, resident_bytes = process.cpu_times(), process.memory_info().rss
                processes.append(ProcessUse(labels, resident_bytes, times.user + times.system))
        memory = psutil.virtual_memory()
        return HostUse(
            cpu_utilization=psutil.cpu_percent(None) / 100,
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            processes=processes,
            gpus=self.gpus.uses(),
        )


def cpu_s(pids: Iterable[int]) -> dict[int, float]:
    """Return CPU time so far, user and system; without processes that have exited."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found
