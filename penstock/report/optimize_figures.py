"""Plots of the optimisation page, as figures in plotly's JSON form. Pure.

Predicted figures are hatched bars and hollow marks, measured ones are solid.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from penstock import slo as promises
from penstock import units
from penstock.optimizer import outcomes, wording
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.first_line import chosen_try
from penstock.optimizer.results import Curve, Optimization, Phase, Served, Try
from penstock.report import bench_figures
from penstock.report.before_after import has_after
from penstock.report.bench_figures import Figure
from penstock.slo import Latency, Slo

BETTER, WORSE, WHOLE, GREY = "#2a9d8f", "#c94a63", "#3d8bc4", "#9aa5b4"
BEFORE_COLOUR, AFTER_COLOUR = "#9aa5b4", "#2a9d8f"
CHOSEN_COLOUR = "#d9822b"
PHASE_COLOURS = {
    "network and codec": "#9aa5b4",
    "preprocess": "#b08968",
    "queue": "#e0a458",
    "compute input": "#8fd0c2",
    "compute": "#2a9d8f",
    "compute output": "#1f6f78",
    "postprocess": "#8c6a9e",
}
OTHER_PHASES = ("#8a56c4", "#b8479c", "#5a6fd0")
# Bars above this multiple of the limit, or of the median without one, are cut off.
CUT = 4.0
# Characters per line of a hover text.
MAX_HOVER = 60
# Characters that fit below a bar.
MAX_LABEL = 10
# Half the width of a bar, as a share of its slot.
HALF_BAR = 0.325
# Least span of an accuracy axis as a share of the largest value, so that noise does not look large.
MIN_SPAN = 0.02


def figures_of(optimization: Optimization) -> dict[str, list[Figure | None]]:
    """Return the figures by name. None: nothing to draw."""
    metric = wording.metric_of(optimization)
    return {
        "latency_steps": [_latency_steps(optimization)],
        "rate_steps": [_waterfall(optimization.phases, RATE)],
        "accuracy_steps": [_accuracy_steps(optimization, metric)],
        "cost_steps": [_waterfall(optimization.phases, COST)],
        "pareto": [_pareto(optimization, metric)],
        "curves": [_curves(optimization)],
        "phases": [_phases(optimization)],
        **_stream_figures(optimization),
    }


def _stream_figures(optimization: Optimization) -> dict[str, list[Figure | None]]:
    if optimization.form != "text":
        return {}
    return {
        "ttft_curves": [_stream_curves(optimization, "ttft", "time to the first token, ms")],
        "tpot_curves": [_stream_curves(optimization, "tpot", "time per token after it, ms")],
    }


@dataclass(frozen=True, slots=True)
class _Quantity:
    """The quantity of a waterfall, in the unit it is drawn in."""

    title: str
    value: Callable[[Phase], float]
    text: Callable[[float], str]
    is_lower_better: bool
    # Whether a phase has it from a served run rather than a prediction.
    is_measured: Callable[[Phase], bool] = lambda phase: phase.is_rate_measured


LATENCY = _Quantity(
    "p99, ms",
    lambda phase: phase.p99_s * 1e3,
    lambda ms: units.duration(ms / 1e3),
    True,
    lambda phase: phase.is_measured,
)
RATE = _Quantity("requests per second", lambda phase: phase.max_rate, wording.rate, False)
COST = _Quantity(
    "per million answers",
    lambda phase: math.nan if phase.cost_per_million is None else phase.cost_per_million,
    units.number,
    True,
)


def _latency_steps(optimization: Optimization) -> Figure | None:
    figure = _waterfall(optimization.phases, LATENCY, _limit_ms(optimization))
    slo = slo_of(optimization)
    if figure is None or slo is None or slo.latency_s is None:
        return figure
    _across(figure["layout"], slo.latency_s * 1e3)
    figure["layout"]["annotations"].append(_corner(f"SLO: {units.duration(slo.latency_s)}"))
    return figure


def _limit_ms(optimization: Optimization) -> float | None:
    slo = slo_of(optimization)
    return None if slo is None or slo.latency_s is None else slo.latency_s * 1e3


def slo_of(optimization: Optimization) -> Slo | None:
    return promises.parse(optimization.slo) if optimization.slo else None


def _across(layout: Figure, at: float) -> None:
    """Draw a dashed line across a plot with a linear axis."""
    line = {"color": bench_figures.LIMIT_COLOUR, "width": 1.5, "dash": "dash"}
    place = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line}
    layout["shapes"].append(place)


def _corner(text: str) -> Figure:
    """Label the dashed line in the corner above the plot, which is free."""
    place = {"x": 1, "xref": "paper", "xanchor": "right", "y": 1, "yref": "paper"}
    font = {"color": bench_figures.LIMIT_COLOUR, "size": 11}
    return place | {"yanchor": "bottom", "text": f"- - {text}", "showarrow": False, "font": font}


def _waterfall(
    phases: Sequence[Phase], quantity: _Quantity, limit: float | None = None
) -> Figure | None:
    """Draw a waterfall: the first and last bar start at zero, each one between runs from the
    previous value to its own. Steps without a value are left out."""
    phases = [phase for phase in phases if not math.isnan(quantity.value(phase))]
    values = [quantity.value(phase) for phase in phases]
    finite = [value for value in values if math.isfinite(value)]
    if len(values) < 2 or len(finite) < 2:
        return None
    top = _top(finite, limit)
    bars = [_bar(values, index, quantity.is_lower_better) for index in range(len(values))]
    texts = [quantity.text(value) + (" ↑" if value > top else "") for value in values]
    layout: Figure = {
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {"title": quantity.title, "range": [0, top * 1.12]},
        "shapes": _connectors(values, top),
        "annotations": _labels(values, texts, top),
        "showlegend": False,
        "bargap": 1 - 2 * HALF_BAR,
    }
    trace: Figure = {
        "type": "bar",
        "x": _names(phases),
        "base": [min(bar.low, top * 1.12) for bar in bars],
        "y": [min(bar.high, top * 1.12) - min(bar.low, top * 1.12) for bar in bars],
        "marker": {
            "color": [bar.colour for bar in bars],
            "pattern": _hatching(list(map(quantity.is_measured, phases))),
        },
        "customdata": [
            f"{escape(phase.label)}: {text}{'' if quantity.is_measured(phase) else ' (predicted)'}"
            for phase, text in zip(phases, map(quantity.text, values), strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    return {"data": [trace], "layout": layout}


def _names(phases: Sequence[Phase]) -> list[str]:
    """Number repeated labels: equal labels would share one bar."""
    seen: dict[str, int] = {}
    found = []
    for phase in phases:
        label = wording.short_label(phase.label)
        seen[label] = seen.get(label, 0) + 1
        number = f" {seen[label]}" if seen[label] > 1 else ""
        found.append(_broken(label) + number)
    return found


def _broken(label: str) -> str:
    """Break long labels into two lines, because they stand side by side below the bars."""
    plain = escape(label).replace(" → ", " →<br>")
    return plain if len(label) <= MAX_LABEL or "<br>" in plain else plain.replace("-", "-<br>", 1)


def _hatching(are_measured: Sequence[bool]) -> Figure:
    shapes = ["" if is_measured else "/" for is_measured in are_measured]
    return {"shape": shapes, "fillmode": "replace", "solidity": 0.35, "size": 7}


@dataclass(frozen=True, slots=True)
class _Bar:
    low: float
    high: float
    colour: str


def _bar(values: Sequence[float], index: int, is_lower_better: bool) -> _Bar:
    value = values[index]
    if not math.isfinite(value):
        # Nothing was answered: beyond the top of any plot.
        return _Bar(0.0, math.inf, WHOLE)
    if index in (0, len(values) - 1):
        return _Bar(0.0, value, WHOLE)
    before = values[index - 1]
    is_better = (value < before) is is_lower_better
    return _Bar(min(before, value), max(before, value), BETTER if is_better else WORSE)


def _top(finite: Sequence[float], limit: float | None) -> float:
    """Return the highest value, without those that would make the others too small to see."""
    usual = sorted(finite)[len(finite) // 2] if limit is None else limit
    kept = [value for value in finite if value <= CUT * usual]
    return max([*kept, usual]) or 1.0


def _connectors(values: Sequence[float], top: float) -> list[Figure]:
    line = {"color": GREY, "width": 1, "dash": "dot"}
    return [
        {"type": "line", "y0": value, "y1": value, "line": line}
        | {"x0": index + HALF_BAR, "x1": index + 1 - HALF_BAR}
        for index, value in enumerate(values[:-1])
        if math.isfinite(value) and value <= top
    ]


def _labels(values: Sequence[float], texts: Sequence[str], top: float) -> list[Figure]:
    """Label the upper end of each bar."""
    found = []
    for index, (value, text) in enumerate(zip(values, texts, strict=True)):
        before = values[index - 1] if 0 < index < len(values) - 1 else 0.0
        end = max(value, before)
        place = {"x": index, "y": min(end, top), "yanchor": "bottom", "text": text}
        if end > top:
            # The bar continues beyond the plot.
            place |= {"y": 1, "yref": "paper"}
        found.append(place | {"showarrow": False, "font": {"size": 11}})
    return found


def _accuracy_steps(optimization: Optimization, metric: str) -> Figure | None:
    """Draw points, not bars, because the axis does not start at zero."""
    known = [phase for phase in optimization.phases if phase.accuracy is not None]
    values = [math.nan if phase.accuracy is None else phase.accuracy for phase in known]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    scale = 100.0 if wording.is_share(metric) else 1.0
    low, high = _accuracy_range(optimization, finite)
    trace: Figure = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "x": _names(known),
        "y": [value * scale for value in values],
        "text": [wording.score(metric, value) for value in values],
        "textposition": [
            "bottom center" if value < before else "top center"
            for before, value in zip([values[0], *values], values, strict=False)
        ],
        "textfont": {"size": 11},
        "line": {"color": GREY, "width": 1.5, "shape": "hv", "dash": "dot"},
        "marker": {"color": WHOLE, "size": 10},
        "customdata": [escape(phase.label) for phase in known],
        "hovertemplate": "%{customdata}: %{text}<extra></extra>",
    }
    unit = ", %" if scale > 1 else ""
    layout: Figure = {
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {"title": f"{metric or 'score'}{unit}", "range": [low * scale, high * scale]},
        "shapes": [],
        "annotations": [],
    }
    if (limit := _accuracy_limit(optimization)) is not None:
        _across(layout, limit * scale)
        layout["annotations"].append(_corner(f"budget: {escape(optimization.accuracy_budget)}"))
    return {"data": [trace], "layout": layout}


def _accuracy_limit(optimization: Optimization) -> float | None:
    """Return the lowest score that the budget allows; None for a relative budget, or one that
    limits a rise."""
    found = optimization.held_out
    budget = optimization.accuracy_budget
    if found is None or wording.is_relative(budget) or " rise " in budget:
        return None
    # The scores of the steps come from other examples than the held-out ones.
    first = next((each.accuracy for each in optimization.phases if each.accuracy is not None), None)
    return (found.original if first is None else first) - found.limit


def _accuracy_range(optimization: Optimization, values: Sequence[float]) -> tuple[float, float]:
    limit = _accuracy_limit(optimization)
    ends = [*values, *([] if limit is None else [limit])]
    span = max(max(ends) - min(ends), MIN_SPAN * max(map(abs, ends)), 1e-9)
    middle = (max(ends) + min(ends)) / 2
    return middle - 0.7 * span, middle + 0.8 * span


@dataclass(frozen=True, slots=True)
class Point:
    """A try in the plane of speed and accuracy."""

    attempt: Try
    rate: float
    # Percentage points for shares, else the unit of the score.
    loss: float
    is_measured: bool


def points_of(optimization: Optimization, metric: str) -> list[Point]:
    """Return every try with a known rate."""
    is_percent = wording.is_share(metric) or wording.is_relative(optimization.accuracy_budget)
    scale = 100.0 if is_percent else 1.0
    found = []
    for each in optimization.tries:
        measured = None if each.served is None else each.served.max_rate
        is_measured = measured is not None and math.isfinite(measured.value)
        rate = measured.value if measured is not None and is_measured else each.predicted_rate
        if rate is not None and math.isfinite(rate):
            lost = _loss_of(optimization, each.candidate)
            found.append(Point(each, rate, lost * scale, is_measured))
    return found


def _loss_of(optimization: Optimization, candidate: Candidate) -> float:
    """Return the measured loss of the last step that changed answers; later steps lose no more."""
    while candidate.steps:
        found = outcomes.try_of(optimization.tries, candidate.key)
        judged = None if found is None else found.accuracy
        if judged is not None and wording.is_known(judged.loss):
            return judged.loss
        candidate = candidate.parent
    return 0.0


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of the allowed points, from slow to fast."""
    barred = ("rejected", "failed", "cut off")
    allowed = [each for each in points if each.attempt.outcome not in barred]
    front: list[Point] = []
    for point in sorted(allowed, key=lambda each: (-each.rate, each.loss)):
        if not front or point.loss < front[-1].loss:
            front.append(point)
    return front[::-1]


# Legend name, colour and symbol by the outcome of a try.
MARKS = {
    "kept": ("kept", BETTER, "circle"),
    "equal": ("equal", WHOLE, "circle"),
    "slower": ("slower", WHOLE, "triangle-down"),
    "rejected": ("rejected by a gate", GREY, "x"),
}


def _pareto(optimization: Optimization, metric: str) -> Figure | None:
    points = points_of(optimization, metric)
    if len(points) < 2:
        return None
    data = [_front_trace(points)]
    for outcome, (name, colour, symbol) in MARKS.items():
        group = [point for point in points if point.attempt.outcome == outcome]
        if group:
            data.append(_marks(group, name, colour, symbol))
    data += _chosen_mark(optimization, points)
    losses = [point.loss for point in points]
    span = max(max(losses) - min(losses), 0.5 if wording.is_share(metric) else 1e-3)
    title = f"{escape(metric)} lost{_loss_unit(optimization, metric)}"
    layout: Figure = {
        "xaxis": {"title": "highest rate that keeps the SLO, per second", "rangemode": "tozero"},
        # Reversed, so that up is good.
        "yaxis": {"title": title, "range": [max(losses) + 0.15 * span, min(losses) - 0.15 * span]},
        "shapes": [],
        "annotations": [],
    }
    if not metric:
        layout["yaxis"] |= {"title": "accuracy was not judged", "showticklabels": False}
    return {"data": data, "layout": layout}


