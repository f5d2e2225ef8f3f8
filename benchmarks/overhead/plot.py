"""One HTML page with the figures as plain SVG: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overhead.report import goal_rows, remarks
from overhead.results import PARTS, PENSTOCK, Part, Point, Results, best_points

WIDTH, LABEL, VALUE = 400, 78, 104  # a panel, and the room beside its bars for names and figures
ROW, BAR, HEAD, GAP = 20, 13, 20, 10
COLOURS = {
    "penstock": "var(--ours)",
    "triton": "#4c78a8",
    "mlserver": "#e08a3c",
    "litserve": "#8f6fc0",
    "bentoml": "#5aa469",
}
STYLE = """
:root { --ink: #1d2530; --soft: #66717f; --line: #dde2e8; --paper: #fcfcfa; --ours: #d1495b;
  --good: #2c7a4b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #97a1ad; --line: #323a44;
  --paper: #14181d; --ours: #ff6b7d; --good: #62c088; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1280px; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { margin: 2.4rem 0 .2rem; font-size: 1.2rem; }
h3 { margin: 1.2rem 0 .3rem; font-size: 1rem; font-weight: 600; }
p, li { color: var(--soft); margin: .2rem 0; }
.panels { display: flex; flex-wrap: wrap; gap: .5rem 1.2rem; }
figure { margin: 0; flex: 1 1 340px; } figcaption { font-size: .85rem; color: var(--soft); }
svg { width: 100%; height: auto; display: block; } text { fill: var(--ink); font-size: 11.5px; }
text.soft { fill: var(--soft); } text.strong { font-weight: 650; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .9rem; }
td, th { text-align: left; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid var(--line); }
.met { color: var(--good); font-weight: 600; } .missed { color: var(--bad); font-weight: 600; }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    caption: str
    draw: Callable[[Point, Callable[[float], float], float], str]
    values: Callable[[Point], Sequence[float]]
    is_log: bool = False


def page(results: Results) -> str:
    points = best_points(results.runs)
    sections = "".join(_part(part, points, results) for part in PARTS)
    machine = ", ".join(f"{key} {value}" for key, value in results.machine.items())
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(results))
    notes += "".join(
        f'<li class="missed">failed: {html.escape(f"{f.server} ({f.variant}), {f.model}")}, '
        f"{f.connections} connections: {html.escape(f.reason)}</li>"
        for f in results.failures
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What serving costs</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body><h1>What serving costs</h1>
<p>Requests per second, latency and server CPU for two models that compute next to nothing.
Medians over {html.escape(results.settings["rounds"])} round(s); the best setting of each server
counts, point by point.</p>
{_goals(points, results)}{sections}
<h2>How it was measured</h2>
<p>{html.escape(machine)}; {html.escape(results.settings["seconds per point"])} s per point. Server
and load generator share the cores. A thin line spans the slowest and the fastest run. Hover over a
bar for its figures and setting.</p>
<ul>{notes}</ul></body></html>
"""


def _goals(points: list[Point], results: Results) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(text)}</td><td>{html.escape(rival)}</td><td>{ratio}</td>"
        f'<td class="{verdict.replace(" ", "-")}">{verdict}</td></tr>'
        for text, rival, ratio, verdict in goal_rows(points, results)
    )
    return (
        "<h2>Goals</h2><table><tr><th>Goal</th><th>Against</th><th>Penstock / other</th>"
        f"<th></th></tr>{rows}</table>"
    )


def _part(part: Part, points: list[Point], results: Results) -> str:
    chosen = [point for point in points if point.part == part]
    if not chosen:
        return ""
    text = f"<h2>{html.escape(PARTS[part])}</h2>"
    for model in sorted({point.model for point in chosen}, reverse=True):
        group = [point for point in chosen if point.model == model]
        panels = "".join(_figure(panel, group, results) for panel in PANELS)
        text += f'<h3>{html.escape(model)}</h3><div class="panels">{panels}</div>'
    return text


def _figure(panel: Panel, points: list[Point], results: Results) -> str:
    scale = _scale([value for point in points for value in panel.values(point)], panel.is_log)
    order = list(COLOURS)
    body, y = "", 0.0
    for connections in sorted({point.connections for point in points}):
        plural = "s" if connections > 1 else ""
        body += f'<text x="0" y="{y + 13}" class="soft">{connections} connection{plural}</text>'
        y += HEAD
        group = [point for point in points if point.connections == connections]
        for point in sorted(group, key=lambda each: order.index(each.server)):
            body += _row(panel, point, scale, y, results)
            y += ROW
        y += GAP
    return (
        f'<figure><figcaption>{panel.caption}</figcaption><svg role="img" aria-label='
        f'"{panel.caption}" viewBox="0 0 {WIDTH} {y}">{body}</svg></figure>'
    )


def _row(
    panel: Panel, point: Point, scale: Callable[[float], float], y: float, results: Results
) -> str:
    title = results.titles[point.server]
    strong = ' class="strong"' if point.server == PENSTOCK else ""
    name = title.split()[0].rstrip(",")
    hint = (
        f"{title} ({point.variant}): {point.requests_per_s:,.0f} requests/s, p50 "
        f"{_duration(point.p50_us)}, p99 {_duration(point.p99_us)}, {point.cpu_us:,.0f} CPU-us"
    )
    return (
        f"<g><title>{html.escape(hint)}</title><text{strong} x='0' y='{y + 12}'>"
        f"{html.escape(name)}</text>{panel.draw(point, scale, y)}</g>"
    )


def _scale(values: Sequence[float], is_log: bool) -> Callable[[float], float]:
    room = WIDTH - LABEL - VALUE
    if not is_log:
        top = max(values)
        return lambda value: LABEL + room * value / top
    low, high = math.log10(min(values) / 1.5), math.log10(max(values))
    return lambda value: LABEL + room * (math.log10(value) - low) / (high - low)


def _bar(point: Point, scale: Callable[[float], float], y: float, value: float) -> str:
    width = max(1.0, scale(value) - LABEL)
    return (
        f'<rect x="{LABEL}" y="{y + 2}" width="{width:.1f}" height="{BAR}" rx="2" '
        f'fill="{COLOURS[point.server]}"/>'
    )


def _draw_rate(point: Point, scale: Callable[[float], float], y: float) -> str:
    end = scale(point.fastest)
    return (
        f"{_bar(point, scale, y, point.requests_per_s)}"
        f'<path d="M{scale(point.slowest):.1f} {y + 8.5}H{end:.1f}" stroke="var(--ink)"/>'
        f'<text x="{end + 6:.1f}" y="{y + 12}">{point.requests_per_s:,.0f}</text>'
    )


def _draw_latency(point: Point, scale: Callable[[float], float], y: float) -> str:
    start, end, middle = scale(point.p50_us), scale(point.p99_us), y + 8.5
    colour = COLOURS[point.server]
    return (
        f'<path d="M{start:.1f} {middle}H{end:.1f}" stroke="{colour}" stroke-width="3" '
        f'opacity=".45"/><circle cx="{start:.1f}" cy="{middle}" r="5" fill="{colour}"/>'
        f'<circle cx="{end:.1f}" cy="{middle}" r="3.5" fill="var(--paper)" stroke="{colour}" '
        f'stroke-width="2"/><text x="{end + 8:.1f}" y="{y + 12}">{_duration(point.p50_us)}'
        f'<tspan fill="var(--soft)"> / {_duration(point.p99_us)}</tspan></text>'
    )


def _draw_cpu(point: Point, scale: Callable[[float], float], y: float) -> str:
    end = scale(point.cpu_us) + 6
    bar = _bar(point, scale, y, point.cpu_us)
    return f'{bar}<text x="{end:.1f}" y="{y + 12}">{point.cpu_us:,.0f} µs</text>'


def _duration(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.0f} µs"
    milliseconds = microseconds / 1000
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"


PANELS = (
    Panel("Requests per second (longer is better)", _draw_rate, lambda point: [point.fastest]),
    Panel(
        "Latency, p50 filled, p99 open, log scale (left is better)",
        _draw_latency,
        lambda point: [point.p50_us, point.p99_us],
        is_log=True,
    ),
    Panel("Server CPU per request (shorter is better)", _draw_cpu, lambda point: [point.cpu_us]),
)
