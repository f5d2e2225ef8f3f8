"""What each step changed on the GPU, as a table."""

import io

from optimizer import made_optimizations as made
from rich.console import Console

from penstock.profiling.results import StepTime
from penstock.report import optimize, optimize_table, step_times


def profiled():
    found = made.kept()
    layers = [
        {"convolution kernel": 0.008, "other kernel": 0.002, "copy on the GPU": 0.001},
        {"convolution kernel": 0.002},
    ]
    for phase, each in zip(found.phases, layers, strict=False):
        phase.step_time = StepTime(4, each, 50, 0.01, 0.004, 0.0004, 0.0)
    return found


def test_times_are_of_one_row_by_kind_of_layer() -> None:
    head, rows = step_times.step_table(profiled())
    assert head[:4] == ["step", "convolution kernel", "copy on the GPU", "other kernels"]
    shown = [[str(cell) for cell in row] for row in rows]
    assert len(shown) == 2
    assert shown[0][1:] == ["2.00 ms", "250 us", "500 us", "1.00 ms", "100 us", "50", "4"]
    assert shown[1][1:4] == ["500 us", "–", "–"]


def test_it_is_on_the_page_and_in_the_terminal() -> None:
    found = profiled()
    assert "The GPU's time" in optimize.page(found)
    console = Console(width=200, file=io.StringIO())
    console.print(optimize_table.shown(found))
    assert "convolution kernel" in console.file.getvalue()


def test_one_profile_shows_no_change() -> None:
    found = profiled()
    found.phases[1].step_time = None
    assert step_times.step_table(found) == ([], [])
    assert "GPU's time" not in optimize.page(found)
