"""The original and the chosen candidate side by side, for managers. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock import units
from penstock.benchmark.stats import Interval
from penstock.optimizer import wording
from penstock.optimizer.first_line import is_original
from penstock.optimizer.results import Optimization, ServedMeasurement

# Relative half-width of the interval given to figures without one.
NEAR = 0.01
# Share of the arriving requests that must be answered for a run to count as keeping up.
KEPT_UP = 0.95
OVERLOADED = "overloaded"
DISTURBED = "disturbed"


@dataclass(frozen=True, slots=True)
class FormattedValue:
    """A formatted value and its 95 % confidence interval."""

    text: str
    range: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.range})" if self.range else self.text


@dataclass(frozen=True, slots=True)
class BeforeAfterRow:
    name: str
    before: FormattedValue
    after: FormattedValue
    # "3.1x more", "2.4x less"; empty if nothing can be said.
    change: str
    # None: neither, or unknown.
    is_better: bool | None


def rows(optimization: Optimization) -> list[BeforeAfterRow]:
    """Return the rows that have a figure on at least one side."""
    before, after = optimization.before, optimization.after
    measured = list(_measured_rows(before, after))
    if is_disturbed(optimization):
        measured = [replace(row, change=DISTURBED, is_better=None) for row in measured]
    found = [*measured, *_accuracy_rows(optimization)]
    return [row for row in found if {row.before.text, row.after.text} != {units.UNKNOWN}]


def is_disturbed(optimization: Optimization) -> bool:
    """Return whether figures contradict each other, so that no gain can be claimed."""
    both = optimization.before, optimization.after
    has_doubts = any(each is not None and each.disturbances for each in both)
    return optimization.outcome == "disturbed" or has_doubts


def has_after(optimization: Optimization) -> bool:
    """Return whether there is a result other than the original to show."""
    return optimization.after is not None and not is_original(optimization)


def keeps_up(served: ServedMeasurement) -> bool:
    """Return whether the server keeps up with the arrivals. If not, queue and latency grow for as
    long as the run lasts, so its latencies are not comparable."""
    asked = float(match[0]) if (match := re.match(r"[0-9.]+(?=/s)", served.load)) else 0.0
    reached = served.throughput.value
    if served.streams is not None and math.isfinite(served.throughput.high):
        # Answers take seconds: those in flight at the end would distort so small a count.
        reached = served.throughput.high
    return not reached < KEPT_UP * asked


def _measured_rows(
    before: ServedMeasurement | None, after: ServedMeasurement | None
) -> Iterator[BeforeAfterRow]:
    both = before, after
    rates = [None if each is None else each.max_rate for each in both]
    yield _row("highest rate", *map(_highest, rates))
    is_overloaded = any(each is not None and not keeps_up(each) for each in both)
    for name in ("p50", "p99"):
        found = [None if each is None else getattr(each, name) for each in both]
        row = _row(name, *map(_duration, found), is_lower_better=True)
        yield replace(row, change=OVERLOADED, is_better=None) if is_overloaded else row
    yield from _stream_rows(before, after, is_overloaded=is_overloaded)
    yield _row("answers/s", *(_rate(None if each is None else each.throughput) for each in both))
    yield _row("answered in time", *map(_goodput, both), has_change=False)
    yield _row("cost per million", *map(_cost, both), is_lower_better=True)
    yield _row("memory", *map(_memory, both), is_lower_better=True)


def _stream_rows(
    before: ServedMeasurement | None, after: ServedMeasurement | None, *, is_overloaded: bool
) -> Iterator[BeforeAfterRow]:
    """Yield the rows of streamed answers."""
    both = [None if each is None else each.streams for each in (before, after)]
    for name, metric in (("p99 first token", "ttft"), ("p99 per token", "tpot")):
        found = [None if each is None else getattr(each, metric) for each in both]
        row = _row(name, *map(_duration, found), is_lower_better=True)
        yield replace(row, change=OVERLOADED, is_better=None) if is_overloaded else row
    rates = [UNKNOWN if each is None else _tokens(each.tokens_per_s) for each in both]
    yield _row("tokens/s", *rates, has_change=False)


def _tokens(per_s: float) -> _Valued:
    return _Valued(FormattedValue(wording.rate(per_s)), _exactly(per_s))


def _accuracy_rows(optimization: Optimization) -> Iterator[BeforeAfterRow]:
    found = optimization.held_out
    if found is None:
        return
    before, after = (
        FormattedValue(wording.score(found.metric, each))
        for each in (found.original, found.candidate)
    )
    change = wording.bound(found, optimization.accuracy_budget) if found.is_passed else ""
    yield BeforeAfterRow(f"{found.metric} ({found.part})", before, after, change, None)


@dataclass(frozen=True, slots=True)
class _Valued:
    """A figure with its numeric interval."""

    figure: FormattedValue
    measured: Interval


UNKNOWN = _Valued(FormattedValue(units.UNKNOWN), Interval(math.nan, math.nan, math.nan))


def _row(
    name: str,
    before: _Valued,
    after: _Valued,
    *,
    is_lower_better: bool = False,
    has_change: bool = True,
) -> BeforeAfterRow:
    change, is_better = "", None
    if has_change:
        change, is_better = _change(before.measured, after.measured, is_lower_better)
    return BeforeAfterRow(name, before.figure, after.figure, change, is_better)


def _change(before: Interval, after: Interval, is_lower_better: bool) -> tuple[str, bool | None]:
    ratio = wording.ratio(before, after)
    if ratio is None:
        return "", None
    if before.low <= after.high and after.low <= before.high:
        return "no difference shown", None
    grows = ratio > 1
    text = wording.times(ratio if grows else 1 / ratio)
    return f"{text} {'more' if grows else 'less'}", grows is not is_lower_better


def _highest(rate: Interval | None) -> _Valued:
    if rate is not None and rate.value == 0:
        return _Valued(FormattedValue("none"), rate)
    return _rate(rate)


def _rate(measured: Interval | None) -> _Valued:
    if measured is None or math.isnan(measured.value):
        return UNKNOWN
    return _Valued(FormattedValue(wording.rate(measured.value), units.range_of(measured)), measured)


def _duration(measured: Interval | None) -> _Valued:
    if measured is None or math.isnan(measured.value):
        return UNKNOWN
    scale = units.SECONDS[units.unit_of([measured.value])]
    range_text = units.range_of(measured, scale) if math.isfinite(measured.value) else ""
    return _Valued(FormattedValue(units.duration(measured.value), range_text), measured)


def _goodput(served: ServedMeasurement | None) -> _Valued:
    if served is None or math.isnan(served.goodput):
        return UNKNOWN
    return _Valued(FormattedValue(f"{100 * served.goodput:.4g} %"), _exactly(served.goodput))


def _cost(served: ServedMeasurement | None) -> _Valued:
    """Return the cost; infinite if nothing can be answered in time."""
    if served is None or served.cost_per_million is None:
        return UNKNOWN
    is_finite = math.isfinite(served.cost_per_million)
    if not is_finite and served.max_rate is not None and math.isnan(served.max_rate.value):
        return UNKNOWN
    text = units.number(served.cost_per_million) if is_finite else "without end"
    return _Valued(FormattedValue(text), _exactly(served.cost_per_million))


def _memory(served: ServedMeasurement | None) -> _Valued:
    if served is None or not served.memory_bytes:
        return UNKNOWN
    return _Valued(FormattedValue(units.size(served.memory_bytes)), _exactly(served.memory_bytes))


def _exactly(value: float) -> Interval:
    """Return a narrow interval around a value that was measured without one."""
    return Interval(value, value * (1 - NEAR), value * (1 + NEAR))
