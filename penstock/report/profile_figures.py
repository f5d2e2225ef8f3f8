"""Plots of a profile: roofline, time by type, timeline, parts of a request, ceilings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock import units
from penstock.profiling import roofline
from penstock.profiling.results import Bound, GpuTime, Operator, Peaks, Profile, RequestPhase
from penstock.report import plots
from penstock.report.plots import Axis, Bars, Plot, Series

BOUND_COLOURS: dict[Bound, str] = {
    "compute": "#2a9d8f",
    "memory": "#e0a458",
    "launch": "#8a56c4",
    "overhead": "#c94a63",
    "unknown": "#9aa5b4",
}
ROOF_COLOURS = {
    "fp32": "#3d8bc4",
    "tf32": "#3fa7a0",
    "fp16": "#5a6fd0",
    "bf16": "#8a56c4",
    "fp8": "#c07a3a",
    "int8": "#b8479c",
}
# From top to bottom.
LANES = {
    "in": ("copies in", "#3d8bc4"),
    "compute": ("kernels", "#2a9d8f"),
    "out": ("copies out", "#e0a458"),
}
MEMORY_COLOUR, CACHE_COLOUR = "#6d7a8c", "#b0b8c2"
NUM_TYPES = 12
# Operators below this share of the time get no dot: they would only stretch the axes.
MIN_SHARE = 0.001
# More dots, and more spans of a timeline, could not be told apart.
MAX_DOTS, MAX_SPANS = 150, 400
LARGEST_DOT, SMALLEST_DOT = 17.0, 3.0


def plots_of(profile: Profile) -> dict[str, Plot | None]:
    return {
        "roofline": roof(profile.operators, profile.peaks),
        "types": _types(profile.operators),
        "buckets": _buckets(profile.buckets),
        "timeline": timeline(profile.gpu),
        "steps": _steps(profile),
    }


def roof(operators: Sequence[Operator], peaks: Peaks) -> Plot | None:
    """Plot FLOP/s against FLOP per byte, both logarithmic, under the measured roofs."""
    least_s = MIN_SHARE * sum(each.seconds for each in operators)
    known = [each for each in operators if each.flops and each.num_bytes and each.seconds > 0]
    known = [each for each in known if each.seconds >= least_s]
    known = sorted(known, key=lambda each: -each.seconds)[:MAX_DOTS]
    if not known or not peaks.flops:
        return None
    intensities = [(each.flops or 0.0) / (each.num_bytes or 1.0) for each in known]
    low = min(*intensities, 0.1) / 2
    high = max(*intensities, max(peaks.flops.values()) / peaks.bytes_per_s) * 3
    series = _roofs(peaks, low, high)
    whole_s = sum(each.seconds for each in known)
    for bound, colour in BOUND_COLOURS.items():
        dots = [each for each in known if each.bound == bound]
        if dots:
            series.append(_dots(bound, colour, dots, whole_s))
    x, y = Axis("FLOP per byte", is_log=True), Axis("GFLOP/s", is_log=True)
    return Plot(x, y, series)


def _roofs(peaks: Peaks, low: float, high: float) -> list[Series]:
    """Return memory as a slope up to the highest peak, and each datatype as a level from there."""
    highest = max(peaks.flops.values())
    slopes = [("memory", peaks.bytes_per_s, MEMORY_COLOUR)]
    if peaks.cache_bytes_per_s > peaks.bytes_per_s:
        slopes.append(("caches", peaks.cache_bytes_per_s, CACHE_COLOUR))
    lines = []
    for name, rate, colour in slopes:
        text, x = f"{name} {units.number(rate / 1e9)} GB/s", (low, highest / rate)
        lines.append(Series(text, x, (low * rate / 1e9, highest / 1e9), colour))
    fastest = max(rate for _, rate, _ in slopes)
    for name, value in peaks.flops.items():
        label = f"{name.upper()} {units.number(value / 1e9)} GFLOP/s"
        colour = ROOF_COLOURS.get(name, MEMORY_COLOUR)
        lines.append(Series(label, (value / fastest, high), (value / 1e9, value / 1e9), colour))
    return lines


def _dots(bound: Bound, colour: str, dots: Sequence[Operator], whole_s: float) -> Series:
    """Return dots whose area is the share of the time."""
    x = [(each.flops or 0.0) / (each.num_bytes or 1.0) for each in dots]
    y = [(each.flops or 0.0) / each.seconds / 1e9 for each in dots]
    texts = [
        f"{each.name}\n{each.type}, {each.datatype}\n{units.duration(each.seconds)},"
        f" {units.share(each.seconds, whole_s)}\n{units.number(rate)} GFLOP/s at"
        f" {units.number(intensity)} FLOP/B"
        for each, intensity, rate in zip(dots, x, y, strict=True)
    ]
    radii = [max(SMALLEST_DOT, LARGEST_DOT * (each.seconds / whole_s) ** 0.5) for each in dots]
    name = roofline.WORDS[bound]
    return Series(name, x, y, colour, texts, width=0.0, radii=radii, opacity=0.75)


def _types(operators: Sequence[Operator]) -> Plot | None:
    """Plot time by type; each bar is coloured by the bottleneck of its parts."""
    groups = roofline.by_type(operators)[:NUM_TYPES]
    if not groups:
        return None
    names = [kind for kind, _ in groups]
    rows = {
        bound: [sum(each.seconds for each in listed if each.bound == bound) for _, listed in groups]
        for bound in BOUND_COLOURS
    }
    shown = [bound for bound, row in rows.items() if any(row)]
    bars = plots.stack(
        [roofline.WORDS[bound] for bound in shown],
        [[seconds * 1e3 for seconds in rows[bound]] for bound in shown],
        [BOUND_COLOURS[bound] for bound in shown],
        [
            [
                f"{name}: {units.duration(seconds)} {roofline.WORDS[bound]}"
                for name, seconds in zip(names, rows[bound], strict=True)
            ]
            for bound in shown
        ],
        is_horizontal=True,
    )
    return plots.row_plot(names, bars, "ms")


def timeline(gpu: GpuTime | None) -> Plot | None:
    """Plot the GPU's copies and kernels over time; lanes at the same x position overlap in time."""
    if gpu is None or not gpu.timeline:
        return None
    spans = gpu.timeline[:MAX_SPANS]
    lanes = {lane: [span for span in spans if span.lane == lane] for lane in LANES}
    lanes = {lane: listed for lane, listed in lanes.items() if listed}
    bars = [
        Bars(
            LANES[lane][0],
            [float(place)] * len(listed),
            [each.start_s * 1e3 for each in listed],
            [(each.start_s + each.seconds) * 1e3 for each in listed],
            (LANES[lane][1],),
            [f"{each.name}\n{units.duration(each.seconds)}" for each in listed],
            is_horizontal=True,
            in_legend=False,
        )
        for place, (lane, listed) in enumerate(lanes.items())
    ]
    return plots.row_plot([LANES[lane][0] for lane in lanes], bars, "ms")


