"""Figures of a served build: from the windows of its levels to one measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.benchmark import pacer, stats, verdicts
from penstock.benchmark.pacer import Load, Open
from penstock.benchmark.results import Level
from penstock.benchmark.stats import Interval, Window
from penstock.benchmark.targets import Counters
from penstock.config import ModelConfig
from penstock.optimizer.disturbance import MIN_CALM, calm_windows
from penstock.optimizer.endpoints import ServedEndpoint
from penstock.optimizer.machine import Conditions
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import (
    Curve,
    MemberTime,
    ServedMeasurement,
    Streams,
    TermVerdict,
    Turn,
)
from penstock.slo import Cost, Goodput, Latency, Memory, Slo, Term, cost_per_million


@dataclass(slots=True)
class ServedAccount:
    """All measurements of one build, over its rounds."""

    config: ModelConfig
    windows: list[Window] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    memory_bytes: int = 0
    # For each worker.
    gpu_memory_bytes: Sequence[int] = ()
    # The windows of each round, and the state of the machine during it.
    rounds: list[tuple[Sequence[Window], Conditions]] = field(default_factory=list)

    def add(self, level: Level, endpoint: ServedEndpoint) -> None:
        """Add a round; its windows follow those of earlier rounds without a gap."""
        conditions = endpoint.conditions
        if level.generator.num_waited:
            # All connections were busy: the server delayed requests, not the machine.
            conditions = msgspec.structs.replace(conditions, is_generator_waiting=True)
        self.rounds.append((level.windows, conditions))
        start_s = max((each.start_s + each.length_s for each in self.windows), default=0.0)
        for window in level.windows:
            window.start_s += start_s
            self.windows.append(window)
        if level.server is not None:
            self.counters.append(level.server)
        self.memory_bytes = max(self.memory_bytes, endpoint.memory_bytes)
        self.gpu_memory_bytes = endpoint.gpu_memory_bytes

    @property
    def promised_bytes(self) -> int:
        """The memory that the SLO's memory term limits: GPU memory for models on GPUs."""
        return sum(self.gpu_memory_bytes) if self.config.uses_gpu else self.memory_bytes


def served_of(account: ServedAccount, load: Load, plan: Plan) -> ServedMeasurement:
    """Combine all rounds; intervals cover the spread between them."""
    windows = account.windows
    turns = [_turn(*each, plan) for each in account.rounds]
    failures = sum((Counter(window.failures) for window in windows), Counter[str]())
    num_executions = sum(each.num_executions for each in account.counters)
    num_inferences = sum(each.num_inferences for each in account.counters)
    return ServedMeasurement(
        load=pacer.label(load),
        p50=spread(_percentile(windows, "latency", 50), [t.p50_s for t in turns]),
        p99=spread(_percentile(windows, "latency", 99), [t.p99_s for t in turns]),
        throughput=spread(stats.throughput_interval(windows), [t.throughput for t in turns]),
        goodput=_goodput(windows, plan.slo),
        verdicts=_verdicts([each for each, _ in account.rounds], account.promised_bytes, plan),
        num_requests=sum(window.num_due for window in windows),
        num_failed=sum(window.num_failed for window in windows),
        phases=phases(account.counters, stats.histogram(windows).mean(), account.config),
        rows_per_batch=num_inferences / num_executions if num_executions else math.nan,
        memory_bytes=account.memory_bytes,
        num_runs=len(turns),
        failure=failures.most_common(1)[0][0] if failures else "",
        gpu_memory_bytes=max(account.gpu_memory_bytes, default=0),
        streams=_streams(windows),
        turns=turns,
        members=members(account.counters),
    )


