"""What the page of the GPU benchmarks draws, as figures in plotly's JSON form. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import techniques
from techniques import CLAIMS, Found, Gain

from penstock import units
from penstock.report import bench_figures
from penstock.report.bench_figures import Figure
from penstock.report.optimize_figures import (
    BETTER,
    GREY,
    WHOLE,
    WORSE,
)

ALONE_COLOUR, LARGEST_COLOUR, HOST_COLOUR = "#8a56c4", BETTER, "#e08e45"
HATCHED = {"shape": "/", "fillmode": "replace", "solidity": 0.35, "size": 6}
# Less is a loss, and not rounding.
LOST = 0.995
# Of the plot of gains, and of one of them in it.
HEAD_PIXELS, PIXELS = 110, 62
# Letters of a name in a line below a bar, and beside one.
BELOW, BESIDE = 16, 46


def figures_of(found: Found) -> dict[str, Figure | None]:
    """By name. None: there is nothing to draw."""
    rows = techniques.rows_of(found)
    return {
        "gains": _gains(techniques.gains(found)),
        "waterfall": waterfall(
            [(name, *_rate(rows[name])) for name in techniques.chain(found)],
            "per second, largest batch",
        ),
        "latency": _latency(rows),
        "rates": _rates(rows),
        "errors": _errors(rows),
    }


def _gains(gains: Sequence[Gain]) -> Figure | None:
    """Bars side by side on an axis of doublings, from 1x: what loses goes to the left."""
    if not gains:
        return None
    names = [_name(each) for each in gains]
    claims = [CLAIMS[each.technique] for each in gains]
    lows = [math.log2(each.low) if each.low else math.nan for each in claims]
    spans = [math.log2(each.high / each.low) if each.low and each.high else 0.0 for each in claims]
    said = {"offsetgroup": "claimed", "type": "bar", "orientation": "h", "y": names}
    data: list[Figure] = [
        said
        | {"name": "guides claim", "x": lows, "marker": {"color": GREY}}
        | {"customdata": [escape(each.text) for each in claims]}
        | {"hovertemplate": "%{customdata}<extra>claimed</extra>"},
        said
        | {"name": "at best", "x": spans, "base": lows, "hoverinfo": "skip"}
        | {"marker": {"color": GREY, "pattern": HATCHED}}
        | {"text": [_claimed(each) for each in claims], "textposition": "outside"}
        | {"cliponaxis": False},
    ]
    measured = (
        ("alone", "measured, one alone", ALONE_COLOUR, [each.alone for each in gains]),
        ("largest", "measured, largest batch", LARGEST_COLOUR, [each.largest for each in gains]),
    )
    for group, name, colour, values in measured:
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "offsetgroup": group,
                "y": names,
                "x": [math.log2(value) if value > 0 else math.nan for value in values],
                "text": ["" if math.isnan(value) else times(value) for value in values],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": {"color": colour},
                "textfont": {"color": [WORSE if value < LOST else colour for value in values]},
                "hovertemplate": "%{y}: %{text}<extra>" + name + "</extra>",
            }
        )
    ends = [*lows, *(low + span for low, span in zip(lows, spans, strict=True))]
    ends += [x for trace in data[2:] for x in trace["x"]]
    layout = _doublings([each for each in ends if not math.isnan(each)])
    layout["height"] = HEAD_PIXELS + PIXELS * len(gains)
    return {"data": data, "layout": layout}


def _doublings(ends: Sequence[float]) -> Figure:
    low, high = math.floor(min([0.0, *ends])), math.ceil(max([1.0, *ends]))
    ticks = list(range(low, high + 1))
    zero = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper"}
    return {
        "barmode": "group",
        "bargap": 0.3,
        "xaxis": {
            "title": "times as fast",
            "tickvals": ticks,
            "ticktext": [times(2.0**tick) for tick in ticks],
            "range": [low - 0.3, high + 0.4],
        },
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "shapes": [zero | {"line": {"color": GREY, "width": 1.5}}],
    }


def _name(gain: Gain) -> str:
    """The technique, and below it between which two rows."""
    lines = [escape(line) for line in textwrap.wrap(gain.label, BESIDE)]
    return f"<b>{CLAIMS[gain.technique].name}</b><br>{'<br>'.join(lines)}"


def _claimed(claim: techniques.Claim) -> str:
    if not claim.low or not claim.high:
        return "no figure"
    return times(claim.low) if claim.low == claim.high else f"{claim.low:g}-{times(claim.high)}"


def times(value: float) -> str:
    return f"{units.number(value).rstrip('0').rstrip('.') if value < 100 else round(value)}x"


def _rate(loads: Found) -> tuple[float, bool]:
    """Of the largest batch, and whether it is of inputs on the device."""
    row = techniques.last(loads)
    is_there = bool(row.get("device_per_s"))
    return float(row.get("device_per_s") or row.get("host_per_s") or math.nan), is_there


def waterfall(steps: Sequence[tuple[str, float, bool]], title: str) -> Figure | None:
    """Each bar goes from what was before to what is now; hatched where it is the second choice of
    figure. The first and the last stand on the ground."""
    known = [step for step in steps if not math.isnan(step[1])]
    if len(known) < 2:
        return None
    values = [value for _, value, _ in known]
    before = [0.0, *values[:-2], 0.0]
    colours = [WHOLE, *(BETTER if b <= v else WORSE for b, v in _pairs(values)[:-1]), WHOLE]
    trace: Figure = {
        "type": "bar",
        "x": [_broken(name) for name, _, _ in known],
        "base": [min(b, v) for b, v in zip(before, values, strict=True)],
        "y": [abs(v - b) for b, v in zip(before, values, strict=True)],
        "marker": {
            "color": colours,
            "pattern": HATCHED | {"shape": ["" if is_first else "/" for _, _, is_first in known]},
        },
        "customdata": [f"{escape(name)}: {value:,.0f}/s" for name, value, _ in known],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    top = max(values)
    notes = [
        {"x": index, "y": max(b, v), "yanchor": "bottom", "text": f"{v:,.0f}", "showarrow": False}
        for index, (b, v) in enumerate(zip(before, values, strict=True))
    ]
    layout: Figure = {
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {"title": title, "range": [0, 1.12 * top]},
        "annotations": notes,
        "showlegend": False,
    }
    return {"data": [trace], "layout": layout}


def _pairs(values: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(values, values[1:], strict=False))


def _broken(name: str) -> str:
    return "<br>".join(map(escape, textwrap.wrap(name, BELOW)))


def _bars(name: str, rows: Mapping[str, float], colour: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [escape(each) for each in rows],
        "x": list(rows.values()),
        "text": [
            f"{value:,.0f}" if value >= 100 else units.number(value) for value in rows.values()
        ],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": colour},
        "hovertemplate": "%{y}: %{text}<extra>" + name + "</extra>",
    }


def _values(rows: Mapping[str, Found], load: str, key: str) -> dict[str, float]:
    """By row; NaN where there is no figure."""
    return {
        name: float(
            (techniques.last(loads) if load == "last" else loads.get(load, {})).get(key, math.nan)
        )
        for name, loads in rows.items()
    }


def _sides(rows: Mapping[str, Found], load: str, keys: tuple[str, str]) -> list[Figure]:
    """On the device and from the host, without rows that have neither and sides that are empty."""
    there, host = (_values(rows, load, key) for key in keys)
    names = [name for name in rows if not math.isnan(there[name]) or not math.isnan(host[name])]
    sides = (("inputs on the device", there, LARGEST_COLOUR), ("host-fed", host, HOST_COLOUR))
    return [
        _bars(title, {name: values[name] for name in names}, colour)
        for title, values, colour in sides
        if any(not math.isnan(values[name]) for name in names)
    ]


def _side_by_side(data: list[Figure], title: str) -> Figure | None:
    if not data:
        return None
    top = max(x for trace in data for x in trace["x"] if not math.isnan(x))
    layout: Figure = {
        "barmode": "group",
        "xaxis": {"title": title, "range": [0, 1.15 * top]},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
    }
    return {"data": data, "layout": layout}


def _latency(rows: Mapping[str, Found]) -> Figure | None:
    data = _sides(rows, techniques.ALONE, ("waited_ms", "host_waited_ms"))
    return _side_by_side(data, "ms, one alone, waited for")


def _rates(rows: Mapping[str, Found]) -> Figure | None:
    data = _sides(rows, "last", ("device_per_s", "host_per_s"))
    return _side_by_side(data, "per second, largest batch")


def error_of(loads: Found) -> float:
    """The largest of a row; NaN where none is known."""
    found = [row["error"] for row in loads.values() if row.get("error") is not None]
    return float(max(found, default=math.nan))


def _errors(rows: Mapping[str, Found]) -> Figure | None:
    found = {name: error_of(loads) for name, loads in rows.items()}
    known = {name: value for name, value in found.items() if value > 0}
    if not known:
        return None
    trace: Figure = {
        "type": "scatter",
        "mode": "markers+text",
        "y": [escape(name) for name in known],
        "x": list(known.values()),
        "text": [f" {value:.1e}" for value in known.values()],
        "textposition": "middle right",
        "marker": {"color": WHOLE, "size": 10},
        "hovertemplate": "%{y}: %{x:.1e}<extra></extra>",
    }
    axis = bench_figures.log_axis("distance from FP32, of the norm", known.values())
    low, high = (math.log10(limit(known.values())) for limit in (min, max))
    axis["range"] = [low - 0.2, high + 0.6]
    layout: Figure = {"xaxis": axis, "yaxis": {"type": "category", "autorange": "reversed"}}
    return {"data": [trace], "layout": layout}


def chosen_steps(found: Mapping[str, Any]) -> Figure | None:
    """What each step added that `penstock optimize` kept; hatched where it was predicted."""
    steps = [
        (str(phase["label"]), _number(phase.get("max_rate")), bool(phase.get("is_measured")))
        for phase in found.get("phases") or []
    ]
    return waterfall(steps, "highest rate that keeps the SLO, per second")


def _number(value: object) -> float:
    """Files have NaN and infinity as words."""
    try:
        found = float(str(value))
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan
