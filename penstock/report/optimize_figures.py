"""Plots of an optimisation: what each step gave, what was tried, before and after. Pure.
Predicted figures are outlined bars and hollow marks, measured ones are solid."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock import slo as promises
from penstock import units
from penstock.optimizer import wording
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.first_line import chosen_try
from penstock.optimizer.results import Curve, Optimization, Phase, ServedMeasurement, Try, try_of
from penstock.report import bench_figures, plots
from penstock.report.before_after import has_after
from penstock.report.plots import BLUE, GREEN, GREY, Axis, Limit, Plot, Series, Symbol
from penstock.slo import Latency, Slo

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
# Of each member of an ensemble: its queue and its compute.
MEMBER_COLOURS = (
    ("#f0cfa3", "#e0a458"),
    ("#a5d6cf", "#2a9d8f"),
    ("#cbb3e6", "#8a56c4"),
    ("#e3b3d5", "#b8479c"),
    ("#b6bdeb", "#5a6fd0"),
    ("#d4bfa8", "#b08968"),
)
# Bars above this multiple of the limit, or of the median without one, are cut off.
CUT = 4.0
# Characters per line of a hover text.
MAX_HOVER = 60
# Characters that fit below a bar.
MAX_LABEL = 10
# Least span of an accuracy axis as a share of the largest value, so that noise does not look large.
MIN_SPAN = 0.02


def plots_of(optimization: Optimization) -> dict[str, Plot | None]:
    """Return the plots by name. None: nothing to draw."""
    metric, slo, phases = wording.metric_of(optimization), slo_of(optimization), optimization.phases
    limit_s = None if slo is None else slo.latency_s
    found = {
        "latency_steps": _waterfall(phases, LATENCY, limit_s),
        "rate_steps": _waterfall(phases, RATE),
        "accuracy_steps": _accuracy_steps(optimization, metric),
        "cost_steps": _waterfall(phases, COST),
        "pareto": _pareto(optimization, metric),
        "curves": _curves(optimization),
        "phases": _phases(optimization),
    }
    if optimization.form == "text":
        ttft, tpot = "time to the first token, ms", "time per token after it, ms"
        found["ttft_curves"] = _stream_curves(optimization, "ttft", ttft)
        found["tpot_curves"] = _stream_curves(optimization, "tpot", tpot)
    if optimization.member:
        found["members"] = _members(optimization)
    return found


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
    lambda ms: wording.latency(ms / 1e3),
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


def slo_of(optimization: Optimization) -> Slo | None:
    return promises.parse(optimization.slo) if optimization.slo else None


def _waterfall(
    phases: Sequence[Phase], quantity: _Quantity, limit_s: float | None = None
) -> Plot | None:
    """Return a waterfall of the steps that have a value."""
    phases = [phase for phase in phases if not math.isnan(quantity.value(phase))]
    finite = [value for phase in phases if math.isfinite(value := quantity.value(phase))]
    if len(finite) < 2:
        return None
    steps = []
    for name, phase in zip(_names(phases), phases, strict=True):
        value, is_measured = quantity.value(phase), quantity.is_measured(phase)
        text = quantity.text(value)
        steps.append(plots.WaterfallStep(name, value, text, is_measured, phase.label))
    # The highest value, without those that would make the others too small to see.
    usual, lines = sorted(finite)[len(finite) // 2], []
    if limit_s is not None:
        usual, lines = limit_s * 1e3, [Limit("y", limit_s * 1e3, f"SLO: {units.duration(limit_s)}")]
    top = max([*(value for value in finite if value <= CUT * usual), usual]) or 1.0
    is_lower_better = quantity.is_lower_better
    return plots.waterfall(
        steps, quantity.title, is_lower_better=is_lower_better, top=top, limits=lines
    )


def _names(phases: Sequence[Phase]) -> list[str]:
    """Number repeated labels, to tell them apart."""
    seen: dict[str, int] = {}
    found = []
    for phase in phases:
        label = wording.short_label(phase.label)
        seen[label] = seen.get(label, 0) + 1
        number = f" {seen[label]}" if seen[label] > 1 else ""
        # Long labels are broken into lines, because they stand side by side below the bars.
        lines = [
            line if len(line.removesuffix(" →")) <= MAX_LABEL else line.replace("-", "-\n", 1)
            for line in label.replace(" → ", " →\n").split("\n")
        ]
        found.append("\n".join(lines) + number)
    return found


def _accuracy_steps(optimization: Optimization, metric: str) -> Plot | None:
    """Plot points, not bars, because the axis does not start at zero."""
    known = [phase for phase in optimization.phases if phase.accuracy is not None]
    values = [math.nan if phase.accuracy is None else phase.accuracy for phase in known]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return None
    scale = 100.0 if wording.is_share(metric) else 1.0
    texts = [wording.score(metric, value) for value in values]
    series = Series(
        metric,
        range(len(known)),
        [value * scale for value in values],
        BLUE,
        [f"{phase.label}: {text}" for phase, text in zip(known, texts, strict=True)],
        width=1.5,
        dash="2 3",
        step="hv",
        radii=(5.0,),
        labels=texts,
    )
    lines: tuple[Limit, ...] = ()
    if (limit := _accuracy_limit(optimization)) is not None:
        lines = (Limit("y", limit * scale, f"budget: {optimization.accuracy_budget}"),)
        finite.append(limit)
    span = max(max(finite) - min(finite), MIN_SPAN * max(map(abs, finite)), 1e-9)
    middle = (max(finite) + min(finite)) / 2
    low, high = (middle - 0.7 * span) * scale, (middle + 0.8 * span) * scale
    x = Axis(categories=tuple(_names(known)), has_grid=False)
    y = Axis(f"{metric or 'score'}{', %' if scale > 1 else ''}", low=low, high=high)
    return Plot(x, y, (series,), limits=lines, has_legend=False)


def _accuracy_limit(optimization: Optimization) -> float | None:
    """Return the lowest score that the budget allows; None if it is relative or limits a rise."""
    found, budget = optimization.held_out, optimization.accuracy_budget
    if found is None or wording.is_relative(budget) or " rise " in budget:
        return None
    # The scores of the steps come from other examples than the held-out ones.
    first = next((each.accuracy for each in optimization.phases if each.accuracy is not None), None)
    return (found.original if first is None else first) - found.limit


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
        measured = _measured_rate(each.served)
        rate = each.predicted_rate if measured is None else measured
        if rate is not None and math.isfinite(rate):
            lost = _loss_of(optimization, each.candidate)
            found.append(Point(each, rate, lost * scale, measured is not None))
    return found


def _measured_rate(served: ServedMeasurement | None) -> float | None:
    rate = None if served is None else served.max_rate
    return rate.value if rate is not None and math.isfinite(rate.value) else None


def _loss_of(optimization: Optimization, candidate: Candidate) -> float:
    """Return the measured loss of the last step that changed answers; later steps lose no more."""
    while candidate.steps:
        found = try_of(optimization.tries, candidate.key)
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


# Legend name, colour and symbols (measured, predicted) by the outcome of a try.
MARKS: dict[str, tuple[str, str, Symbol, Symbol]] = {
    "kept": ("kept", GREEN, "circle", "open"),
    "equal": ("equal", BLUE, "circle", "open"),
    "slower": ("slower", BLUE, "down", "down-open"),
    "rejected": ("rejected by a gate", GREY, "cross", "cross"),
}


def _pareto(optimization: Optimization, metric: str) -> Plot | None:
    points = points_of(optimization, metric)
    if len(points) < 2:
        return None
    front = _places(front_of(points))
    series = [Series("best trade", *front, GREY, width=1.5, dash="2 3", step="vh")]
    for outcome, (name, colour, *symbols) in MARKS.items():
        group = [point for point in points if point.attempt.outcome == outcome]
        if group:
            series.append(_marks(group, name, colour, (symbols[0], symbols[1])))
    series += _chosen_mark(optimization, points)
    losses, is_share = [point.loss for point in points], wording.is_share(metric)
    room = 0.15 * max(max(losses) - min(losses), 0.5 if is_share else 1e-3)
    low, high = min(losses) - room, max(losses) + room
    is_relative = wording.is_relative(optimization.accuracy_budget)
    unit = ", % of the original's" if is_relative else ", points" if is_share else ""
    # Reversed, so that up is good.
    y = Axis(f"{metric} lost{unit}", low=low, high=high, is_reversed=True)
    if not metric:
        y = Axis("accuracy was not judged", low=low, high=high, ticks=((0.0, ""),))
    return Plot(Axis("highest rate that keeps the SLO, per second", has_zero=True), y, series)


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.rate for point in points], [point.loss for point in points]


def _marks(
    points: Sequence[Point], name: str, colour: str, symbols: tuple[Symbol, Symbol]
) -> Series:
    return Series(
        name,
        *_places(points),
        colour,
        [_hover(point, name) for point in points],
        width=0.0,
        radii=(4.0 if symbols[0] == "cross" else 5.5,),
        symbols=tuple(symbols[0] if point.is_measured else symbols[1] for point in points),
    )


def _hover(point: Point, name: str) -> str:
    steps = "\n→ ".join(str(step) for step in point.attempt.candidate.steps)
    how = "measured" if point.is_measured else "predicted"
    reason = "\n".join(textwrap.wrap(point.attempt.reason, MAX_HOVER))
    text = f"{steps or 'original'}\n{units.number(point.rate)}/s {how}, {name}"
    return f"{text}\n{reason}" if reason else text


def _chosen_mark(optimization: Optimization, points: Sequence[Point]) -> list[Series]:
    chosen, measured = chosen_try(optimization), _measured_rate(optimization.after)
    point = next((each for each in points if each.attempt is chosen), None)
    if point is None:
        return []
    place = (point.rate if measured is None else measured,), (point.loss,)
    return [Series("chosen", *place, plots.AMBER, width=0.0, radii=(10.0,), symbols=("ring",))]


def _sides(optimization: Optimization) -> list[tuple[str, ServedMeasurement, str]]:
    """Return the original and the chosen candidate with their colours, as far as they exist."""
    after = optimization.after if has_after(optimization) else None
    both = (("original", optimization.before, GREY), ("chosen", after, GREEN))
    return [(name, run, colour) for name, run, colour in both if run is not None]


def _curves(optimization: Optimization) -> Plot | None:
    """Plot latency against throughput, before and after, with the SLO. Text generation has too few
    answers for a throughput, and has curves of its own."""
    if optimization.form == "text":
        return None
    series = []
    for name, run, colour in _sides(optimization):
        if (curve := run.curve) is not None:
            for percentile, seconds in (("p50", curve.p50_s), ("p99", curve.p99_s)):
                label, x = f"{name} {percentile}", curve.throughput
                series.append(_curve_series(label, curve, x, seconds, colour))
    series = [each for each in series if any(map(math.isfinite, each.y))]
    if not series:
        return None
    return bench_figures.curve_plot(series, _slo_lines(optimization, "latency"))


def _slo_lines(optimization: Optimization, metric: str) -> list[Limit]:
    """Return the limit of a metric across, and the rate of the SLO upright."""
    slo = slo_of(optimization)
    if slo is None:
        return []
    terms = [each for each in slo.terms if isinstance(each, Latency) and each.metric == metric]
    lines = bench_figures.limit_lines("y", terms)
    if slo.rate is None:
        return lines
    return [*lines, Limit("x", slo.rate.per_s, f"{units.number(slo.rate.per_s)}/s")]


def _stream_curves(optimization: Optimization, metric: str, title: str) -> Plot | None:
    """Plot the p99 of a streaming metric against the arrival rate, before and after."""
    series = [
        _curve_series(name, curve, curve.rates, seconds, colour)
        for name, run, colour in _sides(optimization)
        if (curve := run.curve) is not None
        and (seconds := curve.ttft_p99_s if metric == "ttft" else curve.tpot_p99_s)
    ]
    if not series:
        return None
    x, y = Axis("arrivals per second", has_zero=True), Axis(f"p99 {title}", is_log=True)
    return Plot(x, y, series, limits=_slo_lines(optimization, metric))


def _curve_series(
    name: str, curve: Curve, x: Sequence[float], seconds: Sequence[float], colour: str
) -> Series:
    is_reached = x is curve.throughput
    texts = [
        f"{name}\n{units.number(rate)}/s sent"
        + (f"\n{units.number(reached)}/s" if is_reached else "")
        + f", {units.duration(each)}"
        for rate, reached, each in zip(curve.rates, x, seconds, strict=True)
    ]
    is_tail = not name.endswith("p50")
    dash, radii = "" if is_tail else "2 3", (4.0 if is_tail else 3.0,)
    y = [each * 1e3 for each in seconds]
    return Series(name, x, y, colour, texts, dash=dash, radii=radii)


def _members(optimization: Optimization) -> Plot | None:
    """Plot the time of a request in each member of an ensemble, before and after."""
    known: list[tuple[str, dict[str, float]]] = []
    colours: dict[str, str] = {}
    for side, run, _ in _sides(optimization):
        parts: dict[str, float] = {}
        for number, (name, member) in enumerate(run.members.items()):
            pair = MEMBER_COLOURS[number % len(MEMBER_COLOURS)]
            labels = f"{name}: queue", f"{name}: compute"
            parts |= zip(labels, (member.queue_s, member.compute_s), strict=True)
            colours |= zip(labels, pair, strict=True)
        if parts:
            known.append((side, parts))
    if not known:
        return None
    bars, unit, totals = bench_figures.phase_bars(known, colours, is_horizontal=True)
    return plots.row_plot(totals, bars, unit, 80.0 + 60.0 * len(known))


def _phases(optimization: Optimization) -> Plot | None:
    """Plot the parts of a request's time, before and after; the label has the total."""
    known = [(name, run.phases) for name, run, _ in _sides(optimization) if run.phases]
    if not known:
        return None
    others = [name for _, parts in known for name in parts if name not in PHASE_COLOURS]
    cycle = itertools.cycle(OTHER_PHASES)
    colours = PHASE_COLOURS | dict(zip(dict.fromkeys(others), cycle, strict=False))
    bars, unit, totals = bench_figures.phase_bars(known, colours, is_horizontal=True)
    return plots.row_plot(totals, bars, unit, 80.0 + 60.0 * len(known))
