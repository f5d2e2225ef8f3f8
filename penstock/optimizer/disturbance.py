"""Whether measurements can be trusted: contradictions between them, and the machine's state. Pure.

Other programs on a machine only ever make a server slower. So a kept SLO stands, and a missed one
is held against everything else that was measured: the same build at other times, the search for its
highest rate, the original before and after, and the machine itself. The run measures again where
there are doubts; doubts that stay make it *disturbed*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.benchmark.report import units
from penstock.benchmark.stats import Interval, Window
from penstock.optimizer.results import Conditions, Served, Turn

# Units of terms that depend on how fast the machine is.
TIMED = ("s", "%", "/s", "per million")
# The generator was late: by so much, or by this share of the latency limit.
LATE_S, LATE_SHARE = 0.02, 0.2
# A disturbance also covers the windows after it, until latency is back at RECOVERED times its
# median, but at most MAX_RECOVERY windows.
RECOVERED, MAX_RECOVERY = 1.5, 12
# Without this share of the time nothing is said of the rest.
MIN_CALM = 0.3
# A highest rate contradicts a kept or missed rate that is this factor away from it.
RATE_MARGIN = 1.25
# A highest rate below this share of what was just answered in time is void.
VOID_SHARE = 0.5
# The machine was slower by this factor than at another time.
SLOWER = 1.15
# The least that the probe of its speed can tell; and how fast a latency grows with the time that a
# request takes, as a power: queues near saturation do.
MIN_SLOWER, GROWTH = 1.05, 8
# Predictions are off by less.
PREDICTION_MARGIN = 4.0
# Overloaded: less than this share of what arrives is answered.
KEPT_UP = 0.95
# A queue that builds up during a pause can outlast the window: only a latency above this multiple
# of its limit counts as missed without the pause.
PAUSE_EXCESS = 3.0
# Shares of the CPU that are worth naming.
MIN_FOREIGN, MIN_STEAL, MIN_LATE = 0.05, 0.01, 0.01
# Above this share the run itself keeps the generator from sending in time.
OWN_LOAD = 0.85
# Figures taken beside this much load of others are not kept for the next run.
MAX_FOREIGN, MAX_STEAL, MAX_LATE = 0.25, 0.1, 0.2


@dataclass(frozen=True, slots=True)
class BuildHistory:
    """One build: its final measurement, and what else is known of it."""

    name: str
    served: Served
    # The same build at the same load, before.
    earlier: Sequence[Served] = ()
    predicted_rate: float | None = None

    @property
    def turns(self) -> list[Turn]:
        return [turn for each in (self.served, *self.earlier) for turn in each.turns]


def doubts(chosen: BuildHistory, original: BuildHistory, rate: float | None) -> list[str]:
    """Why the verdict on the chosen build cannot stand, one sentence each; empty: it can. `rate` is
    the SLO's load in requests per second; None: a closed loop."""
    if not chosen.served.is_met and not _is_missed_in_time(chosen.served):
        # No machine changes what is missed, such as memory.
        return []
    found = list(rate_doubts(chosen, rate))
    if not chosen.served.is_met:
        found += _pause_doubts(chosen)
        found += _spread_doubts(chosen)
        found += _slowness_doubts(chosen, original, rate)
    if is_close(chosen.served):
        found += _closeness_doubts(chosen, original)
    return list(dict.fromkeys(found))


def _is_missed_in_time(served: Served) -> bool:
    """Whether a term is missed that a faster machine might keep."""
    return any(each.outcome == "missed" and each.unit in TIMED for each in served.verdicts)


def is_close(served: Served) -> bool:
    """Whether chance alone may decide: a limit lies inside the interval of what was measured."""
    return any(
        each.measured is not None
        and each.unit in TIMED
        and each.measured.low <= each.limit <= each.measured.high
        and not each.is_sure
        for each in served.verdicts
    )


