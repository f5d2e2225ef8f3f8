"""The rate that executors sustain within a limit, against the real batcher on a simulated clock."""

import numpy as np
import pytest
from doubles import simulate

from penstock.config import BatchPolicy
from penstock.serving.slo_batcher import SloBatcher
from penstock.serving.sustained_rate import ExecutorModel

# Seconds of a batch: fixed and per row; most rows; SLO.
MODELS = [
    (0.1, 0.02, 16, 1.0),
    (0.05, 0.05, 4, 0.5),
    (0.08, 0.02, 1, 0.4),
    (0.0015, 0.00011, 128, 0.02),
]


def policy(max_rows: int, slo_s: float) -> BatchPolicy:
    return BatchPolicy(max_rows, is_dynamic=max_rows > 1, slo_latency_s=slo_s)


def times(fixed_s: float, row_s: float, max_rows: int) -> dict[int, float]:
    rungs = [1 << power for power in range(8) if 1 << power <= max_rows]
    return {rung: fixed_s + row_s * rung for rung in rungs}


def share_in_time(rate: float, num_executors: int, model: tuple[float, float, int, float]) -> float:
    fixed_s, row_s, max_rows, slo_s = model
    batcher = SloBatcher(policy(max_rows, slo_s), num_executors)
    batcher.seed(times(fixed_s, row_s, max_rows), "shape")
    arrivals = np.random.default_rng(5).exponential(1 / rate, 2000).cumsum().tolist()
    outcomes = simulate(batcher, arrivals, lambda rows: fixed_s + row_s * rows, num_executors)
    return outcomes.num_within(slo_s) / len(arrivals)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_executors", [2, 4, 8])
def test_the_rate_is_close_to_what_the_batcher_serves_in_time(model, num_executors):
    fixed_s, row_s, max_rows, slo_s = model
    found = ExecutorModel.of(policy(max_rows, slo_s), times(fixed_s, row_s, max_rows))
    rate = found.max_rate(num_executors)
    assert share_in_time(0.8 * rate, num_executors, model) >= 0.99
    assert share_in_time(1.4 * rate, num_executors, model) < 0.99


def test_more_executors_sustain_more_than_in_proportion():
    found = ExecutorModel.of(policy(4, 2.0), times(0.4, 0.3, 4))
    each = [found.max_rate(count) / count for count in range(1, 9)]
    assert each == sorted(each)
    assert found.max_rate(0) == 0


def test_bursts_leave_room_for_a_lower_rate():
    rates = [
        ExecutorModel.of(policy(4, 0.5), times(0.05, 0.05, 4), dispersion).max_rate(4)
        for dispersion in (1.0, 2.0, 8.0)
    ]
    assert rates[0] > rates[1] > rates[2] > 0


def test_a_batch_that_takes_longer_than_the_slo_sustains_nothing():
    found = ExecutorModel.of(policy(4, 0.1), times(0.2, 0.05, 4))
    assert found.capacity(8) == found.max_rate(8) == 0
    assert found.num_needed(1.0, 8) == 8


def test_the_number_needed_sustains_the_rate_and_one_less_does_not():
    found = ExecutorModel.of(policy(4, 2.0), times(0.4, 0.3, 4))
    for rate in (0.2, 1.0, 5.5, 9.0):
        needed = found.num_needed(rate, 64)
        assert found.sustains(rate, needed)
        assert needed == 1 or not found.sustains(rate, needed - 1)
    assert found.num_needed(0.0, 8) == 0
    assert found.num_needed(1e6, 8) == 8


def test_sizes_beyond_the_policys_largest_batch_are_not_used():
    unbatched = BatchPolicy(8, slo_latency_s=1.0)
    found = ExecutorModel.of(unbatched, {1: 0.1, 8: 0.2})
    assert found.times_s == {1: 0.1}
    assert found.capacity(2) == pytest.approx(20)


def test_without_an_slo_the_limit_is_how_long_requests_may_queue():
    assert ExecutorModel.of(BatchPolicy(4, is_dynamic=True), {1: 0.5, 4: 0.8}).limit_s == 8.0
    assert ExecutorModel.of(BatchPolicy(4, is_dynamic=True), {1: 0.01, 4: 0.02}).limit_s == 1.0
    given = BatchPolicy(4, is_dynamic=True, max_wait_s=3.0)
    assert ExecutorModel.of(given, {1: 0.5}).limit_s == 3.0


def test_without_times_nothing_is_known_to_be_sustained():
    found = ExecutorModel.of(policy(4, 2.0), {})
    assert found.max_rate(4) == 0 and not found.sustains(0.1, 4)


def test_slow_batches_leave_less_of_the_limit():
    rates = [
        ExecutorModel.of(policy(4, 0.5), times(0.05, 0.05, 4), 1.0, inflation).max_rate(4)
        for inflation in (1.0, 1.5, 2.5)
    ]
    assert rates[0] > rates[1] > rates[2] > 0
