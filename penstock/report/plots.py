"""Plots as values: axes, series of points, bars, limits and notes. Pure. `figures` draws them as
SVG; the modules `*_figures` make plots of results, which nothing here knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Symbol = Literal["circle", "open", "down", "down-open", "cross", "ring"]

BLUE, GREEN, PURPLE, PINK, ORANGE = "#3d8bc4", "#2a9d8f", "#8a56c4", "#b8479c", "#e08e45"
RED, GREY, AMBER = "#c94a63", "#9aa5b4", "#d9822b"
# From low to high.
RAMP = ("#2a9d8f", "#3d8bc4", "#5a6fd0", "#8a56c4", "#b8479c", "#c94a63")
# Half the width of a waterfall's bar, as a share of its slot.
HALF_BAR = 0.325


@dataclass(frozen=True, slots=True)
class Axis:
    """Limits that are None follow the data. With `categories`, values are their indices."""

    title: str = ""
    is_log: bool = False
    low: float | None = None
    high: float | None = None
    # Include zero, so that lengths can be compared.
    has_zero: bool = False
    is_reversed: bool = False
    # Values and their labels; empty: chosen to fit.
    ticks: Sequence[tuple[float, str]] = ()
    # Labels may have several lines.
    categories: Sequence[str] = ()
    has_grid: bool = True


@dataclass(frozen=True, slots=True)
class Series:
    """Points, joined by a line unless `width` is 0. NaN makes a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    # Text of each point, shown when it is pointed at.
    texts: Sequence[str] = ()
    width: float = 2.0
    # In pixels, as SVG's stroke-dasharray; empty: solid.
    dash: str = ""
    # "hv": horizontal, then vertical from each point to the next.
    step: Literal["", "hv", "vh"] = ""
    # Radii of the marks; empty: none.
    radii: Sequence[float] = ()
    symbols: Sequence[Symbol] = ()
    # Beside the marks.
    labels: Sequence[str] = ()
    # Ends of the error bars.
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    # Opacity of the marks.
    opacity: float = 1.0
    # Measured on the axis on the right.
    is_right: bool = False
    in_legend: bool = True


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars from `lows` to `highs` at `places` on the other axis."""

    name: str
    places: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    # One for all, or one each.
    colours: Sequence[str]
    texts: Sequence[str] = ()
    # Beyond the end of each bar.
    labels: Sequence[str] = ()
    # Drawn pale with a dashed outline, as predictions are.
    outlined: Sequence[bool] = ()
    # In units of the axis of the places.
    thickness: float = 0.65
    is_horizontal: bool = False
    is_right: bool = False
    opacity: float = 1.0
    in_legend: bool = True

    def colour(self, index: int) -> str:
        return self.colours[index % len(self.colours)]


@dataclass(frozen=True, slots=True)
class Limit:
    """A dashed line across the plot at a value of one axis."""

    axis: Literal["x", "y"]
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Text at a point; `dx` and `dy` in pixels."""

    x: float
    y: float
    text: str
    dx: float = 0.0
    dy: float = 0.0
    anchor: Literal["start", "middle", "end"] = "middle"
    colour: str = ""


Mark = Series | Bars


@dataclass(frozen=True, slots=True)
class Plot:
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    right: Axis | None = None
    limits: Sequence[Limit] = ()
    notes: Sequence[Note] = ()
    # Dense lines show their values in strips along this axis when pointed at.
    strips: Literal["", "x", "y"] = ""
    # Unit of a strip along x, after its value: " s".
    strip_unit: str = ""
    # Where strips are, each with the nearest point of every line; empty: all along, each with the
    # largest value in it.
    strip_values: Sequence[float] = ()
    has_legend: bool = True
    # None: as usual.
    height: float | None = None


def ramp(number: int) -> list[str]:
    """Return this many colours, from low to high."""
    if number == 1:
        return [RAMP[1]]
    return [_mixed(index / (number - 1) * (len(RAMP) - 1)) for index in range(number)]


def _mixed(position: float) -> str:
    low = min(int(position), len(RAMP) - 2)
    part = position - low
    pairs = zip(_channels(RAMP[low]), _channels(RAMP[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def stack(
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    colours: Sequence[str],
    texts: Sequence[Sequence[str]],
    *,
    is_horizontal: bool = False,
    thickness: float = 0.6,
) -> list[Bars]:
    """Stack bars: `rows[i][j]` is the part of `names[i]` in bar `j`."""
    ends = (0.0,) * len(rows[0]) if rows else ()
    found = []
    for name, row, colour, text in zip(names, rows, colours, texts, strict=True):
        lows, ends = ends, tuple(end + value for end, value in zip(ends, row, strict=True))
        places = tuple(map(float, range(len(row))))
        bars = Bars(name, places, lows, ends, (colour,), text, thickness=thickness)
        found.append(replace(bars, is_horizontal=is_horizontal))
    return found


def row_plot(
    names: Sequence[str], bars: Sequence[Bars], title: str, height: float | None = None
) -> Plot:
    """Plot horizontal bars, the first row on top."""
    rows = Axis(categories=names, is_reversed=True, has_grid=False)
    return Plot(Axis(title, has_zero=True), rows, bars, height=height)


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """A bar of a waterfall. `name` is below the bar, `label` is shown when it is pointed at."""

    name: str
    value: float
    text: str
    is_measured: bool
    label: str


def waterfall(
    steps: Sequence[WaterfallStep],
    title: str,
    *,
    is_lower_better: bool = False,
    top: float | None = None,
    limits: Sequence[Limit] = (),
) -> Plot:
    """Plot steps from the first value to the last; bars beyond `top` are cut off. The first, the
    last and infinite ones (nothing was answered) begin at zero, others at the value before."""
    top = top or max(step.value for step in steps if math.isfinite(step.value)) or 1.0
    edge = top * 1.12
    spans, colours, texts, notes, marks = [], [], [], [], list[Mark]()
    for index, step in enumerate(steps):
        start, colour = 0.0, BLUE
        if 0 < index < len(steps) - 1 and math.isfinite(step.value):
            start = steps[index - 1].value
            colour = GREEN if (step.value < start) is is_lower_better else RED
        low, high = sorted((start, step.value))
        spans.append((min(low, edge), min(high, edge)))
        colours.append(colour)
        texts.append(f"{step.label}: {step.text}{'' if step.is_measured else ' (predicted)'}")
        text = step.text + (" ↑" if step.value > top else "")
        at, dy = (edge, -4.0) if high > top else (high, -5.0)
        notes.append(Note(float(index), at, text, dy=dy))
        if index < len(steps) - 1 and step.value <= top:
            x, y = (index + HALF_BAR, index + 1 - HALF_BAR), (step.value, step.value)
            line = Series("", x, y, GREY, width=1.0, dash="2 3", in_legend=False)
            marks.append(line)
    lows, highs = zip(*spans, strict=True)
    trace = Bars(
        title,
        range(len(steps)),
        lows,
        highs,
        tuple(colours),
        texts,
        outlined=tuple(not each.is_measured for each in steps),
        thickness=2 * HALF_BAR,
        in_legend=False,
    )
    x_axis = Axis(categories=tuple(step.name for step in steps), has_grid=False)
    y_axis = Axis(title, low=0.0, high=edge)
    return Plot(x_axis, y_axis, [*marks, trace], limits=limits, notes=notes, has_legend=False)
