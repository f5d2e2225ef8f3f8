"""Plots of the profile page, as figures in plotly's JSON form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from penstock import units
from penstock.optimizer.profile import roofline
from penstock.optimizer.profile.results import Bound, Bucket, GpuTime, Operator, Peaks, Profile
from penstock.report import bench_figures

Figure = dict[str, Any]

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
# From bottom to top.
LANES = {
    "out": ("copies out", "#e0a458"),
    "compute": ("kernels", "#2a9d8f"),
    "in": ("copies in", "#3d8bc4"),
}
MEMORY_COLOUR, CACHE_COLOUR = "#6d7a8c", "#b0b8c2"
NUM_TYPES = 12
# Operators below this share of the time get no dot: they would only stretch the axes.
MIN_SHARE = 0.001
LARGEST_DOT, SMALLEST_DOT = 34.0, 6.0


def figures(profile: Profile) -> dict[str, list[Figure | None]]:
    return {
        "roofline": [roof(profile.operators, profile.peaks)],
        "types": [_types(profile.operators)],
        "buckets": [_buckets(profile.buckets)],
        "timeline": [timeline(profile.gpu)],
        "steps": [_steps(profile)],
    }


def roof(operators: Sequence[Operator], peaks: Peaks) -> Figure | None:
    """Plot FLOP/s against FLOP per byte, both logarithmic, under the measured roofs."""
    least_s = MIN_SHARE * sum(each.seconds for each in operators)
    known = [
        each
        for each in operators
        if each.flops and each.num_bytes and each.seconds > 0 and each.seconds >= least_s
    ]
    if not known or not peaks.flops:
        return None
    intensities = [(each.flops or 0.0) / (each.num_bytes or 1.0) for each in known]
    low = min(*intensities, 0.1) / 2
    high = max(*intensities, max(peaks.flops.values()) / peaks.bytes_per_s) * 3
    data = _roofs(peaks, low, high)
    for bound, colour in BOUND_COLOURS.items():
        dots = [each for each in known if each.bound == bound]
        if dots:
            data.append(_dots(bound, colour, dots, sum(each.seconds for each in known)))
    return {
        "data": data,
        "layout": {
            "xaxis": bench_figures.log_axis(
                "FLOP per byte", [x for trace in data for x in trace["x"]]
            ),
            "yaxis": bench_figures.log_axis("GFLOP/s", [y for trace in data for y in trace["y"]]),
            "margin": {"l": 60, "r": 20, "t": 20, "b": 44},
        },
    }


def _roofs(peaks: Peaks, low: float, high: float) -> list[Figure]:
    """Return memory as a slope up to the highest peak, and each datatype as a level from there."""
    highest = max(peaks.flops.values())
    slopes = [("memory", peaks.bytes_per_s, MEMORY_COLOUR)]
    if peaks.cache_bytes_per_s > peaks.bytes_per_s:
        slopes.append(("caches", peaks.cache_bytes_per_s, CACHE_COLOUR))
    lines = []
    for name, rate, colour in slopes:
        end = highest / rate
        text = f"{name} {units.number(rate / 1e9)} GB/s"
        lines.append(_line(text, [low, end], [low * rate / 1e9, highest / 1e9], colour))
    fastest = max(rate for _, rate, _ in slopes)
    for name, value in peaks.flops.items():
        label = f"{roofline.NAMES.get(name, name)} {units.number(value / 1e9)} GFLOP/s"
        colour = ROOF_COLOURS.get(name, MEMORY_COLOUR)
        lines.append(_line(label, [value / fastest, high], [value / 1e9] * 2, colour))
    return lines


def _line(name: str, x: list[float], y: list[float], colour: str) -> Figure:
    line = {"color": colour, "width": 2}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line}


def _dots(bound: Bound, colour: str, dots: Sequence[Operator], whole_s: float) -> Figure:
    """Return dots whose area is the share of the time."""
    sizes = [max(SMALLEST_DOT, LARGEST_DOT * (each.seconds / whole_s) ** 0.5) for each in dots]
    texts = [
        f"{escape(each.name)}<br>{escape(each.type)}, {each.datatype}<br>"
        f"{units.duration(each.seconds)}, "
        f"{units.share(each.seconds, whole_s)}"
        for each in dots
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": roofline.WORDS[bound],
        "x": [(each.flops or 0.0) / (each.num_bytes or 1.0) for each in dots],
        "y": [(each.flops or 0.0) / each.seconds / 1e9 for each in dots],
        "text": texts,
        "hovertemplate": "%{text}<br>%{y:.3g} GFLOP/s at %{x:.3g} FLOP/B<extra></extra>",
        "marker": {"color": colour, "size": sizes, "opacity": 0.75, "line": {"width": 0}},
    }


def _types(operators: Sequence[Operator]) -> Figure | None:
    """Plot time by type; each bar is coloured by the bottleneck of its parts."""
    groups = roofline.by_type(operators)[:NUM_TYPES]
    if not groups:
        return None
    names = [kind for kind, _ in groups][::-1]
    data = []
    for bound, colour in BOUND_COLOURS.items():
        by_name = {
            kind: sum(each.seconds for each in listed if each.bound == bound) * 1e3
            for kind, listed in groups
        }
        if any(by_name.values()):
            data.append(_bars(roofline.WORDS[bound], names, [by_name[n] for n in names], colour))
    return _stacked(data, "ms")


def timeline(gpu: GpuTime | None) -> Figure | None:
    """Plot the GPU's copies and kernels over time; lanes at the same x position overlap in time."""
    if gpu is None or not gpu.timeline:
        return None
    data = []
    for lane, (name, colour) in LANES.items():
        spans = [span for span in gpu.timeline if span.lane == lane]
        if spans:
            bars = _bars(name, [name] * len(spans), [each.seconds * 1e3 for each in spans], colour)
            texts = [f"{escape(each.name)}<br>{units.duration(each.seconds)}" for each in spans]
            bars |= {"base": [each.start_s * 1e3 for each in spans], "text": texts}
            bars |= {"textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
            data.append(bars)
    figure = _stacked(data, "ms")
    figure["layout"]["barmode"] = "overlay"
    return figure


def _buckets(buckets: Sequence[Bucket]) -> Figure | None:
    if not buckets:
        return None
    names = [each.name for each in buckets][::-1]
    values = [each.seconds * 1e3 for each in buckets][::-1]
    return _stacked([_bars("one request", names, values, ROOF_COLOURS["fp32"])], "ms")


def _steps(profile: Profile) -> Figure | None:
    """Plot the ceilings; latency and rate have different colours."""
    if not profile.steps:
        return None
    listed = profile.steps[::-1]
    names = [step.name for step in listed]
    data = []
    for is_latency, label in ((True, "latency and rate"), (False, "rate only")):
        values = [step.ceiling if step.is_latency is is_latency else 0.0 for step in listed]
        colour = ROOF_COLOURS["fp32"] if is_latency else ROOF_COLOURS["bf16"]
        if any(values):
            data.append(_bars(label, names, values, colour))
    return _stacked(data, "times as fast, at most")


def _bars(name: str, labels: list[str], values: list[float], colour: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": labels,
        "x": values,
        "marker": {"color": colour},
        "hovertemplate": "%{y}: %{x:.3g}<extra>" + name + "</extra>",
    }


def _stacked(data: list[Figure], title: str) -> Figure:
    return {
        "data": data,
        "layout": {
            "barmode": "stack",
            "xaxis": {"title": title, "rangemode": "tozero"},
            "yaxis": {"title": "", "type": "category"},
            "margin": {"l": 110, "r": 20, "t": 14, "b": 44},
        },
    }
