"""A profile's operators under the roofs of the device, as a figure in plotly's JSON form. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from penstock.benchmark.report import plots, units
from penstock.benchmark.report.plots import Figure
from penstock.optimizer.profile.results import Operator, Profile

BOUND_COLOURS = {
    "compute": "#2a9d8f",
    "memory": "#3d8bc4",
    "launch": "#e08e45",
    "overhead": "#b8479c",
    "unknown": "#9aa5b4",
}
ROOF_DASHES = ("solid", "dash", "dot", "dashdot")
# Room around the operators, as a factor.
ROOM = 4.0
MIN_MARK, MAX_MARK = 6.0, 34.0


def roofline(profile: Profile) -> Figure | None:
    """Operations a second against operations a byte; a mark is as large as its share of time."""
    placed = [each for each in profile.operators if intensity(each) is not None]
    if not placed:
        return None
    found = [x for each in placed if (x := intensity(each)) is not None]
    span = min(found) / ROOM, max(found) * ROOM
    roofs = _roofs(profile, span)
    total_s = sum(each.seconds for each in profile.operators)
    groups = [
        _marks([each for each in placed if each.bound == bound], bound, total_s)
        for bound in BOUND_COLOURS
    ]
    data = [*roofs, *(group for group in groups if group["x"])]
    speeds = [y for trace in data for y in trace["y"]]
    layout = {
        "xaxis": plots.log_axis("operations per byte", [x for trace in data for x in trace["x"]]),
        "yaxis": plots.log_axis("billion operations per second", speeds),
    }
    return {"data": data, "layout": layout}


def intensity(operator: Operator) -> float | None:
    """Operations a byte; None: not to be placed."""
    if not operator.flops or not operator.num_bytes or operator.seconds <= 0:
        return None
    return operator.flops / operator.num_bytes


def _roofs(profile: Profile, span: tuple[float, float]) -> list[Figure]:
    """One for each datatype that the device was measured with, up the slope that memory allows."""
    found = []
    peaks = sorted(profile.peaks.flops.items(), key=lambda each: each[1])
    for index, (datatype, peak) in enumerate(peaks):
        ridge = peak / profile.peaks.bytes_per_s
        right = max(span[1], ridge * 2)
        low = min(span[0], ridge / 2)
        xs = [low * (right / low) ** (step / 40) for step in range(41)] + [ridge]
        xs.sort()
        found.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{datatype}: {units.number(peak / 1e9)} G/s",
                "x": xs,
                "y": [min(peak, x * profile.peaks.bytes_per_s) / 1e9 for x in xs],
                "line": {"color": "#6d7a8c", "width": 1.5, "dash": ROOF_DASHES[index % 4]},
                "hovertemplate": "%{y:.3g} G/s at %{x:.3g} operations a byte<extra>"
                + f"{escape(datatype)}</extra>",
            }
        )
    return found


def _marks(operators: Sequence[Operator], bound: str, total_s: float) -> Figure:
    shares = [each.seconds / total_s if total_s else 0.0 for each in operators]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"bound by {bound}" if bound != "unknown" else "not known",
        "x": [intensity(each) for each in operators],
        "y": [(each.flops or 0.0) / each.seconds / 1e9 for each in operators],
        "marker": {
            "color": BOUND_COLOURS[bound],
            "opacity": 0.75,
            "size": [max(MIN_MARK, MAX_MARK * math.sqrt(share)) for share in shares],
        },
        "customdata": [
            f"<b>{escape(each.name)}</b> ({escape(each.type)})<br>"
            f"{units.duration(each.seconds)}, {units.share(share, 1.0)} of the time"
            for each, share in zip(operators, shares, strict=True)
        ],
        "hovertemplate": "%{customdata}<br>%{y:.3g} G/s<extra></extra>",
    }
