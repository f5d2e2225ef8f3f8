"""Requests land in the windows in which they were due, whenever and in whatever order they come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import columns

from penstock.benchmark.exchange import Collector, StreamTimes, TimedExchange, TimingSample
from penstock.benchmark.recorder import LENGTH_S, MAX_SAMPLES, MAX_WINDOWS, Recorder
from penstock.benchmark.stats import histogram
from penstock.slo import parse


def ignore(exchange):
    """A finished exchange that nobody waits for."""


def test_requests_count_where_they_were_due_and_answers_where_they_arrived():
    recorder = Recorder(100.0)
    recorder.add(columns([100.1, 100.2, 100.3], [100.15, 100.9, 100.4]))
    windows = recorder.windows(101.0)
    assert [window.start_s for window in windows] == [0, 0.25, 0.5, 0.75]
    assert [window.num_due for window in windows] == [2, 1, 0, 0]
    assert [window.num_arrived for window in windows] == [1, 1, 0, 1]
    assert windows[0].metrics["latency"].percentile(100) == pytest.approx(0.7, rel=0.004)


def test_latency_counts_from_when_a_request_was_due():
    recorder = Recorder(0.0)
    recorder.add(columns(due=[0.1], sent=[1.1], done=[1.2]))
    assert histogram(recorder.windows(2.0)).mean() == pytest.approx(1.1, rel=0.004)
    assert recorder.service.mean() == pytest.approx(0.1, rel=0.004)
    assert recorder.lateness.mean() == pytest.approx(1.0, rel=0.004)


def test_failures_are_counted_by_cause_and_are_no_latencies():
    recorder = Recorder(0.0)
    first = columns([0.1, 0.1, 0.1], [0.2] * 3, failed=[1, 0, 2], failures=["refused", "lost"])
    second = columns([0.2, 0.2], [0.2] * 2, failed=[1, 1], failures=["lost"])
    recorder.add(first)
    recorder.add(second)
    (window,) = recorder.windows(0.25)
    assert window.failures == {"refused": 1, "lost": 3}
    assert (window.num_due, window.num_good, window.num_failed, window.num_arrived) == (5, 1, 4, 1)
    assert window.metrics["latency"].total == 1


def test_what_was_never_sent_was_not_sent_late():
    recorder = Recorder(10.0)
    recorder.add(
        columns([10.1, 10.1], [10.2, 10.2], sent=[0.0, 10.15], failed=[1, 0], failures="x")
    )
    assert recorder.lateness.total == 1


def test_before_the_start_only_arrivals_count():
    recorder = Recorder(10.0)
    recorder.add(columns([9.8, 9.9, 10.1], [9.9, 10.1, 10.2]))
    (window,) = recorder.windows(10.25)
    assert (window.num_due, window.num_arrived) == (1, 2)
    assert recorder.service.total == 1


def test_after_the_end_only_what_was_due_before_counts():
    recorder = Recorder(0.0)
    recorder.stop(1.0)
    recorder.add(columns([0.9, 0.9, 1.1], [0.95, 3.0, 1.2]))
    windows = recorder.windows(1.0)
    assert sum(window.num_due for window in windows) == 2
    assert sum(window.num_arrived for window in windows) == 1
    assert histogram(windows).percentile(100) == pytest.approx(2.1, rel=0.004)


@pytest.mark.parametrize(
    ("end", "lengths"), [(0.5, [0.25, 0.25]), (0.7, [0.25, 0.25, 0.2]), (0.6, [0.25, 0.35])]
)
def test_the_last_window_ends_with_the_span_and_is_not_tiny(end, lengths):
    recorder = Recorder(5.0)
    recorder.add(columns([5.05, 5.55], [5.06, 5.56]))
    windows = recorder.windows(5.0 + end)
    assert [window.length_s for window in windows] == pytest.approx(lengths)
    assert sum(window.num_due for window in windows) == (2 if end > 0.55 else 1)


def test_a_silent_server_leaves_empty_windows_and_a_bounded_number():
    recorder = Recorder(0.0)
    assert len(recorder.windows(2.0)) == 8
    windows = recorder.windows(3600.0)
    assert len(windows) <= MAX_WINDOWS
    assert sum(window.length_s for window in windows) == pytest.approx(3600)
    assert recorder.windows(0.0) == []


def test_windows_that_were_given_away_do_not_change():
    recorder = Recorder(0.0)
    recorder.add(columns([0.1], [0.2]))
    (before,) = recorder.windows(0.25)
    recorder.add(columns([0.1], [0.2]))
    assert (before.num_due, before.metrics["latency"].total) == (1, 1)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 20), st.booleans()), min_size=1),
    st.integers(1, 50),
    st.randoms(),
)
def test_neither_order_nor_chunks_matter(requests, size, random):
    """And long runs lose nothing when windows are merged."""
    slo = parse("p99 < 10s")

    def recorded(rows, size):
        recorder = Recorder(0.0, slo)
        for begin in range(0, len(rows), size):
            due, latency, failed = map(np.array, zip(*rows[begin : begin + size], strict=True))
            recorder.add(columns(due, due + latency, failed=failed, failures=["x"]))
        return recorder.windows(600.0)

    shuffled = random.sample(requests, len(requests))
    windows = recorded(requests, len(requests))
    assert windows == recorded(shuffled, size)
    good = [latency for _, latency, failed in requests if not failed]
    assert sum(window.num_due for window in windows) == len(requests)
    assert sum(window.num_good for window in windows) == len(good)
    assert sum(window.num_arrived for window in windows) == len(good)
    assert histogram(windows).total == len(good)


def test_windows_double_when_there_are_too_many():
    recorder = Recorder(0.0)
    due = np.arange(0, LENGTH_S * MAX_WINDOWS * 3, 0.05)
    for part in np.array_split(due, 40):
        recorder.add(columns(part, part + 0.01))
    windows = recorder.windows(due[-1])
    assert MAX_WINDOWS / 2 < len(windows) <= MAX_WINDOWS
    assert windows[0].length_s == 4 * LENGTH_S
    assert {window.num_due for window in windows[:-1]} == {20}


# Streams.


def streamed(due, times, num_output_tokens, num_input_tokens=10):
    exchange = TimedExchange(due, None, ignore)
    exchange.sent, exchange.done = due, times[-1] if times else due + 0.01
    exchange.stream = StreamTimes()
    exchange.stream.times = times
    exchange.stream.num_input_tokens = num_input_tokens
    exchange.stream.num_output_tokens = num_output_tokens
    return exchange


def collected(*exchanges):
    collector = Collector()
    for exchange in exchanges:
        collector.add(exchange)
    return collector.take()


def test_streams_have_their_own_metrics():
    recorder = Recorder(0.0)
    recorder.add(collected(streamed(0.1, [0.3, 0.4, 0.6], 5), streamed(0.2, [0.4], 1)))
    (window,) = recorder.windows(0.25)
    assert window.metrics["latency"].total == 2
    assert window.metrics["ttft"].mean() == pytest.approx(0.2, rel=0.004)
    assert window.metrics["tpot"].total == 1
    assert window.metrics["tpot"].mean() == pytest.approx(0.3 / 4, rel=0.004)
    assert window.metrics["itl"].total == 2
    assert window.metrics["itl"].mean() == pytest.approx(0.15, rel=0.004)
    assert (window.num_input_tokens, window.num_output_tokens) == (20, 6)


def test_streams_from_before_the_start_do_not_count():
    recorder = Recorder(1.0)
    recorder.add(collected(streamed(0.9, [1.1, 1.2], 2)))
    (window,) = recorder.windows(1.25)
    assert (window.metrics, window.num_output_tokens, window.num_arrived) == ({}, 0, 1)


@pytest.mark.parametrize(
    ("slo", "num_kept"),
    [
        ("p99 < 350ms", 3),
        ("p99 ttft < 150ms", 2),
        ("p99 tpot < 80ms", 4),
        ("p99 itl < 150ms", 4),
        ("p99 ttft < 150ms, p99 itl < 150ms", 1),
        ("p99 < 10s, p50 ttft < 10s", 5),
    ],
)
def test_a_request_is_in_the_slo_when_it_keeps_every_limit(slo, num_kept):
    failed = TimedExchange(0.2, None, ignore)
    failed.done, failed.failure = 0.21, "refused"
    exchanges = [
        streamed(0.00, [0.10, 0.40], 2),  # a long gap
        streamed(0.01, [0.21, 0.26], 2),  # late
        streamed(0.02, [0.32], 1),  # later, one token
        failed,
        streamed(0.03, [0.13, 0.20], 2),  # good in every way
        streamed(0.04, [0.44, 0.50], 2),  # very late
    ]
    recorder = Recorder(0.0, parse(slo))
    recorder.add(collected(*exchanges))
    (window,) = recorder.windows(0.25)
    assert (window.num_due, window.num_good, window.num_in_slo) == (6, 5, num_kept)


def test_an_answer_without_pieces_keeps_no_limit_on_its_first():
    recorder = Recorder(0.0, parse("p99 ttft < 1s"))
    recorder.add(collected(streamed(0.1, [0.2], 1), streamed(0.1, [], 0), streamed(0.12, [0.2], 1)))
    (window,) = recorder.windows(0.25)
    assert (window.num_good, window.num_in_slo) == (3, 2)


def test_without_limits_nothing_is_in_an_slo():
    for slo in (None, parse("throughput >= 5/s")):
        recorder = Recorder(0.0, slo)
        recorder.add(columns([0.1], [0.2]))
        assert recorder.windows(0.25)[0].num_in_slo is None


@pytest.mark.parametrize(
    ("slo", "found"),
    [
        ("throughput >= 5/s", {}),
        ("p99 < 20ms, p50 < 5ms", {"latency": 0.02}),
        ("p99 < 20ms, p95 < 10ms", {"latency": 0.01}),
        ("mean < 7ms, p50 < 5ms", {"latency": 0.005}),
        ("p99 < 20ms, p50 ttft < 5ms", {"latency": 0.02, "ttft": 0.005}),
    ],
)
def test_the_limit_of_one_request_is_the_tightest_tail(slo, found):
    assert parse(slo).limits_s == found


# Samples.


def test_samples_are_kept_up_to_a_number_and_from_everywhere():
    recorder = Recorder(0.0)
    for begin in range(0, 3 * MAX_SAMPLES, 100):
        part = columns([0.1], [0.2])
        part.samples = [TimingSample(float(index), {}) for index in range(begin, begin + 100)]
        recorder.add(part)
    kept = np.array([sample.latency_s for sample in recorder.samples])
    assert len(kept) == MAX_SAMPLES == len(set(kept))
    counts, _ = np.histogram(kept, bins=3)
    assert counts == pytest.approx(np.full(3, MAX_SAMPLES / 3), rel=0.1)


def test_samples_from_before_the_start_are_not_kept():
    recorder = Recorder(1.0)
    part = columns([0.9], [1.2])
    part.samples = [TimingSample(0.3, {})]
    recorder.add(part)
    assert recorder.samples == []


def test_nothing_finished_is_nothing_recorded():
    recorder = Recorder(0.0, parse("p99 < 1s"))
    recorder.add(Collector().take())
    assert sum(window.num_due for window in recorder.windows(1.0)) == 0
