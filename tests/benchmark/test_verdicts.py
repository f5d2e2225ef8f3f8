"""Kept, missed, or too close to say; failures count as never answered."""

import math

import numpy as np
import pytest
from simulated import columns, poisson, queued, windows_of

from penstock.benchmark.recorder import Recorder
from penstock.benchmark.stats import Interval
from penstock.benchmark.verdicts import (
    IntervalVerdict,
    has_overdue,
    is_decided,
    measured,
    of_each_request,
    verdicts,
)
from penstock.slo import Latency, Throughput, parse


def law(num=20_000, rate=1000, mean_s=0.01, seed=0, failed_every=0, slo=None):
    """Requests whose latencies are exponential: p99 is 4.6 means."""
    due = np.arange(num) / rate
    latencies = np.random.default_rng(seed).exponential(mean_s, num)
    failed = np.arange(num) % failed_every == 0 if failed_every else None
    return windows_of(due, latencies, num / rate, slo, failed)


def test_every_term_that_windows_know_is_measured_under_its_name():
    slo = parse(
        "p99 < 50ms, mean < 20ms, throughput >= 900/s, goodput >= 98 %, memory <= 1GiB, "
        "cost <= 1 per million"
    )
    found = measured(law(slo=slo), slo)
    assert found.keys() == {"p99 latency", "mean latency", "throughput", "goodput"}
    assert found["p99 latency"].value == pytest.approx(0.046, rel=0.05)
    assert found["mean latency"].value == pytest.approx(0.01, rel=0.05)
    assert found["throughput"].value == pytest.approx(1000, rel=0.01)
    assert found["goodput"].value == pytest.approx(100 * (1 - math.exp(-5)), abs=0.2)
    outcomes = [verdict.outcome for verdict in verdicts(slo, found)]
    assert outcomes == ["kept"] * 4 + ["not measured"] * 2


def test_each_term_is_judged_by_its_own_value():
    slo = parse(
        "p99 < 20ms, throughput >= 500/s, goodput >= 99 %, cost <= 1 per million, mean < 1s"
    )
    values = {
        "p99 latency": 0.020,
        "throughput": 500.0,
        "goodput": 99.9,
        "cost": 1.5,
        "mean latency": math.nan,
    }
    found = {name: Interval(value, value, value) for name, value in values.items()}
    outcomes = [verdict.outcome for verdict in verdicts(slo, found)]
    assert outcomes == ["missed", "kept", "kept", "missed", "not measured"]
    memory = parse("memory <= 1GB")
    assert verdicts(memory, {})[0].outcome == "not measured"
    assert verdicts(memory, {"memory": Interval(1e9, 1e9, 1e9)})[0].outcome == "kept"


def test_streams_are_judged_by_their_own_metrics():
    slo = parse("p50 ttft < 200ms, p99 tpot < 1s, p90 itl < 1s")
    recorder = Recorder(0.0, slo)
    due = np.arange(1000) / 100
    recorder.add(
        columns(
            due,
            due + 1,
            stream_due=due,
            first=due + 0.1,
            tpot=np.full(1000, 0.05),
            num_input_tokens=np.full(1000, 3),
            num_output_tokens=np.full(1000, 4),
            gap_due=due,
            gaps=np.full(1000, 0.06),
        )
    )
    found = measured(recorder.windows(10.0), slo)
    values = {name: round(interval.value, 3) for name, interval in found.items()}
    assert values == {"p50 ttft": 0.1, "p99 tpot": 0.05, "p90 itl": 0.06}


@pytest.mark.parametrize("failed_every", [5, 50, 99])
def test_more_failures_than_the_percentile_forgives_miss_it(failed_every):
    slo = parse("p99 < 1s")
    (verdict,) = verdicts(slo, measured(law(failed_every=failed_every), slo))
    assert (verdict.outcome, verdict.measured.value) == ("missed", math.inf)
    assert not verdict.is_close or failed_every == 99


def test_fewer_failures_than_the_percentile_forgives_keep_it():
    slo = parse("p99 < 1s")
    (verdict,) = verdicts(slo, measured(law(failed_every=1000), slo))
    assert (verdict.outcome, verdict.is_close) == ("kept", False)


def test_a_mean_over_requests_that_are_never_answered_is_infinite():
    slo = parse("mean < 1s")
    (verdict,) = verdicts(slo, measured(law(failed_every=10_000), slo))
    assert verdict.outcome == "missed"


def test_goodput_without_single_requests_is_read_from_the_histogram():
    slo = parse("p99 < 20ms, p50 < 1ms, goodput >= 50 %")
    by_request = measured(law(slo=slo, failed_every=10), slo)["goodput"]
    by_histogram = measured(law(failed_every=10), slo)["goodput"]
    assert by_histogram.value == pytest.approx(by_request.value, abs=0.1)
    assert by_request.value == pytest.approx(90 * (1 - math.exp(-2)), abs=1)


def test_goodput_of_streams_cannot_be_read_from_histograms():
    slo = parse("p99 ttft < 20ms, goodput >= 50 %")
    verdict = verdicts(slo, measured(law(), slo))[1]
    assert (verdict.outcome, verdict.is_close) == ("not measured", True)


def test_goodput_without_limits_is_the_share_of_good_answers():
    slo = parse("goodput >= 85 %")
    (verdict,) = verdicts(slo, measured(law(failed_every=10), slo))
    assert verdict.measured.value == pytest.approx(90)
    assert (verdict.outcome, verdict.is_close) == ("kept", False)


