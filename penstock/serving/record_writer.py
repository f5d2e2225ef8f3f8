"""Writes recorded requests in a thread, so that no event loop waits for a disk.

One per process. Its queue is bounded in bytes: what does not fit is dropped and counted. When a
disk is full, recording of that model stops with one log line, and is tried again later; serving
does not notice. Knows nothing of sampling or redaction.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.serving.metrics import ModelMetrics
from penstock.serving.recording_files import SegmentRing
from penstock.types import Buffer
from penstock.wire.recording import encode_record

log = logging.getLogger("penstock.recorder")

# Limit on the bytes of requests that are in flight or queued to be written.
MAX_HELD_BYTES = 64 << 20
# Time between writes, so that several requests share one and the thread seldom wakes up.
PAUSE_S = 0.05
# Records, and their bytes, of one write.
MAX_TOGETHER = 64
MAX_WRITE_BYTES = 256 * 1024
# A disk that failed is tried again after this time.
RETRY_S = 30.0
# Time to write what is queued when the process ends.
CLOSE_S = 5.0


@dataclass(slots=True, eq=False)
class RingState:
    """A model's ring, as the thread sees it. `retry_at` is set while recording has stopped."""

    ring: SegmentRing
    name: str
    retry_at: float | None = None
    # Those of the versions whose requests could not be written.
    stopped: list[ModelMetrics] = field(default_factory=list)
    # Versions of the model that are open; the file is closed with the last.
    num_open: int = 0


@dataclass(slots=True, eq=False)
class RecordJob:
    """One record for the thread: its encoded description and the bytes of its tensors, which count
    as held until it is written."""

    state: RingState
    metrics: ModelMetrics
    description: bytes
    data: Sequence[Buffer]
    num_held: int


@dataclass(eq=False)
class RecordWriter:
    """`hold` and `put` are for the event loop, which never waits. Each counter has one writer, so
    none needs a lock."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _queue: queue.SimpleQueue[RecordJob | RingState | None] = field(
        default_factory=queue.SimpleQueue
    )
    _thread: threading.Thread | None = None
    # Changed by the event loop only, and by the thread only.
    _num_taken: int = 0
    _num_freed: int = 0

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is queued, and end the thread. Blocks for at most CLOSE_S."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def hold(self, num_bytes: int) -> bool:
        """Take room for a request; False if too much is held already."""
        if self._num_taken - self._num_freed + num_bytes > MAX_HELD_BYTES:
            return False
        self._num_taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Free the room of a request that is not written after all."""
        self._num_taken -= num_bytes

    def put(self, job: RecordJob) -> None:
        self._queue.put(job)

    def end(self, state: RingState) -> None:
        """Close the file of a model that is unloaded, after what is queued."""
        self._queue.put(state)

    def _run(self) -> None:
        while True:
            waiting = [self._queue.get()]
            while not self._queue.empty() and len(waiting) < MAX_TOGETHER:
                waiting.append(self._queue.get())
            self._handle([each for each in waiting if isinstance(each, RecordJob)])
            for each in waiting:
                if isinstance(each, RingState) and not each.num_open:
                    each.ring.close()
            if None in waiting:
                return
            if self._queue.empty():
                self.sleep(PAUSE_S)

    def _handle(self, jobs: Sequence[RecordJob]) -> None:
        by_ring: dict[int, list[RecordJob]] = {}
        for job in jobs:
            by_ring.setdefault(id(job.state), []).append(job)
        for some in by_ring.values():
            self._write(some[0].state, some)
        self._num_freed += sum(job.num_held for job in jobs)

    def _write(self, state: RingState, jobs: Sequence[RecordJob]) -> None:
        """Write records of one model; small ones share a write."""
        now = self.clock()
        if state.retry_at is not None and now < state.retry_at:
            _count_failed(jobs)
            return
        most = min(MAX_WRITE_BYTES, state.ring.max_bytes // MAX_TOGETHER)
        num_done = 0
        while num_done < len(jobs):
            buffers, count = _encode_some(jobs[num_done:], most)
            try:
                state.ring.write(buffers)
            except OSError as error:
                self._stop(state, jobs[num_done:], error, now)
                return
            for job in jobs[num_done : num_done + count]:
                job.metrics.num_recorded += 1
            num_done += count
        if state.retry_at is not None:
            state.retry_at = None
            for metrics in state.stopped:
                metrics.num_record_stopped = 0
            state.stopped.clear()
            log.info("%s is recorded again", state.name, extra={"model": state.name})

    def _stop(
        self, state: RingState, jobs: Sequence[RecordJob], error: OSError, now: float
    ) -> None:
        if state.retry_at is None:
            text = "%s is not recorded any more: %s; trying again every %.0f s"
            why = error.strerror or str(error)
            log.error(text, state.name, why, RETRY_S, extra={"model": state.name, "reason": why})
        state.retry_at = now + RETRY_S
        for job in jobs:
            if not job.metrics.num_record_stopped:
                job.metrics.num_record_stopped = 1
                state.stopped.append(job.metrics)
        _count_failed(jobs)


def _encode_some(jobs: Sequence[RecordJob], most: int) -> tuple[list[Buffer], int]:
    """Return the bytes of the first records, one at least and then up to `most`, and how many."""
    buffers: list[Buffer] = []
    size = count = 0
    while count < len(jobs) and (count == 0 or size + jobs[count].num_held <= most):
        buffers += encode_record(jobs[count].description, jobs[count].data)
        size += jobs[count].num_held
        count += 1
    return buffers, count


def _count_failed(jobs: Sequence[RecordJob]) -> None:
    for job in jobs:
        job.metrics.num_unrecorded["disk"] += 1
