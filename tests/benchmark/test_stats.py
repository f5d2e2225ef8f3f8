"""Percentiles are right, and the truth is in their intervals as often as is promised, for
independent requests and for queues."""

import math
from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import poisson, queued, windows_of

from penstock.benchmark.stats import (
    ALPHA,
    DurationHistogram,
    Interval,
    Window,
    compare,
    compare_throughput,
    histogram,
    mean_interval,
    merged,
    percentile_interval,
    share_interval,
    student_t,
    throughput_interval,
)


def filled(seconds) -> DurationHistogram:
    made = DurationHistogram()
    made.add(np.asarray(seconds, np.float64))
    return made


@given(st.lists(st.floats(1e-9, 1e5), min_size=1, max_size=300), st.floats(0.1, 100))
def test_percentiles_are_those_of_nearest_rank_within_a_bucket(values, percent):
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert filled(values).percentile(percent) == pytest.approx(expected, rel=1 / 128)


@pytest.mark.parametrize("percent", [50, 90, 99, 99.9])
def test_of_many_they_are_within_half_a_bucket(percent):
    values = np.random.default_rng(0).lognormal(-5, 1, 100_000)
    expected = np.percentile(values, percent)
    assert filled(values).percentile(percent) == pytest.approx(expected, rel=0.004)


@given(st.floats(1e-9, 1e6))
def test_the_middle_of_a_bucket_is_at_most_0_4_percent_off(value):
    assert filled([value]).mean() == pytest.approx(value, rel=0.004)


@given(st.lists(st.floats(0, 1e3)), st.lists(st.floats(0, 1e3)))
def test_merging_is_adding_all(first, second):
    one = filled(first)
    one.merge(filled(second))
    assert one == filled(first + second)


def test_what_is_no_usual_duration():
    odd = filled([-1.0, 0.0, math.nan, math.inf, 1e300])
    assert odd.total == 4
    assert odd.percentile(50) < 1e-9
    assert odd.percentile(100) == pytest.approx(1e9, rel=0.004)


def test_an_empty_histogram_says_nothing():
    empty = DurationHistogram()
    assert math.isnan(empty.percentile(50))
    assert math.isnan(empty.mean())
    assert empty.num_below(1) == 0
    assert empty.total == 0


def test_mean_and_number_below():
    values = np.random.default_rng(0).exponential(0.01, 50_000)
    made = filled(values)
    assert made.mean() == pytest.approx(values.mean(), rel=0.002)
    for limit in (0.001, 0.01, 0.05):
        assert made.num_below(limit) == pytest.approx((values < limit).sum(), abs=100)
    assert made.num_below(math.inf) == 50_000
    assert made.num_below(0) == 0


def test_a_window_survives_json():
    window = Window(1.0, 0.5, 3, 2, 2, {"refused": 1}, {"latency": filled([0.1, 0.2])})
    assert msgspec.json.decode(msgspec.json.encode(window), type=Window) == window


def test_an_interval_of_which_an_end_is_not_known_survives_json():
    written = msgspec.json.encode(Interval(2.0, math.nan, math.inf))
    read = msgspec.json.decode(written, type=Interval)
    assert read.value == 2
    assert math.isnan(read.low)
    assert math.isnan(read.high)


def test_a_copy_shares_nothing():
    window = Window(0.0, 1.0, 1, 1, 1, {"a": 1}, {"latency": filled([0.1])})
    twin = window.copy()
    twin.metrics["latency"].add(np.array([0.2]))
    twin.failures["b"] = 1
    assert (window.metrics["latency"].total, window.failures) == (1, {"a": 1})


def test_merged_windows_hold_what_each_held():
    first = Window(0.0, 1.0, 5, 4, 3, {"a": 1}, {"latency": filled([0.1])}, 10, 20, 2)
    second = Window(1.0, 1.0, 5, 3, 4, {"a": 1, "b": 1}, {"ttft": filled([0.2])}, 1, 2, 1)
    both = merged([first, second])
    metrics = {"latency": filled([0.1]), "ttft": filled([0.2])}
    assert both == Window(0.0, 2.0, 10, 7, 7, {"a": 2, "b": 1}, metrics, 11, 22, 3)
    assert histogram([first, second, second], "ttft").total == 2


