"""Sends the core what a model's code does to its metrics, while it changes them.

A thread does it, so that a change costs the model no system call and threads of its own are heard
too. Any thread may change metrics.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from penstock.backends.metric_book import BOOK, MetricBook
from penstock.wire.frames import Measured, encode

# Changes within this time are sent together.
SEND_EVERY_S = 0.05
# Limit on the changes of one frame.
MAX_CHANGES = 100


class WorkerMetrics:
    """The metrics of the model that this thread loads and runs."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._book = MetricBook(self._wake, self._tell)
        self._changed = threading.Event()
        self._closed = threading.Event()
        # Guards `_thread`, which is there once a metric has changed.
        self._lock = threading.Lock()
        # Keeps the order of what is sent.
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        BOOK.set(self._book)

    def close(self) -> None:
        """Send the last changes, and stop."""
        self._closed.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        self._changed.set()
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        is_closed = False
        while not is_closed:
            self._changed.wait()
            is_closed = self._closed.is_set()
            self._changed.clear()
            self._tell()
            self._closed.wait(SEND_EVERY_S)

    def _tell(self) -> None:
        """Send what has changed; also at once, so that a new metric is in the next scrape."""
        with self._sending:
            changes = self._book.take()
            # A core that has exited needs none; the thread that reads notices too.
            with contextlib.suppress(OSError):
                for first in range(0, len(changes), MAX_CHANGES):
                    part = tuple(changes[first : first + MAX_CHANGES])
                    self._send(encode(Measured(part)))
