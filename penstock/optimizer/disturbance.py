"""Detection of disturbed measurements: contradictions between them, and other load. Pure.

Other programs on a machine can only make a server slower. So a kept SLO stands, and a missed one is
compared with everything else that was measured: the same build at other times, the search for its
highest rate, the original before and after, and the machine itself. If there are doubts, the run
measures again; doubts that remain make it *disturbed*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock import units
from penstock.benchmark.stats import Interval, Window
from penstock.optimizer.machine import Conditions
from penstock.optimizer.results import ServedMeasurement, Turn

# Units of SLO terms that depend on the machine's speed.
TIMED = ("s", "%", "/s", "per million")
# The generator counts as late above this delay, or above this share of the latency limit.
LATE_S, LATE_SHARE = 0.02, 0.2
# A disturbance also covers the windows after it, until latency is back at RECOVERED times its
# median, but at most MAX_RECOVERY windows.
RECOVERED, MAX_RECOVERY = 1.5, 12
# With less calm time than this share, no figures are given for calm time.
MIN_CALM = 0.3
# A highest rate contradicts a kept or missed rate that differs from it by this factor.
RATE_MARGIN = 1.25
# A highest rate below this share of the rate just answered in time is void.
VOID_SHARE = 0.5
# Factor by which the machine was slower than at another time.
SLOWER = 1.15
# The smallest slowdown that the speed probe can detect; and the power by which latency grows with
# the time per request, as queues do near saturation.
MIN_SLOWER, GROWTH = 1.05, 8
# Factor within which predicted and measured rates agree.
PREDICTION_MARGIN = 4.0
# Overload: less than this share of the arriving requests is answered.
KEPT_UP = 0.95
# A queue that builds up during a pause can outlast its window: only a latency above this multiple
# of its limit counts as missed regardless of the pause.
PAUSE_EXCESS = 3.0
# Shares that are worth reporting: CPU used by others, steal time, time with a late generator.
MIN_FOREIGN, MIN_STEAL, MIN_LATE = 0.05, 0.01, 0.01
# Above this CPU share, the run itself delays the generator.
OWN_LOAD = 0.85
# Figures measured under more load by others than this are not reused by the next run.
MAX_FOREIGN, MAX_STEAL, MAX_LATE = 0.25, 0.1, 0.2


@dataclass(frozen=True, slots=True)
class BuildHistory:
    """One build: its final measurement, and everything else known about it."""

    name: str
    served: ServedMeasurement
    # Earlier measurements of the same build at the same load.
    earlier: Sequence[ServedMeasurement] = ()
    predicted_rate: float | None = None

    @property
    def turns(self) -> list[Turn]:
        return [turn for each in (self.served, *self.earlier) for turn in each.turns]


def doubts(chosen: BuildHistory, original: BuildHistory, rate: float | None) -> list[str]:
    """Return why the verdict on the chosen build cannot stand, one sentence each; empty if it can.
    `rate` is the SLO's load in requests per second; None: a closed loop."""
    served = chosen.served
    is_late = any(each.outcome == "missed" and each.unit in TIMED for each in served.verdicts)
    if not served.is_met and not is_late:
        # A faster machine would not help: only terms such as memory are missed.
        return []
    found = own_doubts(chosen, rate)
    factor, text = slowness(chosen, original)
    if text and not served.is_met and _may_be_kept(served, factor, rate):
        found.append(f"{chosen.name}: SLO missed while {text}")
    # A limit inside the interval cannot be decided on a disturbed machine. A neighbour that takes a
    # tenth of the CPU does not count as a disturbance.
    if text and is_close(served):
        found.append(f"{chosen.name}: too close to the limit to decide ({text})")
    return list(dict.fromkeys(found))


def is_close(served: ServedMeasurement) -> bool:
    """Return whether chance may decide: a limit lies inside the measured confidence interval."""
    return any(
        each.measured is not None
        and each.unit in TIMED
        and each.measured.low <= each.limit <= each.measured.high
        and not each.is_sure
        for each in served.verdicts
    )


def own_doubts(history: BuildHistory, rate: float | None) -> list[str]:
    """Return doubts about a build's figures by themselves: those of the original are the baseline
    of a claimed gain."""
    found = list(rate_doubts(history, rate))
    if not history.served.is_met:
        found += [*_pause_doubts(history), *_spread_doubts(history)]
    return list(dict.fromkeys(found))


# Contradictions.