@pytest.mark.parametrize(
    ("num_degrees", "point"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (19, 2.093), (38, 2.024)],
)
def test_points_of_student_t(num_degrees, point):
    assert student_t(num_degrees) == pytest.approx(point, rel=0.005)


def test_other_confidences_of_student_t():
    assert student_t(19, 0.995) == pytest.approx(3.174, rel=0.005)
    assert student_t(10_000, 0.90) == pytest.approx(1.645, rel=0.001)


# How often the truth is in the interval. Times in units in which a request takes 1 ms to serve.

MEAN_S = 0.001
LOAD = 0.8


@cache
def independent_runs(num=200):
    def run(seed):
        random = np.random.default_rng(seed)
        return windows_of(np.arange(5_000) / 500, random.exponential(MEAN_S, 5_000), 10)

    return [run(seed) for seed in range(num)]


@cache
def queue_runs(duration_s, num):
    """M/M/1 at a load of 0.8. The memory of this queue is about 0.1 s."""

    def run(seed):
        random = np.random.default_rng(seed)
        before_s = 3.0
        due = poisson(LOAD / MEAN_S, duration_s + before_s, random) - before_s
        latencies = queued(due, random.exponential(MEAN_S, len(due)))
        return windows_of(due[due >= 0], latencies[due >= 0], duration_s)

    return [run(seed) for seed in range(num)]


CASES = {
    "independent": (lambda: independent_runs(), MEAN_S),
    "a short run of a queue": (lambda: queue_runs(20, 200), MEAN_S / (1 - LOAD)),
    "a long run of a queue": (lambda: queue_runs(100, 60), MEAN_S / (1 - LOAD)),
}


def judged(intervals, truth):
    """Coverage, and the median width over that of an interval from the estimates' true spread."""
    inside = [each.low <= truth <= each.high for each in intervals]
    ideal = 2 * 1.96 * np.std([each.value for each in intervals])
    return np.mean(inside), np.median([each.high - each.low for each in intervals]) / ideal


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("percent", [50, 99])
def test_the_true_percentile_is_in_the_interval(case, percent):
    runs, mean_s = CASES[case][0](), CASES[case][1]
    intervals = [percentile_interval(windows, "latency", percent) for windows in runs]
    coverage, width = judged(intervals, -math.log(1 - percent / 100) * mean_s)
    assert coverage >= 0.9
    assert 0.8 < width < 1.8


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if "queue" in case else case for case in CASES],
)
def test_the_true_mean_is_in_the_interval(case):
    runs, mean_s = CASES[case][0](), CASES[case][1]
    coverage, width = judged([mean_interval(windows) for windows in runs], mean_s)
    assert coverage >= 0.9
    assert 0.8 < width < 1.8


def test_the_true_throughput_is_in_the_interval():
    intervals = [throughput_interval(windows) for windows in queue_runs(20, 200)]
    coverage, width = judged(intervals, LOAD / MEAN_S)
    assert coverage >= 0.9
    assert 0.8 < width < 1.8


def test_an_interval_for_independent_requests_would_be_wrong_for_a_queue():
    """The reason for all this: without clusters it would hold the truth far too rarely."""
    truth = math.log(2) * MEAN_S / (1 - LOAD)
    inside = []
    for windows in queue_runs(20, 200):
        whole = histogram(windows)
        half = 1.96 * math.sqrt(0.25 * whole.total)
        ends = (whole.at_rank(round(whole.total / 2 + sign * half)) for sign in (-1, 1))
        inside.append(next(ends) <= truth <= next(ends))
    assert np.mean(inside) < 0.5


def test_a_stall_is_seen_by_all_who_were_due():
    """A server that pauses 1 s in 20 s: of all requests 1 % wait longer than 0.8 s. A client that
    stops sending meanwhile would have seen one slow request."""
    due = np.arange(20_000) / 1000
    service_s = np.full(len(due), 0.0001)
    service_s[10_000] = 1.0
    windows = windows_of(due, queued(due, service_s), 20)
    p99 = percentile_interval(windows, "latency", 99)
    # What waited is served ten times as fast as it came.
    assert p99.value == pytest.approx(1 - 0.2 * 0.9, rel=0.01)
    assert p99.high > 0.9
    assert percentile_interval(windows, "latency", 50).high < 0.001


