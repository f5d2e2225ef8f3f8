"""How long a batch may take is learned from batches of about its size."""

import pytest

from penstock.serving.batches import HANG_FACTOR, NUM_REMEMBERED, HangLimits


def test_without_batches_it_is_the_minimum():
    assert HangLimits(5.0).limit_s(1) == 5.0


def test_slow_models_get_a_multiple_of_their_slowest_batches():
    limits = HangLimits(5.0)
    limits.seed({4: 1.0})
    limits.note(7, 2.0)
    assert limits.limit_s(5) == pytest.approx(HANG_FACTOR * 2.0)
    assert limits.limit_s(8) == 5.0, "batches of another size say nothing"


def test_old_batches_are_forgotten():
    limits = HangLimits(0.0)
    limits.note(1, 100.0)
    for _ in range(NUM_REMEMBERED):
        limits.note(1, 1.0)
    assert limits.limit_s(1) == pytest.approx(HANG_FACTOR)


def test_the_longest_limit_is_that_of_the_slowest_size():
    limits = HangLimits(5.0)
    assert limits.longest_s == 5.0
    limits.note(1, 1.0)
    limits.note(4, 3.0)
    limits.note(32, 2.0)
    assert limits.longest_s == limits.limit_s(4) == HANG_FACTOR * 3.0
