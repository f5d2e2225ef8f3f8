"""Plots as SVG: inside a page, or as a file of its own. Pure but for `write_svg`.

Colours of text and grid are CSS variables that the page or the file's own style sets, so that one
drawing fits a light and a dark theme. Every mark has its exact values in a `<title>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from penstock.report import scales
from penstock.report.plots import Axis, Bars, Limit, Mark, Note, Plot, Series
from penstock.report.scales import Scale

WIDTH, HEIGHT = 560.0, 320.0
# Of a letter in the font of ticks, in pixels.
LETTER = 6.4
LINE_HEIGHT = 14.0
TOP, RIGHT, GAP = 26.0, 14.0, 8.0
# Letters on small screens, compared with others; those of words, compared with digits.
LARGER, WORDS = 1.4, 1.12
# Pixels for a horizontal bar with its label.
ROW = 34.0
# Lines with more points keep the lowest and the highest of each piece.
MAX_POINTS = 160
MAX_STRIPS = 40
# Share of the width that labels of horizontal bars may take.
MAX_LABELS = 0.42
LIMIT_COLOUR = "#d9822b"
# The light theme of files of their own.
STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
fill:#5d6b7a}
.g{stroke:#e9ecf0}.a{stroke:#c3cad2}.v,.k,.h1,.n{fill:#1c2530}.h1{font-size:19px;font-weight:600}
.v,.n,.l{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}
.h2{font-size:13px}.hit{fill:transparent}.dot{fill:#fff}
"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The rectangle of the plot, and its scales."""

    left: float
    top: float
    right: float
    bottom: float
    x: Scale
    y: Scale
    y2: Scale | None

    def vertical(self, mark: Mark) -> Scale:
        return self.y2 if mark.is_right and self.y2 is not None else self.y


def draw(plot: Plot, label: str = "", width: float = WIDTH, height: float = HEIGHT) -> str:
    """Return an `<svg>` element for a page."""
    height = _height(plot, height)
    body = "".join(_body(plot, width, height))
    name = f' aria-label="{escape(label)}"' if label else ""
    return f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img"{name}>{body}</svg>'


