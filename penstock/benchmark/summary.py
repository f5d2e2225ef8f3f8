"""The figures of a level as plain values for all reports. Pure.

Percentiles are of good answers; the SLO is judged elsewhere, where failed requests count as never
answered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from penstock import slo as promises
from penstock.benchmark import pacer, stats, verdicts
from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.results import BenchRun, Level
from penstock.benchmark.stats import Interval, Window, percentile_interval
from penstock.benchmark.targets import Counters
from penstock.slo import Goodput, Latency, Slo

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p99.9": 99.9}
# Metrics of streams: time to first token, between two chunks, and per token after the first.
STREAM_METRICS = ("ttft", "itl", "tpot")
NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a request's mean time went, in seconds; the server's parts are its own figures."""

    # due -> sent, and everything between client and server.
    unsent_s: float = 0.0
    outside_s: float = 0.0
    overhead_s: float = 0.0
    queue_s: float = 0.0
    input_s: float = 0.0
    infer_s: float = 0.0
    output_s: float = 0.0
    # The two parts of the queue, where the server reports them.
    batch_wait_s: float | None = None
    instance_wait_s: float | None = None

    @property
    def server_s(self) -> float:
        return self.overhead_s + self.queue_s + self.input_s + self.infer_s + self.output_s

    def phases(self) -> dict[str, float]:
        """Return all parts in the order a request passes them; their sum is its latency."""
        outside = {"waiting to be sent": self.unsent_s, "network and client": self.outside_s}
        return outside | self.inside()

    def inside(self) -> dict[str, float]:
        """Return the server's parts."""
        found = {"server overhead": self.overhead_s}
        if self.batch_wait_s is None or self.instance_wait_s is None:
            found["queue"] = self.queue_s
        else:
            found["queue: for a batch"] = self.batch_wait_s
            found["queue: for an instance"] = self.instance_wait_s
        found |= {"compute input": self.input_s, "compute infer": self.infer_s}
        return found | {"compute output": self.output_s}


@dataclass(frozen=True, slots=True)
class MemberFigures:
    """A model that an ensemble runs: its own figures, over the requests of all its clients."""

    # Requests to it for each request to the ensemble.
    num_requests: float
    # Rows of an execution, in the mean; NaN without one.
    num_rows: float
    # Means per request to it, nothing of them outside of the server.
    breakdown: Breakdown


@dataclass(frozen=True, slots=True)
class Figures:
    """One level in numbers. Durations in seconds, rates per second."""

    label: str
    num_requests: int
    num_good: int
    failures: dict[str, int]
    throughput: Interval
    mean_s: float
    # By percentile: latency, then each observed metric of streams.
    latency: dict[str, Interval]
    streams: dict[str, dict[str, Interval]]
    # Percent of requests answered well and in time; None without limits on latency.
    goodput_percent: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    breakdown: Breakdown | None
    # By name, in the order of an ensemble's steps; empty for other models.
    members: dict[str, MemberFigures]
    # Percent by server resource; empty where none is visible.
    utilisation: dict[str, float]

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def busiest(self) -> tuple[str, float] | None:
        """The resource that would saturate first."""
        return max(self.utilisation.items(), key=lambda item: item[1], default=None)


def figures_of(run: BenchRun, level: Level) -> Figures:
    windows = level.windows
    whole = stats.merged(windows)
    seen = [name for name in STREAM_METRICS if name in whole.metrics]
    has_tokens = whole.num_output_tokens > 0 and whole.length_s > 0
    return Figures(
        label=level.label,
        num_requests=whole.num_due,
        num_good=whole.num_good,
        failures=dict(sorted(whole.failures.items(), key=lambda item: -item[1])),
        throughput=stats.throughput_interval(windows),
        mean_s=stats.histogram(windows, "latency").mean(),
        latency=_percentiles(windows, "latency"),
        streams={name: _percentiles(windows, name) for name in seen},
        goodput_percent=_goodput(windows, slo_of(run)),
        input_tokens_per_s=whole.num_input_tokens / whole.length_s if has_tokens else None,
        output_tokens_per_s=whole.num_output_tokens / whole.length_s if has_tokens else None,
        breakdown=breakdown_of(level),
        members=members_of(level),
        utilisation=utilisation_of(run, level),
    )


def _percentiles(windows: list[Window], metric: str) -> dict[str, Interval]:
    known = PERCENTILES.items()
    return {name: percentile_interval(windows, metric, percent) for name, percent in known}


