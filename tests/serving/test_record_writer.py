"""The thread that writes recordings: bounded, and quiet when the disk fails."""

import errno
import logging
from collections.abc import Sequence

import pytest
from doubles import FakeClock
from waiting import wait_until

from penstock.serving.metrics import ModelMetrics
from penstock.serving.record_writer import (
    MAX_HELD_BYTES,
    MAX_WRITE_BYTES,
    RETRY_S,
    RecordJob,
    RecordWriter,
    RingState,
)
from penstock.types import Buffer
from penstock.wire.recording import (
    OK,
    RecordedRequest,
    SegmentHeader,
    decode_records,
    encode_description,
    encode_header,
)

HEADER = SegmentHeader("m", 0, 1.0, 0.0)


class FakeRing:
    """Takes records in memory; fails while `is_full`."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_full = False
        self.num_closed = 0
        self.max_bytes = 10**9

    def write(self, buffers: Sequence[Buffer]) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(b"".join(buffers))

    def close(self) -> None:
        self.num_closed += 1


def new_metrics() -> ModelMetrics:
    metrics = ModelMetrics("m", "1")
    metrics.num_unrecorded = {"disk": 0}
    return metrics


def job(state: RingState, metrics: ModelMetrics, number: int = 0, held: int = 10) -> RecordJob:
    record = RecordedRequest(float(number), str(number), "1", OK, 0.0, "")
    return RecordJob(state, metrics, encode_description(record), [], held)


def test_records_are_written_in_order_before_the_end() -> None:
    ring, metrics = FakeRing(), new_metrics()
    state, writer = RingState(ring, "m"), RecordWriter()
    writer.start()
    for number in range(200):
        assert writer.hold(10)
        writer.put(job(state, metrics, number))
    writer.close()
    assert metrics.num_recorded == 200 and len(ring.written) < 200
    whole = b"".join(ring.written)
    start = len(encode_header(HEADER))
    records = decode_records(memoryview(encode_header(HEADER) + whole), start)
    assert [each.id for each, _ in records] == [str(number) for number in range(200)]


def test_large_records_do_not_share_a_write() -> None:
    ring, metrics = FakeRing(), new_metrics()
    state, writer = RingState(ring, "m"), RecordWriter()
    for number in range(10):
        writer.put(job(state, metrics, number, held=MAX_WRITE_BYTES))
    writer.start()
    writer.close()
    assert metrics.num_recorded == len(ring.written) == 10


def test_what_is_held_is_bounded_and_freed() -> None:
    ring, metrics = FakeRing(), new_metrics()
    state, writer = RingState(ring, "m"), RecordWriter()
    assert writer.hold(MAX_HELD_BYTES)
    assert not writer.hold(1)
    writer.give_back(MAX_HELD_BYTES)
    assert writer.hold(MAX_HELD_BYTES)
    writer.start()
    writer.put(job(state, metrics, held=MAX_HELD_BYTES))
    wait_until(lambda: metrics.num_recorded == 1)
    wait_until(lambda: writer.hold(MAX_HELD_BYTES))
    writer.close()


def test_a_full_disk_stops_with_one_line_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring, metrics, clock = FakeRing(), new_metrics(), FakeClock()
    state, writer = RingState(ring, "m"), RecordWriter(clock)
    writer.start()
    ring.is_full = True
    with caplog.at_level(logging.INFO, "penstock.recorder"):
        for number in range(5):
            writer.put(job(state, metrics, number))
            wait_until(lambda number=number: metrics.num_unrecorded["disk"] == number + 1)
        assert metrics.num_record_stopped == 1
        assert [each.levelname for each in caplog.records] == ["ERROR"]
        assert "No space left on device" in caplog.text
        ring.is_full = False
        writer.put(job(state, metrics))
        wait_until(lambda: metrics.num_unrecorded["disk"] == 6)
        clock.advance(RETRY_S)
        writer.put(job(state, metrics))
        wait_until(lambda: metrics.num_recorded == 1)
        writer.close()
        assert metrics.num_record_stopped == 0
        assert [each.levelname for each in caplog.records] == ["ERROR", "INFO"]


def test_when_a_disk_has_room_again_no_version_of_the_model_is_shown_as_stopped() -> None:
    ring, clock = FakeRing(), FakeClock()
    old, new = new_metrics(), new_metrics()
    state, writer = RingState(ring, "m"), RecordWriter(clock)
    ring.is_full = True
    for metrics in (old, new):
        writer.put(job(state, metrics))
    writer.start()
    wait_until(lambda: new.num_unrecorded["disk"] == 1)
    assert (old.num_record_stopped, new.num_record_stopped) == (1, 1)
    ring.is_full = False
    clock.advance(RETRY_S)
    writer.put(job(state, new))
    writer.close()
    assert (old.num_record_stopped, new.num_record_stopped) == (0, 0)


def test_one_model_on_a_full_disk_does_not_stop_another() -> None:
    full, good = FakeRing(), FakeRing()
    full.is_full = True
    first, second, writer = new_metrics(), new_metrics(), RecordWriter()
    writer.put(job(RingState(full, "a"), first))
    writer.put(job(RingState(good, "b"), second))
    writer.start()
    writer.close()
    assert (first.num_recorded, second.num_recorded) == (0, 1)


def test_a_file_is_closed_with_the_last_version_of_its_model() -> None:
    ring = FakeRing()
    state, writer = RingState(ring, "m", num_open=1), RecordWriter()
    writer.end(state)
    writer.start()
    writer.close()
    assert ring.num_closed == 0
    state.num_open = 0
    writer.end(state)
    writer.start()
    writer.close()
    assert ring.num_closed == 1
