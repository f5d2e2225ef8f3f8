"""Plots of a run: latency by load, distribution, breakdown, and one level over time. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from penstock import units
from penstock.benchmark import stats, summary
from penstock.benchmark.exchange import TimingSample
from penstock.benchmark.pacer import Load
from penstock.benchmark.results import BenchRun, Level
from penstock.benchmark.stats import DurationHistogram
from penstock.benchmark.summary import PERCENTILES, Figures
from penstock.report import plots
from penstock.report.plots import Axis, Bars, Limit, Note, Plot, Series
from penstock.slo import Latency

# Percentiles that are drawn as lines.
CURVES = {"p50": plots.BLUE, "p99": plots.PURPLE}
STREAM_COLOURS = {"ttft": plots.BLUE, "itl": plots.GREEN, "tpot": plots.PURPLE}
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
SYSTEM_COLOURS = (plots.BLUE, plots.GREEN, plots.PURPLE, plots.PINK, plots.ORANGE)
# Percentiles at which a distribution is drawn.
CDF_PERCENTS = (
    *(0.1, 0.5, *map(float, range(1, 90))),
    *(tenth / 10 for tenth in range(900, 1000)),
    *(99.9 + hundredth / 100 for hundredth in range(1, 10)),
)
CDF_TICKS = {"0": 0.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9, "p99.99": 99.99}
# Percentiles whose values are shown when a distribution is pointed at.
CDF_STRIPS = (1.0, 25.0, 50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)
# Percentiles of typical and of slow requests, by latency.
TYPICAL = (40.0, 60.0)
SLOW = 95.0
MIN_SAMPLES = 40
# Smaller shares of a request's time would not be visible.
MIN_SHARE = 0.002
# Bars that differ by more are drawn as shares.
MAX_SUM_RATIO = 20
SINCE = "seconds since measuring began"
RATE = "good answers per second"


def run_plots(run: BenchRun, figures: Sequence[Figures]) -> dict[str, Plot | None]:
    """Return the plots of all levels together, by name. None: nothing to draw."""
    return {
        "curve": _curve(run, figures),
        "cdf": _cdf(run),
        "breakdown": _breakdown([level.load for level in run.levels], figures),
    }


def level_plots(run: BenchRun, level: Level) -> dict[str, Plot | None]:
    """Return the plots of one level, by name. None: nothing to draw."""
    return {
        "over_time": _over_time(run, level),
        "samples": _samples(level.samples),
        "utilisation": _utilisation(level),
        "streams": _streams(run, level),
    }


def limits(run: BenchRun, metric: str = "latency") -> list[Latency]:
    slo = summary.slo_of(run)
    terms = () if slo is None else slo.terms
    return [term for term in terms if isinstance(term, Latency) and term.metric == metric]


def limit_lines(axis: Literal["x", "y"], terms: Sequence[Latency]) -> list[Limit]:
    """Draw limits across an axis in milliseconds."""
    return [Limit(axis, term.limit_s * 1e3, f"SLO: {term}") for term in terms]


def _curve(run: BenchRun, figures: Sequence[Figures]) -> Plot | None:
    """Plot latency against throughput, in order of growing load."""
    if len(figures) < 2:
        return None
    series = [curve_series(run, name, name, colour) for name, colour in CURVES.items()]
    ring, notes = _knee(run, figures)
    return curve_plot([*series, *ring], limit_lines("y", limits(run)), notes)


def curve_plot(
    series: Sequence[Series], lines: Sequence[Limit] = (), notes: Sequence[Note] = ()
) -> Plot:
    x, y = Axis(RATE, has_zero=True), Axis("latency, ms", is_log=True)
    return Plot(x, y, series, limits=lines, notes=notes)


def curve_series(run: BenchRun, name: str, percentile: str, colour: str) -> Series:
    """Return a percentile of each level against its throughput, from low load to high."""
    loads = [level.load for level in run.levels]
    named = dict(zip(map(id, run.levels), summary.short_loads(loads)[1], strict=True))
    levels = sorted(run.levels, key=lambda level: summary.load_size(level.load))
    percent = PERCENTILES[percentile]
    values = [stats.percentile_interval(each.windows, "latency", percent) for each in levels]
    rates = [stats.throughput_interval(each.windows).value for each in levels]
    return Series(
        name,
        rates,
        [each.value * 1e3 for each in values],
        colour,
        [
            f"{each.label}\n{units.number(x)}/s, {name} {units.duration_interval(y)}"
            for each, x, y in zip(levels, rates, values, strict=True)
        ],
        radii=(4.0,),
        labels=[named[id(each)] for each in levels] if percentile == "p99" else (),
        lows=[each.low * 1e3 for each in values],
        highs=[each.high * 1e3 for each in values],
    )


def _knee(run: BenchRun, figures: Sequence[Figures]) -> tuple[list[Series], tuple[Note, ...]]:
    knee = run.knee
    if knee is None or not 0 <= knee.level < len(figures):
        return [], ()
    at = figures[knee.level]
    x, y_ms, colour = at.throughput.value, at.latency["p50"].value * 1e3, plots.AMBER
    ring = Series("knee", (x,), (y_ms,), colour, (at.label,), 0.0, radii=(9.0,), symbols=("ring",))
    text = f"knee: concurrency {units.number(knee.concurrency)}"
    return [ring], (Note(x, y_ms, text, dx=-12, dy=-9, anchor="end", colour=colour),)


def nines(percent: float) -> float:
    """Return a percentile's place on an axis that gives each further nine the same room."""
    return -math.log10(1 - percent / 100)


