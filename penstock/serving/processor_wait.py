"""How long a thread has waited for a CPU, as counted by the kernel.

While an event loop waits for a CPU, requests wait in the kernel's socket buffers, without an
arrival time yet. `model` passes this wait to the SLO batcher, which then refuses earlier. 0 if the
kernel does not count it.
"""

from __future__ import annotations

import contextlib
import os

SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorWait:
    """The CPU wait of the thread that creates it."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def total_s(self) -> float:
        """Return the total wait since the thread started."""
        if self._fd is None:
            return 0.0
        try:
            return int(os.pread(self._fd, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """Safe to call again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
