"""Writes traces in a thread: to a file, or to a collector of OpenTelemetry by OTLP over HTTP.

The event loop only appends to a bounded queue. What does not fit, or cannot be written, is dropped
and counted; a collector that is slow or gone delays no request.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from penstock.config import TraceConfig
from penstock.serving.trace_files import TraceFile
from penstock.wire.trace_records import TraceRecord
from penstock.wire.trace_spans import chrome_events, otlp_body, otlp_spans, triton_entries

log = logging.getLogger("penstock.traces")

# Traces that wait for a file.
MAX_WAITING = 8192
# Traces that are written together.
MAX_TOGETHER = 64
# Time between writes to a file, so that several traces share one wake-up.
PAUSE_S = 0.05
# Time for the collector to answer, and for the rest when the server stops.
POST_S = 10.0
CLOSE_S = 3.0
DEFAULT_RESOURCE = {"service.name": "penstock"}


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A trace for the thread, and how many go to one file."""

    record: TraceRecord
    log_frequency: int = 0


class TraceTarget(Protocol):
    """Where traces go; belongs to the thread."""

    def write(self, jobs: Sequence[TraceJob]) -> int:
        """Write traces; return how many could be. OSError or HTTPException if it fails."""

    def close(self) -> None: ...


class TritonTarget:
    """Triton's trace file."""

    def __init__(self, path: Path) -> None:
        self._file = TraceFile(path)
        self._new_id = itertools.count(1).__next__
        self.close = self._file.close

    def write(self, jobs: Sequence[TraceJob]) -> int:
        return sum(
            self._file.write(triton_entries(job.record, self._new_id), job.log_frequency)
            for job in jobs
        )


class ChromeTarget:
    """A file for chrome://tracing and Perfetto."""

    def __init__(self, path: Path) -> None:
        self._file = TraceFile(path)
        self._new_id = itertools.count(1).__next__
        self.close = self._file.close

    def write(self, jobs: Sequence[TraceJob]) -> int:
        pid = os.getpid()
        return sum(
            self._file.write(chrome_events(job.record, self._new_id, pid), job.log_frequency)
            for job in jobs
        )


class OtlpTarget:
    """A collector: one POST of OTLP's JSON for each batch, on a connection that is kept."""

    def __init__(self, config: TraceConfig) -> None:
        url = urlsplit(config.url)
        self._connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
        self._host, self._port = url.hostname or "", url.port
        self._path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._resource = {**DEFAULT_RESOURCE, **config.resource}
        self._connection: HTTPConnection | None = None

    def write(self, jobs: Sequence[TraceJob]) -> int:
        offset_s = time.time() - time.monotonic()
        spans = [span for job in jobs for span in otlp_spans(job.record, offset_s, _new_hex)]
        body = otlp_body(spans, self._resource)
        try:
            self._post(body)
        except (OSError, HTTPException):
            self.close()
            raise
        return len(jobs)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes) -> None:
        is_kept = self._connection is not None
        if self._connection is None:
            self._connection = self._connect(self._host, self._port, timeout=POST_S)
        try:
            status = self._ask(self._connection, body)
        except (ConnectionError, HTTPException):
            if not is_kept:
                raise
            # The collector has closed a connection that was idle.
            self._connection.close()
            status = self._ask(self._connection, body)
        if status >= 300:
            raise HTTPException(f"the collector answered {status}")

    def _ask(self, connection: HTTPConnection, body: bytes) -> int:
        connection.request("POST", self._path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


def _new_hex(num_bytes: int) -> str:
    return os.urandom(num_bytes).hex()


def make_target(config: TraceConfig) -> TraceTarget | None:
    """Return where traces go; None if the operator has named no place."""
    if config.exports:
        return OtlpTarget(config)
    if not config.file:
        return None
    path = Path(config.file).absolute()
    return ChromeTarget(path) if config.mode == "chrome" else TritonTarget(path)


@dataclass(eq=False)
class TraceWriter:
    """`put` is for the event loop; each counter has one writer, so none needs a lock. The thread
    starts with the first trace. It writes as soon as `max_together` traces wait, or `pause_s`
    after the last write."""

    target: TraceTarget
    max_waiting: int = MAX_WAITING
    max_together: int = MAX_TOGETHER
    pause_s: float = PAUSE_S
    _queue: queue.Queue[TraceJob | None] = field(init=False)
    _thread: threading.Thread | None = None
    # Set while the thread must not wait for further traces: the server stops, or many wait.
    _is_due: threading.Event = field(default_factory=threading.Event)
    _is_ending: bool = False
    # By the event loop, and by the thread.
    num_refused: int = 0
    num_written: int = 0
    num_lost: int = 0
    # Whether the last write failed; logged once.
    _is_failing: bool = False

    @classmethod
    def make(cls, config: TraceConfig) -> TraceWriter | None:
        target = make_target(config)
        if target is None:
            return None
        if not config.exports:
            return cls(target)
        return cls(target, config.max_queue_size, config.max_batch_size, config.schedule_delay_s)

    def __post_init__(self) -> None:
        # One more, for the end.
        self._queue = queue.Queue(self.max_waiting + 1)

    @property
    def num_dropped(self) -> int:
        return self.num_refused + self.num_lost

    def put(self, job: TraceJob) -> None:
        if self._queue.qsize() >= self.max_waiting:
            self.num_refused += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        self._queue.put_nowait(job)
        if self._queue.qsize() >= self.max_together:
            self._is_due.set()

    def close(self) -> None:
        """Write what waits, and end the thread. Blocks for at most CLOSE_S."""
        if self._thread is None:
            return
        self._is_ending = True
        self._queue.put_nowait(None)
        self._is_due.set()
        self._thread.join(CLOSE_S)
        self._thread = None

    def _run(self) -> None:
        has_ended = False
        while not has_ended:
            jobs = [self._queue.get()]
            if not self._is_ending:
                self._is_due.wait(self.pause_s)
                self._is_due.clear()
            with contextlib.suppress(queue.Empty):
                while len(jobs) < self.max_together:
                    jobs.append(self._queue.get_nowait())
            if self._queue.qsize() >= self.max_together:
                self._is_due.set()
            has_ended = None in jobs
            self._write([job for job in jobs if job is not None])
        self.target.close()

    def _write(self, jobs: Sequence[TraceJob]) -> None:
        if not jobs:
            return
        try:
            count = self.target.write(jobs)
            reason = "the trace file is full" if count < len(jobs) else ""
        except (OSError, HTTPException) as error:
            count, reason = 0, str(error) or type(error).__name__
        except Exception:  # A trace that cannot be written must not end the thread.
            log.exception("traces could not be written")
            count, reason = 0, "internal error"
        self.num_written += count
        self.num_lost += len(jobs) - count
        if reason and not self._is_failing:
            log.error("traces are dropped: %s", reason, extra={"reason": reason})
        elif self._is_failing and not reason:
            log.info("traces are written again")
        self._is_failing = bool(reason)