def _goodput(windows: list[Window], limits: Slo | None) -> float | None:
    if limits is None or not any(isinstance(term, Latency) for term in limits.terms):
        return None
    # Computed even if the SLO has no goodput term, with the SLO's latency limits.
    asked = Slo((*(term for term in limits.terms if term.name != "goodput"), Goodput(100.0)))
    percent = verdicts.measured(windows, asked)["goodput"].value
    return None if math.isnan(percent) else percent


def breakdown_of(level: Level) -> Breakdown | None:
    server = level.server
    if server is None or not server.num_success:
        return None
    latency_s, service_s = stats.histogram(level.windows, "latency").mean(), level.service.mean()
    found = _inside(server)
    outside_s = min(latency_s, service_s) - server.success_ns / server.num_success * NANOSECOND
    unsent_s, outside_s = max(0.0, latency_s - service_s), max(0.0, outside_s)
    return replace(found, unsent_s=unsent_s, outside_s=outside_s)


def members_of(level: Level) -> dict[str, MemberFigures]:
    """Return the figures of an ensemble's members that have answered."""
    server = level.server
    if server is None or not server.num_success:
        return {}
    return {
        name: MemberFigures(
            each.num_success / server.num_success,
            each.num_inferences / each.num_executions if each.num_executions else math.nan,
            _inside(each),
        )
        for name, each in server.members.items()
        if each.num_success
    }


def _inside(server: Counters) -> Breakdown:
    """Return the parts that a server counts."""

    def mean_s(total_ns: int) -> float:
        return total_ns / server.num_success * NANOSECOND

    parts_ns = server.queue_ns + server.compute_input_ns
    parts_ns += server.compute_infer_ns + server.compute_output_ns
    has_waits = server.batch_wait_ns is not None and server.instance_wait_ns is not None
    return Breakdown(
        overhead_s=max(0.0, mean_s(server.success_ns - parts_ns)),
        queue_s=mean_s(server.queue_ns),
        input_s=mean_s(server.compute_input_ns),
        infer_s=mean_s(server.compute_infer_ns),
        output_s=mean_s(server.compute_output_ns),
        batch_wait_s=mean_s(server.batch_wait_ns or 0) if has_waits else None,
        instance_wait_s=mean_s(server.instance_wait_ns or 0) if has_waits else None,
    )


def utilisation_of(run: BenchRun, level: Level) -> dict[str, float]:
    """Return means over the level. The machine counts only if the server runs on it."""
    found: dict[str, float] = {}
    if run.environment.is_server_local and level.system:
        found["CPU"] = fmean(sample.cpu_percent for sample in level.system)
        for index in range(min(len(sample.gpu_percent) for sample in level.system)):
            name = "GPU" if len(run.environment.gpus) <= 1 else f"GPU {index}"
            found[name] = fmean(sample.gpu_percent[index] for sample in level.system)
    server, num_instances = level.server, run.target.num_instances
    if server is not None and server.busy_ns is not None and num_instances and level.measured_s > 0:
        busy = 100 * server.busy_ns * NANOSECOND / (level.measured_s * num_instances)
        found["instances"] = min(100.0, busy)
    return found


def slo_of(run: BenchRun) -> Slo | None:
    return promises.parse(run.slo) if run.slo else None


def in_order(run: BenchRun) -> BenchRun:
    """Return the run with its levels sorted by load, if they are of one kind."""
    if len({type(level.load) for level in run.levels}) != 1:
        return run
    order = sorted(range(len(run.levels)), key=lambda i: load_size(run.levels[i].load))
    knee = run.knee
    if knee is not None and 0 <= knee.level < len(order):
        knee = msgspec.structs.replace(knee, level=order.index(knee.level))
    levels = [run.levels[index] for index in order]
    return msgspec.structs.replace(run, levels=levels, knee=knee)


def short_loads(loads: list[Load]) -> tuple[str, list[str]]:
    """Return a column's name and cells, as short as levels of one kind allow."""
    if all(isinstance(load, Closed) for load in loads):
        return "concurrency", [str(load.concurrency) for load in loads if isinstance(load, Closed)]
    flats = [
        (load.profile.rate, load.arrivals, load.cv)
        for load in loads
        if isinstance(load, Open) and isinstance(load.profile, Flat)
    ]
    if len(flats) == len(loads) and len({(kind, cv) for _, kind, cv in flats}) == 1:
        rates = [f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}" for rate, _, _ in flats]
        return f"{flats[0][1]} /s", rates
    return "load", [pacer.label(load) for load in loads]


def load_size(load: Load) -> float:
    """Return the sort key of levels of one kind: concurrency or mean rate."""
    return float(load.concurrency) if isinstance(load, Closed) else pacer.mean_rate(load)