def _loss_unit(optimization: Optimization, metric: str) -> str:
    if wording.is_relative(optimization.accuracy_budget):
        return ", % of the original's"
    return ", points" if wording.is_share(metric) else ""


def _front_trace(points: Sequence[Point]) -> Figure:
    front = front_of(points)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "best trade",
        "x": [point.rate for point in front],
        "y": [point.loss for point in front],
        "line": {"color": GREY, "width": 1.5, "dash": "dot", "shape": "vh"},
        "hoverinfo": "skip",
    }


def _marks(points: Sequence[Point], name: str, colour: str, symbol: str) -> Figure:
    is_crossed = symbol == "x"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point.rate for point in points],
        "y": [point.loss for point in points],
        "marker": {
            "color": colour,
            "size": 9 if is_crossed else 11,
            "symbol": [
                symbol if point.is_measured or is_crossed else f"{symbol}-open" for point in points
            ],
            "line": {"width": 1 if is_crossed else 2, "color": colour},
        },
        "customdata": [_hover(point) for point in points],
        "hovertemplate": "%{customdata}<extra>" + name + "</extra>",
    }


def _hover(point: Point) -> str:
    steps = "<br>→ ".join(escape(str(step)) for step in point.attempt.candidate.steps)
    how = "measured" if point.is_measured else "predicted"
    reason = "<br>".join(map(escape, textwrap.wrap(point.attempt.reason, MAX_HOVER)))
    return f"<b>{steps or 'original'}</b><br>{units.number(point.rate)}/s {how}<br>{reason}"


