"""Runs side by side: faster, slower, or no difference shown; and whether they can be compared."""

import math

import msgspec
import pytest
from benchmark import made_runs
from benchmark.made_runs import Server

from penstock.benchmark import comparison
from penstock.benchmark.comparison import Named, Pair
from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.results import BenchRun
from penstock.benchmark.stats import Interval

LOADS = (Closed(1), Closed(8))


def measured(median_s: float = 0.004, seed: int = 0) -> BenchRun:
    server = Server(median_s=median_s)
    return made_runs.run([made_runs.level(load, server, seed=seed) for load in LOADS])


def brief(seed: int) -> BenchRun:
    loads = (Closed(2), Open(Flat(600.0)))
    levels = [made_runs.level(load, span_s=3.0, seed=2 * seed + i) for i, load in enumerate(loads)]
    return made_runs.run(levels)


def pair(base: BenchRun, other: BenchRun) -> Pair:
    return comparison.pair_of(Named("a.json", base), Named("b.json", other))


def test_a_slower_run_is_slower_at_every_load_and_figure() -> None:
    found = pair(measured(), measured(0.005, seed=1))
    assert [(row.load, row.figure) for row in found.rows] == [
        (f"concurrency {number}", figure)
        for number in (1, 8)
        for figure in ("throughput", "p50", "p99")
    ]
    assert {row.verdict for row in found.rows} == {"slower"}
    p50 = found.rows[1].ratio
    assert p50.low < p50.value < p50.high
    # Of the 4.3 ms that a request takes, 0.3 are on the way.
    assert p50.value == pytest.approx(5.3 / 4.3, rel=0.03)
    assert found.differences == ()
    assert comparison.summary_text(found) == "b.json against a.json: slower at 2 of 2 loads (p99)"


def test_a_faster_run_is_faster() -> None:
    found = pair(measured(0.005), measured(0.004, seed=1))
    assert {row.verdict for row in found.rows} == {"faster"}


def test_the_same_law_twice_shows_no_difference_but_rarely() -> None:
    """Six figures a pair, each of which alone would be wrong one time in ten: about half of the
    pairs would show something. All together may be wrong one time in twenty."""
    pairs = [pair(brief(seed), brief(seed + 1)) for seed in range(0, 60, 2)]
    num_wrong = sum(any(row.verdict != "no difference shown" for row in p.rows) for p in pairs)
    assert num_wrong <= 4


def test_no_difference_in_one_sentence() -> None:
    found = pair(measured(), measured())
    assert comparison.summary_text(found) == "b.json: no difference to a.json shown (p99)"


def test_a_tolerance_forgives() -> None:
    base, other = Named("a", measured()), Named("b", measured(0.0044, seed=1))
    strict = comparison.pair_of(base, other)
    lenient = comparison.pair_of(base, other, tolerance=0.3)
    assert "slower" in {row.verdict for row in strict.rows}
    assert "slower" not in {row.verdict for row in lenient.rows}


def test_levels_are_matched_by_load() -> None:
    base = measured()
    other = made_runs.run([made_runs.level(load) for load in (Closed(8), Open(Flat(100.0)))])
    found = comparison.matched(base, other)
    assert [(ours.load, theirs.load) for ours, theirs in found] == [(Closed(8), Closed(8))]
    assert comparison.differences(base, other) == ["load: 2 levels of one only"]


def test_nothing_in_common() -> None:
    other = made_runs.open_loop()
    found = pair(measured(), other)
    assert found.rows == ()
    assert "load: no level of one has a level of the same load in the other" in found.differences
    assert comparison.summary_text(found) == "b.json and a.json have no load in common"


def test_what_else_differs_is_said() -> None:
    base, other = measured(), measured(seed=1)
    other.target.model_digest = "sha256:other"
    other.target.server = ""
    other.environment.num_cores = 1
    other.batch_size = 4
    other.origin = msgspec.structs.replace(other.origin, digest="d2")
    assert comparison.differences(base, other) == [
        "server: penstock 0.1.0 against not known",
        "model files: sha256:9f2e against sha256:other",
        "inputs: 450 examples of digits.npz, shuffled anew each time round (d1) against"
        " 450 examples of digits.npz, shuffled anew each time round (d2)",
        "rows a request: 1 against 4",
        "hardware: Example CPU 9000, 8 cores against Example CPU 9000, 1 core",
    ]


def test_streams_are_compared_by_their_own_figures() -> None:
    found = pair(made_runs.streams(), made_runs.streams())
    assert {row.figure for row in found.rows} == {
        "throughput",
        *("p50", "p99", "p50 TTFT", "p99 TTFT", "p50 TPOT", "p99 TPOT"),
    }


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Interval(1.234, 1.1, 1.4), "1.23 (1.10-1.40)"),
        (Interval(1.234, 0.0, 1.4), "1.23 (< 1.40)"),
        (Interval(1.234, 1.1, math.inf), "1.23 (> 1.10)"),
        (Interval(1.234, math.nan, math.nan), "1.23"),
        (Interval(math.nan, math.nan, math.nan), "-"),
    ],
)
def test_ratios(ratio: Interval, text: str) -> None:
    assert comparison.ratio_text(ratio) == text