def _turn(windows: Sequence[Window], conditions: Conditions, plan: Plan) -> Turn:
    is_waiting = conditions.is_generator_waiting
    calm = list(windows) if is_waiting else calm_windows(windows, plan.slo.latency_s)
    share = len(calm) / len(windows) if windows else 0.0
    return Turn(
        p50_s=_percentile(windows, "latency", 50).value,
        p99_s=_percentile(windows, "latency", 99).value,
        throughput=stats.throughput_interval(windows).value,
        goodput=_goodput(windows, plan.slo),
        is_kept=_is_kept(windows, plan),
        is_kept_calm=_is_kept(calm, plan) if share >= MIN_CALM else None,
        p99_calm_s=_percentile(calm, "latency", 99).value if share >= MIN_CALM else None,
        late_share=1 - share,
        conditions=conditions,
    )


def _percentile(windows: Sequence[Window], metric: str, percent: float) -> Interval:
    """Return a percentile as the SLO judges it: failed requests count as infinitely slow."""
    return stats.percentile_interval(windows, metric, percent, with_failures=True)


def _is_kept(windows: Sequence[Window], plan: Plan) -> bool:
    """Return whether no term that windows can judge is missed, by its estimate."""
    found = verdicts.measured(windows, plan.slo)
    judged = verdicts.verdicts(plan.slo, found)
    return all(each.outcome != "missed" for each in judged)


def spread(measured: Interval, values: Sequence[float]) -> Interval:
    """Widen an interval to cover each repetition: differences between them are not chance."""
    known = [each for each in values if not math.isnan(each)]
    if len(known) < 2:
        return measured
    low = measured.low if math.isnan(measured.low) else min(measured.low, *known)
    high = measured.high if math.isnan(measured.high) else max(measured.high, *known)
    return Interval(measured.value, low, high)


def _streams(windows: Sequence[Window]) -> Streams | None:
    length_s = sum(window.length_s for window in windows)
    if not length_s or not any(window.num_output_tokens for window in windows):
        return None
    return Streams(
        ttft=_percentile(windows, "ttft", 99),
        tpot=_percentile(windows, "tpot", 99),
        prompt_tokens_per_s=sum(window.num_input_tokens for window in windows) / length_s,
        tokens_per_s=sum(window.num_output_tokens for window in windows) / length_s,
    )


def phases(counters: Sequence[Counters], latency_s: float, config: ModelConfig) -> dict[str, float]:
    """Return mean seconds of a request by phase, from the server's counters; the rest of the
    client's latency is network and codec. With a preprocessing or postprocessing function, that
    dominates compute input or output, and names the phase."""
    num = sum(each.num_success for each in counters)
    if not num:
        return {}
    fields = {
        "queue": "queue_ns",
        "preprocess" if config.preprocess else "compute input": "compute_input_ns",
        "compute": "compute_infer_ns",
        "postprocess" if config.postprocess else "compute output": "compute_output_ns",
    }
    found = {
        name: sum(getattr(each, field) for each in counters) / num / 1e9
        for name, field in fields.items()
    }
    found["network and codec"] = max(0.0, latency_s - sum(found.values()))
    return found


def members(counters: Sequence[Counters]) -> dict[str, MemberTime]:
    """Return the time in each member for each request to the ensemble, in the order of its steps;
    empty for other models."""
    num = sum(each.num_success for each in counters)
    found: dict[str, MemberTime] = {}
    for name in dict.fromkeys(name for each in counters for name in each.members):
        own = [each.members[name] for each in counters if name in each.members]
        compute = sum(c.compute_input_ns + c.compute_infer_ns + c.compute_output_ns for c in own)
        queue, num_own = sum(c.queue_ns for c in own), sum(c.num_success for c in own)
        if num and num_own:
            found[name] = MemberTime(queue / num / 1e9, compute / num / 1e9, num_own / num)
    return found


def _goodput(windows: Sequence[Window], slo: Slo) -> float:
    """Return the share of requests that were answered successfully and in time."""
    limits = [term for term in slo.terms if isinstance(term, Latency)]
    whole = Slo((*limits, Goodput(100.0)))
    return verdicts.measured(windows, whole)["goodput"].value / 100


