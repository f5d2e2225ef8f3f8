"""Processes that share a GPU and take turns: one measures alone, several compile together.

A lock file says who may (`flock`). Importing and loading need none. Compiling takes it together
with others: it keeps the CPU busy, and no process measures meanwhile. Measuring and timing of
kernels take it alone. A child that takes too long ends itself; waiting for others does not count.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

# How often a child looks at its limit.
LOOK_S = 0.5
# How they hold the GPU.
TUNER_METHODS = {"_fastest": "alone", "_compile": "together"}


class GpuLock:
    """For one thread. Who holds it alone may ask for it again; who holds it together may not ask
    for it alone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._held = ""
        self._waits_since: float | None = None
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else time.monotonic() - since)

    def close(self) -> None:
        self._file.close()

    def alone(self) -> AbstractContextManager[None]:
        return self._hold("alone", fcntl.LOCK_EX)

    def together(self) -> AbstractContextManager[None]:
        return self._hold("together", fcntl.LOCK_SH)

    @contextmanager
    def _hold(self, how: str, flag: int) -> Iterator[None]:
        if self._held:
            if how == "alone" != self._held:
                raise RuntimeError("the GPU is held together with others; it was asked for alone")
            yield
            return
        self._waits_since = time.monotonic()
        fcntl.flock(self._file, flag)
        self._waited_s, self._waits_since = self.waited_s, None
        self._held = how
        try:
            yield
        finally:
            self._held = ""
            fcntl.flock(self._file, fcntl.LOCK_UN)


def time_kernels_in_turns(lock: GpuLock) -> None:
    """Tuners of this process compile together with other processes, and time alone. cuDNN times
    its algorithms by itself at the first call of a shape, so a layer is held alone as a whole."""
    from penstock.kernels.convolution import GpuTimer, Tuner

    _wrap(GpuTimer, "seconds", lock.alone)
    for name, how in TUNER_METHODS.items():
        _wrap(Tuner, name, getattr(lock, how))


def _wrap(kind: type, name: str, hold: Callable[[], AbstractContextManager[None]]) -> None:
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def held(*args: object, **keywords: object) -> object:
        with hold():
            return plain(*args, **keywords)

    setattr(kind, name, held)


def end_after(limit_s: float, lock: GpuLock) -> None:
    """End this process with an answer when it has worked for so long."""
    began = time.monotonic()

    def watch() -> None:
        while time.monotonic() - began - lock.waited_s < limit_s:
            time.sleep(LOOK_S)
        print("\n" + json.dumps({"error": f"not done in {limit_s:.0f} s"}), flush=True)
        sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
