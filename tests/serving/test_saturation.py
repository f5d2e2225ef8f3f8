"""The clock that runs while no instance is idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.context import Saturation


def test_it_runs_from_the_start_until_an_instance_is_idle():
    clock = Saturation(100.0)
    assert clock.at(103.0) - clock.at(101.0) == 2.0
    clock.note(False, 103.0)
    before = clock.at(103.0)
    assert clock.at(200.0) == before
    clock.note(True, 200.0)
    assert clock.at(207.0) - before == 7.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), min_size=1), st.data())
def test_a_difference_is_the_saturated_part_of_the_time_between(steps, data):
    now = 1e6
    clock = Saturation(now)
    is_saturated, began, ended = True, now, now
    readings = [(now, clock.at(now))]
    stretches = []
    for step_s, will_be in steps:
        if is_saturated:
            stretches.append((now, now + step_s))
        now += step_s
        clock.note(will_be, now)
        is_saturated = will_be
        readings.append((now, clock.at(now)))
    began = data.draw(st.integers(0, len(readings) - 1))
    ended = data.draw(st.integers(began, len(readings) - 1))
    (start, first), (end, last) = readings[began], readings[ended]
    expected = sum(max(0.0, min(b, end) - max(a, start)) for a, b in stretches)
    assert last - first == pytest.approx(expected, abs=1e-6)
    assert -1e-9 <= last - first <= end - start + 1e-9
