"""CI goes on when the SLO is kept and nothing is slower for sure."""

import math
import re

import made_runs
import pytest
from made_runs import Server

from penstock import slo
from penstock.benchmark.ci_gate import Check, checks
from penstock.benchmark.pacer import Closed, Flat, Load, Open
from penstock.benchmark.results import BenchRun, MaxRate
from penstock.benchmark.stats import Interval

LOAD = Open(Flat(100.0))


def run_of(median_s: float, load: Load = LOAD, seed: int = 0) -> BenchRun:
    return made_runs.run([made_runs.level(load, Server(median_s=median_s), 20.0, seed)])


def judged(run: BenchRun, text: str = "", baseline: BenchRun | None = None) -> list[Check]:
    return checks(run, slo.parse(text) if text else None, baseline, 0.05)


@pytest.mark.parametrize(("limit", "is_passed"), [("1s", True), ("1ms", False)])
def test_the_slo_is_judged_at_every_level(limit: str, is_passed: bool) -> None:
    (check,) = judged(run_of(0.010), f"p99 < {limit}")
    assert check.is_passed == is_passed
    assert "100/s poisson: p99 < " in check.text


def test_a_term_that_was_not_measured_shuts_the_gate() -> None:
    (check,) = judged(run_of(0.010), "memory <= 1GiB")
    assert not check.is_passed
    assert "not measured" in check.text


def test_a_price_makes_cost_a_term_like_others() -> None:
    run = run_of(0.010)
    run.price_per_hour = 3.6
    assert [check.is_passed for check in judged(run, "cost <= 20 per million")] == [True]
    assert [check.is_passed for check in judged(run, "cost <= 1 per million")] == [False]


def test_figures_read_as_in_the_report() -> None:
    (check,) = judged(run_of(0.010), "p99 < 1s")
    assert re.search(r"p99 < 1s: kept, \d\d\.\d ms \(\d\d\.\d-\d\d\.\d\)$", check.text)


@pytest.mark.parametrize(("rate", "is_passed"), [(850.0, True), (0.0, False)])
def test_a_search_that_found_no_rate_shuts_the_gate(rate: float, is_passed: bool) -> None:
    run = made_runs.max_rate()
    run.max_rate = MaxRate(Interval(rate, rate, rate), "p99 < 20ms")
    assert [check.is_passed for check in judged(run, "p99 < 20ms")] == [is_passed]


def test_nothing_measured_keeps_nothing() -> None:
    assert [check.is_passed for check in judged(made_runs.run([]), "p99 < 1s")] == [False]


def test_a_partial_run_never_passes() -> None:
    run = run_of(0.010)
    run.is_partial, run.problem = True, "interrupted"
    assert not judged(run, "p99 < 1s")[0].is_passed


def by_figure(checked: list[Check]) -> dict[str, Check]:
    return {check.text.split(": ")[1].split()[0]: check for check in checked}


def test_a_slower_run_is_a_regression() -> None:
    found = by_figure(judged(run_of(0.013, seed=1), baseline=run_of(0.010)))
    assert not found["p50"].is_passed and "slower" in found["p50"].text
    assert not found["p99"].is_passed
    assert found["throughput"].is_passed  # An open loop sends as much to a slow server.


def test_the_same_server_again_is_none() -> None:
    assert all(check.is_passed for check in judged(run_of(0.010, seed=1), "", run_of(0.010)))


def test_a_faster_run_is_none() -> None:
    checked = judged(run_of(0.007, seed=1), baseline=run_of(0.010))
    assert all(check.is_passed for check in checked)
    assert "faster" in by_figure(checked)["p50"].text


def test_more_failures_shut_the_gate() -> None:
    """Failing fast must not look like an improvement."""
    server = Server(median_s=0.010, fail_share=0.1)
    failing = made_runs.run([made_runs.level(LOAD, server, 20.0, 1)])
    (check,) = (each for each in judged(failing, "", run_of(0.010)) if "failed" in each.text)
    assert not check.is_passed


def test_only_like_is_compared_with_like() -> None:
    (check,) = judged(run_of(0.010, Closed(4)), baseline=run_of(0.010))
    assert not check.is_passed
    assert "100/s poisson" in check.text


@pytest.mark.parametrize(
    ("rate", "text", "is_passed"),
    [
        (Interval(120.0, 115.0, 125.0), "p99 < 1s", True),
        (Interval(120.0, 115.0, 125.0), "p99 < 1s at 100/s", True),
        (Interval(120.0, 115.0, 125.0), "p99 < 1s at 200/s", False),
        (Interval(math.nan, math.nan, 1.0), "p99 < 1s", False),
    ],
)
def test_a_search_passes_when_it_found_a_rate_and_enough_of_it(
    rate: Interval, text: str, is_passed: bool
) -> None:
    run = run_of(0.010)
    run.max_rate = MaxRate(rate, text, "missed even at 1/s")
    (check,) = judged(run, text)
    assert check.is_passed == is_passed
