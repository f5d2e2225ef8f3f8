"""The first line says whether the SLO was kept, and by how much."""

import math
import re

import pytest
from benchmark import made_runs
from benchmark.made_runs import Server

from penstock.benchmark.headline import (
    headline_of,
    level_outcome,
)
from penstock.benchmark.pacer import Flat, Open
from penstock.benchmark.results import MaxRate
from penstock.benchmark.stats import Interval


def test_kept_with_the_figure_its_interval_and_the_limit() -> None:
    found = headline_of(made_runs.open_loop(400.0))
    assert found.outcome == "kept"
    pattern = r"SLO kept: p99 7\.\d\d ms \(\d\.\d\d-\d\.\d\d\) < 20 ms at 400/s poisson"
    assert re.fullmatch(pattern, found.text)


def test_missed_with_the_sign_turned() -> None:
    found = headline_of(made_runs.open_loop(400.0, "p99 < 2ms"))
    assert found.outcome == "missed"
    assert re.match(r"SLO missed: p99 7\.\d\d ms \(.*\) >= 2 ms at 400/s", found.text)


def test_only_the_terms_that_decide_are_named() -> None:
    found = headline_of(made_runs.open_loop(400.0, "p50 < 1s, throughput >= 1000/s"))
    assert found.outcome == "missed"
    assert re.match(r"SLO missed: throughput 39\d/s \(\d+-\d+\) < 1000/s at", found.text)


def test_failed_requests_miss_an_slo_that_good_answers_keep() -> None:
    found = headline_of(made_runs.open_loop(400.0, server=Server(fail_share=0.05)))
    assert found.outcome == "missed"
    assert "p99 infinite (too many requests failed) >= 20 ms" in found.text


def test_a_limit_inside_the_interval_is_said_to_be_close() -> None:
    run = made_runs.open_loop(400.0, "p99 < 7.2ms")
    assert "too close to be sure" in headline_of(run).text


def test_an_interval_without_an_end_is_not_said_to_be_close() -> None:
    text = headline_of(made_runs.open_loop(10.0, "p99 < 1s")).text
    assert "(> " in text and "too few to be sure" in text


def test_without_an_slo_the_most_that_was_answered() -> None:
    pattern = r"No SLO was given: \d+/s with p99 [\d.]+ ms \(.*\) at concurrency 64"
    run = made_runs.sweep("")
    run.knee = None
    assert re.fullmatch(pattern, headline_of(run).text)


def test_without_an_slo_the_knee_that_was_asked_for() -> None:
    expected = "No SLO was given: a plateau of 960/s, knee at concurrency 4.30"
    assert headline_of(made_runs.sweep("")).text == expected


def test_no_slo_and_nothing_measured() -> None:
    run = made_runs.empty()
    run.slo = ""
    assert headline_of(run).text == "No SLO was given (partial run)"
    found = headline_of(made_runs.empty())
    assert found.outcome == "not measured"
    assert found.text == "SLO not judged: nothing was measured (partial run)"


def test_a_sweep_says_up_to_where() -> None:
    found = headline_of(made_runs.sweep("p99 < 20ms"))
    assert found.outcome == "partly kept"
    assert found.text.startswith("SLO kept up to concurrency 16, then missed: p99 36.")
    assert found.text.endswith(">= 20 ms at concurrency 32")


def test_the_order_of_a_search_does_not_matter() -> None:
    run = made_runs.sweep("p99 < 20ms")
    straight = headline_of(run)
    run.levels = run.levels[::-1]
    assert headline_of(run) == straight


def test_levels_missed_in_between_are_counted() -> None:
    run = made_runs.sweep("p99 < 20ms")
    run.levels[1].windows = run.levels[6].windows
    assert headline_of(run).text.startswith("SLO missed at 3 of 7 levels: p99 70")


def test_every_level() -> None:
    kept, missed = (headline_of(made_runs.sweep(f"p99 < {limit}")) for limit in ("1s", "1ms"))
    assert kept.text.startswith("SLO kept at every level: p99 7")
    assert kept.text.endswith("at concurrency 64")
    assert missed.text.startswith("SLO missed at every level: p99 6")
    assert missed.text.endswith("at concurrency 1")


def test_only_the_rate_that_the_slo_names_is_judged() -> None:
    slo = "p99 < 20ms at 400/s"
    levels = [made_runs.level(Open(Flat(rate)), slo=slo) for rate in (400.0, 1100.0)]
    found = headline_of(made_runs.run(levels, slo))
    assert found.outcome == "kept" and found.text.endswith("at 400/s poisson")


def test_what_windows_do_not_know_is_not_judged() -> None:
    found = headline_of(made_runs.open_loop(400.0, "p99 < 20ms, memory <= 2GiB"))
    assert found.outcome == "not measured"
    assert "memory was not measured (memory <= 2GiB)" in found.text


def test_cost_needs_a_price() -> None:
    run = made_runs.open_loop(400.0, "cost <= 1 per million")
    assert headline_of(run).outcome == "not measured"
    run.price_per_hour = 3.6
    # 0.001 a second for 391 answers.
    found = headline_of(run)
    assert found.outcome == "missed"
    assert re.match(r"SLO missed: cost 2\.5\d \(2\.\d\d-2\.\d\d\) > 1 per million", found.text)


@pytest.mark.parametrize(
    ("rate", "reason", "outcome", "text"),
    [
        (Interval(872.0, 850.0, 900.0), "", "kept", "SLO kept up to 872/s (850-900): p99 < 20ms"),
        (
            Interval(900.0, 900.0, math.nan),
            "none tried missed it",
            "kept",
            "SLO kept up to 900/s (> 900): p99 < 20ms (none tried missed it)",
        ),
        (
            Interval(math.nan, math.nan, 10.0),
            "",
            "missed",
            "SLO missed at every rate tried: p99 < 20ms",
        ),
        (
            Interval(0.0, math.nan, 10.0),
            "",
            "missed",
            "SLO missed at every rate tried: p99 < 20ms",
        ),
    ],
)
def test_highest_rate(rate: Interval, reason: str, outcome: str, text: str) -> None:
    run = made_runs.open_loop()
    run.max_rate = MaxRate(rate, "p99 < 20ms", reason)
    found = headline_of(run)
    assert (found.outcome, found.text) == (outcome, text)


def test_no_promise_is_kept_by_a_server_that_is_gone() -> None:
    run = made_runs.open_loop(400.0, "p99 < 1s")
    run.levels[-1].ending = "lost"
    run.is_partial, run.problem = True, "the server stopped answering: connection refused"
    found = headline_of(run)
    assert found.outcome == "missed"
    assert found.text == f"SLO missed: {run.problem} (partial run)"


def test_a_partial_run_says_so() -> None:
    assert headline_of(made_runs.partial()).text.endswith("(partial run)")


def test_a_level_without_an_slo_has_no_outcome() -> None:
    run = made_runs.open_loop(400.0, "")
    assert level_outcome(run, run.levels[0]) == "not measured"
