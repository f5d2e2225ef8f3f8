"""Plots of the page of the GPU benchmarks. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import techniques
from techniques import CLAIMS, Found, Gain

from penstock import units
from penstock.report import plots
from penstock.report.plots import BLUE, GREEN, GREY, Axis, Bars, Plot, Series, WaterfallStep

ALONE_COLOUR, LARGEST_COLOUR, HOST_COLOUR = plots.PURPLE, GREEN, plots.ORANGE
# Letters of a name in a line below a bar, and beside one.
BELOW, BESIDE = 12, 34
# Pixels of a group of bars.
GROUP = 66.0


def plots_of(found: Found) -> dict[str, Plot | None]:
    """Return the plots by name. None: nothing to draw."""
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


def _gains(gains: Sequence[Gain]) -> Plot | None:
    """Plot bars side by side on an axis of doublings, from 1x: losses go to the left."""
    if not gains:
        return None
    claims = [CLAIMS[each.technique] for each in gains]
    lows = [math.log2(each.low) if each.low else math.nan for each in claims]
    highs = [math.log2(each.high) if each.high else math.nan for each in claims]
    zeros = [0.0] * len(gains)
    texts = tuple(each.text for each in claims)
    marks = [
        replace(_group("guides claim", -0.27, (zeros, lows), GREY), texts=texts),
        replace(
            _group("at best", -0.27, (lows, highs), GREY),
            texts=texts,
            labels=tuple(map(claimed, claims)),
            outlined=(True,) * len(claims),
        ),
    ]
    measured = (
        (0.0, "measured, one alone", ALONE_COLOUR, [each.alone for each in gains]),
        (0.27, "measured, largest batch", LARGEST_COLOUR, [each.largest for each in gains]),
    )
    for offset, name, colour, values in measured:
        words = tuple("" if math.isnan(value) else times(value) for value in values)
        ends = [math.log2(value) if value > 0 else math.nan for value in values]
        bars = _group(name, offset, (zeros, ends), colour)
        hover = tuple(f"{name}: {word}" for word in words)
        marks.append(replace(bars, texts=hover, labels=words))
    found = [each for mark in marks for each in mark.highs if not math.isnan(each)]
    low, high = math.floor(min([0.0, *found])), math.ceil(max([1.0, *found]))
    ticks = tuple((float(tick), times(2.0**tick)) for tick in range(low, high + 1))
    return Plot(
        Axis("times as fast", low=low - 0.3, high=high + 0.4, ticks=ticks),
        Axis(categories=tuple(map(_name, gains)), is_reversed=True, has_grid=False),
        tuple(marks),
        height=80.0 + GROUP * len(gains),
    )


def _group(
    name: str, offset: float, ends: tuple[Sequence[float], Sequence[float]], colour: str
) -> Bars:
    """Return bars beside those of other groups, without texts."""
    lows, highs = ends
    return Bars(
        name,
        tuple(index + offset for index in range(len(lows))),
        tuple(lows),
        tuple(highs),
        (colour,),
        thickness=0.24,
        is_horizontal=True,
    )


def _name(gain: Gain) -> str:
    """The technique, and below it between which two rows."""
    return "\n".join([CLAIMS[gain.technique].name, *textwrap.wrap(gain.label, BESIDE)])


def claimed(claim: techniques.Claim) -> str:
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


def waterfall(steps: Sequence[tuple[str, float, bool]], title: str) -> Plot | None:
    """Each bar goes from what was before to what is now; outlined where it is the second choice of
    figure. The first and the last stand on the ground."""
    known = [
        WaterfallStep(
            "\n".join(textwrap.wrap(name, BELOW)), value, f"{value:,.0f}/s", is_first, name
        )
        for name, value, is_first in steps
        if not math.isnan(value)
    ]
    return plots.waterfall(known, title) if len(known) > 1 else None


def _values(rows: Mapping[str, Found], load: str, key: str) -> dict[str, float]:
    """By row; NaN where there is no figure."""
    return {
        name: float(
            (techniques.last(loads) if load == "last" else loads.get(load, {})).get(key, math.nan)
        )
        for name, loads in rows.items()
    }


def _sides(rows: Mapping[str, Found], load: str, keys: tuple[str, str], title: str) -> Plot | None:
    """On the device and from the host, without rows that have neither and sides that are empty."""
    there, host = (_values(rows, load, key) for key in keys)
    names = [name for name in rows if not math.isnan(there[name]) or not math.isnan(host[name])]
    sides = (("inputs on the device", there, LARGEST_COLOUR), ("host-fed", host, HOST_COLOUR))
    shown = [
        (label, values, colour)
        for label, values, colour in sides
        if any(not math.isnan(values[name]) for name in names)
    ]
    marks = []
    for index, (label, values, colour) in enumerate(shown):
        offset = 0.0 if len(shown) == 1 else (index - 0.5) * 0.34
        ends = [values[name] for name in names]
        words = tuple("" if math.isnan(each) else _figure(each) for each in ends)
        hover = tuple(f"{name}, {label}: {word}" for name, word in zip(names, words, strict=True))
        bars = _group(label, offset, ([0.0] * len(ends), ends), colour)
        marks.append(replace(bars, texts=hover, labels=words))
    if not marks:
        return None
    categories = tuple("\n".join(textwrap.wrap(name, BESIDE)) for name in names)
    return Plot(
        Axis(title, has_zero=True),
        Axis(categories=categories, is_reversed=True, has_grid=False),
        tuple(marks),
        height=80.0 + 46.0 * len(names),
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else units.number(value)


def _latency(rows: Mapping[str, Found]) -> Plot | None:
    keys = ("waited_ms", "host_waited_ms")
    return _sides(rows, techniques.ALONE, keys, "ms, one alone, waited for")


def _rates(rows: Mapping[str, Found]) -> Plot | None:
    return _sides(rows, "last", ("device_per_s", "host_per_s"), "per second, largest batch")


def error_of(loads: Found) -> float:
    """The largest of a row; NaN where none is known."""
    found = [row["error"] for row in loads.values() if row.get("error") is not None]
    return float(max(found, default=math.nan))


def _errors(rows: Mapping[str, Found]) -> Plot | None:
    found = {name: error_of(loads) for name, loads in rows.items()}
    known = {name: value for name, value in found.items() if value > 0}
    if not known:
        return None
    series = Series(
        "error",
        tuple(known.values()),
        tuple(map(float, range(len(known)))),
        BLUE,
        tuple(f"{name}: {value:.1e}" for name, value in known.items()),
        width=0.0,
        radii=(5.0,),
        labels=tuple(f"{value:.1e}" for value in known.values()),
    )
    categories = tuple("\n".join(textwrap.wrap(name, BESIDE)) for name in known)
    return Plot(
        Axis("distance from FP32, of the norm", is_log=True),
        Axis(categories=categories, is_reversed=True, has_grid=False),
        (series,),
        height=80.0 + 40.0 * len(known),
    )


def chosen_steps(found: Mapping[str, Any]) -> Plot | None:
    """What each step added that `penstock optimize` kept; outlined where it was predicted."""
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
