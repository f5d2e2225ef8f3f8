"""Plots as SVG: well-formed, self-contained, with their texts."""

import re
from pathlib import Path
from xml.etree import ElementTree

from penstock.report import figures, plots
from penstock.report.plots import Axis, Limit, Note, Plot, Series

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
    assert ElementTree.fromstring(figures.standalone(plot, EVIL, EVIL)) is not None


def test_nothing_is_loaded_from_elsewhere() -> None:
    plot = plots.bar_chart([("a", 1.0, "1/s")], "rate")
    text = figures.standalone(plot, "title").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|href|url\(|@import", text)


def test_a_file_has_its_title_and_legend(tmp_path: Path) -> None:
    lines = [Series(name, (0.0, 1.0), (1.0, 2.0), plots.BLUE) for name in ("before", "after")]
    path = tmp_path / "plot.svg"
    figures.write_svg(Plot(Axis(), Axis(), tuple(lines)), path, title="Faster", width=800)
    root = ElementTree.parse(path).getroot()
    assert root.get("width") == "800"
    words = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert {"Faster", "before", "after"} <= set(words)


def test_labels_that_would_touch_are_left_out() -> None:
    ticks = tuple((float(index), "a long label") for index in range(40))
    plot = Plot(Axis(ticks=ticks), Axis(), (Series("", (0.0, 39.0), (0.0, 1.0), plots.BLUE),))
    assert 2 <= texts(plot).count("a long label") < 8
