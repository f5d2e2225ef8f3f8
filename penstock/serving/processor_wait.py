"""How long a thread has waited for a processor, as the kernel counts it.

An event loop that waits for a processor cannot see that requests wait for it: they are in the
kernel's buffers and have no time of arrival yet. `model` tells the SLO batcher, which refuses
earlier. 0 where the kernel does not count.
"""

from __future__ import annotations

import contextlib
import os

SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorWait:
    """Of the thread that makes it."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def total_s(self) -> float:
        """Since the thread began."""
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
