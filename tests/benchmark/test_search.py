"""The searches find what is known of simulated servers: knees, capacities, the rate of an SLO."""

import math

import numpy as np
import pytest
from simulated import due_until, queued, windows_of

from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.search import Knee, KneeSearch, MaxRateSearch
from penstock.benchmark.stats import Interval
from penstock.errors import ConfigError
from penstock.slo import parse

SERVICE_S = 0.001


def closed_loop(throughput, concurrency, seed=0, noise=0.02, duration_s=5.0):
    """Windows of a server that answers so much; by Little's law that is also its latency."""
    random = np.random.default_rng(seed)
    done = np.arange(0, duration_s, 1 / throughput)
    latency_s = concurrency / throughput
    latencies = latency_s * random.lognormal(0, noise, len(done))
    return windows_of(np.maximum(done - latency_s, 0), latencies, duration_s)


def found_knee(law, search=None):
    """Every concurrency that was measured, and the knee."""
    search = search or KneeSearch()
    tried = []
    while (load := search.next()) is not None:
        tried.append(load.concurrency)
        search.add(load, closed_loop(law(load.concurrency), load.concurrency, len(tried)))
        assert len(tried) < 30
    return tried, search.knee


@pytest.mark.parametrize("num_instances", [1, 2, 5, 12])
def test_the_knee_of_instances_is_their_number(num_instances):
    """X(N) = min(N, k) / T."""
    tried, knee = found_knee(lambda num: min(num, num_instances) / 0.01)
    assert knee.concurrency == pytest.approx(num_instances, rel=0.05)
    assert knee.throughput == pytest.approx(num_instances / 0.01, rel=0.05)
    assert knee.alone_s == pytest.approx(0.01, rel=0.05)
    assert tried[knee.level] == num_instances
    assert knee.reason == ""


@pytest.mark.parametrize(("fixed_s", "per_row_s", "max_batch"), [(0.004, 0.0005, 32), (0.01, 0, 8)])
def test_the_knee_of_a_batching_server_follows_its_law(fixed_s, per_row_s, max_batch):
    """T(b) = a + c b: the knee is B (a + c) / (a + c B)."""

    def law(concurrency):
        rows = min(concurrency, max_batch)
        return rows / (fixed_s + per_row_s * rows)

    tried, knee = found_knee(law)
    expected = max_batch * (fixed_s + per_row_s) / (fixed_s + per_row_s * max_batch)
    assert knee.concurrency == pytest.approx(expected, rel=0.05)
    assert abs(tried[knee.level] - expected) <= 1
    assert max(tried) <= 8 * max_batch


def test_concurrency_doubles_until_two_doublings_bring_nothing():
    tried, _ = found_knee(lambda num: min(num, 4) / 0.01)
    assert tried == [1, 2, 4, 8, 16]


def test_a_server_that_breaks_down_under_load_has_its_knee_before():
    tried, knee = found_knee(lambda num: 100 * num if num <= 8 else 800 / (num / 8))
    assert max(tried) == 32
    assert knee.throughput == pytest.approx(800, rel=0.05)
    assert knee.concurrency == pytest.approx(8, rel=0.05)


