"""Copies large rows into shared memory in a thread of its own, while the event loop goes on.

numpy copies without the interpreter's lock, so the loop takes the next requests meanwhile. Copies
are made in the order in which they were asked for.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np

from penstock.types import Array, Buffer

# Copied apart from this size on: below it handing over takes longer. A copy of 150 kB takes 12 to
# 27 us, handing it over 3 us (2 cores, 2026-11-15).
MIN_BYTES = 48 * 1024


class Copier:
    """`copy` and `wait` belong to one thread. The other starts with the first copy."""

    def __init__(self) -> None:
        # A pair to copy, a lock to release when its turn comes, or None at the end.
        self._given: SimpleQueue[tuple[Array, Array] | threading.Lock | None] = SimpleQueue()
        self._num_given = 0
        self._num_done = 0
        self._thread: threading.Thread | None = None

    def copy(self, target: Buffer, source: Buffer) -> None:
        """As many bytes; both stay as they are until `wait` has returned. ValueError if they
        differ in size."""
        pair = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
        if pair[0].size != pair[1].size:
            raise ValueError(f"{pair[1].size} bytes for a place of {pair[0].size}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._num_given += 1
        self._given.put(pair)

    def wait(self) -> None:
        """Until all that was asked for is done: mostly it is."""
        if self._num_done == self._num_given:
            return
        turn = threading.Lock()
        turn.acquire()
        self._given.put(turn)
        turn.acquire()

    def close(self) -> None:
        """What was asked for is done first."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while self._take_next():
            pass

    def _take_next(self) -> bool:
        """Whoever waits for the next keeps none of the memory of this one."""
        given = self._given.get()
        if isinstance(given, tuple):
            target, source = given
            target[:] = source
            self._num_done += 1
        elif given is not None:
            given.release()
        return given is not None