def test_few_requests_do_not_tell_how_high_a_percentile_may_be():
    windows = windows_of(np.arange(100) / 10, np.full(100, 0.01), 10)
    assert percentile_interval(windows, "latency", 99).high == math.inf
    assert percentile_interval(windows, "latency", 50).high == pytest.approx(0.01, rel=0.004)


def test_failures_count_as_never_answered_when_they_are_to():
    """Every twentieth fails: p95 is the slowest good answer, p99 is never."""
    failed = np.arange(10_000) % 20 == 0
    windows = windows_of(np.arange(10_000) / 1000, np.full(10_000, 0.01), 10, failed=failed)
    plain = percentile_interval(windows, "latency", 99)
    assert plain.high == pytest.approx(0.01, rel=0.004)
    most = percentile_interval(windows, "latency", 90, with_failures=True)
    assert most.high == pytest.approx(0.01, rel=0.004)
    never = percentile_interval(windows, "latency", 99, with_failures=True)
    assert never == Interval(math.inf, math.inf, math.inf)
    unclear = percentile_interval(windows, "latency", 95, with_failures=True)
    assert (unclear.low < 1, unclear.high) == (True, math.inf)


def test_nothing_measured_is_nothing_said():
    empty = windows_of(np.array([]), np.array([]), 5)
    assert len(empty) == 20
    for interval in (percentile_interval(empty, "latency", 99), mean_interval(empty)):
        assert math.isnan(interval.value)
    assert throughput_interval(empty) == Interval(0, 0, 0)
    assert math.isnan(throughput_interval([]).value)


def test_one_window_has_a_value_and_no_interval():
    (window,) = windows_of(np.arange(10) / 100, np.full(10, 0.01), 0.2)
    for interval in (percentile_interval([window], "latency", 50), mean_interval([window])):
        assert interval.value == pytest.approx(0.01, rel=0.004)
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)


def test_the_slowest_request_has_no_interval():
    windows = windows_of(np.arange(100) / 10, np.linspace(0.01, 0.02, 100), 10)
    slowest = percentile_interval(windows, "latency", 100)
    assert slowest.value == pytest.approx(0.02, rel=0.004)
    assert math.isnan(slowest.high)


def test_all_of_few_is_not_surely_all():
    sizes = np.full(10, 5.0)
    share = share_interval(sizes, sizes)
    assert share.value == share.high == 1
    assert 0.8 < share.low < 0.95


@pytest.mark.parametrize("truth", [0.5, 0.99])
def test_the_true_share_is_in_the_interval(truth):
    random = np.random.default_rng(0)
    sizes = np.full(40, 50.0)
    found = [share_interval(random.binomial(50, truth, 40) * 1.0, sizes) for _ in range(300)]
    assert np.mean([each.low <= truth <= each.high for each in found]) >= 0.92


def test_shares_whose_failures_come_together_are_less_sure():
    sizes = np.full(20, 100.0)
    spread = share_interval(np.full(20, 95.0), sizes)
    together = share_interval(np.array([0.0] + [100.0] * 19), sizes)
    assert together.value == spread.value
    assert together.high - together.low > 3 * (spread.high - spread.low)


def test_relative_error_is_of_the_farther_end():
    assert Interval(10, 9, 12).relative_error == pytest.approx(0.2)
    assert Interval(10, 9, math.inf).relative_error == math.inf
    assert math.isnan(Interval(math.nan, math.nan, math.nan).relative_error)
    assert math.isnan(Interval(0, 0, 0).relative_error)


# Comparisons.


def law(seed, mean_s=0.01, rate=500, duration_s=10):
    random = np.random.default_rng(seed)
    due = poisson(rate, duration_s, random)
    return windows_of(due, random.lognormal(math.log(mean_s), 0.4, len(due)), duration_s)


@cache
def baselines():
    return [law(seed) for seed in range(200)]


def found(test, a, b, *how, **tolerated):
    if test(a, b, *how, **tolerated).p_value < ALPHA:
        return "regression"
    is_better = test(b, a, *how, **tolerated).p_value < ALPHA
    return "improvement" if is_better else "no difference shown"