def original_doubts(original: BuildHistory, rate: float | None) -> list[str]:
    """The same for the figures of the original that a gain is claimed against."""
    found = list(rate_doubts(original, rate))
    if not original.served.is_met:
        found += [*_pause_doubts(original), *_spread_doubts(original)]
    return list(dict.fromkeys(found))


# Contradictions.


def rate_doubts(history: BuildHistory, rate: float | None) -> Iterator[str]:
    """The search for the highest rate against the SLO's rate."""
    highest = history.served.max_rate
    if rate is None or highest is None or not highest.value > 0:
        return
    found, asked = f"{units.number(highest.value)}/s", f"{units.number(rate)}/s"
    if history.served.is_met and _end(highest, "high") * RATE_MARGIN < rate:
        yield f"{history.name}: SLO kept at {asked}, but the highest rate found is {found}"
    is_late = any(
        each.outcome == "missed" and each.unit in ("s", "%") for each in history.served.verdicts
    )
    if is_late and _end(highest, "low") > rate * RATE_MARGIN:
        yield f"{history.name}: SLO missed at {asked}, but kept at {found} in the rate search"


def _end(rate: Interval, name: str) -> float:
    """An end of the interval, or the estimate where it is not known."""
    end: float = getattr(rate, name)
    return rate.value if math.isnan(end) else end


def is_void(highest: Interval, answered: float) -> bool:
    """Whether a highest rate is far below what the same server has just answered in time."""
    return highest.value < VOID_SHARE * answered


def _pause_doubts(history: BuildHistory) -> Iterator[str]:
    """The SLO is missed because of times in which the generator could not run either: without them
    it is kept, or not missed by so much that the queue they leave could not be why."""
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
    """The same build at the same load kept the SLO at one time and missed it at another, when the
    machine was slower."""
    kept = [turn.conditions.speed_s for turn in history.turns if turn.is_kept]
    missed = [turn.conditions.speed_s for turn in history.turns if not turn.is_kept]
    if kept and missed and min(missed) > SLOWER * min(kept):
        shown = _span([turn.p99_s for turn in history.turns])
        yield f"{history.name}: repetitions disagree, with p99 from {shown}"


def _slowness_doubts(
    chosen: BuildHistory, original: BuildHistory, rate: float | None
) -> Iterator[str]:
    """Whether the SLO may be kept at the speed that this machine has shown or would have alone."""
    factor, text = slowness(chosen, original)
    if text and _may_be_kept(chosen.served, factor, rate):
        yield f"{chosen.name}: SLO missed while {text}"


def slowness(chosen: BuildHistory, original: BuildHistory) -> tuple[float, str]:
    """How many times slower than possible the machine was in the final measurement, and why; 1
    where it is not known to have been. Cores that others use may be the ones that were idle, so
    they have to take more before that counts than a slower clock."""
    turns = chosen.served.turns
    drift = _drift(turns, [*chosen.turns, *original.turns])
    taken = max((each.conditions.foreign_cpu + each.conditions.steal for each in turns), default=0)
    late = _late_share(turns)
    # Steal time and pauses may be the same.
    factor = drift / max(0.05, 1 - max(taken, late))
    if drift > MIN_SLOWER:
        return factor, f"the machine was {drift:.2f}x slower than at another time of this run"
    if 1 / max(0.05, 1 - taken) > SLOWER:
        return factor, f"others used {taken:.0%} of the CPU"
    if late >= MIN_LATE:
        return factor, f"the load generator was late in up to {late:.0%} of the time"
    return 1.0, ""


def _late_share(turns: Sequence[Turn]) -> float:
    """The largest share of the time in which the generator was late, and not by the run's doing."""
    others = (turn.late_share for turn in turns if not _is_own(turn.conditions))
    return max(others, default=0.0)


def _drift(turns: Sequence[Turn], every: Sequence[Turn]) -> float:
    """The slowest moment of these turns over the fastest of all, by the fixed piece of work."""
    last = [turn.conditions.speed_s for turn in turns if turn.conditions.speed_s > 0]
    known = [turn.conditions.speed_s for turn in every if turn.conditions.speed_s > 0]
    return max(last) / min(known) if last else 1.0


