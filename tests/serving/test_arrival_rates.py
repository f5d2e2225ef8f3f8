"""Arrival rates over two windows, from totals that sources count."""

import numpy as np
import pytest

from penstock.serving.arrival_rates import KEPT_S, ArrivalRates, Arrivals


def feed(rates: ArrivalRates, counts: list[int], start: float = 0.0) -> Arrivals:
    """Look every half second, after so many arrivals each."""
    total, found = 0.0, Arrivals()
    for index, count in enumerate(counts):
        now = start + 0.5 * (index + 1)
        total += count
        rates.count("core", total, now)
        found = rates.look(now)
    return found


def test_a_constant_rate_is_the_same_in_both_windows():
    found = feed(ArrivalRates(0.0), [5] * 100)
    assert found.short == found.long == pytest.approx(10)
    assert found.dispersion == 1.0 and found.idle_s == 0 and not found.has_burst


def test_the_short_window_shows_a_burst_first():
    found = feed(ArrivalRates(0.0), [5] * 100 + [20] * 4)
    assert found.short > 2 * found.long > 20
    assert found.has_burst


def test_fluctuations_of_poisson_arrivals_are_no_burst():
    counts = np.random.default_rng(1).poisson(5, 2000).tolist()
    rates, bursts, total = ArrivalRates(0.0), 0, 0
    for index, count in enumerate(counts):
        total += count
        rates.count("core", total, 0.5 * (index + 1))
        bursts += rates.look(0.5 * (index + 1)).has_burst
    assert bursts <= 0.01 * len(counts)
    assert 1.0 <= rates.look(1000.5).dispersion < 1.5


def test_arrivals_in_groups_have_a_larger_dispersion():
    counts = (10 * np.random.default_rng(2).poisson(0.5, 400)).tolist()
    assert 7 < feed(ArrivalRates(0.0), counts).dispersion < 13


def test_sources_add_up_and_one_that_starts_again_counts_from_zero():
    rates = ArrivalRates(0.0)
    rates.count("a", 4, 1.0)
    rates.count("b", 5, 1.0)
    assert rates.look(3.0).short == pytest.approx(3)
    rates.count("a", 2, 4.0)
    rates.forget("b")
    rates.count("b", 1, 4.0)
    assert rates.look(6.0).short == pytest.approx(1)


def test_idle_time_counts_from_the_last_arrival():
    rates = ArrivalRates(10.0)
    assert rates.look(15.0).idle_s == 5
    rates.count("core", 1, 20.0)
    assert rates.look(20.0).idle_s == 0
    rates.count("core", 1, 25.0)
    rates.look(30.0)
    found = rates.look(60.0)
    assert found.idle_s == 40 and found.short == found.long == 0


def test_what_was_long_ago_is_forgotten():
    rates = ArrivalRates(0.0)
    feed(rates, [1000] * 20)
    assert feed(rates, [0] * int(4 * KEPT_S), start=10.0).dispersion == 1.0


def test_the_first_arrivals_are_not_taken_for_a_high_rate():
    """One request in the first half second does not mean two per second."""
    rates = ArrivalRates(0.0)
    rates.count("core", 1, 0.1)
    found = rates.look(0.1)
    assert found.short == found.long == pytest.approx(1 / 3)