def share_of(findings, wanted):
    return np.mean([finding == wanted for finding in findings])


@pytest.mark.parametrize("percent", [50, 99])
def test_the_same_law_twice_is_rarely_called_different(percent):
    pairs = zip(baselines()[:100], baselines()[100:], strict=True)
    findings = [found(compare, a, b, "latency", percent) for a, b in pairs]
    assert share_of(findings, "regression") <= 0.07
    assert share_of(findings, "improvement") <= 0.07


@pytest.mark.parametrize("percent", [50, 99])
def test_nor_is_the_same_queue(percent):
    runs = queue_runs(20, 200)
    pairs = zip(runs[:100], runs[100:], strict=True)
    findings = [found(compare, a, b, "latency", percent) for a, b in pairs]
    assert share_of(findings, "regression") <= 0.07


@pytest.mark.parametrize(("percent", "power"), [(50, 0.99), (99, 0.6)])
def test_ten_percent_slower_is_mostly_found(percent, power):
    pairs = [(base, law(1000 + seed, 0.011)) for seed, base in enumerate(baselines()[:60])]
    worse = [compare(a, b, "latency", percent) for a, b in pairs]
    findings = [found(compare, a, b, "latency", percent) for a, b in pairs]
    assert share_of(findings, "regression") >= power
    better = [found(compare, b, a, "latency", percent) for a, b in pairs]
    assert share_of(better, "improvement") >= power
    assert np.mean([each.ratio.low <= 1.1 <= each.ratio.high for each in worse]) >= 0.9


def test_what_is_tolerated_is_no_regression():
    pairs = [(base, law(1000 + seed, 0.011)) for seed, base in enumerate(baselines()[:60])]
    findings = [found(compare, a, b, "latency", 50, tolerance=0.1) for a, b in pairs]
    assert share_of(findings, "regression") <= 0.1
    findings = [found(compare, a, b, "latency", 50, tolerance=0.05) for a, b in pairs]
    assert share_of(findings, "regression") >= 0.9


def test_less_throughput_is_a_regression_and_more_is_not():
    fast, slow = law(1, rate=1000), law(2, rate=800)
    worse, better = compare_throughput(fast, slow), compare_throughput(slow, fast)
    assert found(compare_throughput, fast, slow) == "regression"
    assert found(compare_throughput, slow, fast) == "improvement"
    assert worse.ratio.low < 0.8 < worse.ratio.high < 1
    assert better.ratio.low < 1.25 < better.ratio.high
    assert worse.p_value < 0.001 < 0.999 < better.p_value
    assert found(compare_throughput, fast, slow, tolerance=0.3) == "no difference shown"


def test_throughput_of_the_same_law_is_rarely_called_different():
    pairs = zip(baselines()[:100], baselines()[100:], strict=True)
    findings = [found(compare_throughput, a, b) for a, b in pairs]
    assert share_of(findings, "regression") <= 0.1


def test_a_comparison_with_nothing_shows_nothing():
    empty = windows_of(np.array([]), np.array([]), 5)
    for pair in [(empty, law(0)), (law(0), empty), (empty, empty), ([], [])]:
        assert found(compare, *pair, "latency", 99) == "no difference shown"
        assert math.isnan(compare(*pair, "latency", 99).p_value)


def test_too_few_requests_show_no_difference_however_large():
    few = windows_of(np.arange(40) / 10, np.full(40, 0.01), 4)
    slower = windows_of(np.arange(40) / 10, np.full(40, 0.05), 4)
    assert found(compare, few, slower, "latency", 99) == "no difference shown"
    assert found(compare, few, slower, "latency", 50) == "regression"


@settings(max_examples=30)
@given(st.integers(2, 300))
def test_any_number_of_windows_gives_intervals_around_the_value(num_windows):
    latencies = np.random.default_rng(num_windows).exponential(0.01, num_windows * 3)
    windows = [
        Window(i * 1.0, 1.0, 3, 3, 3, {}, {"latency": filled(latencies[3 * i : 3 * i + 3])})
        for i in range(num_windows)
    ]
    for interval in (
        percentile_interval(windows, "latency", 50),
        mean_interval(windows),
        throughput_interval(windows),
    ):
        assert interval.low <= interval.value <= interval.high
