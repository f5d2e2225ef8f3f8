"""Plots as SVG: well-formed, self-contained, with their texts."""

import re
from xml.etree import ElementTree

from penstock.report import figures, plots
from penstock.report.plots import Axis, Bars, Limit, Note, Plot, Series

EVIL = "</svg><img src=x onerror=alert(1)>\"'&"


def parsed(plot: Plot) -> ElementTree.Element:
    return ElementTree.fromstring(figures.draw(plot, "a plot"))


def texts(plot: Plot) -> list[str]:
    return ["".join(each.itertext()) for each in parsed(plot).iter("text")]


def test_names_cannot_become_code() -> None:
    series = Series(EVIL, (1.0,), (1.0,), "#123456", (EVIL,), radii=(3.0,), labels=(EVIL,))
    plot = Plot(
        Axis(EVIL, categories=(EVIL, "b")),
        Axis(EVIL),
        (series,),
        limits=(Limit("y", 1.0, EVIL),),
        notes=(Note(0.0, 1.0, EVIL),),
    )
    assert "<img" not in figures.draw(plot, EVIL)
    assert ElementTree.fromstring(figures.draw(plot, EVIL)).get("aria-label") == EVIL


def test_nothing_is_loaded_from_elsewhere() -> None:
    bars = Bars("rate", (0.0,), (0.0,), (1.0,), (plots.BLUE,), labels=("1/s",), is_horizontal=True)
    text = figures.draw(plots.row_plot(["a"], [bars], "rate"), "title")
    assert not re.search(r"https?:|href|url\(|@import", text)


def test_labels_that_would_touch_are_left_out() -> None:
    ticks = tuple((float(index), "a long label") for index in range(40))
    plot = Plot(Axis(ticks=ticks), Axis(), (Series("", (0.0, 39.0), (0.0, 1.0), plots.BLUE),))
    assert 2 <= texts(plot).count("a long label") < 8
