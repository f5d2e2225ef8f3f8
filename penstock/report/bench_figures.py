"""The plots of a page as figures in plotly's JSON form. Pure; the page sets the colours of text and
grid, so that figures fit a light and a dark theme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock import units
from penstock.benchmark import stats, summary
from penstock.benchmark.exchange import TimingSample
from penstock.benchmark.pacer import Load
from penstock.benchmark.results import Level, Run
from penstock.benchmark.stats import Histogram
from penstock.benchmark.summary import Figures
from penstock.slo import Latency

Figure = dict[str, Any]

# From low load to high.
RAMP = ("#2a9d8f", "#3d8bc4", "#5a6fd0", "#8a56c4", "#b8479c", "#c94a63")
MEDIAN_COLOUR, TAIL_COLOUR, FAILURE_COLOUR = "#3d8bc4", "#8a56c4", "#c94a63"
LIMIT_COLOUR = "#d9822b"
STREAM_COLOURS = {"ttft": "#3d8bc4", "itl": "#2a9d8f", "tpot": "#8a56c4"}
PHASE_COLOURS = {
    "waiting to be sent": "#b08968",
    "network and client": "#9aa5b4",
    "server overhead": "#6d7a8c",
    "queue": "#e0a458",
    "queue: for a batch": "#e8c468",
    "queue: for an instance": "#e08e45",
    "compute input": "#8fd0c2",
    "compute infer": "#2a9d8f",
    "compute output": "#1f6f78",
}
SYSTEM_COLOURS = ("#3d8bc4", "#2a9d8f", "#8a56c4", "#b8479c", "#e08e45")
# Percentiles at which a distribution is drawn.
CDF_PERCENTS = (
    *(0.1, 0.5, *map(float, range(1, 90))),
    *(tenth / 10 for tenth in range(900, 1000)),
    *(99.9 + hundredth / 100 for hundredth in range(1, 10)),
)
# A log axis spans at least the square of this factor.
NARROW = 1.5
CDF_TICKS = {"0": 0.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "p99.99": 99.99}
# Percentiles of typical and of slow requests, by latency.
TYPICAL = (40.0, 60.0)
SLOW = 95.0
MIN_SAMPLES = 40
# Smaller shares of a request's time would not be visible.
MIN_SHARE = 0.002
# Bars that differ by more are drawn as shares.
MAX_SUM_RATIO = 20


def figures_of_run(run: Run, figures: Sequence[Figures]) -> dict[str, list[Figure | None]]:
    """Return figures by name: one for the run, or one per level. None: nothing to draw."""
    levels = run.levels
    return {
        "curve": [_curve(run, figures)],
        "cdf": [_cdf(run)],
        "breakdown": [_breakdown([level.load for level in levels], figures)],
        "over_time": [_over_time(run, level) for level in levels],
        "samples": [_samples(level.samples) for level in levels],
        "utilisation": [_utilisation(level) for level in levels],
        "streams": [_streams(run, level) for level in levels],
    }


def plain(value: Any) -> Any:
    """Replace NaN and infinity with None: gaps in a line."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def colours(num_levels: int) -> list[str]:
    """Return this many colours along the ramp."""
    if num_levels == 1:
        return [RAMP[1]]
    return [_mixed(index / (num_levels - 1) * (len(RAMP) - 1)) for index in range(num_levels)]


