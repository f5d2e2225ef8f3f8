"""Figures are those of the requests that went in."""

import msgspec
import numpy as np
import pytest
from benchmark import made_runs
from benchmark.made_runs import START, Server

from penstock.benchmark import summary
from penstock.benchmark.pacer import Closed, Flat, Open, Ramp, Replay
from penstock.benchmark.results import SystemSample


def test_percentiles_and_mean_are_those_of_the_good_answers() -> None:
    server, load = Server(fail_share=0.1), Open(Flat(500.0))
    made = made_runs.simulate(server, load, 10.0)
    good = [each.done - each.due for each in made.exchanges if each.failure is None]
    run = made_runs.run([made_runs.level(load, server)])
    figures = summary.figures_of(run, run.levels[0])
    assert figures.num_requests == len(made.exchanges)
    assert figures.num_good == len(good)
    assert figures.mean_s == pytest.approx(np.mean(good), rel=0.005)
    for name, percent in summary.PERCENTILES.items():
        expected = np.percentile(good, percent, method="inverted_cdf")
        assert figures.latency[name].value == pytest.approx(expected, rel=0.005)
        assert figures.latency[name].low <= figures.latency[name].value
    arrived = [each for each in made.exchanges if not each.failure and each.done < START + 10]
    assert figures.throughput.value == pytest.approx(len(arrived) / 10)


def test_failures_are_counted_by_cause_the_most_frequent_first() -> None:
    run = made_runs.partial()
    figures = summary.figures_of(run, run.levels[0])
    assert list(figures.failures) == ["503 Overloaded", "timed out"]
    assert figures.num_failed == figures.num_requests - figures.num_good > 0


def test_goodput_counts_failed_requests_as_late() -> None:
    run = made_runs.open_loop(200.0, "p99 < 1s", Server(fail_share=0.25))
    figures = summary.figures_of(run, run.levels[0])
    assert figures.goodput_percent == pytest.approx(
        100 * figures.num_good / figures.num_requests, abs=0.01
    )


def test_goodput_needs_a_limit_on_latency() -> None:
    run = made_runs.open_loop(200.0, "throughput >= 10/s")
    assert summary.figures_of(run, run.levels[0]).goodput_percent is None


def test_phases_sum_up_to_the_mean_latency() -> None:
    run = made_runs.open_loop(800.0)
    figures = summary.figures_of(run, run.levels[0])
    assert figures.breakdown is not None
    assert sum(figures.breakdown.phases().values()) == pytest.approx(figures.mean_s, rel=0.005)
    assert figures.breakdown.overhead_s == pytest.approx(60e-6, rel=0.01)


def test_a_queue_is_split_where_the_server_says_how() -> None:
    level = made_runs.level(Closed(16))
    split = summary.breakdown_of(level)
    assert split is not None and level.server is not None
    assert {"queue: for a batch", "queue: for an instance"} <= split.phases().keys()
    level.server = msgspec.structs.replace(level.server, batch_wait_ns=None)
    whole = summary.breakdown_of(level)
    assert whole is not None
    assert whole.phases()["queue"] == pytest.approx(split.queue_s)


def test_no_breakdown_without_an_account_or_an_answer() -> None:
    level = made_runs.level(Closed(1))
    assert level.server is not None
    level.server = msgspec.structs.replace(level.server, num_success=0)
    assert summary.breakdown_of(level) is None
    level.server = None
    assert summary.breakdown_of(level) is None


def test_members_of_an_ensemble_have_their_own_means() -> None:
    level = made_runs.ensemble_level(Closed(16))
    whole, found = summary.breakdown_of(level), summary.members_of(level)
    assert list(found) == ["tokenizer", "encoder/2"] and whole is not None
    tokenizer, encoder = found.values()
    assert (tokenizer.num_requests, encoder.num_requests) == (2.0, 1.0)
    assert tokenizer.num_rows == pytest.approx(4.0, rel=0.01) and encoder.num_rows == 1.0
    # The same time for twice as many requests.
    assert encoder.breakdown.server_s == pytest.approx(whole.server_s)
    assert tokenizer.breakdown.infer_s == pytest.approx(whole.infer_s / 2)
    assert tokenizer.breakdown.outside_s == 0.0
    assert summary.members_of(made_runs.level(Closed(16))) == {}


def test_utilisation_is_the_servers() -> None:
    run = made_runs.open_loop(400.0)
    level = run.levels[0]
    level.system = [
        SystemSample(0.5, 30.0, 0, gpu_percent=[80.0, 10.0]),
        SystemSample(1.0, 50.0, 0, gpu_percent=[90.0, 20.0]),
    ]
    run.environment.gpus = ["a", "b"]
    assert level.server is not None and level.server.busy_ns is not None
    busy = 100 * level.server.busy_ns / (10e9 * 4)
    found = summary.utilisation_of(run, level)
    assert found == pytest.approx({"CPU": 40.0, "GPU 0": 85.0, "GPU 1": 15.0, "instances": busy})
    figures = summary.figures_of(run, level)
    assert figures.busiest == ("GPU 0", 85.0)
    run.environment.is_server_local = False
    assert list(summary.utilisation_of(run, level)) == ["instances"]
    run.target.num_instances = None
    assert summary.utilisation_of(run, level) == {}
    assert summary.figures_of(run, level).busiest is None


def test_streams_have_their_own_percentiles_and_tokens() -> None:
    run = made_runs.streams()
    figures = summary.figures_of(run, run.levels[1])
    assert list(figures.streams) == ["ttft", "itl", "tpot"]
    assert figures.streams["itl"]["p50"].value == pytest.approx(0.012, rel=0.03)
    tokens = sum(window.num_output_tokens for window in run.levels[1].windows)
    assert figures.output_tokens_per_s == pytest.approx(tokens / 20)


def test_levels_of_a_search_are_put_in_order_and_the_knee_goes_with_its_level() -> None:
    run = made_runs.sweep()
    assert run.knee is not None
    knee = run.levels[run.knee.level].load
    run.levels.reverse()
    run.knee.level = len(run.levels) - 1 - run.knee.level
    ordered = summary.in_order(run)
    assert [level.load for level in ordered.levels] == [Closed(2**power) for power in range(7)]
    assert ordered.knee is not None and ordered.levels[ordered.knee.level].load == knee
    assert run.levels[0].load == Closed(64)


def test_loads_are_as_short_as_they_can_be() -> None:
    assert summary.short_loads([Closed(1), Closed(8)]) == ("concurrency", ["1", "8"])
    assert summary.short_loads([Open(Flat(10.0)), Open(Flat(12.5))]) == (
        "poisson /s",
        ["10", "12.5"],
    )
    head, names = summary.short_loads([Open(Flat(10.0)), Open(Flat(10.0), "constant")])
    assert head == "load" and names == ["10/s poisson", "10/s constant"]
    head, _ = summary.short_loads([Open(Ramp(1.0, 2.0, 3.0))])
    assert head == "load"


def test_loads_have_a_size() -> None:
    assert summary.load_size(Closed(8)) == 8
    assert summary.load_size(Replay((0.0, 1.0, 2.0), 2.0)) == pytest.approx(3.0)