def cdf_series(
    histogram: DurationHistogram, name: str, colour: str, dash: str = ""
) -> Series | None:
    """Return a distribution up to the last percentile with a request beyond; None if empty."""
    total = histogram.total
    shown = [each for each in CDF_PERCENTS if total * (1 - each / 100) >= 1]
    if not shown:
        return None
    found = [histogram.percentile(each) for each in shown]
    texts = [f"p{p:g}: {units.duration(each)}" for p, each in zip(shown, found, strict=True)]
    x, y = [each * 1e3 for each in found], [nines(each) for each in shown]
    return Series(name, x, y, colour, texts, dash=dash)


def cdf_plot(
    found: Sequence[Series | None], lines: Sequence[Limit], title: str = "latency, ms"
) -> Plot | None:
    series = [each for each in found if each is not None]
    if not series:
        return None
    ticks = [(nines(percent), text) for text, percent in CDF_TICKS.items()]
    x, y = Axis(title, is_log=True), Axis("percentile", has_zero=True, ticks=ticks)
    strips = [nines(each) for each in CDF_STRIPS]
    return Plot(x, y, series, limits=lines, strips="y", strip_values=strips)


def _cdf(run: BenchRun) -> Plot | None:
    found = [
        cdf_series(stats.histogram(level.windows, "latency"), level.label, colour)
        for level, colour in zip(run.levels, plots.ramp(max(1, len(run.levels))), strict=False)
    ]
    return cdf_plot(found, limit_lines("x", limits(run)))


def _breakdown(loads: Sequence[Load], figures: Sequence[Figures]) -> Plot | None:
    title, names = summary.short_loads(list(loads))
    both = zip(names, figures, strict=True)
    rows = [(name, row.breakdown.phases()) for name, row in both if row.breakdown is not None]
    return stacked(rows, title, PHASE_COLOURS) if rows else None


def stacked(
    rows: Sequence[tuple[str, Mapping[str, float]]], title: str, colours: Mapping[str, str]
) -> Plot:
    """Stack phases of `colours`; the sum is below each bar."""
    bars, y_title, texts = phase_bars(rows, colours, thickness=0.6 if len(rows) > 2 else 0.4)
    x = Axis(title, categories=texts, has_grid=False)
    return Plot(x, Axis(y_title, has_zero=True), bars)


def phase_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    *,
    is_horizontal: bool = False,
    thickness: float = 0.6,
) -> tuple[list[Bars], str, list[str]]:
    """Return stacked bars of phases in ms, or of shares if one bar would dwarf the others; their
    unit; and the name of each bar with its sum."""
    sums = [sum(parts.values()) for _, parts in rows]
    is_shares = max(sums) > MAX_SUM_RATIO * min(sums)
    scales = [100 / whole if is_shares and whole else 1e3 for whole in sums]
    both = list(zip(rows, sums, scales, strict=True))
    phases = [
        phase
        for phase in colours
        if any(parts.get(phase, 0.0) > MIN_SHARE * whole for (_, parts), whole, _ in both)
    ]
    bars = plots.stack(
        phases,
        [[parts.get(phase, 0.0) * scale for (_, parts), _, scale in both] for phase in phases],
        [colours[phase] for phase in phases],
        [
            [
                f"{phase}: {units.duration(parts.get(phase, 0.0))},"
                f" {units.share(parts.get(phase, 0.0), whole)} at {name}"
                for (name, parts), whole, _ in both
            ]
            for phase in phases
        ],
        is_horizontal=is_horizontal,
        thickness=thickness,
    )
    texts = [f"{name}\n{units.duration(whole)}" for (name, _), whole, _ in both]
    return bars, "share, %" if is_shares else "mean, ms", texts