def _mixed(position: float) -> str:
    low = min(int(position), len(RAMP) - 2)
    part = position - low
    pairs = zip(_channels(RAMP[low]), _channels(RAMP[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _limits(run: Run) -> list[Latency]:
    slo = summary.slo_of(run)
    return [] if slo is None else [term for term in slo.terms if isinstance(term, Latency)]


def _line(axis: str, at: float, text: str) -> tuple[Figure, Figure]:
    """Return a dashed line across a plot at `at` on its logarithmic `axis`, and its label."""
    other = "y" if axis == "x" else "x"
    shape = {"type": "line", f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1}
    shape |= {f"{other}ref": "paper", f"{axis}ref": axis}
    shape["line"] = {"color": LIMIT_COLOUR, "width": 1.5, "dash": "dash"}
    # On a log axis plotly places annotations by logarithm, but shapes by value.
    note = {axis: math.log10(at), f"{axis}ref": axis, f"{other}ref": "paper", "text": text}
    note |= {"showarrow": False, "font": {"color": LIMIT_COLOUR, "size": 11}}
    note |= {other: 1 if axis == "x" else 0, "yanchor": "bottom"}
    note["xanchor"] = "center" if axis == "x" else "left"
    return shape, note


def _curve(run: Run, figures: Sequence[Figures]) -> Figure | None:
    """Plot throughput against latency, in order of growing load."""
    if len(figures) < 2:
        return None
    colour_of = {"p50": MEDIAN_COLOUR, "p99": TAIL_COLOUR}
    figure = curve_figure(
        [curve_trace(run, name, name, colour) for name, colour in colour_of.items()]
    )
    for term in _limits(run):
        add_limit_across(figure["layout"], term)
    _mark_knee(run, figures, figure)
    return figure


def curve_figure(traces: list[Figure]) -> Figure:
    layout = {
        "xaxis": {"title": "good answers per second", "rangemode": "tozero"},
        "yaxis": log_axis("latency, ms", _with_bars(traces)),
        "shapes": [],
        "annotations": [],
    }
    return {"data": traces, "layout": layout}


def curve_trace(run: Run, name: str, percentile: str, colour: str) -> Figure:
    """Trace a percentile of each level against its throughput, from low load to high."""
    loads = [level.load for level in run.levels]
    named = dict(zip(map(id, run.levels), summary.short_loads(loads)[1], strict=True))
    levels = sorted(run.levels, key=lambda level: summary.load_size(level.load))
    percent = summary.PERCENTILES[percentile]
    values = [stats.percentile_interval(each.windows, "latency", percent) for each in levels]
    return {
        "type": "scatter",
        "mode": "lines+markers" + ("+text" if percentile == "p99" else ""),
        "name": name,
        "x": [stats.throughput_interval(each.windows).value for each in levels],
        "y": [each.value * 1e3 for each in values],
        "text": [named[id(each)] for each in levels],
        "textposition": "top left",
        "textfont": {"size": 10},
        "customdata": [summary.label_of(each) for each in levels],
        "hovertemplate": "%{customdata}<br>%{x:.1f}/s, %{y:.3g} ms<extra>%{fullData.name}</extra>",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 7},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [(each.high - each.value) * 1e3 for each in values],
            "arrayminus": [(each.value - each.low) * 1e3 for each in values],
            "color": colour,
            "thickness": 1,
            "width": 3,
        },
    }


def _with_bars(traces: Sequence[Figure]) -> Iterator[float]:
    """Yield the values of points, and the ends of their error bars."""
    for trace in traces:
        bars = trace.get("error_y", {"array": [], "arrayminus": []})
        yield from trace["y"]
        yield from (y + more for y, more in zip(trace["y"], bars["array"], strict=False))
        yield from (y - less for y, less in zip(trace["y"], bars["arrayminus"], strict=False))


def add_limit_across(layout: Figure, term: Latency, metric: str = "latency") -> None:
    """Draw the limit of a metric across a vertical axis of that metric."""
    if term.metric != metric:
        return
    _add_line(layout, "y", term, f" SLO: {term}")


def _add_line(layout: Figure, axis: str, term: Latency, text: str) -> None:
    at = term.limit_s * 1e3
    shape, note = _line(axis, at, text)
    layout["shapes"].append(shape)
    layout["annotations"].append(note)
    if (found := layout[f"{axis}axis"].get("range")) is not None:
        low, high = found
        layout[f"{axis}axis"]["range"] = [
            min(low, math.log10(at) - 0.05),
            max(high, math.log10(at) + 0.05),
        ]


def _mark_knee(run: Run, figures: Sequence[Figures], figure: Figure) -> None:
    knee = run.knee
    if knee is None or not 0 <= knee.level < len(figures):
        return
    at = figures[knee.level]
    y_ms = at.latency["p50"].value * 1e3
    ring = {"size": 16, "color": "rgba(0,0,0,0)", "line": {"color": LIMIT_COLOUR, "width": 2.5}}
    figure["data"].append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "knee",
            "x": [at.throughput.value],
            "y": [y_ms],
            "marker": ring,
            "hovertemplate": f"{at.label}<extra>knee</extra>",
        }
    )
    text = f"<b>knee</b>: concurrency {units.number(knee.concurrency)}"
    note = {"x": at.throughput.value, "y": math.log10(y_ms) if y_ms > 0 else 0.0, "text": text}
    note |= {"ax": -20, "ay": 44, "xanchor": "right", "arrowcolor": LIMIT_COLOUR, "arrowwidth": 1}
    note["font"] = {"color": LIMIT_COLOUR, "size": 12}
    figure["layout"]["annotations"].append(note)