def _verdicts(rounds: Sequence[Sequence[Window]], num_bytes: int, plan: Plan) -> list[TermVerdict]:
    found = verdicts.measured([window for each in rounds for window in each], plan.slo)
    turns = [verdicts.measured(each, plan.slo) for each in rounds]
    found = {n: spread(each, [turn[n].value for turn in turns]) for n, each in found.items()}
    if num_bytes:
        found[Memory.name] = Interval(*3 * (float(num_bytes),))
    return [_verdict(term, found.get(term.name)) for term in plan.slo.terms]


def _verdict(term: Term, measured: Interval | None) -> TermVerdict:
    if isinstance(term, Latency):
        limit, unit = term.limit_s, "s"
    else:
        limit, unit = term.limit, "bytes" if isinstance(term, Memory) else term.unit.strip()
    judged = verdicts.IntervalVerdict(term, measured)
    return TermVerdict(str(term), judged.outcome, measured, limit, unit)


def _by_rate(levels: Sequence[Level]) -> dict[float, Level]:
    """Return the levels of an open loop by increasing rate, each as measured last."""
    rates = {pacer.mean_rate(each.load): each for each in levels if isinstance(each.load, Open)}
    return dict(sorted(rates.items()))


def curve_of(levels: Sequence[Level]) -> Curve:
    """Return throughput and latency at increasing rates."""
    by_rate = _by_rate(levels)
    ordered = list(by_rate.values())
    histograms = [stats.histogram(level.windows) for level in ordered]
    return Curve(
        rates=list(by_rate),
        throughput=[stats.throughput_interval(level.windows).value for level in ordered],
        p50_s=[each.percentile(50) for each in histograms],
        p99_s=[each.percentile(99) for each in histograms],
        ttft_p99_s=_p99s(ordered, "ttft"),
        tpot_p99_s=_p99s(ordered, "tpot"),
    )


def _p99s(levels: Sequence[Level], metric: str) -> list[float]:
    """Return p99 of each level; empty if answers are not streamed."""
    found = [stats.histogram(level.windows, metric).percentile(99) for level in levels]
    return [] if all(map(math.isnan, found)) else found


def priced(served: ServedMeasurement, max_rate: Interval, plan: Plan) -> ServedMeasurement:
    """Add the highest rate, the cost of a million answers at it, and the verdict on that."""
    if plan.price_per_hour is None:
        return msgspec.structs.replace(served, max_rate=max_rate)
    price = plan.price_per_hour
    ends = (max_rate.low, max_rate.value, max_rate.high)
    low, value, high = (cost_per_million(each, price) for each in ends)
    # A higher rate means a lower cost.
    cost = Interval(value, min(low, high), max(low, high))
    judged = [
        _verdict(term, cost) if isinstance(term, Cost) else known
        for term, known in zip(plan.slo.terms, served.verdicts, strict=True)
    ]
    found = msgspec.structs.replace(served, max_rate=max_rate, verdicts=judged)
    return msgspec.structs.replace(found, cost_per_million=cost.value)


def repriced(served: ServedMeasurement, plan: Plan) -> ServedMeasurement:
    """Recompute costs with the current price."""
    return served if served.max_rate is None else priced(served, served.max_rate, plan)


def shown_level(levels: Sequence[Level], rate: Interval) -> Level:
    """Return the level of the highest rate that met the SLO, or of the lowest rate if none did."""
    by_rate = _by_rate(levels)
    kept = [level for each, level in by_rate.items() if each <= rate.value * (1 + 1e-9)]
    return kept[-1] if kept else next(iter(by_rate.values()))


def in_time_rate(windows: Sequence[Window], slo: Slo) -> float:
    """Return the requests per second that were answered within the limits."""
    length_s = sum(window.length_s for window in windows)
    num_due = sum(window.num_due for window in windows)
    return _goodput(windows, slo) * num_due / length_s if length_s and num_due else 0.0
