"""Copies large rows into shared memory in a thread of its own, while the event loop goes on.

numpy copies without the interpreter's lock, so the loop takes the next requests meanwhile. Whoever
needs the rows does what is left himself: a thread that gets no core holds nobody up.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

import numpy as np

from penstock.types import Array, Buffer

# Copied apart from this size on. What copying and handing over take of the loop (2 cores,
# 2026-11-15): 16 kB 1.2 and 1.4 us, 48 kB 1.9 and 1.4 us, 150 kB 7.9 and 1.4 us, or 27 us to copy
# what no cache holds.
MIN_BYTES = 48 * 1024


class Copier:
    """`copy` and `wait` belong to one thread. The other starts with the first copy.

    Invariant: a copy is in `_due`, or whoever took it out holds `_busy` until it is made.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[Array, Array]] = deque()
        self._busy = threading.Lock()
        # True for each copy that is due, False at the end.
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def copy(self, target: Buffer, source: Buffer) -> None:
        """As many bytes; nobody touches either until `wait` has returned. ValueError if they differ
        in size."""
        pair = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        if pair[0].size != pair[1].size:
            raise ValueError(f"{pair[1].size} bytes for a place of {pair[0].size}")
        if self._thread is None:
            self._start()
        self._due.append(pair)
        self._calls.put(True)

    def wait(self) -> None:
        """Until all that was asked for is done: mostly it is."""
        while self._due:
            self._copy_next()
        with self._busy:
            pass  # The thread may be at the last one.

    def close(self) -> None:
        """What was asked for is done first."""
        self.wait()
        if self._thread is not None:
            self._calls.put(False)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # The process may have no more threads now: whoever waits copies.
        self._thread = thread

    def _run(self) -> None:
        while self._calls.get():
            self._copy_next()

    def _copy_next(self) -> None:
        with self._busy:
            if self._due:
                target, source = self._due.popleft()
                target[:] = source
