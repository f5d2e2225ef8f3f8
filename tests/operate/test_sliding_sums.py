"""Sums over a window: what has left it does not count, and memory does not grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operate.sliding_sums import NUM_SLOTS, CounterStep, SlidingSums


def test_a_sum_covers_the_window_and_no_more():
    sums = SlidingSums(60.0, 2)
    sums.add(100.5, 3, 1)
    sums.add(130.5, 4, 0)
    assert sums.sums(130.5) == (7, 1)
    assert sums.sums(159.9) == (7, 1)
    assert sums.sums(160.5) == (4, 0)
    assert sums.sums(191.0) == (0, 0)
    sums.add(1e6, 5, 5)
    assert sums.sums(1e6) == (5, 5)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 100)), max_size=200))
def test_sums_are_those_of_the_last_window_to_within_a_slot(events):
    window_s = 60.0
    slot_s = window_s / NUM_SLOTS
    sums, now, seen = SlidingSums(window_s, 1), 1000.0, []
    for gap_s, figure in events:
        now += gap_s
        sums.add(now, figure)
        seen.append((now, figure))
        (found,) = sums.sums(now)
        at_least = sum(each for at, each in seen if at > now - window_s + slot_s)
        at_most = sum(each for at, each in seen if at >= now - window_s - slot_s)
        assert at_least <= found <= at_most


def test_a_counter_that_starts_again_is_all_new():
    step = CounterStep()
    assert step.take(10, 2) == (10, 2)
    assert step.take(15, 2) == (5, 0)
    assert step.take(15, 2) == (0, 0)
    assert step.take(4, 1) == (4, 1)
    assert step.take(5.5, 1) == pytest.approx((1.5, 0))
