"""One check: its states, and what it says."""

import numpy as np
import pytest

from penstock.operate.rollout_checks import CheckText, ShareCheck, Totals, percent

LATE = CheckText("p99 < 20ms", "requests", "were late", " by p99 < 20ms (the evidence)")


def test_a_new_check_is_open_and_has_seen_nothing() -> None:
    report = ShareCheck(LATE, 0.01, 0.002).report()
    assert (report.state, report.live, report.promised) == ("open", None, 0.01)
    assert report.text == "no requests compared yet"
    assert report.e_limit == 500


def test_a_check_says_what_it_saw_and_what_it_needs() -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    check.add(Totals(0, 40, 2, 400))
    report = check.report()
    assert report.state == "open"
    assert report.text.startswith("0 of 40 requests were late: 0 % (0 % to ")
    assert ", 1 % allowed by p99 < 20ms (the evidence); stable version: 0.5 %" in report.text
    assert "5 % would have been found with a probability of" in report.text


def test_a_check_holds_once_it_would_have_found_a_fault() -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    for _ in range(30):
        check.add(Totals(0, 50, 0, 500))
    assert check.state == "holds"
    assert check.report().text.endswith("5 % would have been found")
    check.begin_step()
    assert check.state == "open"


def test_a_broken_check_stays_broken() -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    for _ in range(10):
        check.add(Totals(20, 50, 1, 500))
    for _ in range(200):
        check.add(Totals(0, 50, 1, 500))
    assert check.state == "broken"
    assert "reached 500" in check.report().text


@pytest.mark.parametrize("stable_late", [100, 0])
def test_the_stable_version_in_the_same_seconds_decides_what_is_allowed(stable_late: int) -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    for _ in range(20):
        check.add(Totals(15, 50, stable_late, 500))
    assert check.state == ("open" if stable_late else "broken")


@pytest.mark.parametrize("period", [2, 5])
def test_late_requests_that_end_seconds_after_their_burst_are_compared_with_it(
    period: int,
) -> None:
    """The share is a third of what is allowed, but late requests are alone in their second."""
    random = np.random.default_rng(1)
    checks = [ShareCheck(LATE, 0.01, 0.002) for _ in range(20)]
    for check in checks:
        for late, stable_late in random.binomial(100, 0.003, (600 // period, 2)):
            check.add(Totals(0, 100 - late, 0, 100 - stable_late))
            check.add(Totals(late, late, stable_late, stable_late))
            for _ in range(period - 2):
                check.add(Totals(0, 0))
    assert [check for check in checks if check.test.is_rejected] == []


def test_a_limit_that_both_versions_miss_does_not_hold() -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    for _ in range(100):
        check.add(Totals(2, 100, 20, 1000))
    assert check.state == "open"
    assert check.report().text.endswith("; the stable version misses it too")
    for _ in range(60):
        check.add(Totals(0, 100, 0, 1000))
    assert check.state == "holds"


def test_a_limit_that_is_missed_as_the_stable_version_does_is_not_kept() -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    for _ in range(300):
        check.add(Totals(15, 1000, 200, 10_000))
    assert check.test.e_value < 1
    assert check.state == "open"


def test_a_second_without_candidate_requests_says_nothing() -> None:
    check = ShareCheck(LATE, 0.01, 0.002)
    check.add(Totals(0, 0, 3, 500))
    assert check.test.num_observations == 0


def test_shares_are_short() -> None:
    shares = (0.01, 0.12345, 1.0, 0.0)
    assert [percent(each) for each in shares] == ["1 %", "12.3 %", "100 %", "0 %"]


@pytest.mark.parametrize("limit", [0.001, 0.01, 0.05, 0.1])
@pytest.mark.parametrize(("rate", "share"), [(0.5, 1.0), (20.0, 0.3)])
def test_a_large_fault_is_found_within_30_s_also_by_few_requests(
    limit: float, rate: float, share: float
) -> None:
    """A share of the candidate's requests goes wrong from the start, none of the stable one's."""
    random = np.random.default_rng(1)
    num_found = 0
    for _ in range(100):
        check = ShareCheck(LATE, limit, 0.002)
        for total in random.poisson(rate, 30):
            check.add(Totals(int(random.binomial(total, share)), int(total), 0, 10))
        num_found += check.test.is_rejected
    assert num_found >= 95