def _buckets(buckets: Sequence[RequestPhase]) -> Plot | None:
    if not buckets:
        return None
    names, values = [each.name for each in buckets], [each.seconds * 1e3 for each in buckets]
    labels = [units.duration(each.seconds) for each in buckets]
    texts = [f"{name}: {label}" for name, label in zip(names, labels, strict=True)]
    bars = _bars("one request", "fp32", range(len(buckets)), values)
    return plots.row_plot(names, [replace(bars, texts=texts, labels=labels)], "ms")


def _steps(profile: Profile) -> Plot | None:
    """Plot the ceilings; latency and rate have different colours."""
    if not profile.steps:
        return None
    bars = []
    for name, peak in (("latency and rate", "fp32"), ("rate only", "bf16")):
        is_latency = name != "rate only"
        places = [n for n, step in enumerate(profile.steps) if step.is_latency is is_latency]
        steps = [profile.steps[place] for place in places]
        if steps:
            made = _bars(name, peak, places, [step.ceiling for step in steps])
            labels = [f"{units.number(step.ceiling)}x" for step in steps]
            bars.append(replace(made, texts=[step.text for step in steps], labels=labels))
    return plots.row_plot([step.name for step in profile.steps], bars, "times as fast, at most")


def _bars(name: str, peak: str, places: Sequence[int], values: Sequence[float]) -> Bars:
    bars = Bars(name, places, [0.0] * len(values), values, (ROOF_COLOURS[peak],))
    return replace(bars, thickness=0.6, is_horizontal=True)
