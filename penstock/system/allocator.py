"""The C library's allocator in long-lived processes."""

from __future__ import annotations

import ctypes
import os

# Options of mallopt, in malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# By default glibc returns freed memory at once beyond some MB, so each request that makes arrays
# gets its pages anew: 576 page faults for one JPEG in a Python model, 1.4 of 4.4 CPU-ms (2 cores,
# 2026-11-19). Beyond these, memory still goes back.
KEPT_BYTES, LARGEST_KEPT_BYTES = 64 << 20, 32 << 20
# Operators who set these have the last word.
OPTIONS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed memory for the next request; return False if that was left as it is: it is set in
    the environment, or the C library is another one."""
    if any(name in os.environ for name in OPTIONS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {M_MMAP_THRESHOLD: LARGEST_KEPT_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES}
    return all([mallopt(option, value) == 1 for option, value in options.items()])