def _may_be_kept(served: Served, factor: float, rate: float | None) -> bool:
    """On a machine faster by this factor."""
    if rate is not None and served.throughput.value < KEPT_UP * rate:
        return served.throughput.value * factor * RATE_MARGIN >= rate
    return _excess(served) < factor**GROWTH


def _excess(served: Served) -> float:
    """How many times its limit the worst latency is, without pauses of the machine."""
    calm = [turn.p99_calm_s for turn in served.turns if turn.p99_calm_s is not None]
    lowered = min(calm) / served.p99.value if calm and served.p99.value > 0 else 1.0
    found = [
        each.measured.value / each.limit
        for each in served.verdicts
        if each.unit == "s" and each.measured is not None
    ]
    return max(found, default=1.0) * min(1.0, lowered)


def _closeness_doubts(chosen: BuildHistory, original: BuildHistory) -> Iterator[str]:
    """A limit inside the interval is decided by chance; beside a disturbance not even by that. A
    neighbour that takes a tenth of the CPU is no disturbance yet."""
    _, text = slowness(chosen, original)
    if text:
        yield f"{chosen.name}: too close to the limit to decide ({text})"


def prediction_gap(history: BuildHistory, rate: float | None) -> str:
    """A sentence where the server answers far less, or far more, than batch times predict."""
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


def disturbances(servings: Sequence[Served]) -> list[str]:
    """Signs of other load on the machine, one sentence each; empty if there are none."""
    turns = [turn for served in servings for turn in served.turns]
    if not turns:
        return []
    conditions = [turn.conditions for turn in turns]
    found = []
    foreign = max(each.foreign_cpu for each in conditions)
    if foreign >= MIN_FOREIGN:
        busiest = max(conditions, key=lambda each: each.load_average)
        load = (
            f"load average {busiest.load_average:.1f} on {units.count(busiest.num_cores, 'core')}"
        )
        found.append(f"other processes used up to {foreign:.0%} of the CPU ({load})")
    steal = max(each.steal for each in conditions)
    if steal >= MIN_STEAL:
        found.append(f"the hypervisor took up to {steal:.0%} of the CPU (steal time)")
    late = _late_share(turns)
    if late >= MIN_LATE:
        found.append(f"the load generator was late in up to {late:.0%} of the time")
    for served in servings:
        found += _spread_text(served)
    return list(dict.fromkeys(found))


def _spread_text(served: Served) -> list[str]:
    drift = _drift(served.turns, served.turns)
    if drift <= SLOWER:
        return []
    p99s = _span([turn.p99_s for turn in served.turns])
    return [f"the speed of the machine changed by {drift:.2f}x between repetitions (p99 {p99s})"]


def is_reusable(served: Served) -> bool:
    """Whether another run may take these figures from the journal."""
    return not served.disturbances and all(
        turn.conditions.foreign_cpu <= MAX_FOREIGN
        and turn.conditions.steal <= MAX_STEAL
        and (turn.late_share <= MAX_LATE or _is_own(turn.conditions))
        for turn in served.turns
    )


def _is_own(conditions: Conditions) -> bool:
    """Whether the run itself keeps all cores busy, so that lateness is its own doing."""
    others = conditions.foreign_cpu + conditions.steal
    return conditions.own_cpu >= OWN_LOAD and others < MIN_FOREIGN


def _span(seconds: Sequence[float]) -> str:
    known = [each for each in seconds if math.isfinite(each)]
    if not known:
        return units.UNKNOWN
    return f"{units.duration(min(known))} to {units.duration(max(known))}"


# Windows.


def calm_windows(windows: Sequence[Window], limit_s: float | None) -> list[Window]:
    """Those in which the generator was in time, and the queue of a late one was gone."""
    late_s = max(LATE_S, LATE_SHARE * (limit_s or 0.0))
    medians = [_median(window) for window in windows]
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


def _median(window: Window) -> float:
    latency = window.metrics.get("latency")
    return math.nan if latency is None else latency.percentile(50)
