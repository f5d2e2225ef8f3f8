"""Bars from each value to the next."""

import math
from typing import Any

from penstock.report.waterfall import BETTER, WHOLE, WORSE, WaterfallStep, waterfall


def steps(*values: float) -> list[WaterfallStep]:
    return [
        WaterfallStep(str(index), value, f"{value:g}/s", index != 1, f"step {index}")
        for index, value in enumerate(values)
    ]


def test_the_first_and_the_last_stand_on_the_ground() -> None:
    bars: Any = waterfall(steps(10.0, 30.0, 20.0, 25.0), "rate").named("rate")
    assert bars.lows == (0.0, 10.0, 20.0, 0.0) and bars.highs == (10.0, 30.0, 30.0, 25.0)
    assert bars.colours == (WHOLE, BETTER, WORSE, WHOLE)
    assert bars.outlined == (False, True, False, False)
    assert bars.texts[1] == "step 1: 30/s (predicted)"


def test_lower_can_be_better() -> None:
    bars: Any = waterfall(steps(30.0, 10.0, 10.0), "ms", is_lower_better=True).named("ms")
    assert bars.colours[1] == BETTER


def test_a_bar_beyond_the_plot_has_an_arrow() -> None:
    plot = waterfall(steps(math.inf, 30.0, 20.0), "ms", top=30.0)
    assert [note.text for note in plot.notes] == ["inf/s ↑", "30/s", "20/s"]
    bars: Any = plot.named("ms")
    assert bars.highs[0] == plot.y.high
