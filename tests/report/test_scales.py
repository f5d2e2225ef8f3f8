"""Which part of an axis is shown, and where its ticks are."""

import pytest

from penstock.report.plots import Axis
from penstock.report.scales import scale, ticks


def test_a_linear_axis_from_zero_has_room_above() -> None:
    found = scale(Axis(has_zero=True), [20.0, 100.0], 0.0, 500.0)
    assert found.low == 0.0 and 100.0 < found.high <= 106.0
    assert found(0.0) == 0.0 and 470.0 < found(100.0) < 500.0
    assert [text for _, text in ticks(Axis(), found)] == ["0", "25", "50", "75", "100"]


def test_a_log_axis_has_ticks_at_one_two_five() -> None:
    axis = Axis(is_log=True)
    found = scale(axis, [1.0, 40.0], 0.0, 100.0)
    assert [text for _, text in ticks(axis, found)] == ["1", "2", "5", "10", "20"]
    assert found(40.0) - found(4.0) == pytest.approx(found(10.0) - found(1.0))


def test_many_decades_have_powers_of_ten() -> None:
    axis = Axis(is_log=True)
    found = scale(axis, [0.1, 1e5], 0.0, 100.0)
    assert [text for _, text in ticks(axis, found)] == [
        "0.1",
        "1",
        "10",
        "100",
        "1000",
        "10k",
        "100k",
    ]


def test_values_that_hardly_differ_have_ticks_in_sight() -> None:
    axis = Axis(is_log=True)
    found = scale(axis, [126.5, 127.1], 0.0, 100.0)
    assert found.low < 100 and found.high > 150
    assert len(ticks(axis, found)) >= 2


def test_values_outside_are_drawn_at_the_edge() -> None:
    found = scale(Axis(low=0.0, high=10.0), [5.0], 0.0, 100.0)
    assert found(20.0) == 100.0 and found(-3.0) == 0.0


def test_an_axis_can_be_reversed_and_hold_categories() -> None:
    axis = Axis(categories=("a", "b"), is_reversed=True)
    found = scale(axis, [], 100.0, 0.0)
    assert found(0.0) < found(1.0)
    assert [text for _, text in ticks(axis, found)] == ["a", "b"]


@pytest.mark.parametrize("values", [[], [0.0], [5.0, 5.0]])
@pytest.mark.parametrize("is_log", [False, True])
def test_any_values_have_a_scale(values: list[float], is_log: bool) -> None:
    axis = Axis(is_log=is_log)
    found = scale(axis, values, 0.0, 100.0)
    assert found.low < found.high and ticks(axis, found)