def standalone(plot: Plot, title: str = "", subtitle: str = "", width: float = 800.0) -> str:
    """Return a whole SVG file with a light background, a title and a legend."""
    at, parts = 14.0, []
    for text, style, size in ((title, "h1", 30.0), (subtitle, "h2", 22.0)):
        if text:
            at += size
            parts.append(f'<text class="{style}" x="20" y="{_n(at - 8)}">{escape(text)}</text>')
    keys = legend(plot)
    if len(keys) > 1:
        places = _legend_places(keys, width - 40)
        parts += [_drawn_key(key, x, at + y) for key, (x, y) in zip(keys, places, strict=True)]
        at += max(y for _, y in places) + 24
    inner = _height(plot, 0.52 * width)
    body = "".join(_body(plot, width - 40, inner))
    parts.append(f'<g transform="translate(20 {_n(at)})">{body}</g>')
    height = at + inner + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}"'
        f' width="{_n(width)}" height="{_n(height)}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def write_svg(
    plot: Plot, path: Path, *, title: str = "", subtitle: str = "", width: float = 800.0
) -> None:
    """Write a plot as a file of its own."""
    path.write_text(standalone(plot, title, subtitle, width), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class LegendKey:
    name: str
    colour: str
    shape: Literal["line", "box", "dot"]


def legend(plot: Plot) -> list[LegendKey]:
    """Return an entry for each mark that has one."""
    found = {mark.name: _legend_key(mark) for mark in plot.marks if mark.in_legend and mark.name}
    return list(found.values()) if plot.has_legend else []


def _legend_key(mark: Mark) -> LegendKey:
    if isinstance(mark, Bars):
        return LegendKey(mark.name, mark.colour(0), "box")
    return LegendKey(mark.name, mark.colour, "line" if mark.width else "dot")


def _legend_places(keys: Sequence[LegendKey], width: float) -> list[tuple[float, float]]:
    """Place the entries in lines of at most this width."""
    x, y, found = 20.0, 8.0, []
    for key in keys:
        need = 18 + LETTER * len(key.name) + 14
        if x > 20 and x + need > width + 20:
            x, y = 20.0, y + 20
        found.append((x, y))
        x += need
    return found


def _drawn_key(key: LegendKey, x: float, y: float) -> str:
    size = 3 if key.shape == "line" else 10
    round_by = 5 if key.shape == "dot" else 1.5
    width = 10 if key.shape == "dot" else 12
    box = f'<rect x="{_n(x)}" y="{_n(y - size / 2)}" width="{width}" height="{size}"'
    text = f'<text class="k" x="{_n(x + 18)}" y="{_n(y + 4)}">{escape(key.name)}</text>'
    return f'{box} rx="{round_by}" fill="{key.colour}"/>{text}'


def _height(plot: Plot, usual: float) -> float:
    if plot.height is not None:
        return plot.height
    if any(isinstance(mark, Bars) and mark.is_horizontal for mark in plot.marks):
        return TOP + 44 + ROW * max(1, len(plot.y.categories))
    return usual


def _body(plot: Plot, width: float, height: float) -> Iterator[str]:
    frame = _frame(plot, width, height)
    yield from _axes(plot, frame)
    yield from (_limit_line(each, frame) for each in plot.limits)
    for mark in plot.marks:
        yield from _bars(mark, frame) if isinstance(mark, Bars) else _series(mark, plot, frame)
    yield from (_note(each, frame) for each in plot.notes)
    yield from (_limit_label(each, plot, frame) for each in plot.limits)
    if plot.strips:
        yield from _strips(plot, frame)


def _frame(plot: Plot, width: float, height: float) -> _Frame:
    """Choose the margins by the widths of the labels, then the scales."""
    below = max(text.count("\n") for text in plot.x.categories) if plot.x.categories else 0
    top = TOP if plot.y.title or plot.right or plot.limits or plot.notes else 14.0
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
    return _Frame(left, top, right_edge, bottom, x, y, y2)


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


def _axes(plot: Plot, frame: _Frame) -> Iterator[str]:
    for value, text in scales.ticks(plot.y, frame.y):
        y = frame.y(value)
        if plot.y.has_grid and not plot.y.categories:
            yield _rule(frame.left, y, frame.right, y, "g")
        style = "c" if plot.y.categories else ""
        most = _most_letters(plot.y, frame)
        middle = y + 4 - LINE_HEIGHT / 2 * text.count("\n")
        yield _lines(text, frame.left - GAP + 2, middle, "end", most, style)
    yield from _bottom(plot, frame)
    if plot.right is not None and frame.y2 is not None:
        for value, text in scales.ticks(plot.right, frame.y2):
            yield _lines(text, frame.right + GAP - 2, frame.y2(value) + 4, "start")
        yield _lines(plot.right.title, frame.right + RIGHT, 14, "end")
    if plot.y.title:
        yield _lines(plot.y.title, 2, 14, "start")


def _most_letters(axis: Axis, frame: _Frame) -> int:
    return int((frame.left - GAP) / LETTER) + 1 if axis.categories else 1000


def _bottom(plot: Plot, frame: _Frame) -> Iterator[str]:
    is_categories = bool(plot.x.categories)
    last = -math.inf
    for value, text in scales.ticks(plot.x, frame.x):
        x = frame.x(value)
        if plot.x.has_grid and not is_categories:
            yield _rule(x, frame.top, x, frame.bottom, "g")
        # Labels that would touch their neighbour are left out.
        half = LETTER * max(map(len, text.split("\n"))) / 2
        if is_categories or x - half > last:
            style = "c" if is_categories else ""
            yield _lines(text, x, frame.bottom + 16, "middle", style=style)
            last = x + half + 6
    yield _rule(frame.left, frame.bottom, frame.right, frame.bottom, "a")
    if plot.x.title:
        below = max(text.count("\n") for text in plot.x.categories) if plot.x.categories else 0
        y = frame.bottom + 36 + LINE_HEIGHT * below
        yield _lines(plot.x.title, (frame.left + frame.right) / 2, y, "middle")


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}"/>'


