"""Decide when a worker must free GPU memory, before a batch runs out of it. Pure.

torch keeps memory that it got from the driver. Batches of many sizes fragment it, and a leak makes
it grow for ever. That is harmless as long as the GPU has room. When it has not, unused memory goes
back to the driver (*shrink*); if that is not enough, and this worker has grown, a new one replaces
it (*restart*).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "shrink", "restart"]

# With less than this free, the next large batch may run out of memory.
TIGHT_BYTES = 512 << 20
# Least amount worth returning: it is allocated again later, which takes time.
MIN_UNUSED_BYTES = 64 << 20
# Allowed growth beyond the use after warm-up, for batches of other shapes.
GROWTH = 0.25
MIN_GROWTH_BYTES = 256 << 20
# Out-of-memory messages of libraries: cuBLAS, cuDNN, Triton and ONNX Runtime do not raise torch's
# error.
NO_MEMORY = (
    "out of memory",
    "Failed to allocate memory",
    "is smaller than requested bytes",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)
# Ambiguous messages: they count as out of memory if the GPU is full.
PERHAPS_NO_MEMORY = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)


@dataclass(frozen=True, slots=True)
class Use:
    """Memory of one worker and of its GPU."""

    # Used by tensors; and reserved by the allocator, including unused memory.
    allocated_bytes: int
    reserved_bytes: int
    # Free on the GPU.
    free_bytes: int


def limit_of(settled_bytes: int) -> int:
    """Return the limit of a worker that reserved `settled_bytes` after warm-up."""
    return settled_bytes + max(MIN_GROWTH_BYTES, int(GROWTH * settled_bytes))


def judge(use: Use, limit_bytes: int, *, was_shrunk: bool) -> Verdict:
    """Return what to do. `was_shrunk`: the last check already returned unused memory."""
    if use.free_bytes >= TIGHT_BYTES:
        return "fine"
    unused = use.reserved_bytes - use.allocated_bytes
    if unused >= MIN_UNUSED_BYTES and not was_shrunk:
        return "shrink"
    # A worker that has not grown would be as large after a restart.
    return "restart" if use.reserved_bytes > limit_bytes else "fine"


def tells_of_no_memory(text: str, use: Use | None) -> bool:
    """Return whether an error means out of memory. `use` is None if unknown."""
    if any(each in text for each in NO_MEMORY):
        return True
    is_tight = use is not None and use.free_bytes < TIGHT_BYTES
    return is_tight and any(each in text for each in PERHAPS_NO_MEMORY)


class Guard:
    """Periodic memory check; inactive before `settle`."""

    def __init__(self) -> None:
        self._limit_bytes: int | None = None
        self._was_shrunk = False

    def settle(self, use: Use) -> None:
        """Set the limit from the use after warm-up."""
        self._limit_bytes = limit_of(use.reserved_bytes)

    def look(self, use: Use) -> Verdict:
        if self._limit_bytes is None:
            return "fine"
        verdict = judge(use, self._limit_bytes, was_shrunk=self._was_shrunk)
        self._was_shrunk = verdict == "shrink" or (
            self._was_shrunk and use.free_bytes < TIGHT_BYTES
        )
        return verdict
