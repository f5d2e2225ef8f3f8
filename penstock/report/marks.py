"""Bars, lines, symbols and hover strips of plots, as SVG. Pure. `figures` draws what is around
them. A mark has its exact values in a `<title>`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from penstock.report.plots import Bars, Mark, Plot, Series
from penstock.report.scales import Scale

# Lines with more points keep the lowest and the highest of each piece.
MAX_POINTS = 160
MAX_STRIPS = 40


@dataclass(frozen=True, slots=True)
class PlotFrame:
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


def short(value: float) -> str:
    """Format a coordinate with one decimal, as short as possible."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def text_lines(text: str, x: float, y: float, anchor: str, look: str = "", most: int = 1000) -> str:
    """Draw text with the attributes `look`; lines that are too long are cut, and in a title."""
    if not text:
        return ""
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    place += f" {look}" if look else ""
    lines = [line if len(line) <= most else line[: most - 1] + "…" for line in text.split("\n")]
    whole = f"<title>{escape(text)}</title>" if lines != text.split("\n") else ""
    if len(lines) == 1:
        return f'<text x="{short(x)}" y="{short(y)}"{place}>{whole}{escape(lines[0])}</text>'
    spans = "".join(
        f'<tspan x="{short(x)}" dy="{0 if index == 0 else "1.15em"}">{escape(line)}</tspan>'
        for index, line in enumerate(lines)
    )
    return f'<text y="{short(y)}"{place}>{whole}{spans}</text>'


def draw_bars(bars: Bars, frame: PlotFrame) -> Iterator[str]:
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
            yield text_lines(bars.labels[index], *at, anchor, 'class="v"')


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
    return f'<rect class="m" {_box(x, y, width, height)} {look}>{title}</rect>'


def draw_series(series: Series, plot: Plot, frame: PlotFrame) -> Iterator[str]:
    vertical = frame.vertical(series)
    least = 0.0 if plot.y.is_log else -math.inf
    points = [
        (frame.x(x), vertical(y)) if math.isfinite(x) and least < y < math.inf else None
        for x, y in zip(series.x, series.y, strict=True)
    ]
    if series.width:
        path = _path(_thinned(points), series.step)
        dash = f' stroke-dasharray="{series.dash}"' if series.dash else ""
        yield f'<path class="m" fill="none" stroke="{series.colour}"'
        yield f' stroke-width="{short(series.width)}"{dash} d="{path}"/>'
    if series.highs:
        yield from _error_bars(series, frame, vertical)
    for index, point in enumerate(points):
        if point is None:
            continue
        if series.radii:
            yield _symbol(series, index, point)
        if series.labels and series.labels[index]:
            yield text_lines(series.labels[index], point[0], point[1] - 9, "middle", 'class="v"')