def log_axis(title: str, values: Iterable[float]) -> Figure:
    """Make an axis with ticks at 1, 2, 5, 10 …, in plain numbers; more where the values are close
    together. Values that hardly differ get room around them: otherwise no tick would be visible,
    and noise would look large."""
    finite = [value for value in values if math.isfinite(value) and value > 0]
    axis: Figure = {"title": title, "type": "log"}
    if not finite:
        return axis
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    steps: tuple[float, ...] = (1.0,) if high - low > 4 else (1.0, 2.0, 5.0)
    if max(finite) < 5 * min(finite):
        steps = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    ticks = [step * 10.0**power for power in range(low - 1, high + 1) for step in steps]
    if max(finite) < NARROW * min(finite):
        centre = math.log10(min(finite) * max(finite)) / 2
        axis["range"] = [centre - math.log10(NARROW), centre + math.log10(NARROW)]
    return axis | {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def cdf_trace(histogram: Histogram, name: str, colour: str, dash: str = "solid") -> Figure:
    """Trace a distribution up to the last percentile with at least one request beyond."""
    total = histogram.total
    shown = [each for each in CDF_PERCENTS if total * (1 - each / 100) >= 1]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [histogram.percentile(each) * 1e3 for each in shown],
        "y": [nines(each) for each in shown],
        "customdata": [f"{each:g}" for each in shown],
        "hovertemplate": "p%{customdata}: %{x:.3g} ms<extra>%{fullData.name}</extra>",
        "line": {"color": colour, "width": 2, "dash": dash},
    }


def nines(percent: float) -> float:
    """Return a percentile's place on an axis that gives each further nine the same room."""
    return -math.log10(1 - percent / 100)


def cdf_layout(data: Sequence[Figure], title: str = "latency, ms") -> Figure:
    values = [x for trace in data for x in trace["x"]]
    return {
        "xaxis": log_axis(title, values),
        "yaxis": {
            "title": "percentile",
            "tickvals": [nines(percent) for percent in CDF_TICKS.values()],
            "ticktext": list(CDF_TICKS),
            "rangemode": "tozero",
        },
        "shapes": [],
        "annotations": [],
    }


def _cdf(run: Run) -> Figure | None:
    data = [
        cdf_trace(stats.histogram(level.windows, "latency"), summary.label_of(level), colour)
        for level, colour in zip(run.levels, colours(max(1, len(run.levels))), strict=False)
    ]
    data = [trace for trace in data if trace["x"]]
    if not data:
        return None
    layout = cdf_layout(data)
    for term in _limits(run):
        if term.metric == "latency":
            add_limit(layout, term)
    return {"data": data, "layout": layout}


def add_limit(layout: Figure, term: Latency) -> None:
    _add_line(layout, "x", term, f"SLO: {term}")


def _breakdown(loads: Sequence[Load], figures: Sequence[Figures]) -> Figure | None:
    title, names = summary.short_loads(list(loads))
    rows = [
        (name, row.breakdown.phases())
        for name, row in zip(names, figures, strict=True)
        if row.breakdown is not None
    ]
    if not rows:
        return None
    figure = _stacked(rows)
    figure["layout"]["xaxis"]["title"] = title
    return figure


def _stacked(rows: Sequence[tuple[str, dict[str, float]]]) -> Figure:
    """Stack bars in ms, or as shares if one bar would dwarf the others; the sum is below each."""
    sums = [sum(parts.values()) for _, parts in rows]
    is_shares = max(sums) > MAX_SUM_RATIO * min(sums)
    data = [
        _phase_bars(rows, sums, phase, is_shares)
        for phase in PHASE_COLOURS
        if any(
            parts.get(phase, 0.0) > MIN_SHARE * whole
            for (_, parts), whole in zip(rows, sums, strict=True)
        )
    ]
    texts = [
        f"{name}<br>{units.duration(whole)}" for (name, _), whole in zip(rows, sums, strict=True)
    ]
    layout: Figure = {
        "barmode": "stack",
        "xaxis": {"tickvals": list(range(len(rows))), "ticktext": texts, "showgrid": False},
        "yaxis": {"title": "share, %" if is_shares else "mean, ms", "rangemode": "tozero"},
    }
    if len(rows) == 1:
        layout["xaxis"]["range"] = [-1, 1]
    return {"data": data, "layout": layout}


def _phase_bars(
    rows: Sequence[tuple[str, dict[str, float]]], sums: Sequence[float], phase: str, is_share: bool
) -> Figure:
    times_s = [parts.get(phase, 0.0) for _, parts in rows]
    shares = [
        100 * time_s / whole if whole else 0.0 for time_s, whole in zip(times_s, sums, strict=True)
    ]
    return {
        "type": "bar",
        "name": phase,
        # By index: two levels of one load are two bars.
        "x": list(range(len(rows))),
        "y": shares if is_share else [time_s * 1e3 for time_s in times_s],
        "customdata": [units.duration(time_s) for time_s in times_s],
        "marker": {"color": PHASE_COLOURS[phase]},
        "width": 0.6 if len(rows) > 2 else 0.4,
        "hovertemplate": "%{customdata}<extra>" + phase + "</extra>",
    }


# Phases of the server's timing header, under the breakdown's names.
SAMPLE_PHASES = {
    "queue_batch": "queue: for a batch",
    "queue_instance": "queue: for an instance",
    "compute_input": "compute input",
    "compute_infer": "compute infer",
    "compute_output": "compute output",
}