def _lines(text: str, x: float, y: float, anchor: str, most: int = 1000, style: str = "") -> str:
    """Draw text of one or more lines; lines that are too long are cut, and whole in a title."""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    place += f' class="{style}"' if style else ""
    lines = [line if len(line) <= most else line[: most - 1] + "…" for line in text.split("\n")]
    whole = f"<title>{escape(text)}</title>" if lines != text.split("\n") else ""
    if len(lines) == 1:
        return f'<text x="{_n(x)}" y="{_n(y)}"{place}>{whole}{escape(lines[0])}</text>'
    spans = "".join(
        f'<tspan x="{_n(x)}" dy="{0 if index == 0 else "1.15em"}">{escape(line)}</tspan>'
        for index, line in enumerate(lines)
    )
    return f'<text y="{_n(y)}"{place}>{whole}{spans}</text>'


def _limit_line(limit: Limit, frame: _Frame) -> str:
    style = f'stroke="{LIMIT_COLOUR}" stroke-width="1.5" stroke-dasharray="5 4"'
    title = f"<title>{escape(limit.text)}</title>" if limit.text else ""
    if limit.axis == "x":
        line = f"M{_n(frame.x(limit.at))} {_n(frame.top)}V{_n(frame.bottom)}"
    else:
        line = f"M{_n(frame.left)} {_n(frame.y(limit.at))}H{_n(frame.right)}"
    return f'<path d="{line}" {style}>{title}</path>'


def _limit_label(limit: Limit, plot: Plot, frame: _Frame) -> str:
    """Label a limit where there is room: beside an upright line, above the freer end of another."""
    if limit.axis == "x":
        x = frame.x(limit.at)
        is_left = x > (frame.left + frame.right) / 2
        anchor, at = ("end", x - 5) if is_left else ("start", x + 5)
        return _tinted(limit.text, at, frame.top + 10, anchor, LIMIT_COLOUR)
    y = frame.y(limit.at) - 5
    width = LETTER * len(limit.text)
    left = _clearance(plot, frame, (frame.left, frame.left + width), y - 5)
    right = _clearance(plot, frame, (frame.right - width, frame.right), y - 5)
    if left > right:
        return _tinted(limit.text, frame.left + 4, y, "start", LIMIT_COLOUR)
    return _tinted(limit.text, frame.right - 2, y, "end", LIMIT_COLOUR)


def _clearance(plot: Plot, frame: _Frame, span: tuple[float, float], y: float) -> float:
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


def _tinted(text: str, x: float, y: float, anchor: str, colour: str) -> str:
    if not text:
        return ""
    style = f' class="l" style="fill:{colour}"' if colour else ' class="n"'
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_n(x)}" y="{_n(y)}"{place}{style}>{escape(text)}</text>'


def _note(note: Note, frame: _Frame) -> str:
    x, y = frame.x(note.x) + note.dx, frame.y(note.y) + note.dy
    return _tinted(note.text, x, y, note.anchor, note.colour)


def _bars(bars: Bars, frame: _Frame) -> Iterator[str]:
    across = frame.y if bars.is_horizontal else frame.x
    along = frame.x if bars.is_horizontal else frame.vertical(bars)
    for index, place in enumerate(bars.places):
        low, high = bars.lows[index], bars.highs[index]
        if math.isnan(low) or math.isnan(high):
            continue
        a, b = sorted((along(low), along(high)))
        c, d = sorted((across(place - bars.thickness / 2), across(place + bars.thickness / 2)))
        box = (a, c, b - a, d - c) if bars.is_horizontal else (c, a, d - c, b - a)
        yield _bar(bars, index, box)
        if bars.labels and bars.labels[index]:
            middle = (c + d) / 2
            at = (b + 5, middle + 4) if bars.is_horizontal else (middle, a - 5)
            anchor = "start" if bars.is_horizontal else "middle"
            yield _lines(bars.labels[index], *at, anchor, style="v")