def _thinned(points: Sequence[tuple[float, float] | None]) -> list[tuple[float, float] | None]:
    """Keep the first, lowest, highest and last of each piece of a long line."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MAX_POINTS // 4))
    kept: list[tuple[float, float] | None] = []
    for start in range(0, len(points), size):
        listed = enumerate(points[start : start + size])
        piece = [(index, point) for index, point in listed if point is not None]
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
                parts.append(f"M{short(point[0])} {short(point[1])}")
            else:
                corner = {"hv": f"H{short(point[0])}", "vh": f"V{short(point[1])}"}.get(step, "")
                parts.append(f"{corner}L{short(point[0])} {short(point[1])}")
        last = point
    return "".join(parts)


def _error_bars(series: Series, frame: PlotFrame, vertical: Scale) -> Iterator[str]:
    parts = []
    for x, low, high in zip(series.x, series.lows, series.highs, strict=True):
        if math.isfinite(x) and math.isfinite(low) and math.isfinite(high):
            at, top, bottom = frame.x(x), vertical(high), vertical(low)
            caps = f"M{short(at - 3)} {short(top)}h6M{short(at - 3)} {short(bottom)}h6"
            parts.append(f"M{short(at)} {short(top)}V{short(bottom)}{caps}")
    if parts:
        yield f'<path fill="none" stroke="{series.colour}" d="{"".join(parts)}"/>'


def _symbol(series: Series, index: int, point: tuple[float, float]) -> str:
    x, y, r = *point, series.radii[index % len(series.radii)]
    symbol = series.symbols[index % len(series.symbols)] if series.symbols else "circle"
    title = f"<title>{escape(series.texts[index])}</title>" if series.texts else ""
    line = f'stroke="{series.colour}" stroke-width="2"'
    if symbol == "cross":
        cross = f"M{short(x - r)} {short(y - r)}l{short(2 * r)} {short(2 * r)}m0 {short(-2 * r)}"
        shape = f'<path d="{cross}l{short(-2 * r)} {short(2 * r)}" fill="none" {line}'
    elif symbol in ("down", "down-open"):
        top = f"M{short(x - r)} {short(y - 0.8 * r)}h{short(2 * r)}"
        fill = f'fill="{series.colour}"' if symbol == "down" else f'class="dot" {line}'
        shape = f'<path d="{top}l{short(-r)} {short(1.8 * r)}z" {fill}'
    else:
        looks = {"open": 'class="dot" ', "ring": 'fill="none" pointer-events="none" '}
        look = looks[symbol] + line if symbol in looks else f'fill="{series.colour}"'
        if series.opacity < 1:
            look += f' opacity="{series.opacity}"'
        shape = f'<circle cx="{short(x)}" cy="{short(y)}" r="{short(r)}" {look}'
    return f"{shape}>{title}</{'path' if shape.startswith('<path') else 'circle'}>"


def draw_strips(plot: Plot, frame: PlotFrame) -> Iterator[str]:
    """Draw invisible strips over dense lines; each names the values below it."""
    is_x = plot.strips == "x"
    axis = frame.x if is_x else frame.y
    lines = [each for each in plot.marks if isinstance(each, Series) and each.texts]
    # Values along the axis of the strips, and across.
    both = [(each.x, each.y) if is_x else (each.y, each.x) for each in lines]
    for low, high, at in _strip_ranges([along for along, _ in both], plot.strip_values, axis):
        texts = [f"{low:.3g}-{high:.3g}{plot.strip_unit}"] if is_x else []
        for each, (along, across) in zip(lines, both, strict=True):
            inside = [
                n for n, v in enumerate(along) if low <= v < high and math.isfinite(across[n])
            ]
            # The point nearest to a wanted value, or else the largest value.
            keys = [-abs(along[n] - at) if plot.strip_values else across[n] for n in inside]
            if inside:
                texts.append(f"{each.name} {each.texts[inside[keys.index(max(keys))]]}")
        a, b = sorted((axis(low), axis(high)))
        high_px, wide_px = frame.bottom - frame.top, frame.right - frame.left
        box = (a, frame.top, b - a, high_px) if is_x else (frame.left, a, wide_px, b - a)
        yield f'<rect class="hit" {_box(*box)}><title>{escape(chr(10).join(texts))}</title></rect>'


def _strip_ranges(
    lines: Sequence[Sequence[float]], wanted: Sequence[float], axis: Scale
) -> Iterator[tuple[float, float, float]]:
    """Cut an axis half-way between groups of neighbouring values, or between the wanted ones. Yield
    the ends of each piece and its first value."""
    values = sorted({value for each in lines for value in each if math.isfinite(value)})
    if not values:
        return
    if wanted:
        values = [*(each for each in wanted if each < values[-1]), values[-1]]
    size = math.ceil(len(values) / MAX_STRIPS)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    edges = [axis.low]
    edges += [(a[-1] + b[0]) / 2 for a, b in zip(groups, groups[1:], strict=False)]
    edges.append(axis.high)
    for group, low, high in zip(groups, edges, edges[1:], strict=False):
        yield low, high, group[0]


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{short(x)}" y="{short(y)}" width="{short(width)}" height="{short(height)}"'