def _samples(samples: Sequence[TimingSample]) -> Figure | None:
    """Compare where slow and typical requests spend their time."""
    if len(samples) < MIN_SAMPLES:
        return None
    ordered = sorted(samples, key=lambda sample: sample.latency_s)
    first, last, slow = (round(len(ordered) * p / 100) for p in (*TYPICAL, SLOW))
    groups = {"typical (p40-p60)": ordered[first:last], "slow (p95 and above)": ordered[slow:]}
    rows = [(name, _mean_phases(group)) for name, group in groups.items()]
    return _stacked(rows)


def _mean_phases(samples: Sequence[TimingSample]) -> dict[str, float]:
    num = len(samples)
    found = {
        name: sum(sample.phases_s.get(key, 0.0) for sample in samples) / num
        for key, name in SAMPLE_PHASES.items()
    }
    latency_s = sum(sample.latency_s for sample in samples) / num
    total_s = sum(sample.phases_s.get("total", 0.0) for sample in samples) / num
    inside_s = sum(found.values())
    # A server that reports no total has no overhead to show.
    found["server overhead"] = max(0.0, total_s - inside_s)
    found["network and client"] = max(0.0, latency_s - max(total_s, inside_s))
    return found


def _over_time(run: Run, level: Level) -> Figure | None:
    windows = level.windows
    if not windows:
        return None
    middles = [window.start_s + window.length_s / 2 for window in windows]
    empty = Histogram({})
    data: list[Figure] = []
    for name, percent, colour in (("p50", 50.0, MEDIAN_COLOUR), ("p99", 99.0, TAIL_COLOUR)):
        found = [window.metrics.get("latency", empty) for window in windows]
        y = [each.percentile(percent) * 1e3 if each.total else math.nan for each in found]
        data.append(_time_trace(name, middles, y, colour))
    values = [each for trace in data for each in trace["y"]]
    layout: Figure = {
        "xaxis": {"title": "seconds since measuring began", "rangemode": "tozero"},
        "yaxis": log_axis("latency, ms", values),
        "shapes": [],
        "annotations": [],
    }
    for term in _limits(run):
        add_limit_across(layout, term)
    failures = [sum(window.failures.values()) for window in windows]
    if any(failures):
        data.append(
            {
                "type": "bar",
                "name": "failed requests",
                "x": middles,
                "y": failures,
                "yaxis": "y2",
                "marker": {"color": FAILURE_COLOUR, "opacity": 0.45},
                "hovertemplate": "%{y} failed<extra></extra>",
            }
        )
        # Keep the bars low, below the lines.
        layout["yaxis2"] = _second_axis("failed requests") | {"range": [0, 3 * max(failures)]}
    return {"data": data, "layout": layout}


def _second_axis(title: str) -> Figure:
    return {
        "title": title,
        "overlaying": "y",
        "side": "right",
        "tickmode": "auto",
        "nticks": 5,
        "showgrid": False,
        "rangemode": "tozero",
    }


def _time_trace(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, unit: str = " ms"
) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2},
        "hovertemplate": "%{y:.3g}" + unit + "<extra>" + name + "</extra>",
    }


def _utilisation(level: Level) -> Figure | None:
    samples = level.system
    if not samples:
        return None
    x = [sample.at_s for sample in samples]
    lines = {"CPU": [sample.cpu_percent for sample in samples]}
    for index in range(min(len(sample.gpu_percent) for sample in samples)):
        lines[f"GPU {index}"] = [sample.gpu_percent[index] for sample in samples]
    data = [
        _time_trace(name, x, y, SYSTEM_COLOURS[i % len(SYSTEM_COLOURS)], " %")
        for i, (name, y) in enumerate(lines.items())
    ]
    memory = [sample.memory_bytes / 2**30 for sample in samples]
    trace = _time_trace("memory", x, memory, "#9aa5b4", " GiB")
    trace["yaxis"] = "y2"
    trace["line"]["dash"] = "dot"
    layout: Figure = {
        "xaxis": {"title": "seconds since measuring began", "rangemode": "tozero"},
        "yaxis": {"title": "busy, %", "range": [0, 105]},
        "yaxis2": _second_axis("memory, GiB"),
    }
    return {"data": [*data, trace], "layout": layout}


def _streams(run: Run, level: Level) -> Figure | None:
    data = []
    for metric, colour in STREAM_COLOURS.items():
        trace = cdf_trace(stats.histogram(level.windows, metric), metric.upper(), colour)
        if trace["x"]:
            data.append(trace)
    if not data:
        return None
    layout = cdf_layout(data, "ms")
    for term in _limits(run):
        if term.metric in STREAM_COLOURS:
            add_limit(layout, term)
    return {"data": data, "layout": layout}
