"""Waterfall plots: bars that go from each value to the next. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.report import plots
from penstock.report.plots import Axis, Bars, Limit, Note, Plot, Series

BETTER, WORSE, WHOLE, GREY = plots.GREEN, plots.RED, plots.BLUE, plots.GREY
# Half the width of a bar, as a share of its slot.
HALF_BAR = 0.325


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """A bar of a waterfall. `name` is below the bar, `label` is shown when it is pointed at."""

    name: str
    value: float
    text: str
    is_measured: bool
    label: str


def waterfall(
    steps: Sequence[WaterfallStep],
    title: str,
    *,
    is_lower_better: bool = False,
    top: float | None = None,
    limits: Sequence[Limit] = (),
) -> Plot:
    """Plot steps from the first value to the last; bars beyond `top` are cut off."""
    values = [step.value for step in steps]
    top = top or max(value for value in values if math.isfinite(value)) or 1.0
    edge = top * 1.12
    bars = [_bar(values, index, is_lower_better) for index in range(len(values))]
    texts = [step.text + (" ↑" if step.value > top else "") for step in steps]
    trace = Bars(
        title,
        range(len(steps)),
        tuple(min(low, edge) for low, _, _ in bars),
        tuple(min(high, edge) for _, high, _ in bars),
        tuple(colour for _, _, colour in bars),
        [
            f"{step.label}: {step.text}{'' if step.is_measured else ' (predicted)'}"
            for step in steps
        ],
        outlined=tuple(not step.is_measured for step in steps),
        thickness=2 * HALF_BAR,
        in_legend=False,
    )
    return Plot(
        Axis(categories=tuple(step.name for step in steps), has_grid=False),
        Axis(title, low=0.0, high=edge),
        (*_connectors(values, top), trace),
        limits=limits,
        notes=_labels(values, texts, top),
        has_legend=False,
    )


def _bar(values: Sequence[float], index: int, is_lower_better: bool) -> tuple[float, float, str]:
    """Return the ends of a bar, and its colour."""
    value = values[index]
    if not math.isfinite(value):
        # Nothing was answered: beyond the top of any plot.
        return 0.0, math.inf, WHOLE
    if index in (0, len(values) - 1):
        return 0.0, value, WHOLE
    low, high = sorted((values[index - 1], value))
    is_better = (value < values[index - 1]) is is_lower_better
    return low, high, BETTER if is_better else WORSE


def _connectors(values: Sequence[float], top: float) -> list[Series]:
    found = []
    for index, value in enumerate(values[:-1]):
        if math.isfinite(value) and value <= top:
            ends = (index + HALF_BAR, index + 1 - HALF_BAR)
            line = Series("", ends, (value, value), GREY, width=1.0, dash="2 3", in_legend=False)
            found.append(line)
    return found


def _labels(values: Sequence[float], texts: Sequence[str], top: float) -> list[Note]:
    """Label the upper end of each bar."""
    found = []
    for index, (value, text) in enumerate(zip(values, texts, strict=True)):
        before = values[index - 1] if 0 < index < len(values) - 1 else 0.0
        end = max(value, before)
        at, dy = (top * 1.12, -4.0) if end > top else (end, -5.0)
        found.append(Note(float(index), at, text, dy=dy))
    return found
