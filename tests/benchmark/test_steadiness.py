"""Warm-up ends when it is over: not before a decay has decayed, soon when nothing changes."""

import math

import numpy as np
import pytest
from simulated import poisson, queued, windows_of

from penstock.benchmark.recorder import LENGTH_S
from penstock.benchmark.stats import DurationHistogram, Window
from penstock.benchmark.steadiness import is_growing, steadiness

PATIENCE_S = 30.0
NUM_PER_WINDOW = 50


def window(index, median_s, num=NUM_PER_WINDOW):
    """So many requests around a median; as many arrived."""
    latency = DurationHistogram()
    latency.add(median_s * np.linspace(0.9, 1.1, num))
    return Window(index * LENGTH_S, LENGTH_S, num, num, num, {}, {"latency": latency})


def series(level, noise, seed, num_windows=120):
    """Windows whose medians follow `level(seconds)` with relative noise; throughput is the inverse,
    as in a closed loop."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(num_windows):
        median_s = 0.01 * level((index + 0.5) * LENGTH_S) * math.exp(random.normal(0, noise))
        made.append(window(index, median_s, round(NUM_PER_WINDOW * 0.01 / median_s) + 1))
    return made


def settled_s(windows, patience_s=PATIENCE_S):
    """When it is called steady, asked twice a second; None: never within its patience."""
    for num in range(2, len(windows) + 1, 2):
        state = steadiness(windows[:num], patience_s)
        if state.is_over:
            return num * LENGTH_S if state.is_steady else None
    return None


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.1])
def test_what_does_not_change_is_soon_called_steady(noise):
    times = [settled_s(series(lambda _: 1.0, noise, seed)) for seed in range(40)]
    assert np.mean([time is not None and time <= 8 for time in times]) > 0.95
    assert np.median([time or PATIENCE_S for time in times]) <= 4


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("decay_s", [0.3, 1.0, pytest.param(3.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("excess", [0.5, 5.0])
def test_a_decay_is_not_called_steady_before_it_has_decayed(noise, decay_s, excess):
    """Like a compiler or a cache at work: 1 + excess, down to 1."""

    def level(seconds):
        return 1 + excess * math.exp(-seconds / decay_s)

    times = [settled_s(series(level, noise, seed)) for seed in range(10)]
    left = [level(time) - 1 for time in times if time is not None]
    assert sum(excess_left > 0.05 for excess_left in left) <= 1
    if decay_s <= 1:
        assert None not in times


@pytest.mark.parametrize("per_s", [0.03, 0.2, -0.03])
def test_a_slow_ramp_is_not_called_steady(per_s):
    """Until it has slowed down: what grows by a constant grows by ever less of itself."""

    def level(seconds):
        return math.exp(per_s * seconds)

    times = [settled_s(series(level, 0.01, seed), patience_s=10) for seed in range(20)]
    assert np.mean([time is None for time in times]) >= 0.9


def test_a_step_is_steady_only_when_it_is_behind():
    def level(seconds):
        return 2.0 if seconds < 2.5 else 1.0

    times = [settled_s(series(level, 0.02, seed)) for seed in range(30)]
    assert None not in times
    assert min(times) > 5


def test_a_busy_queue_settles_in_spite_of_its_noise():
    settled = []
    for seed in range(30):
        random = np.random.default_rng(seed)
        due = poisson(400, PATIENCE_S, random)
        latencies = queued(due, random.exponential(0.002, len(due)))
        settled.append(settled_s(windows_of(due, latencies, PATIENCE_S)))
    assert np.mean([time is not None for time in settled]) >= 0.95


def test_few_requests_are_not_steady_until_there_are_enough():
    """Two requests a second: no window holds enough to have a median of its own."""
    due = np.arange(0, PATIENCE_S, 0.5)
    windows = windows_of(due, np.full(len(due), 0.01), PATIENCE_S)
    assert settled_s(windows) == pytest.approx(24, abs=1)


def test_patience_ends():
    rising = series(lambda seconds: math.exp(0.3 * seconds), 0.01, 0)
    state = steadiness(rising[:40], 10.0)
    assert (state.is_steady, state.is_over) == (False, True)
    assert not steadiness(rising[:39], 10.0).is_over
    assert state.last_s > 3 * state.first_s


def test_a_server_that_answers_nothing_is_not_steady():
    state = steadiness([Window(i * LENGTH_S, LENGTH_S, 50) for i in range(40)], 30.0)
    assert (state.is_steady, state.is_over) == (False, False)
    assert math.isnan(state.first_s)
    assert not steadiness([], 30.0).is_over


def test_it_says_where_it_began_and_ended():
    state = steadiness(series(lambda seconds: 3.0 if seconds < 2 else 1.0, 0.0, 0, 24), 30.0)
    assert state.first_s == pytest.approx(0.03, rel=0.05)
    assert state.last_s == pytest.approx(0.01, rel=0.05)


# Growth while measuring.


def queue_windows(load, seed, duration_s=20.0):
    random = np.random.default_rng(seed)
    due = poisson(load / 0.002, duration_s + 2, random) - 2
    latencies = queued(due, random.exponential(0.002, len(due)))
    return windows_of(due[due >= 0], latencies[due >= 0], duration_s)


def test_a_queue_above_capacity_grows():
    found = [is_growing(queue_windows(1.1, seed)) for seed in range(40)]
    assert np.mean(found) >= 0.95


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_a_queue_below_capacity_does_not(load):
    found = [is_growing(queue_windows(load, seed)) for seed in range(60)]
    assert np.mean(found) <= 0.05


def test_a_little_growth_is_no_queue():
    slow = series(lambda seconds: 1 + 0.005 * seconds, 0.0, 0, 40)
    assert not is_growing(slow)


def test_few_windows_show_no_trend():
    assert not is_growing(series(lambda seconds: 1 + seconds, 0.0, 0, 5))
    assert not is_growing([])