# Phases of the server's timing header, under the breakdown's names.
SAMPLE_PHASES = {
    "queue_batch": "queue: for a batch",
    "queue_instance": "queue: for an instance",
    "compute_input": "compute input",
    "compute_infer": "compute infer",
    "compute_output": "compute output",
}


def _samples(samples: Sequence[TimingSample]) -> Plot | None:
    """Compare where slow and typical requests spend their time."""
    if len(samples) < MIN_SAMPLES:
        return None
    ordered = sorted(samples, key=lambda sample: sample.latency_s)
    first, last, slow = (round(len(ordered) * p / 100) for p in (*TYPICAL, SLOW))
    groups = {"typical (p40-p60)": ordered[first:last], "slow (p95 and above)": ordered[slow:]}
    rows = [(name, _mean_phases(group)) for name, group in groups.items()]
    return stacked(rows, "", PHASE_COLOURS)


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


def _over_time(run: BenchRun, level: Level) -> Plot | None:
    windows = level.windows
    if not windows:
        return None
    middles = [window.start_s + window.length_s / 2 for window in windows]
    empty = DurationHistogram({})
    marks: list[Series | Bars] = []
    for name, colour in CURVES.items():
        found, percent = [w.metrics.get("latency", empty) for w in windows], PERCENTILES[name]
        values = [each.percentile(percent) if each.total else math.nan for each in found]
        texts = [units.duration(each) for each in values]
        marks.append(Series(name, middles, [each * 1e3 for each in values], colour, texts))
    failures = [sum(window.failures.values()) for window in windows]
    right = None
    if any(failures):
        texts = [f"{number} failed" for number in failures]
        bars = Bars(
            "failed requests", middles, [0.0] * len(failures), failures, (plots.RED,), texts
        )
        thickness = 0.8 * sum(window.length_s for window in windows) / len(windows)
        marks.insert(0, replace(bars, thickness=thickness, is_right=True, opacity=0.45))
        # Keep the bars low, below the lines.
        right = Axis("failed requests", has_zero=True, high=3.0 * max(failures))
    y, lines = Axis("latency, ms", is_log=True), limit_lines("y", limits(run))
    return Plot(Axis(SINCE, has_zero=True), y, marks, right, lines, strips="x", strip_unit=" s")


def _utilisation(level: Level) -> Plot | None:
    samples = level.system
    if not samples:
        return None
    x = [sample.at_s for sample in samples]
    lines = {"CPU": [sample.cpu_percent for sample in samples]}
    for index in range(min(len(sample.gpu_percent) for sample in samples)):
        lines[f"GPU {index}"] = [sample.gpu_percent[index] for sample in samples]
    marks = [
        Series(name, x, tuple(y), colour, [f"{value:.0f} %" for value in y])
        for (name, y), colour in zip(lines.items(), itertools.cycle(SYSTEM_COLOURS), strict=False)
    ]
    sizes = [sample.memory_bytes for sample in samples]
    gib, texts = tuple(each / 2**30 for each in sizes), tuple(map(units.size, sizes))
    marks.append(Series("memory", x, gib, plots.GREY, texts, dash="2 3", is_right=True))
    y, right = Axis("busy, %", low=0.0, high=105.0), Axis("memory, GiB", has_zero=True)
    return Plot(Axis(SINCE, has_zero=True), y, marks, right, strips="x", strip_unit=" s")


def _streams(run: BenchRun, level: Level) -> Plot | None:
    found = [
        cdf_series(stats.histogram(level.windows, metric), metric.upper(), colour)
        for metric, colour in STREAM_COLOURS.items()
    ]
    terms = [term for metric in STREAM_COLOURS for term in limits(run, metric)]
    return cdf_plot(found, limit_lines("x", terms), "ms")