def rate_doubts(history: BuildHistory, rate: float | None) -> Iterator[str]:
    """Compare the highest rate found with the verdict at the SLO's rate."""
    highest = history.served.max_rate
    if rate is None or highest is None or not highest.value > 0:
        return
    found, asked = f"{units.number(highest.value)}/s", f"{units.number(rate)}/s"
    # The estimate stands for an unknown end.
    low, high = (highest.value if math.isnan(end) else end for end in (highest.low, highest.high))
    # A search that ended before any rate missed says nothing of higher ones.
    has_end = not math.isnan(highest.high) or highest.value != highest.low
    if history.served.is_met and has_end and high * RATE_MARGIN < rate:
        yield f"{history.name}: SLO kept at {asked}, but the highest rate found is {found}"
    missed = {each.unit for each in history.served.verdicts if each.outcome == "missed"}
    if missed & {"s", "%"} and low > rate * RATE_MARGIN:
        yield f"{history.name}: SLO missed at {asked}, but kept at {found} in the rate search"


def is_void(highest: Interval, answered: float) -> bool:
    """Return whether a highest rate is far below what the same server just answered in time."""
    return highest.value < VOID_SHARE * answered


def _pause_doubts(history: BuildHistory) -> Iterator[str]:
    """Yield a doubt if the SLO is missed because of pauses in which the generator could not run
    either: without them it is kept, or missed by so little that the queue after one explains it."""
    missed = [
        turn
        for turn in history.served.turns
        if not turn.is_kept and turn.late_share >= MIN_LATE and not _is_own(turn.conditions)
    ]
    is_near = _excess(history.served) < PAUSE_EXCESS
    paused = [turn for turn in missed if turn.is_kept_calm is not False or is_near]
    if paused:
        share = max(turn.late_share for turn in paused)
        yield (
            f"{history.name}: SLO missed because of pauses in which the load generator did not run "
            f"either ({share:.0%} of the time)"
        )


def _spread_doubts(history: BuildHistory) -> Iterator[str]:
    """Yield a doubt if the same build at the same load kept the SLO at one time and missed it at
    another, when the machine was slower."""
    kept = [turn.conditions.speed_s for turn in history.turns if turn.is_kept]
    missed = [turn.conditions.speed_s for turn in history.turns if not turn.is_kept]
    if kept and missed and min(missed) > SLOWER * min(kept):
        yield f"{history.name}: repetitions disagree, with p99 from {_span(history.turns)}"


def slowness(chosen: BuildHistory, original: BuildHistory) -> tuple[float, str]:
    """Return the slowdown of the machine in the final measurement, and its cause; 1 if unknown.
    Others may run on idle cores, so their CPU use has a higher threshold than a slower clock."""
    turns = chosen.served.turns
    drift = _drift(turns, [*chosen.turns, *original.turns])
    taken = max((each.conditions.foreign_cpu + each.conditions.steal for each in turns), default=0)
    late = _late_share(turns)
    # Steal time and pauses may be the same time.
    factor = drift / max(0.05, 1 - max(taken, late))
    if drift > MIN_SLOWER:
        return factor, f"the machine was {drift:.2f}x slower than at another time of this run"
    if 1 / max(0.05, 1 - taken) > SLOWER:
        return factor, f"others used {taken:.0%} of the CPU"
    if late >= MIN_LATE:
        return factor, f"the load generator was late in up to {late:.0%} of the time"
    return 1.0, ""


def _late_share(turns: Sequence[Turn]) -> float:
    """Return the largest share of time with a generator late through no fault of the run."""
    others = (turn.late_share for turn in turns if not _is_own(turn.conditions))
    return max(others, default=0.0)


def _drift(turns: Sequence[Turn], every: Sequence[Turn]) -> float:
    """Return the slowest speed probe of these turns relative to the fastest of all."""
    last = [turn.conditions.speed_s for turn in turns if turn.conditions.speed_s > 0]
    known = [turn.conditions.speed_s for turn in every if turn.conditions.speed_s > 0]
    return max(last) / min(known) if last else 1.0


def _may_be_kept(served: ServedMeasurement, factor: float, rate: float | None) -> bool:
    """Return whether the SLO might be kept on a machine faster by this factor."""
    if rate is not None and served.throughput.value < KEPT_UP * rate:
        return served.throughput.value * factor * RATE_MARGIN >= rate
    return _excess(served) < factor**GROWTH


