"""Values that plots are made of."""

import pytest

from penstock.report import plots
from penstock.report.plots import Bars


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
    assert plot.named("rate") is bars
    assert bars.colour(0) == plots.GREEN and bars.colour(1) == plots.GREY
    with pytest.raises(KeyError):
        plot.named("other")
