"""Burn rates of fast and slow windows, on a clock of their own."""

import pytest

from penstock.operate.burn_rate import WINDOWS, BurnRate
from penstock.slo import Objective, parse


def burn(share=0.99):
    return BurnRate(Objective("latency", share, 0.02))


def test_one_bad_request_in_a_hundred_burns_the_budget_of_p99_at_1():
    found = burn()
    found.add(10.0, 100, 1)
    assert found.rates(10.0) == pytest.approx(dict.fromkeys(WINDOWS, 1.0))
    found = BurnRate(parse("p99.9 < 20ms").objectives[0])
    found.add(10.0, 1000, 10)
    assert found.rates(10.0)["5m"] == pytest.approx(10.0)


def test_an_outage_shows_in_the_fast_window_first_and_stays_in_the_slow_one():
    found, now = burn(), 0.0
    for _ in range(6 * 3600):  # Six hours at 10/s.
        now += 1
        found.add(now, 10, 0)
    for _ in range(300):  # Five minutes in which half of the requests fail.
        now += 1
        found.add(now, 10, 5)
    rates = found.rates(now)
    assert rates["5m"] == pytest.approx(50, rel=0.02)
    assert rates["1h"] == pytest.approx(50 * 300 / 3600, rel=0.03)
    assert rates["6h"] == pytest.approx(50 * 300 / 21600, rel=0.03)
    assert rates["3d"] == pytest.approx(50 * 300 / 21900, rel=0.03)
    for _ in range(310):
        now += 1
        found.add(now, 10, 0)
    rates = found.rates(now)
    assert rates["5m"] == 0 and rates["1h"] > 4


def test_without_requests_nothing_burns():
    found = burn()
    assert set(found.rates(5.0).values()) == {0.0}
    found.add(5.0, 10, 10)
    assert found.rates(5.0)["5m"] == pytest.approx(100)
    assert found.rates(5.0 + 2 * WINDOWS["3d"]) == dict.fromkeys(WINDOWS, 0.0)


def test_no_objective_is_without_a_budget():
    (objective,) = parse("goodput >= 100 %").objectives
    found = BurnRate(objective)
    found.add(1.0, 1000, 1)
    assert found.rates(1.0)["5m"] == pytest.approx(100)
