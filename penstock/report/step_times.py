"""What each step changed on the GPU, as one table for terminal and page: kernels by kind of layer,
gaps between them, copies."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import units
from penstock.optimizer import wording
from penstock.optimizer.results import Optimization
from penstock.profiling.results import StepTime
from penstock.report.tables import Cell

# Kinds of layers with a column of their own, those that take longest anywhere.
MAX_LAYERS = 4


def step_table(optimization: Optimization) -> tuple[list[str], list[list[Cell]]]:
    """Return head and rows, times per row of the batch; no rows if fewer than two were profiled."""
    known = [
        (wording.short_label(each.label), each.step_time)
        for each in optimization.phases
        if each.step_time is not None
    ]
    if len(known) < 2:
        return [], []
    layers = _layers([time for _, time in known])
    head = ["step", *layers, "other kernels", "gaps", "copies", "kernels", "rows"]
    return head, [[Cell(label), *_cells(time, layers)] for label, time in known]


def _layers(times: Sequence[StepTime]) -> list[str]:
    longest: dict[str, float] = {}
    for time in times:
        for name, seconds in time.layers.items():
            longest[name] = max(seconds / time.num_rows, longest.get(name, 0.0))
    ordered = sorted(longest, key=lambda name: -longest[name])
    return [name for name in ordered if name != "other kernel"][:MAX_LAYERS]


def _cells(time: StepTime, layers: Sequence[str]) -> list[Cell]:
    def shown(seconds: float) -> Cell:
        return Cell(units.duration(seconds / time.num_rows) if seconds > 0 else "–")

    rest = sum(seconds for name, seconds in time.layers.items() if name not in layers)
    return [
        *(shown(time.layers.get(name, 0.0)) for name in layers),
        shown(rest),
        shown(time.gap_s),
        shown(time.copy_in_s + time.copy_out_s),
        Cell(str(time.num_kernels)),
        Cell(str(time.num_rows)),
    ]
