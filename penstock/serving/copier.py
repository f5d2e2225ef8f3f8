"""Copies rows into shared memory: small ones at once, large ones, where cores are many, by threads,
while the event loop goes on.

A thread that copies row by row needs the interpreter's lock for each, and gets it when the loop
happens to wait: it copies hardly anything of what comes fast. So rows that lie next to each other
are handed over together, and the kernel writes them in one call without the lock. That takes twice
as long as copying by hand, of a core that has nothing else to do. Whoever needs the rows does what
is left himself: threads that get no core hold nobody up.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

from penstock.serving.slab import Segment
from penstock.types import Buffer

# By threads from this size on: to copy less takes no longer than to hand it over.
MIN_BYTES = 48 * 1024
# Handed over as soon as so much lies together.
RUN_BYTES = 1 << 20
# Of these on two are left for copying. One writes some 4 GB a second.
MANY_CORES, NUM_THREADS = 8, 2


@dataclass(slots=True)
class Run:
    """What goes to one stretch of a segment. Buffers stay as they are until it is written."""

    segment: Segment
    offset: int
    end: int
    buffers: list[Buffer]

    def write(self) -> None:
        """By hand, where the kernel would not or not all of it."""
        try:
            is_done = os.pwritev(self.segment.fd, self.buffers, self.offset) == self.num_bytes
        except Exception:  # Whatever it is, the rows must be there.
            is_done = False
        if not is_done:
            offset = self.offset
            for each in self.buffers:
                self.segment.view[offset : offset + len(each)] = each
                offset += len(each)

    @property
    def num_bytes(self) -> int:
        return self.end - self.offset


class Copier:
    """`copy` and `wait` belong to one thread; the others start with the first large copy.

    Invariant: a run is being put together, or in `_due`, or whoever took it out holds a lock of
    `_busy` until it is written.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        """None: as many as this machine has cores for, which may be none."""
        self._num_threads = default_threads() if num_threads is None else num_threads
        self._run: Run | None = None
        self._due: deque[Run] = deque()
        # True for each run that is due, False at the end.
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._busy: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []

    def copy(self, segment: Segment, offset: int, num_bytes: int, source: Buffer) -> None:
        """Bytes, to that place. Nobody touches either before `wait` has returned. ValueError where
        they differ in size."""
        if num_bytes < MIN_BYTES or not self._num_threads:
            segment.view[offset : offset + num_bytes] = source
            return
        if len(source) != num_bytes:
            raise ValueError(f"{len(source)} bytes for a place of {num_bytes}")
        run, end = self._run, offset + num_bytes
        if run is not None and run.segment is segment and run.end == offset:
            run.end = end
            run.buffers.append(source)
        else:
            self._hand_over()
            run = self._run = Run(segment, offset, end, [source])
        if run.num_bytes >= RUN_BYTES:
            self._hand_over()

    def wait(self) -> None:
        """Until all that was asked for is done: mostly it is."""
        self._hand_over()
        while self._due:
            self._write_next()
        for lock in self._busy:
            with lock:
                pass  # A thread may be at its last one.

    def close(self) -> None:
        """What was asked for is done first."""
        self.wait()
        for _ in self._threads:
            self._calls.put(False)
        for thread in self._threads:
            thread.join()
        self._threads, self._busy = [], []

    def _hand_over(self) -> None:
        if self._run is not None:
            if not self._threads:
                self._start()
            self._due.append(self._run)
            self._run = None
            if self._threads:
                self._calls.put(True)

    def _start(self) -> None:
        for _ in range(self._num_threads):
            lock = threading.Lock()
            thread = threading.Thread(target=self._serve, args=(lock,), daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # The process may have no more threads now: whoever waits copies.
            self._threads.append(thread)
            self._busy.append(lock)

    def _serve(self, lock: threading.Lock) -> None:
        while self._calls.get():
            with lock:
                self._write_next()

    def _write_next(self) -> None:
        try:
            run = self._due.popleft()
        except IndexError:
            return  # Somebody else was there first.
        run.write()


def default_threads() -> int:
    return NUM_THREADS if len(os.sched_getaffinity(0)) >= MANY_CORES else 0