def _bar(bars: Bars, index: int, box: tuple[float, float, float, float]) -> str:
    x, y, width, height = box
    # A bar that is there can be seen and pointed at.
    width, height = max(width, 0.7), max(height, 0.7)
    colour = bars.colour(index)
    look = f'fill="{colour}"'
    if bars.outlined and bars.outlined[index]:
        look += f' fill-opacity=".25" stroke="{colour}" stroke-dasharray="4 3"'
    elif bars.opacity < 1:
        look += f' opacity="{bars.opacity}"'
    title = f"<title>{escape(bars.texts[index])}</title>" if bars.texts else ""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f'<rect class="m" {place} {look}>{title}</rect>'


def _series(series: Series, plot: Plot, frame: _Frame) -> Iterator[str]:
    vertical = frame.vertical(series)
    points = [
        None
        if not (math.isfinite(x) and math.isfinite(y)) or (plot.y.is_log and y <= 0)
        else (frame.x(x), vertical(y))
        for x, y in zip(series.x, series.y, strict=True)
    ]
    if series.width:
        path = _path(_thinned(points), series.step)
        dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
        yield f'<path class="m" fill="none" stroke="{series.colour}"'
        yield f' stroke-width="{_n(series.width)}"{dash} d="{path}"/>'
    if series.highs:
        yield from _error_bars(series, frame, vertical)
    for index, point in enumerate(points):
        if point is None:
            continue
        if series.radii:
            yield _symbol(series, index, point)
        if series.labels and series.labels[index]:
            yield _lines(series.labels[index], point[0], point[1] - 9, "middle", style="v")