def _chosen_mark(optimization: Optimization, points: Sequence[Point]) -> list[Figure]:
    chosen = chosen_try(optimization)
    found = [point for point in points if point.attempt is chosen]
    if not found:
        return []
    measured = None if optimization.after is None else optimization.after.max_rate
    is_known = measured is not None and math.isfinite(measured.value)
    ring = {"size": 20, "color": "rgba(0,0,0,0)", "line": {"color": CHOSEN_COLOUR, "width": 2.5}}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "chosen",
            "x": [measured.value if measured is not None and is_known else found[0].rate],
            "y": [found[0].loss],
            "marker": ring,
            "hoverinfo": "skip",
        }
    ]


def _curves(optimization: Optimization) -> Figure | None:
    """Plot latency against throughput, before and after, with the SLO. Text generation has too few
    answers for a throughput, and has curves of its own."""
    if optimization.form == "text":
        return None
    sides: list[tuple[str, Served | None, str]] = [("original", optimization.before, BEFORE_COLOUR)]
    if has_after(optimization):
        sides.append(("chosen", optimization.after, AFTER_COLOUR))
    traces = [
        _curve_trace(f"{name} {percentile}", run.curve, percentile, colour)
        for name, run, colour in sides
        if run is not None and run.curve is not None
        for percentile in ("p50", "p99")
    ]
    traces = [trace for trace in traces if any(map(math.isfinite, trace["y"]))]
    if not traces:
        return None
    figure = bench_figures.curve_figure(traces)
    slo = slo_of(optimization)
    for term in () if slo is None else slo.terms:
        if isinstance(term, Latency):
            bench_figures.add_limit_across(figure["layout"], term)
    if slo is not None and slo.rate is not None:
        _rate_line(figure["layout"], slo.rate.per_s)
    # Labels on the lines would cover the curves.
    figure["layout"]["annotations"] = [_corner(f"SLO: {escape(str(slo))}")] if slo else []
    return figure


