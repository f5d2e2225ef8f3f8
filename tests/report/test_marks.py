"""Marks of plots: every extreme and every value."""

import math
import random
import re
from xml.etree import ElementTree

import pytest

from penstock.report import figures, marks
from penstock.report.plots import Axis, Bars, Limit, Plot, Series

EVIL = "</svg><img src=x onerror=alert(1)>\"'&"


def parsed(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(figures.draw(plot, "a plot"))


def titles(plot: Plot) -> list[str]:
    return [each.text or "" for each in parsed(plot).iter("title")]


def texts(plot: Plot) -> list[str]:
    return ["".join(each.itertext()) for each in parsed(plot).iter("text")]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def line(plot: Plot, colour: str) -> list[tuple[float, float]]:
    (path,) = [each for each in parsed(plot).iter("path") if each.get("stroke") == colour]
    return points(path.get("d") or "")


def test_a_long_line_keeps_its_extremes() -> None:
    drawn = random.Random(1)
    y = [drawn.uniform(1.0, 2.0) for _ in range(5000)]
    y[1234], y[4321] = 90.0, 0.5
    series = Series("p99", tuple(map(float, range(5000))), tuple(y), "#123456")
    plot = Plot(Axis(), Axis(low=0.0, high=100.0), (series,))
    found = line(plot, "#123456")
    assert len(found) <= marks.MAX_POINTS
    heights = sorted(y for _, y in found)
    other = Plot(
        Axis(), Axis(low=0.0, high=100.0), (Series("", (0.0, 1.0), (90.0, 0.5), "#123456"),)
    )
    assert [heights[0], heights[-1]] == [y for _, y in line(other, "#123456")]


def test_gaps_are_gaps() -> None:
    series = Series("", (0.0, 1.0, 2.0, 3.0), (1.0, math.nan, 1.0, 2.0), "#123456")
    (path,) = [
        each.get("d") or ""
        for each in parsed(Plot(Axis(), Axis(), (series,))).iter("path")
        if each.get("stroke") == "#123456"
    ]
    assert path.count("M") == 2


def test_every_mark_says_its_exact_values() -> None:
    series = Series("a", (1.0, 2.0), (3.0, 4.0), "#123456", ("first", "second"), radii=(4.0,))
    bars = Bars("b", (0.0,), (0.0,), (5.0,), ("#654321",), ("5 ms",), labels=("5",))
    plot = Plot(Axis(), Axis(), (series, bars), limits=(Limit("y", 4.5, "SLO: 4.5"),))
    assert {"first", "second", "5 ms", "SLO: 4.5"} <= set(titles(plot))
    assert {"5", "SLO: 4.5"} <= set(texts(plot))


@pytest.mark.parametrize("axis", ["x", "y"])
def test_strips_name_the_largest_value_below_them(axis: str) -> None:
    values = tuple(map(float, range(1, 201)))
    words = tuple(f"{value:g} ms" for value in values)
    series = Series("p99", values, values, "#123456", words)
    plot = Plot(Axis(), Axis(), (series,), strips="x" if axis == "x" else "y", strip_unit=" s")
    found = titles(plot)
    assert len(found) <= marks.MAX_STRIPS
    assert "200 ms" in found[-1] and "5 ms" in found[0]


def test_predictions_are_outlined() -> None:
    bars = Bars("", (0.0, 1.0), (0.0, 0.0), (1.0, 2.0), ("#123456",), outlined=(True, False))
    found = [each for each in parsed(Plot(Axis(), Axis(), (bars,))).iter("rect")]
    assert [each.get("stroke-dasharray") is not None for each in found] == [True, False]