def _excess(served: ServedMeasurement) -> float:
    """Return the worst latency as a multiple of its limit, without pauses of the machine."""
    calm = [turn.p99_calm_s for turn in served.turns if turn.p99_calm_s is not None]
    is_known = calm and 0 < served.p99.value < math.inf
    lowered = min(calm) / served.p99.value if is_known else 1.0
    found = [
        each.measured.value / each.limit
        for each in served.verdicts
        if each.unit == "s" and each.measured is not None
    ]
    return max(found, default=1.0) * min(1.0, lowered)


def prediction_gap(history: BuildHistory, rate: float | None) -> str:
    """Return a sentence if the server answers far less, or far more, than batch times predict."""
    predicted, served = history.predicted_rate, history.served
    measured = None if served.max_rate is None else served.max_rate.value
    if measured is None or not measured > 0:
        is_overloaded = rate is not None and served.throughput.value < KEPT_UP * rate
        measured = served.throughput.value if is_overloaded else None
    if not predicted or measured is None or not measured > 0:
        return ""
    if max(predicted / measured, measured / predicted) < PREDICTION_MARGIN:
        return ""
    shown = f"{units.number(measured)}/s, batch times predict {units.number(predicted)}/s"
    return f"{history.name}: the server answers {shown}"


# The state of the machine.


def disturbances(servings: Sequence[ServedMeasurement]) -> list[str]:
    """Return signs of other load on the machine, one sentence each; empty without any."""
    turns = [turn for served in servings for turn in served.turns]
    if not turns:
        return []
    conditions = [turn.conditions for turn in turns]
    found = []
    foreign = max(each.foreign_cpu for each in conditions)
    if foreign >= MIN_FOREIGN:
        busiest = max(conditions, key=lambda each: each.load_average)
        cores = units.count(busiest.num_cores, "core")
        load = f"load average {busiest.load_average:.1f} on {cores}"
        found.append(f"other processes used up to {foreign:.0%} of the CPU ({load})")
    steal = max(each.steal for each in conditions)
    if steal >= MIN_STEAL:
        found.append(f"the hypervisor took up to {steal:.0%} of the CPU (steal time)")
    late = _late_share(turns)
    if late >= MIN_LATE:
        found.append(f"the load generator was late in up to {late:.0%} of the time")
    for served in servings:
        drift, p99s = _drift(served.turns, served.turns), _span(served.turns)
        if drift > SLOWER:
            changed = f"the speed of the machine changed by {drift:.2f}x"
            found.append(f"{changed} between repetitions (p99 {p99s})")
    return list(dict.fromkeys(found))


def is_reusable(served: ServedMeasurement) -> bool:
    """Return whether another run may reuse these figures from the journal."""
    return not served.disturbances and all(
        turn.conditions.foreign_cpu <= MAX_FOREIGN
        and turn.conditions.steal <= MAX_STEAL
        and (turn.late_share <= MAX_LATE or _is_own(turn.conditions))
        for turn in served.turns
    )


def _is_own(conditions: Conditions) -> bool:
    """Return whether the run itself keeps all cores busy, so that it causes the lateness."""
    others = conditions.foreign_cpu + conditions.steal
    return conditions.own_cpu >= OWN_LOAD and others < MIN_FOREIGN


def _span(turns: Sequence[Turn]) -> str:
    """Return the range of p99."""
    known = [turn.p99_s for turn in turns if math.isfinite(turn.p99_s)]
    if not known:
        return units.UNKNOWN
    return f"{units.duration(min(known))} to {units.duration(max(known))}"


# Windows.


def calm_windows(windows: Sequence[Window], limit_s: float | None) -> list[Window]:
    """Return the windows with a generator on time and without the queue after a pause."""
    late_s = max(LATE_S, LATE_SHARE * (limit_s or 0.0))
    latencies = [window.metrics.get("latency") for window in windows]
    medians = [math.nan if each is None else each.percentile(50) for each in latencies]
    known = [each for each in medians if not math.isnan(each)]
    usual = float(np.median(known)) if known else math.nan
    found: list[Window] = []
    recovering = 0
    for window, median in zip(windows, medians, strict=True):
        if window.max_late_s > late_s:
            # Requests in flight when the pause began were due in the window before it.
            found = found[:-1] if not recovering else found
            recovering = MAX_RECOVERY
        elif recovering and not median <= RECOVERED * usual:
            recovering -= 1
        else:
            recovering = 0
            found.append(window)
    return found
