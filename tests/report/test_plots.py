"""Values that plots are made of."""

import math
from typing import Any

import pytest

from penstock.report import plots
from penstock.report.plots import Bars, WaterfallStep


@pytest.mark.parametrize("number", [1, 2, 6, 11])
def test_every_level_has_its_own_colour(number: int) -> None:
    found = plots.ramp(number)
    assert len(set(found)) == number
    assert all(len(colour) == 7 for colour in found)


def test_stacked_bars_begin_where_the_last_ended() -> None:
    first, second = plots.stack(
        ["a", "b"], [[1.0, 2.0], [3.0, 0.5]], ["red", "blue"], [["", ""]] * 2
    )
    assert first.highs == second.lows == (1.0, 2.0)
    assert second.highs == (4.0, 2.5)


def test_rows_of_bars_are_in_order() -> None:
    bars = Bars("rate", (0.0, 1.0), (0.0, 0.0), (3.0, 1.0), (plots.GREEN, plots.GREY))
    plot = plots.row_plot(["ours", "theirs"], [bars], "rate")
    assert plot.y.categories == ["ours", "theirs"] and plot.y.is_reversed
    assert list(plot.marks) == [bars]
    assert bars.colour(0) == plots.GREEN and bars.colour(1) == plots.GREY


def steps(*values: float) -> list[WaterfallStep]:
    return [
        WaterfallStep(str(index), value, f"{value:g}/s", index != 1, f"step {index}")
        for index, value in enumerate(values)
    ]


def test_the_first_and_the_last_stand_on_the_ground() -> None:
    bars: Any = plots.waterfall(steps(10.0, 30.0, 20.0, 25.0), "rate").marks[-1]
    assert bars.lows == (0.0, 10.0, 20.0, 0.0) and bars.highs == (10.0, 30.0, 30.0, 25.0)
    assert bars.colours == (plots.BLUE, plots.GREEN, plots.RED, plots.BLUE)
    assert bars.outlined == (False, True, False, False)
    assert bars.texts[1] == "step 1: 30/s (predicted)"


def test_lower_can_be_better() -> None:
    bars: Any = plots.waterfall(steps(30.0, 10.0, 10.0), "ms", is_lower_better=True).marks[-1]
    assert bars.colours[1] == plots.GREEN


def test_a_bar_beyond_the_plot_has_an_arrow() -> None:
    plot = plots.waterfall(steps(math.inf, 30.0, 20.0), "ms", top=30.0)
    assert [note.text for note in plot.notes] == ["inf/s ↑", "30/s", "20/s"]
    bars: Any = plot.marks[-1]
    assert bars.highs[0] == plot.y.high