LIMIT = Latency("p99", 0.02)


@pytest.mark.parametrize(
    ("term", "interval", "outcome", "is_close"),
    [
        (LIMIT, Interval(0.010, 0.009, 0.012), "kept", False),
        (LIMIT, Interval(0.019, 0.018, 0.021), "kept", True),
        (LIMIT, Interval(0.021, 0.019, 0.023), "missed", True),
        (LIMIT, Interval(0.030, 0.028, math.inf), "missed", False),
        (LIMIT, Interval(0.010, 0.009, math.inf), "kept", True),
        (LIMIT, Interval(0.020, 0.020, 0.020), "missed", False),
        (LIMIT, Interval(0.010, math.nan, math.nan), "kept", True),
        (LIMIT, Interval(math.nan, math.nan, math.nan), "not measured", True),
        (LIMIT, None, "not measured", True),
        (Throughput(100), Interval(110, 105, 115), "kept", False),
        (Throughput(100), Interval(101, 95, 107), "kept", True),
        (Throughput(100), Interval(90, 85, 95), "missed", False),
    ],
)
def test_the_estimate_decides_and_the_interval_says_how_sure_that_is(
    term, interval, outcome, is_close
):
    verdict = IntervalVerdict(term, interval)
    assert (verdict.outcome, verdict.is_close) == (outcome, is_close)


# Ending early.


def test_a_clear_case_is_decided():
    assert is_decided(law(), parse("p99 < 100ms"))
    assert is_decided(law(), parse("p99 < 20ms"))


def test_a_close_one_is_not():
    assert not is_decided(law(), parse("p99 < 46ms"))


def test_one_term_that_is_surely_missed_decides():
    assert is_decided(law(), parse("p50 < 1ms, p99 < 46ms"))
    assert not is_decided(law(), parse("p50 < 100ms, p99 < 46ms"))


@pytest.mark.parametrize(
    ("slo", "num", "expected"),
    [
        ("p50 < 1s", 999, False),
        ("p50 < 1s", 1000, True),
        ("p99 < 1s", 1900, False),
        ("p99 < 1s", 2100, True),
        ("p99.9 < 1s", 19_000, False),
        ("p99.9 < 1s", 21_000, True),
    ],
)
def test_nothing_is_decided_on_few_requests(slo, num, expected):
    assert is_decided(law(num=num), parse(slo)) is expected


def test_a_queue_that_still_grows_is_not_called_kept():
    """Above capacity, and the limit not reached yet."""
    random = np.random.default_rng(0)
    due = poisson(1100, 10, random)
    windows = windows_of(due, queued(due, np.full(len(due), 0.001)), 10)
    assert not is_decided(windows, parse("p99 < 10s"))
    assert is_decided(windows, parse("p99 < 100ms"))


def test_terms_that_nobody_measures_do_not_decide():
    assert not is_decided(law(), parse("memory <= 1GiB"))
    assert is_decided(law(), parse("memory <= 1GiB, p99 < 1s"))


@pytest.mark.parametrize(
    ("rate", "num", "expected"), [(200, 400, True), (200, 150, False), (105, 400, False)]
)
def test_a_rate_far_above_capacity_is_decided_on_few_requests(rate, num, expected):
    """100/s can be answered; the SLO is p99 < 100 ms."""
    due = np.arange(num) / rate
    windows = windows_of(due, queued(due, np.full(num, 0.01)), num / rate)
    assert is_decided(windows, parse("p99 < 100ms")) == expected


def test_early_decisions_are_rarely_wrong():
    """Asked every second, with a limit above and below the true p99."""
    truth_s = -math.log(0.01) * 0.01
    decided = []
    for seed in range(30):
        windows = law(num=10_000, seed=seed)
        for factor, wanted in ((1.15, "kept"), (1 / 1.15, "missed")):
            slo = parse(f"p99 < {truth_s * factor:.9f}s")
            looks = (windows[:end] for end in range(4, len(windows) + 1, 4))
            if first := next((look for look in looks if is_decided(look, slo)), None):
                (verdict,) = verdicts(slo, measured(first, slo))
                decided.append(verdict.outcome == wanted)
    assert len(decided) > 20
    assert np.mean(decided) >= 0.97


@pytest.mark.parametrize(
    ("num_in_flight", "expected"),
    [
        (0, False),
        (15, False),  # 1000/s for 10 ms each are 10.
        (150, True),  # Nobody is answered any more.
    ],
)
def test_a_stall_that_is_not_over_is_seen_by_what_is_under_way(num_in_flight, expected):
    assert has_overdue(law(), num_in_flight, 0.046) == expected


def test_when_most_are_under_way_nothing_is_known_of_them():
    assert not has_overdue(law(), 9_000, math.inf)
    assert has_overdue(law(), 11_000, math.inf)


def test_nothing_is_called_kept_while_too_many_are_under_way():
    slo = parse("p99 < 100ms")
    assert is_decided(law(), slo, num_in_flight=20)
    assert not is_decided(law(), slo, num_in_flight=500)
    # What is missed stays missed.
    assert is_decided(law(), parse("p99 < 10ms"), num_in_flight=500)


def test_terms_of_each_request_are_those_that_more_load_does_not_help():
    slo = parse("p99 < 20ms, throughput >= 500/s, goodput >= 99 %, memory <= 1GiB at 200/s")
    assert str(of_each_request(slo)) == "p99 < 20ms, goodput >= 99% at 200/s poisson"
