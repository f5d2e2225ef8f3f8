"""T(b): what is learnt, what is guessed, and that one bad batch does not spoil it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ladder
from penstock.serving.batch_times import (
    DRIFT_WINDOW,
    MAX_INFLATION,
    SPREAD_WINDOW,
    STALE_AFTER_S,
    BatchTimes,
    Spread,
)


def line(num_rows: float) -> float:
    return 0.004 + 0.0005 * num_rows


def learnt(max_rows: int = 8, times=line) -> BatchTimes:
    table = BatchTimes(max_rows)
    for rung in ladder(max_rows):
        table.seed(rung, times(rung))
    return table


@pytest.mark.parametrize(
    ("largest", "rungs"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_the_ladder_doubles_and_ends_with_the_largest_batch(largest, rungs):
    assert ladder(largest) == rungs


def test_before_anything_ran_batches_take_no_time():
    table = BatchTimes(8)
    assert not table.is_known
    assert table.mean_s(8) == 0.0
    assert table.largest_within(0.0) == 8


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 8])
def test_between_rungs_it_is_a_straight_line(num_rows):
    assert learnt().mean_s(num_rows) == pytest.approx(line(num_rows))


def test_what_never_ran_is_guessed_on_the_slow_side():
    table = BatchTimes(64)
    table.observe(4, line(4), 0.0)
    assert table.mean_s(1) >= line(1)
    assert table.mean_s(64) >= line(64)
    table.observe(8, line(8), 0.0)
    assert table.mean_s(64) == pytest.approx(line(64))
    assert table.mean_s(2) >= line(2)


@given(st.integers(1, 64))
def test_the_first_batch_whatever_its_size_gives_no_hope_that_is_too_high(num_rows):
    table = BatchTimes(64)
    table.observe(num_rows, line(num_rows), 0.0)
    for other in ladder(64):
        if other >= num_rows:
            assert table.mean_s(other) >= line(other) * (1 - 1e-9)


def test_batches_between_rungs_teach_both_neighbours():
    chance = random.Random(1)
    table = BatchTimes(64)
    for index in range(3000):
        num_rows = chance.choice([1, 3, 6, 11, 23, 40, 64])
        table.observe(num_rows, line(num_rows) * chance.uniform(0.97, 1.03), index)
    for num_rows in (1, 3, 6, 11, 23, 40, 64):
        assert table.mean_s(num_rows) == pytest.approx(line(num_rows), rel=0.03)


def test_the_largest_batch_within_a_limit():
    table = learnt()
    assert table.largest_within(line(8)) == 8
    assert table.largest_within(line(6) + 1e-9) == 6
    assert table.largest_within(line(1)) == 1
    assert table.largest_within(0.0) == 1


class TestSeedsBetweenRungs:
    """Tokens of a warm-up are rows times the length of their bucket, whatever the ladder."""

    def test_rungs_between_them_are_on_their_lines(self):
        table = BatchTimes(4096)
        table.seed_between({384 * rows: line(384 * rows) for rows in (1, 2, 4, 8)})
        for rung in (512, 1024, 2048, 4096):
            assert table.mean_s(rung) == pytest.approx(line(rung))

    def test_below_the_smallest_nothing_is_hoped_for(self):
        table = BatchTimes(4096)
        table.seed_between({384: 1.0, 768: 2.0})
        assert table.mean_s(1) >= 1.0

    @pytest.mark.parametrize("size", [1, 3, 384, 4000, 4096])
    def test_one_time_is_enough(self, size):
        table = BatchTimes(4096)
        table.seed_between({size: line(size)})
        assert table.is_known
        assert table.mean_s(4096) >= line(4096) * (1 - 1e-9)

    def test_what_is_larger_than_the_ladder_helps_where_it_can(self):
        table = BatchTimes(4096)
        table.seed_between({2000: 2.0, 8000: 8.0})
        assert table.mean_s(4096) == pytest.approx(4.096)
        table = BatchTimes(4096)
        table.seed_between({8000: 8.0})
        assert not table.is_known

    def test_of_nothing_follows_nothing(self):
        table = BatchTimes(4096)
        table.seed_between({})
        assert not table.is_known


def test_one_stall_is_not_believed():
    table = learnt()
    for index in range(10):
        table.observe(8, line(8), index)
    table.observe(8, 1.0, 11)
    assert table.mean_s(8) < 1.15 * line(8)


class TestSpread:
    def test_inflation_is_what_one_batch_in_a_hundred_exceeds(self):
        chance = random.Random(2)
        spread, exceeded = Spread(), 0
        for index in range(20_000):
            duration_s = 1 + chance.expovariate(20)
            if index >= SPREAD_WINDOW:
                exceeded += duration_s > spread.inflation
            spread.note(duration_s, 1.0)
        assert 0.003 < exceeded / 20_000 < 0.03

    def test_few_batches_are_as_slow_as_the_slowest(self):
        spread = Spread()
        assert spread.inflation == 1.0
        for ratio in (0.9, 1.5, 1.1):
            spread.note(2 * ratio, 2.0)
        assert spread.inflation == 1.5

    def test_it_follows_within_seconds_of_load_and_forgets_as_fast(self):
        spread = Spread()
        for ratio in [1.0] * 1000 + [2.0] * 5:
            spread.note(ratio, 1.0)
        assert spread.inflation == 2.0
        for _ in range(SPREAD_WINDOW):
            spread.note(1.0, 1.0)
        assert spread.inflation == 1.0

    def test_it_has_limits(self):
        spread = Spread()
        spread.note(1.0, 0.0)
        assert spread.inflation == 1.0
        spread.note(100.0, 1.0)
        assert spread.inflation == MAX_INFLATION
        spread.forget()
        assert spread.inflation == 1.0


def test_drift_moves_also_the_rungs_that_do_not_run():
    table = learnt()
    has_drifted = [
        table.observe(2, 1.5 * line(2), 1.0 + index) for index in range(DRIFT_WINDOW + 1)
    ]
    assert has_drifted.count(True) == 1
    assert table.mean_s(8) == pytest.approx(1.5 * line(8), rel=0.05)
    assert table.mean_s(2) == pytest.approx(1.5 * line(2), rel=0.1)


def test_noise_is_not_drift():
    chance = random.Random(3)
    table = learnt()
    assert not any(
        table.observe(2, line(2) * chance.uniform(0.88, 1.12), float(index))
        for index in range(2000)
    )


def test_the_rung_to_try_again_is_the_one_not_seen_for_longest():
    table = learnt()
    for index, rung in enumerate(ladder(8)):
        table.observe(rung, line(rung), float(index))
    assert table.stale_rung(8, 4.0) is None
    assert table.stale_rung(8, STALE_AFTER_S + 0.5) == 1
    table.observe(1, line(1), STALE_AFTER_S)
    assert table.stale_rung(8, STALE_AFTER_S + 1.5) == 2
    assert table.stale_rung(1, STALE_AFTER_S + 1.5) is None
    assert table.stale_rung(0, 1e9) is None
    assert table.stale_rung(8, STALE_AFTER_S + 3.5, min_size=3) == 4


@given(
    st.sampled_from([0.1, 0.5, 2.0, 10.0]),
    st.sets(st.integers(1, 8), min_size=1),
    st.integers(0, 2**32),
)
def test_a_warm_up_far_off_is_forgotten_whatever_sizes_run(factor, sizes, seed):
    """Also where no rung runs itself: its neighbours together are right, and neither is absurd."""
    table = learnt(times=lambda rows: factor * line(rows))
    chance = random.Random(seed)
    for batch in range(400):
        num_rows = chance.choice(sorted(sizes))
        table.observe(num_rows, line(num_rows), float(batch))
        assert min(table.means_s.values()) > 0
    for num_rows in sizes:
        assert table.mean_s(num_rows) == pytest.approx(line(num_rows), rel=0.5)


def test_times_that_were_none_are_learnt():
    table = BatchTimes(8)
    for _ in range(5):
        table.observe(3, 0.0, 0.0)
    for _ in range(60):
        table.observe(3, line(3), 0.0)
    assert table.mean_s(3) == pytest.approx(line(3), rel=0.01)