def _thinned(points: Sequence[tuple[float, float] | None]) -> list[tuple[float, float] | None]:
    """Keep the first, lowest, highest and last of each piece of a long line."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MAX_POINTS // 4))
    kept: list[tuple[float, float] | None] = []
    for start in range(0, len(points), size):
        piece = [
            (index, point)
            for index, point in enumerate(points[start : start + size])
            if point is not None
        ]
        if not piece:
            kept.append(None)
            continue
        ends = {piece[0], piece[-1]}
        ends |= {pick(piece, key=lambda each: each[1][1]) for pick in (min, max)}
        kept += [point for _, point in sorted(ends)]
    return kept


def _path(points: Sequence[tuple[float, float] | None], step: str) -> str:
    parts: list[str] = []
    last: tuple[float, float] | None = None
    for point in points:
        if point is not None:
            if last is None:
                parts.append(f"M{_n(point[0])} {_n(point[1])}")
            else:
                corner = {"hv": f"H{_n(point[0])}", "vh": f"V{_n(point[1])}"}.get(step, "")
                parts.append(f"{corner}L{_n(point[0])} {_n(point[1])}")
        last = point
    return "".join(parts)


def _error_bars(series: Series, frame: _Frame, vertical: Scale) -> Iterator[str]:
    parts = []
    for x, low, high in zip(series.x, series.lows, series.highs, strict=True):
        if math.isfinite(x) and math.isfinite(low) and math.isfinite(high):
            at, top, bottom = frame.x(x), vertical(high), vertical(low)
            caps = f"M{_n(at - 3)} {_n(top)}h6M{_n(at - 3)} {_n(bottom)}h6"
            parts.append(f"M{_n(at)} {_n(top)}V{_n(bottom)}{caps}")
    if parts:
        yield f'<path fill="none" stroke="{series.colour}" d="{"".join(parts)}"/>'


def _symbol(series: Series, index: int, point: tuple[float, float]) -> str:
    radius = series.radii[index % len(series.radii)]
    symbol = series.symbols[index % len(series.symbols)] if series.symbols else "circle"
    x, y, r = point[0], point[1], radius
    title = f"<title>{escape(series.texts[index])}</title>" if series.texts else ""
    line = f'stroke="{series.colour}" stroke-width="2"'
    if symbol == "cross":
        cross = f"M{_n(x - r)} {_n(y - r)}l{_n(2 * r)} {_n(2 * r)}m0 {_n(-2 * r)}"
        shape = f'<path d="{cross}l{_n(-2 * r)} {_n(2 * r)}" fill="none" {line}'
    elif symbol in ("down", "down-open"):
        triangle = f"M{_n(x - r)} {_n(y - 0.8 * r)}h{_n(2 * r)}l{_n(-r)} {_n(1.8 * r)}z"
        fill = f'fill="{series.colour}"' if symbol == "down" else f'class="dot" {line}'
        shape = f'<path d="{triangle}" {fill}'
    else:
        look = f'fill="{series.colour}"'
        if symbol == "open":
            look = f'class="dot" {line}'
        elif symbol == "ring":
            look = f'fill="none" pointer-events="none" {line}'
        if series.opacity < 1:
            look += f' opacity="{series.opacity}"'
        shape = f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}" {look}'
    return f"{shape}>{title}</{'path' if shape.startswith('<path') else 'circle'}>"


@dataclass(frozen=True, slots=True)
class _Strip:
    low: float
    high: float
    # What the strip is about; None: all between its ends.
    at: float | None = None


def _strips(plot: Plot, frame: _Frame) -> Iterator[str]:
    """Draw invisible strips over dense lines; each names the values below it."""
    lines = [each for each in plot.marks if isinstance(each, Series) and each.texts]
    axis = frame.x if plot.strips == "x" else frame.y
    for strip in _strip_ranges(plot, lines, axis):
        texts = [_head(plot, strip)]
        for each in lines:
            text = _text_in(each, plot.strips, strip)
            if text:
                texts.append(f"{each.name} {text}")
        a, b = sorted((axis(strip.low), axis(strip.high)))
        high, wide = frame.bottom - frame.top, frame.right - frame.left
        x, y, width, height = (
            (a, frame.top, b - a, high) if plot.strips == "x" else (frame.left, a, wide, b - a)
        )
        box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        title = escape("\n".join(filter(None, texts)))
        yield f'<rect class="hit" {box}><title>{title}</title></rect>'


def _strip_ranges(plot: Plot, lines: Sequence[Series], axis: Scale) -> Iterator[_Strip]:
    """Cut an axis half-way between groups of neighbouring values."""
    along = [each.x if plot.strips == "x" else each.y for each in lines]
    values = sorted({value for each in along for value in each if math.isfinite(value)})
    if plot.strip_values and values:
        last = values[-1]
        values = [*(each for each in plot.strip_values if each < last), last]
    if not values:
        return
    size = math.ceil(len(values) / MAX_STRIPS)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    edges = [axis.low]
    edges += [(a[-1] + b[0]) / 2 for a, b in zip(groups, groups[1:], strict=False)]
    edges.append(axis.high)
    for group, low, high in zip(groups, edges, edges[1:], strict=False):
        yield _Strip(low, high, group[0] if plot.strip_values else None)


def _head(plot: Plot, strip: _Strip) -> str:
    """Name the place of a strip along x; along y the texts do."""
    if plot.strips == "y":
        return ""
    return f"{strip.low:.3g}-{strip.high:.3g}{plot.strip_unit}"


def _text_in(series: Series, axis: str, strip: _Strip) -> str:
    """Return the text of the point nearest to what a strip is about, or of its largest value."""
    along = series.x if axis == "x" else series.y
    other = series.y if axis == "x" else series.x
    inside = [
        index
        for index, value in enumerate(along)
        if strip.low <= value < strip.high and math.isfinite(other[index])
    ]
    if not inside:
        return ""
    at = strip.at
    if at is not None:
        return series.texts[min(inside, key=lambda index: abs(along[index] - at))]
    return series.texts[max(inside, key=lambda index: other[index])]


def _n(value: float) -> str:
    """Format a coordinate with one decimal, as short as possible."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