def _stream_curves(optimization: Optimization, metric: str, title: str) -> Figure | None:
    """Plot the p99 of a streaming metric against the arrival rate, before and after."""
    sides: list[tuple[str, Served | None, str]] = [("original", optimization.before, BEFORE_COLOUR)]
    if has_after(optimization):
        sides.append(("chosen", optimization.after, AFTER_COLOUR))
    traces = [
        _stream_trace(name, run.curve, metric, colour)
        for name, run, colour in sides
        if run is not None and run.curve is not None and getattr(run.curve, f"{metric}_p99_s")
    ]
    if not traces:
        return None
    figure = bench_figures.curve_figure(traces)
    layout = figure["layout"]
    layout["xaxis"]["title"] = "arrivals per second"
    layout["yaxis"]["title"] = f"p99 {title}"
    slo = slo_of(optimization)
    limits = [
        term
        for term in (() if slo is None else slo.terms)
        if isinstance(term, Latency) and term.metric == metric
    ]
    for term in limits:
        bench_figures.add_limit_across(layout, term, metric)
    if slo is not None and slo.rate is not None:
        _rate_line(layout, slo.rate.per_s)
    # Labels on the lines would cover the curves.
    layout["annotations"] = [_corner(f"SLO: {escape(str(term))}") for term in limits[:1]]
    return figure


def _stream_trace(name: str, curve: Curve, metric: str, colour: str) -> Figure:
    seconds: list[float] = getattr(curve, f"{metric}_p99_s")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": curve.rates,
        "y": [each * 1e3 for each in seconds],
        "hovertemplate": "%{x:.3g}/s sent, %{y:.3g} ms<extra>" + name + "</extra>",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7},
    }


def _curve_trace(name: str, curve: Curve, percentile: str, colour: str) -> Figure:
    seconds = curve.p99_s if percentile == "p99" else curve.p50_s
    is_tail = percentile == "p99"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": curve.throughput,
        "y": [each * 1e3 for each in seconds],
        "customdata": [f"{units.number(rate)}/s sent" for rate in curve.rates],
        "hovertemplate": "%{customdata}<br>%{x:.1f}/s, %{y:.3g} ms<extra>" + name + "</extra>",
        "line": {"color": colour, "width": 2, "dash": "solid" if is_tail else "dot"},
        "marker": {"color": colour, "size": 7 if is_tail else 5},
    }


def _rate_line(layout: Figure, rate: float) -> None:
    line = {"color": bench_figures.LIMIT_COLOUR, "width": 1.5, "dash": "dash"}
    place = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": rate, "x1": rate}
    layout["shapes"].append(place | {"line": line})


def _phases(optimization: Optimization) -> Figure | None:
    """Plot the parts of a request's time, before and after; the label has the total."""
    rows = [("original", optimization.before)]
    rows += [("chosen", optimization.after)] if has_after(optimization) else []
    known = [(name, run.phases) for name, run in rows if run is not None and run.phases]
    if not known:
        return None
    names = list(dict.fromkeys(name for _, parts in known for name in parts))
    order = [*PHASE_COLOURS, *(name for name in names if name not in PHASE_COLOURS)]
    colours = PHASE_COLOURS | dict(zip(order[len(PHASE_COLOURS) :], OTHER_PHASES, strict=False))
    sums = [sum(parts.values()) for _, parts in known]
    # Use one unit for both as long as the shorter bar is visible, else shares.
    is_share = max(sums) > bench_figures.MAX_SUM_RATIO * min(sums)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [f"{side}<br>{units.duration(sum(parts.values()))}" for side, parts in known],
            "x": [
                parts.get(name, 0.0) * (100 / whole if is_share else 1e3)
                for (_, parts), whole in zip(known, sums, strict=True)
            ],
            "customdata": [units.duration(parts.get(name, 0.0)) for _, parts in known],
            "marker": {"color": colours.get(name, GREY)},
            "hovertemplate": "%{customdata}<extra>" + name + "</extra>",
        }
        for name in order
        if name in names
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": "share, %" if is_share else "mean per request, ms"},
        "yaxis": {"type": "category", "autorange": "reversed"},
        "bargap": 0.45,
    }
    return {"data": data, "layout": layout}
