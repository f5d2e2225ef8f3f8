"""Plots as SVG elements of a page. Pure. Colours of text and grid are CSS variables that the page
sets, so that one drawing fits a light and a dark theme."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from penstock.report import scales
from penstock.report.marks import PlotFrame, draw_bars, draw_series, draw_strips, short, text_lines
from penstock.report.plots import Bars, Limit, Mark, Note, Plot, Series

WIDTH, HEIGHT = 560.0, 320.0
# Width of a letter in the font of ticks, in pixels.
LETTER = 6.4
LINE_HEIGHT = 14.0
TOP, RIGHT, GAP = 26.0, 14.0, 8.0
# Letters on small screens, compared with others; those of words, compared with digits.
LARGER, WORDS = 1.4, 1.12
# Pixels for a horizontal bar with its label.
ROW = 34.0
# Share of the width that labels of horizontal bars may take.
MAX_LABELS = 0.42
LIMIT_COLOUR = "#d9822b"


def draw(plot: Plot, label: str = "", width: float = WIDTH) -> str:
    """Return an `<svg>` element for a page."""
    has_rows = any(isinstance(mark, Bars) and mark.is_horizontal for mark in plot.marks)
    usual = TOP + 44 + ROW * max(1, len(plot.y.categories)) if has_rows else HEIGHT
    height = usual if plot.height is None else plot.height
    body = "".join(_body(plot, width, height))
    name = f' aria-label="{escape(label)}"' if label else ""
    return f'<svg viewBox="0 0 {short(width)} {short(height)}" role="img"{name}>{body}</svg>'


@dataclass(frozen=True, slots=True)
class LegendKey:
    name: str
    colour: str
    shape: Literal["line", "box", "dot"]


def legend(plot: Plot) -> list[LegendKey]:
    found = {mark.name: _legend_key(mark) for mark in plot.marks if mark.in_legend and mark.name}
    return list(found.values()) if plot.has_legend else []


def _legend_key(mark: Mark) -> LegendKey:
    if isinstance(mark, Bars):
        return LegendKey(mark.name, mark.colour(0), "box")
    return LegendKey(mark.name, mark.colour, "line" if mark.width else "dot")


def _body(plot: Plot, width: float, height: float) -> Iterator[str]:
    frame = _frame(plot, width, height)
    yield from _axes(plot, frame)
    yield from (_limit_line(each, frame) for each in plot.limits)
    for mark in plot.marks:
        yield from (
            draw_bars(mark, frame) if isinstance(mark, Bars) else draw_series(mark, plot, frame)
        )
    yield from (_note(each, frame) for each in plot.notes)
    yield from (_limit_label(each, plot, frame) for each in plot.limits)
    if plot.strips:
        yield from draw_strips(plot, frame)


def _frame(plot: Plot, width: float, height: float) -> PlotFrame:
    """Choose the margins by the widths of the labels, then the scales."""
    below = max(text.count("\n") for text in plot.x.categories) if plot.x.categories else 0
    top = TOP if plot.y.title or plot.right or plot.limits else 14.0
    # Notes at the upper end are below the title.
    top += 10 * any(note.y >= (plot.y.high or math.inf) for note in plot.notes)
    bottom = height - 24 - LINE_HEIGHT * below - 18 * bool(plot.x.title)
    y = scales.scale(plot.y, _values(plot, "y", False), bottom, top)
    y2 = None
    if plot.right is not None:
        y2 = scales.scale(plot.right, _values(plot, "y", True), bottom, top)
    # Small screens have larger letters: numbers get room for them.
    room = WORDS if plot.y.categories else LARGER
    left = GAP + min(room * _widest(scales.ticks(plot.y, y)), MAX_LABELS * width)
    right = RIGHT
    if plot.right is not None and y2 is not None:
        right = GAP + 4 + LARGER * _widest(scales.ticks(plot.right, y2))
    elif any(isinstance(each, Bars) and each.is_horizontal and each.labels for each in plot.marks):
        right += LETTER * max(
            len(text) for each in plot.marks if isinstance(each, Bars) for text in each.labels
        )
    right_edge = width - right
    x = scales.scale(plot.x, _values(plot, "x", False), left, right_edge)
    return PlotFrame(left, top, right_edge, bottom, x, y, y2)


def _widest(ticks: Sequence[tuple[float, str]]) -> float:
    lines = [line for _, text in ticks for line in text.split("\n")]
    return LETTER * max(map(len, lines), default=0)


def _values(plot: Plot, axis: str, is_right: bool) -> Iterator[float]:
    """Yield everything that must be visible along an axis."""
    for mark in plot.marks:
        if axis == "y" and mark.is_right is not is_right:
            continue
        if isinstance(mark, Series):
            yield from mark.x if axis == "x" else mark.y
            if axis == "y":
                yield from (*mark.lows, *mark.highs)
        elif mark.is_horizontal is (axis == "x"):
            yield from (*mark.lows, *mark.highs)
        else:
            half = mark.thickness / 2
            yield from (place + side for place in mark.places for side in (-half, half))
    if not is_right:
        chosen = plot.x if axis == "x" else plot.y
        for limit in plot.limits:
            if limit.axis == axis:
                # A little room, so that the line is not the frame.
                yield limit.at * 1.08
                yield limit.at / 1.08 if chosen.is_log else limit.at


def _axes(plot: Plot, frame: PlotFrame) -> Iterator[str]:
    is_rows = bool(plot.y.categories)
    for value, text in scales.ticks(plot.y, frame.y):
        y = frame.y(value)
        if plot.y.has_grid and not is_rows:
            yield _rule(frame.left, y, frame.right, y, "g")
        look, most = ('class="c"', int((frame.left - GAP) / LETTER) + 1) if is_rows else ("", 1000)
        middle = y + 4 - LINE_HEIGHT / 2 * text.count("\n")
        yield text_lines(text, frame.left - GAP + 2, middle, "end", look, most)
    yield from _bottom(plot, frame)
    if plot.right is not None and frame.y2 is not None:
        for value, text in scales.ticks(plot.right, frame.y2):
            yield text_lines(text, frame.right + GAP - 2, frame.y2(value) + 4, "start")
        yield text_lines(plot.right.title, frame.right + RIGHT, 14, "end")
    yield text_lines(plot.y.title, 2, 14, "start")


def _bottom(plot: Plot, frame: PlotFrame) -> Iterator[str]:
    is_categories = bool(plot.x.categories)
    last = -math.inf
    for value, text in scales.ticks(plot.x, frame.x):
        x = frame.x(value)
        if plot.x.has_grid and not is_categories:
            yield _rule(x, frame.top, x, frame.bottom, "g")
        # Labels that would touch their neighbour are left out.
        half = LETTER * max(map(len, text.split("\n"))) / 2
        if is_categories or x - half > last:
            look = 'class="c"' if is_categories else ""
            yield text_lines(text, x, frame.bottom + 16, "middle", look)
            last = x + half + 6
    yield _rule(frame.left, frame.bottom, frame.right, frame.bottom, "a")
    if plot.x.title:
        below = max(text.count("\n") for text in plot.x.categories) if plot.x.categories else 0
        y = frame.bottom + 36 + LINE_HEIGHT * below
        yield text_lines(plot.x.title, (frame.left + frame.right) / 2, y, "middle")


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{short(x1)} {short(y1)}L{short(x2)} {short(y2)}"/>'


def _limit_line(limit: Limit, frame: PlotFrame) -> str:
    style = f'stroke="{LIMIT_COLOUR}" stroke-width="1.5" stroke-dasharray="5 4"'
    title = f"<title>{escape(limit.text)}</title>" if limit.text else ""
    line = f"M{short(frame.left)} {short(frame.y(limit.at))}H{short(frame.right)}"
    if limit.axis == "x":
        line = f"M{short(frame.x(limit.at))} {short(frame.top)}V{short(frame.bottom)}"
    return f'<path d="{line}" {style}>{title}</path>'


def _limit_label(limit: Limit, plot: Plot, frame: PlotFrame) -> str:
    """Label a limit where there is room: beside an upright line, above the freer end of another."""
    if limit.axis == "x":
        x, y = frame.x(limit.at), frame.top + 10
        is_left = x > (frame.left + frame.right) / 2
        anchor, x = ("end", x - 5) if is_left else ("start", x + 5)
    else:
        y, width = frame.y(limit.at) - 5, LETTER * len(limit.text)
        left = _clearance(plot, frame, (frame.left, frame.left + width), y - 5)
        right = _clearance(plot, frame, (frame.right - width, frame.right), y - 5)
        anchor, x = ("start", frame.left + 4) if left > right else ("end", frame.right - 2)
    return text_lines(limit.text, x, y, anchor, f'class="l" style="fill:{LIMIT_COLOUR}"')


def _clearance(plot: Plot, frame: PlotFrame, span: tuple[float, float], y: float) -> float:
    """Return how far the marks between two columns are from a height, in pixels."""
    found = [frame.bottom - frame.top]
    for mark in plot.marks:
        vertical = frame.vertical(mark)
        if isinstance(mark, Series):
            near = [b for a, b in zip(mark.x, mark.y, strict=True) if _within(frame.x(a), span)]
            found += [abs(vertical(each) - y) for each in near if math.isfinite(each)]
        elif not mark.is_horizontal:
            for place, low, high in zip(mark.places, mark.lows, mark.highs, strict=True):
                if _within(frame.x(place), span) and vertical(high) <= y <= vertical(low):
                    found.append(0.0)
    return min(found)


def _within(value: float, span: tuple[float, float]) -> bool:
    return span[0] - 20 <= value <= span[1] + 20


def _note(note: Note, frame: PlotFrame) -> str:
    x, y = frame.x(note.x) + note.dx, frame.y(note.y) + note.dy
    look = f'class="l" style="fill:{note.colour}"' if note.colour else 'class="n"'
    return text_lines(note.text, x, y, note.anchor, look)
