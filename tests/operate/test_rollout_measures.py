"""What is read from the counts of both versions."""

import pytest

from penstock.operate.rollout_checks import Totals
from penstock.operate.rollout_measures import (
    BeyondQuantile,
    CostlySeconds,
    RolloutReading,
    disagreements,
    failures,
    lateness,
)
from penstock.serving.split_counts import LATENCY, LENGTH, SplitCounts

LIMITS = ((LATENCY, 0.02), ("ttft", 0.1))


def test_failures_lateness_and_disagreements() -> None:
    counts = SplitCounts(num_compared=7, num_disagreeing=1.5)
    counts.stable.add(LATENCY, 0.01, LIMITS)
    counts.candidate.add(LATENCY, 0.03, LIMITS)
    counts.candidate.num_failed = 2
    reading = RolloutReading(counts)
    assert failures(reading) == Totals(2, 3, 0, 1)
    assert lateness(LATENCY, 0)(reading) == Totals(1, 1, 0, 1)
    assert lateness("ttft", 1)(reading) == Totals(0, 0, 0, 0)
    assert disagreements(reading) == Totals(1.5, 7)


@pytest.mark.parametrize(("is_above", "limits"), [(True, (100, 1000)), (False, (89, 891))])
def test_values_are_compared_with_a_quantile_of_the_stable_version_before(
    is_above: bool, limits: tuple[int, int]
) -> None:
    measure, counts = BeyondQuantile(LENGTH, 0.5, is_above=is_above), SplitCounts()
    for length in range(50, 149):
        counts.stable.add(LENGTH, length, ())
    counts.candidate.add(LENGTH, 30, ())
    assert measure(RolloutReading(counts)) == Totals(0, 0)
    assert measure.limit is None
    counts.stable.add(LENGTH, 149, ())
    assert measure(RolloutReading(counts)) == Totals(0, 0)
    assert measure.limit == limits[0]
    for length in (30, 300, 400):
        counts.candidate.add(LENGTH, length, ())
    counts.stable.add(LENGTH, 200, ())
    expected = Totals(2, 3, 1, 1) if is_above else Totals(1, 3, 0, 1)
    assert measure(RolloutReading(counts)) == expected
    assert measure(RolloutReading(counts)) == expected
    # Later seconds are compared with what the stable version does by then.
    for _ in range(300):
        counts.stable.add(LENGTH, 1000, ())
    measure(RolloutReading(counts))
    assert measure.limit == limits[1]


@pytest.mark.parametrize("is_above", [True, False])
@pytest.mark.parametrize("length", [1, 12, 256])
def test_texts_of_one_length_are_neither_longer_nor_shorter(is_above: bool, length: int) -> None:
    measure, counts = BeyondQuantile(LENGTH, 0.5, is_above=is_above), SplitCounts()
    for _ in range(3):
        for _ in range(100):
            counts.stable.add(LENGTH, length, ())
            counts.candidate.add(LENGTH, length, ())
        totals = measure(RolloutReading(counts))
    assert totals == Totals(0, 200, 0, 200)


def cost(*seconds: tuple[dict, dict]) -> tuple[Totals, float | None]:
    measure = CostlySeconds(1.25)
    for stable, candidate in seconds:
        totals = measure(RolloutReading(SplitCounts(), stable, candidate))
    return totals, measure.ratio


def test_costs_are_compared_at_equal_batch_sizes() -> None:
    """The candidate runs smaller batches, whose rows take longer in both versions."""
    stable = {1: (10, 0.010), 8: (10, 0.200)}
    totals, ratio = cost((stable, {1: (10, 0.011)}))
    assert totals == Totals(0, 1)
    assert ratio == pytest.approx(1.1)
    assert cost((stable, {1: (10, 0.02)}))[0] == Totals(1, 1)


def test_a_candidate_that_runs_rarely_may_take_longer() -> None:
    stable = {1: (100, 10.0)}
    assert cost((stable, {1: (49, 4.9 * 4.9)})) == (Totals(0, 1), None)
    assert cost((stable, {1: (49, 5.1 * 4.9)})) == (Totals(1, 1), None)
    assert cost((stable, {1: (50, 1.3 * 5.0)})) == (Totals(1, 1), pytest.approx(1.3))


def test_microseconds_are_no_cost() -> None:
    stable = {1: (100, 0.002)}
    assert cost((stable, {1: (100, 0.02)}))[0] == Totals(0, 1)
    assert cost((stable, {1: (100, 0.03)}))[0] == Totals(1, 1)


def test_sizes_that_only_one_version_ran_are_not_compared() -> None:
    assert cost(({8: (10, 0.1)}, {1: (10, 9.0)})) == (Totals(0, 0), None)


def test_only_new_batches_count() -> None:
    stable = {1: (10, 0.01)}
    slow = stable, {1: (10, 0.05)}
    totals, _ = cost(slow, slow, ({1: (20, 0.02)}, {1: (20, 0.06)}))
    assert totals == Totals(1, 2)
