"""The original and the chosen candidate side by side, for managers. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock import units
from penstock.benchmark.stats import Interval
from penstock.optimizer import wording
from penstock.optimizer.first_line import is_original
from penstock.optimizer.results import Optimization, ServedMeasurement
from penstock.report.tables import Cell

# Relative half-width of the interval given to figures without one.
NEAR = 0.01
# Share of the arriving requests that must be answered for a run to count as keeping up.
KEPT_UP = 0.95
OVERLOADED = "overloaded"
DISTURBED = "disturbed"


@dataclass(frozen=True, slots=True)
class FormattedValue(Cell):
    """A value and, as the cell's detail, its 95 % confidence interval; both to compare, too."""

    text: str = units.UNKNOWN
    measured: Interval = Interval(math.nan, math.nan, math.nan)


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
    measured = [_row(figure, before, after) for figure in FIGURES]
    if is_disturbed(optimization):
        measured = [replace(row, change=DISTURBED, is_better=None) for row in measured]
    found = measured + _accuracy_rows(optimization)
    return [row for row in found if {row.before.text, row.after.text} != {units.UNKNOWN}]


def table(optimization: Optimization) -> tuple[list[str], list[list[Cell]]]:
    """Return the head and the rows of the table; without a result, of the original alone."""
    head, styles = ["", "original", "chosen", "change"], {True: "kept-text", False: "missed-text"}
    num_columns = 4 if has_after(optimization) else 2
    cells = []
    for row in rows(optimization):
        change = Cell(row.change, style="" if row.is_better is None else styles[row.is_better])
        cells.append([Cell(row.name), row.before, row.after, change][:num_columns])
    return head[:num_columns], cells


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


def _accuracy_rows(optimization: Optimization) -> list[BeforeAfterRow]:
    found = optimization.held_out
    if found is None:
        return []
    before, after = (
        FormattedValue(wording.score(found.metric, each))
        for each in (found.original, found.candidate)
    )
    change = wording.bound(found, optimization.accuracy_budget) if found.is_passed else ""
    return [BeforeAfterRow(f"{found.metric} ({found.part})", before, after, change, None)]


def _row(
    figure: _Figure, before: ServedMeasurement | None, after: ServedMeasurement | None
) -> BeforeAfterRow:
    known = [each for each in (before, after) if each is not None]
    one, other = (UNKNOWN if each is None else figure.value(each) for each in (before, after))
    change, is_better = "", None
    if figure.is_latency and not all(map(keeps_up, known)):
        change = OVERLOADED
    elif figure.has_change:
        change, is_better = _change(one.measured, other.measured, figure.is_lower_better)
    return BeforeAfterRow(figure.name, one, other, change, is_better)


def _change(before: Interval, after: Interval, is_lower_better: bool) -> tuple[str, bool | None]:
    ratio = wording.ratio(before, after)
    if ratio is None:
        return "", None
    if before.low <= after.high and after.low <= before.high:
        return "no difference shown", None
    grows = ratio > 1
    text = wording.times(ratio if grows else 1 / ratio)
    return f"{text} {'more' if grows else 'less'}", grows is not is_lower_better


def _rate(measured: Interval | None, zero: str = "") -> FormattedValue:
    if measured is None or math.isnan(measured.value):
        return UNKNOWN
    if measured.value == 0 and zero:
        return FormattedValue(zero, measured=measured)
    text = wording.rate(measured.value)
    return FormattedValue(text, units.range_of(measured), measured=measured)


def _duration(measured: Interval | None) -> FormattedValue:
    if measured is None or math.isnan(measured.value):
        return UNKNOWN
    if math.isinf(measured.value):
        return FormattedValue(wording.INFINITE, wording.TOO_MANY_FAILED, measured=measured)
    range_text = units.range_of(measured, units.SECONDS[units.unit_of([measured.value])])
    return FormattedValue(units.duration(measured.value), range_text, measured=measured)


def _cost(served: ServedMeasurement) -> FormattedValue:
    """Return the cost; infinite if nothing can be answered in time."""
    if served.cost_per_million is None:
        return UNKNOWN
    is_finite = math.isfinite(served.cost_per_million)
    if not is_finite and served.max_rate is not None and math.isnan(served.max_rate.value):
        return UNKNOWN
    text = units.number(served.cost_per_million) if is_finite else "without end"
    return _exactly(text, served.cost_per_million)


def _exactly(text: str, value: float) -> FormattedValue:
    """Return a value that was measured without an interval, with a narrow one; unknown if NaN."""
    if math.isnan(value):
        return UNKNOWN
    around = Interval(value, value * (1 - NEAR), value * (1 + NEAR))
    return FormattedValue(text, measured=around)


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    value: Callable[[ServedMeasurement], FormattedValue]
    is_lower_better: bool = False
    # Latencies of an overloaded server are not compared.
    is_latency: bool = False
    has_change: bool = True


def _tokens(served: ServedMeasurement) -> FormattedValue:
    per_s = math.nan if served.streams is None else served.streams.tokens_per_s
    return _exactly(wording.rate(per_s), per_s)


def _memory(served: ServedMeasurement) -> FormattedValue:
    return _exactly(units.size(served.memory_bytes), served.memory_bytes or math.nan)


UNKNOWN = FormattedValue()
FIGURES = (
    _Figure("highest rate", lambda each: _rate(each.max_rate, "none")),
    _Figure("p50", lambda each: _duration(each.p50), True, True),
    _Figure("p99", lambda each: _duration(each.p99), True, True),
    _Figure(
        "p99 first token", lambda s: _duration(s.streams.ttft if s.streams else None), True, True
    ),
    _Figure(
        "p99 per token", lambda s: _duration(s.streams.tpot if s.streams else None), True, True
    ),
    _Figure("tokens/s", _tokens, has_change=False),
    _Figure("answers/s", lambda each: _rate(each.throughput)),
    _Figure(
        "answered in time",
        lambda each: _exactly(f"{100 * each.goodput:.4g} %", each.goodput),
        has_change=False,
    ),
    _Figure("cost per million", _cost, True),
    _Figure("memory", _memory, True),
)
