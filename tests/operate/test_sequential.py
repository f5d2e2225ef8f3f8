"""False alarms under continuous looking, delays of detection, and intervals, by simulation."""

import math

import numpy as np
import pytest

from penstock.operate.sequential import ExcessTest, PowerCheck, num_needed, share_interval

ALPHA = 0.05


def found_at(
    events: np.ndarray, wrong: np.ndarray, limit: float, alpha: float = ALPHA
) -> np.ndarray:
    """The second in which each stream, a row, is rejected; infinity if it never is."""
    tests = ExcessTest(alpha).twins(len(events))
    found = np.full(len(events), math.inf)
    for second, (total, count) in enumerate(zip(events.T, wrong.T, strict=True)):
        # A second without events says nothing: nothing is won or lost.
        tests.add(np.where(total > 0, count / np.maximum(total, 1) / limit, 1.0))
        found[tests.rejections & np.isinf(found)] = second
    return found


@pytest.mark.parametrize(
    ("rate", "limit"), [(2.0, 0.01), (50.0, 0.01), (20.0, 0.001), (5.0, 0.5)], ids=str
)
def test_false_alarms_are_rare_although_every_second_is_looked_at(
    rate: float, limit: float
) -> None:
    """The share is exactly what is allowed, which is the worst case."""
    random = np.random.default_rng(7)
    events = random.poisson(rate, (2000, 600))
    alarms = np.isfinite(found_at(events, random.binomial(events, limit), limit))
    # Three standard deviations of the simulation itself.
    assert alarms.mean() <= ALPHA + 3 * math.sqrt(ALPHA / 2000)


def test_events_that_come_in_clumps_raise_no_more_false_alarms() -> None:
    """A batch is late as a whole."""
    random = np.random.default_rng(8)
    late = 16 * random.binomial(3, 0.01, (2000, 600))
    assert np.isfinite(found_at(np.full_like(late, 48), late, 0.01)).mean() <= ALPHA


def test_the_bound_is_not_idle() -> None:
    """At twice the limit the same streams are found."""
    random = np.random.default_rng(7)
    events = random.poisson(50.0, (200, 600))
    assert np.isfinite(found_at(events, random.binomial(events, 0.02), 0.01)).mean() > 0.95


@pytest.mark.parametrize(
    ("rate", "share", "begins", "within_s"),
    [
        pytest.param(50.0, 0.3, 0, 5, id="30 % late from the start"),
        pytest.param(50.0, 0.3, 600, 10, id="30 % late after ten minutes"),
        pytest.param(50.0, 1.0, 3600, 8, id="all late after an hour"),
        pytest.param(2.5, 0.3, 0, 30, id="30 % late at 2.5/s"),
        pytest.param(50.0, 0.05, 0, 30, id="5 % late"),
    ],
)
def test_an_excess_is_found_soon_whenever_it_begins(
    rate: float, share: float, begins: int, within_s: int
) -> None:
    random = np.random.default_rng(9)
    events = random.poisson(rate, (200, begins + 120))
    shares = np.where(np.arange(begins + 120) < begins, 0.004, share)
    delays = found_at(events, random.binomial(events, shares), 0.01, alpha=0.002) + 1 - begins
    assert delays.min() > 0, "a false alarm before the fault"
    assert np.quantile(delays, 0.95) <= within_s


def test_a_new_bet_finds_a_later_excess_sooner_and_raises_no_more_false_alarms() -> None:
    random = np.random.default_rng(12)
    delays = []
    for is_new in (False, True):
        test = ExcessTest(0.002)
        for _ in range(300):
            test.add(0.0)
        if is_new:
            test.invest()
        tests = test.twins(500)
        found = np.full(500, math.inf)
        for second in range(120):
            tests.add(random.binomial(50, 0.05, 500) / 50 / 0.01)
            found[tests.rejections & np.isinf(found)] = second
        delays.append(np.median(found))
    assert delays[1] < 0.7 * delays[0]
    tests = ExcessTest(ALPHA).twins(2000)
    for second in range(600):
        if second % 100 == 50:
            tests.invest()
        tests.add(random.binomial(20, 0.01, 2000) / 20 / 0.01)
    assert tests.rejections.mean() <= ALPHA + 3 * math.sqrt(ALPHA / 2000)


def test_a_share_below_the_limit_loses_the_bet() -> None:
    test = ExcessTest(ALPHA)
    for _ in range(100):
        test.add(0.2)
    assert test.e_value < 0.35, "what is set aside is kept"
    assert not test.is_rejected


def test_what_was_found_stays_found() -> None:
    test = ExcessTest(0.01)
    for _ in range(5):
        test.add(30.0)
    for _ in range(500):
        test.add(0.0)
    assert test.is_rejected
    assert test.e_value < 1 < test.highest


def test_capital_does_not_overflow() -> None:
    test = ExcessTest(0.01)
    for _ in range(1000):
        test.add(1e6)
    assert test.e_value == 1e300


@pytest.mark.parametrize("rate", [2, 20, 200])
def test_power_is_the_probability_of_finding_the_share(rate: int) -> None:
    """By another simulation, at the moment when the power is said to be 0.9."""
    power, num_seconds = PowerCheck(ExcessTest(0.002), 0.05), 0
    while power.power < 0.9:
        power.add(rate, 0.01 * rate)
        num_seconds += 1
    random, events = np.random.default_rng(10), np.full((1000, num_seconds), rate)
    found = np.isfinite(found_at(events, random.binomial(events, 0.05), 0.01, alpha=0.002))
    # At 200/s one second more makes much of a difference.
    assert 0.82 <= found.mean() <= (0.97 if rate < 200 else 1)
    assert num_seconds * rate >= num_needed(0.01, 0.05, 0.002)


def test_power_counts_from_where_the_test_is() -> None:
    """After a long good time a fault takes longer to find, and the twins know it."""
    test = ExcessTest(0.002)
    early = PowerCheck(test, 0.05)
    for _ in range(300):
        test.add(0.0)
    late = PowerCheck(test, 0.05)
    for _ in range(15):
        early.add(50, 0.5)
        late.add(50, 0.5)
    assert late.power < 0.5 < 0.9 < early.power


def test_fewer_events_are_needed_for_a_larger_share() -> None:
    numbers = [num_needed(0.01, share, 0.002) for share in (0.02, 0.05, 0.3)]
    assert numbers == sorted(numbers, reverse=True)
    assert 100 < numbers[1] < 400


def test_intervals_cover_the_share_at_all_times() -> None:
    random = np.random.default_rng(11)
    num_missed = 0
    for _ in range(300):
        counts = np.cumsum(random.random(300) < 0.1)
        checked = range(9, 300, 10)
        intervals = [share_interval(int(counts[n]), n + 1, ALPHA) for n in checked]
        num_missed += any(not low <= 0.1 <= high for low, high in intervals)
    assert num_missed <= 300 * ALPHA


@pytest.mark.parametrize(("count", "total"), [(0, 0), (0, 10), (10, 10), (3, 400)])
def test_intervals_hold_what_was_observed(count: int, total: int) -> None:
    low, high = share_interval(count, total, ALPHA)
    assert 0 <= low <= (count / total if total else 0.5) <= high <= 1
    assert (low, high) != (0.0, 1.0) or total == 0
