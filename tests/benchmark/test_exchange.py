"""Finished exchanges become columns, and columns say the same."""

import math

import numpy as np

from penstock.benchmark.exchange import Collector, StreamTimes, TimedExchange, floats


def finished(
    due: float, sent: float, done: float, *, failure: str | None = None, **more: object
) -> TimedExchange:
    exchange = TimedExchange(due, None, lambda _: None)
    exchange.sent, exchange.done, exchange.failure = sent, done, failure
    for name, value in more.items():
        setattr(exchange, name, value)
    return exchange


def streamed(times: list[float], num_output: int, num_input: int = 0) -> StreamTimes:
    stream = StreamTimes()
    stream.times, stream.num_output_tokens, stream.num_input_tokens = times, num_output, num_input
    return stream


def test_times_come_back_as_they_went_in() -> None:
    collector = Collector()
    collector.add(finished(1.0, 1.25, 2.0))
    collector.add(finished(3.0, 3.5, 4.0))
    columns = collector.take()
    assert floats(columns.due).tolist() == [1.0, 3.0]
    assert floats(columns.sent).tolist() == [1.25, 3.5]
    assert floats(columns.done).tolist() == [2.0, 4.0]
    assert columns.failed == b"\0\0"


def test_failures_are_named_once() -> None:
    collector = Collector()
    for text in ("connection lost", None, "status 503", "connection lost"):
        collector.add(finished(0, 0, 1, failure=text))
    columns = collector.take()
    assert columns.failures == ["connection lost", "status 503"]
    assert columns.failed == bytes([1, 0, 2, 1])


def test_too_many_causes_end_up_together() -> None:
    collector = Collector()
    for number in range(400):
        collector.add(finished(0, 0, 1, failure=f"cause {number}"))
    columns = collector.take()
    assert len(columns.failures) == 255
    assert columns.failures[-1] == "other failures"
    assert columns.failed[-1] == 255


def test_taking_starts_anew() -> None:
    collector = Collector()
    collector.add(finished(0, 0, 1, failure="x"))
    collector.take()
    collector.add(finished(0, 0, 1))
    columns = collector.take()
    assert (columns.failed, columns.failures) == (b"\0", [])
    assert collector.take().done == b""


def test_a_stream_has_first_token_gaps_and_time_per_token() -> None:
    """TPOT = (last token - first token) / (output tokens - 1)."""
    collector = Collector()
    # Five tokens in three pieces: what counts is what the server says.
    collector.add(finished(10.0, 10.0, 12.0, stream=streamed([10.5, 11.0, 12.0], 5, 7)))
    columns = collector.take()
    assert floats(columns.stream_due).tolist() == [10.0]
    assert floats(columns.first).tolist() == [10.5]
    assert floats(columns.tpot).tolist() == [1.5 / 4]
    assert floats(columns.gaps).tolist() == [0.5, 1.0]
    assert floats(columns.gap_due).tolist() == [10.0, 10.0]
    assert np.frombuffer(columns.num_output_tokens, np.int64).tolist() == [5]
    assert np.frombuffer(columns.num_input_tokens, np.int64).tolist() == [7]


def test_one_token_has_no_time_per_token() -> None:
    collector = Collector()
    collector.add(finished(0, 0, 1, stream=streamed([0.5], 1)))
    columns = collector.take()
    assert math.isnan(floats(columns.tpot)[0])
    assert columns.gaps == b""


def test_failed_streams_and_empty_ones_are_not_streams() -> None:
    collector = Collector()
    collector.add(finished(0, 0, 1, failure="stream cut", stream=streamed([0.5], 1)))
    collector.add(finished(0, 0, 1, stream=streamed([], 0)))
    assert collector.take().first == b""


def test_what_the_server_said_of_a_request_is_kept_beside_its_latency() -> None:
    collector = Collector()
    collector.add(finished(1.0, 1.5, 3.0, phases={"queue": 0.5}))
    (sample,) = collector.take().samples
    assert (sample.latency_s, sample.phases_s) == (2.0, {"queue": 0.5})