def test_next_to_the_knee_is_measured_once_however_noisy_it_is():
    random = np.random.default_rng(0)
    for _ in range(20):
        tried, knee = found_knee(lambda num: min(num, 300) * random.normal(10, 0.1))
        assert tried[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        assert len(tried) <= 12
        assert knee.concurrency == pytest.approx(300, rel=0.1)
        assert abs(tried[knee.level] - 300) < 45


def test_a_server_that_is_slowest_alone_has_no_knee_beyond_what_was_tried():
    """It waits for a batch that does not come."""
    tried, knee = found_knee(lambda num: 10 if num == 1 else 400)
    assert max(tried) == 8
    assert tried[knee.level] == 8


def test_without_a_plateau_it_says_so():
    tried, knee = found_knee(lambda num: 10.0 * num, KneeSearch(max_concurrency=48))
    assert tried == [1, 2, 4, 8, 16, 32, 48]
    assert knee.reason == "throughput still grew at concurrency 48"
    assert knee.throughput == pytest.approx(480, rel=0.05)


def test_a_server_that_never_answers_has_no_knee():
    search = KneeSearch()
    assert search.knee is None
    empty = windows_of(np.array([]), np.array([]), 5)
    tried = 0
    while (load := search.next()) is not None:
        search.add(load, empty)
        tried += 1
    assert tried == 3
    assert search.knee is None


def test_a_knee_is_known_before_the_search_ends():
    search = KneeSearch()
    search.add(Closed(1), closed_loop(100, 1))
    assert isinstance(search.knee, Knee)


# The highest rate.


def queue_level(load, seed, duration_s=40.0, service_s=SERVICE_S, warm_up_s=2.0):
    """One server with a constant service time, after some warm-up."""
    due = due_until(load, duration_s + warm_up_s, seed)
    latencies = queued(due, np.full(len(due), service_s))
    kept = due >= warm_up_s
    return windows_of(due[kept] - warm_up_s, latencies[kept], duration_s)


def found_rate(search, level, seed=0):
    """Every rate that was measured, and the answer."""
    tried = []
    while (load := search.next()) is not None:
        tried.append(load.profile.rate)
        search.add(load, level(load, 1000 * seed + len(tried)))
        assert len(tried) < 60
    return tried, search.max_rate


def share_of_waits_below(limit_s, rate):
    """M/D/1: the waiting time's distribution (Erlang)."""
    terms = (
        (rate * (k * SERVICE_S - limit_s)) ** k
        / math.factorial(k)
        * math.exp(-rate * (k * SERVICE_S - limit_s))
        for k in range(int(limit_s / SERVICE_S) + 1)
    )
    return (1 - rate * SERVICE_S) * sum(terms)


def true_max_rate(limit_s, share):
    low, high = 1.0, 0.999 / SERVICE_S
    while high - low > 0.01:
        middle = (low + high) / 2
        is_kept = share_of_waits_below(limit_s - SERVICE_S, middle) >= share
        low, high = (middle, high) if is_kept else (low, middle)
    return low


def test_the_law_of_the_queue_is_that_of_the_simulation():
    load = Open(Flat(700))
    windows = queue_level(load, 0, duration_s=400.0)
    latency = sum(w.metrics["latency"].num_below(0.005) for w in windows if w.num_good)
    num = sum(window.num_due for window in windows)
    assert latency / num == pytest.approx(share_of_waits_below(0.004, 700), abs=0.001)


def test_the_highest_rate_of_a_queue_is_found():
    """p99 < 5 ms behind an M/D/1 queue with a service time of 1 ms."""
    truth = true_max_rate(0.005, 0.99)
    assert truth == pytest.approx(560.8, abs=0.1)
    answers = []
    for seed in range(8):
        search = MaxRateSearch(parse("p99 < 5ms"), start=50)
        _, answer = found_rate(search, queue_level, seed)
        answers.append(answer)
    rates = np.array([answer.rate.value for answer in answers])
    assert np.abs(rates / truth - 1).max() <= 0.05
    assert np.median(rates) == pytest.approx(truth, rel=0.025)
    is_inside = [answer.rate.low <= truth <= answer.rate.high for answer in answers]
    assert sum(is_inside) >= 7
    assert answers[0].slo == "p99 < 5ms"
    assert answers[0].reason == ""


def test_constant_arrivals_are_served_up_to_capacity():
    search = MaxRateSearch(parse("p99 < 5ms"), start=100, arrivals="constant")
    tried, answer = found_rate(search, lambda load, seed: queue_level(load, seed, 10.0))
    assert answer.rate.value == pytest.approx(1000, rel=0.03)
    assert answer.rate.low <= 1000 * (1 + 1e-9)
    assert answer.rate.low <= answer.rate.value <= answer.rate.high <= answer.rate.low * 1.03
    assert tried[:5] == [100, 200, 400, 800, 1600]
    assert len(tried) <= 10


def test_a_start_that_is_too_high_goes_down_first():
    search = MaxRateSearch(parse("p99 < 5ms"), start=8000, arrivals="constant")
    tried, answer = found_rate(search, lambda load, seed: queue_level(load, seed, 4.0))
    assert tried[:3] == [8000, 4000, 2000]
    assert answer.rate.value == pytest.approx(1000, rel=0.03)


def test_nothing_keeps_what_is_impossible():
    search = MaxRateSearch(parse("p99 < 500us"), start=200, arrivals="constant")
    _, answer = found_rate(search, lambda load, seed: queue_level(load, seed, 4.0))
    assert math.isnan(answer.rate.value)
    assert math.isnan(answer.rate.low)
    assert answer.reason.startswith("missed even at 0.")


def test_a_cap_that_is_kept_is_said_to_be_the_cap():
    search = MaxRateSearch(parse("p99 < 5ms"), start=100, max_rate=300, arrivals="constant")
    tried, answer = found_rate(search, lambda load, seed: queue_level(load, seed, 20.0))
    assert tried == [100, 200, 300]
    assert (answer.rate.value, answer.rate.low) == (300, 300)
    assert math.isnan(answer.rate.high)
    assert answer.reason == "kept even at 300/s, the highest rate that was tried"


def test_a_queue_that_only_grows_is_not_kept_however_short_the_measurement():
    """In 10 s a load of 1.05 makes a queue of half a second, and p99 < 1 s is not missed yet."""
    search = MaxRateSearch(parse("p99 < 1s"), start=300)
    _, answer = found_rate(search, lambda load, seed: queue_level(load, seed, 10.0, warm_up_s=0.0))
    assert answer.rate.value == pytest.approx(1000, rel=0.05)


def test_terms_that_a_low_rate_would_miss_do_not_decide():
    slo = parse("p99 < 5ms, throughput >= 500/s, memory <= 1GiB")
    search = MaxRateSearch(slo, start=100, arrivals="constant")
    _, answer = found_rate(search, lambda load, seed: queue_level(load, seed, 10.0))
    assert answer.rate.value == pytest.approx(1000, rel=0.03)
    assert answer.slo == str(slo)
    with pytest.raises(ConfigError, match="the highest rate needs a limit on latency or goodput"):
        MaxRateSearch(parse("throughput >= 500/s"), start=100)


def test_a_server_that_answers_nothing_keeps_nothing():
    search = MaxRateSearch(parse("p99 < 5ms"), start=100)
    due = np.linspace(0, 5, 50, endpoint=False)
    refused = windows_of(due, np.full(50, 0.001), 5, None, np.full(50, True))
    tried, answer = found_rate(search, lambda load, seed: refused)
    assert len(tried) == 11
    assert math.isnan(answer.rate.value)


def test_a_rate_at_which_nothing_was_due_is_no_evidence():
    """Nothing keeps the SLO, and at some rate nobody asks within the time of a level."""

    def level(load, seed):
        due = np.arange(0, 2, 1 / load.profile.rate)[1:]
        return windows_of(due, np.full(len(due), 0.01), 2)

    search = MaxRateSearch(parse("p99 < 5ms"), start=8, arrivals="constant")
    tried, answer = found_rate(search, level)
    assert tried == [8, 4, 2, 1, 0.5]
    assert answer.reason == "missed even at 1/s, the lowest rate that was tried"


def test_before_anything_was_measured_there_is_no_answer():
    assert MaxRateSearch(parse("p99 < 5ms"), start=100).max_rate is None


def level_of(latency_s, num=10_000, spread=0.0):
    """A level whose every request took about so long."""
    latencies = latency_s * np.random.default_rng(0).lognormal(0, spread, num)
    return windows_of(np.linspace(0, 10, num, endpoint=False), latencies, 10)


def test_an_accident_is_measured_again_and_does_not_decide():
    """At 200/s the server happened to stall; at 100/s and later at 200/s it is fast."""
    search = MaxRateSearch(parse("p90 < 10ms"), start=100, arrivals="constant")
    search.add(search.next(), level_of(0.001))
    assert search.next().profile.rate == 200
    stalled = level_of(0.001)
    for window in stalled[: len(stalled) // 8]:
        window.metrics["latency"].counts = {
            bucket + 128 * 10: count for bucket, count in window.metrics["latency"].counts.items()
        }
    search.add(Open(Flat(200.0), "constant"), stalled)
    tried = []
    while (load := search.next()) is not None and len(tried) < 30:
        tried.append(load.profile.rate)
        search.add(load, level_of(0.001 if load.profile.rate <= 500 else 1.0))
    assert 200 in tried
    assert search.max_rate.rate.value == pytest.approx(500, rel=0.03)


def test_a_rate_that_missed_below_one_that_kept_is_tried_once_more():
    search = MaxRateSearch(parse("p99 < 10ms"), start=100)
    search.add(Open(Flat(100.0)), level_of(0.001))
    search.add(Open(Flat(400.0)), level_of(0.001))
    search.add(Open(Flat(200.0)), level_of(1.0))
    assert search.next().profile.rate == 200
    search.add(Open(Flat(200.0)), level_of(1.0))
    assert search.next().profile.rate == pytest.approx(math.sqrt(100 * 200))


def test_close_ends_widen_the_interval():
    """Rates near the limit whose verdicts might be otherwise bound nothing."""
    search = MaxRateSearch(parse("p50 < 10ms"), start=100, precision=0.5)
    search.add(Open(Flat(100.0)), level_of(0.001, 200))
    search.add(Open(Flat(200.0)), level_of(0.0095, 200, spread=0.5))
    search.add(Open(Flat(300.0)), level_of(0.0105, 200, spread=0.5))
    search.add(Open(Flat(400.0)), level_of(0.1, 200))
    rate = search.max_rate.rate
    assert 100 <= rate.low < 200 < rate.value < 300 < rate.high <= 400


def test_a_latency_is_interpolated_and_other_terms_are_not():
    crossing = MaxRateSearch(parse("p50 < 10ms"), start=100)
    crossing.add(Open(Flat(100.0)), level_of(0.005))
    crossing.add(Open(Flat(200.0)), level_of(0.020))
    assert crossing.max_rate.rate == Interval(pytest.approx(math.sqrt(2) * 100, rel=0.01), 100, 200)
    failing = MaxRateSearch(parse("p50 < 10ms, goodput >= 99 %"), start=100)
    failing.add(Open(Flat(100.0)), level_of(0.005))
    failed = np.arange(10_000) % 10 == 0
    failing.add(
        Open(Flat(200.0)),
        windows_of(np.arange(10_000) / 1000, np.full(10_000, 0.005), 10, failed=failed),
    )
    assert failing.max_rate.rate == Interval(100, 100, 200)


def test_the_arrivals_asked_for_are_those_measured():
    load = MaxRateSearch(parse("p99 < 5ms"), start=10, arrivals="gamma", cv=2.0).next()
    assert load == Open(Flat(10), "gamma", 2.0)
