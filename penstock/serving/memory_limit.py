"""Decides whether a worker that ran out of memory has to be replaced.

A batch that is too large fails and frees its memory. A leak stays: all later batches of the worker
would fail, and so fast that the worker would attract most of the load. Knows neither frames nor
processes.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable
from pathlib import Path

# The wording of Python, numpy, torch and C++ libraries.
OUT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|allocate|out of memory", re.IGNORECASE)
# A worker is replaced when it keeps more than this share of what was free after its load.
MAX_KEPT_SHARE = 0.5
MIB = 1 << 20


def read_private_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return how much memory, as limited by RLIMIT_DATA, this process has."""
    for line in status.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


class MemoryLimit:
    """The `penstock.memory_bytes` of one worker; created when its model is loaded and warm."""

    def __init__(
        self, limit_bytes: int, read_bytes: Callable[[], int] = read_private_bytes
    ) -> None:
        self._limit_bytes = limit_bytes
        self._read_bytes = read_bytes
        free_bytes = max(0, limit_bytes - read_bytes())
        self._max_kept_bytes = limit_bytes - int((1 - MAX_KEPT_SHARE) * free_bytes)

    def restart_reason(self, errors: Iterable[str]) -> str:
        """Return why a new worker should replace this one after a batch that failed with `errors`;
        empty if it need not. Call it when the exceptions are gone, since they hold memory."""
        if not any(OUT_OF_MEMORY.search(error) for error in errors):
            return ""
        gc.collect()
        kept_bytes = self._read_bytes()
        if kept_bytes <= self._max_kept_bytes:
            return ""
        return (
            f"it ran out of memory and keeps {kept_bytes // MIB} MiB of the "
            f"{self._limit_bytes // MIB} MiB that parameters.penstock.memory_bytes allows"
        )
