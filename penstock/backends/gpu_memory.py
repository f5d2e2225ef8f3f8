"""When a worker's share of a GPU's memory has to be put in order, before a batch finds none. Pure.

torch keeps what it has taken from the driver. Batches of many sizes leave it in pieces that none of
the next fits into, and a leak takes more of it for ever. As long as the GPU has room that harms
nobody. When it has not, what is kept and unused goes back to the driver (*shrink*); where that is
not enough, and it is this worker that has grown, a new one takes its place (*restart*).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fine", "shrink", "restart"]

# With less than this free, the next large batch may find no memory.
TIGHT_BYTES = 512 << 20
# What is worth giving back: it is asked for again, which takes time.
MIN_UNUSED_BYTES = 64 << 20
# Beyond what a worker had when it was warm, that it may grow by for batches of other shapes.
GROWTH = 0.25
MIN_GROWTH_BYTES = 256 << 20
# What libraries say when they find no memory, each in its own way; cuBLAS, cuDNN and Triton know
# nothing of torch's error for it.
NO_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)
# What they say of that and of other trouble: believed where the GPU is full.
PERHAPS_NO_MEMORY = (
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)


@dataclass(frozen=True, slots=True)
class Use:
    """Of one worker, and of its GPU."""

    # By tensors, and kept by the allocator with what is not used now.
    allocated_bytes: int
    reserved_bytes: int
    # Of the GPU, by nobody.
    free_bytes: int


def limit_of(settled_bytes: int) -> int:
    """The high-water mark of a worker that kept so much when everything was warm."""
    return settled_bytes + max(MIN_GROWTH_BYTES, int(GROWTH * settled_bytes))


def judge(use: Use, limit_bytes: int, *, was_shrunk: bool) -> Verdict:
    """`was_shrunk`: the last look already had it give back what it could."""
    if use.free_bytes >= TIGHT_BYTES:
        return "fine"
    unused = use.reserved_bytes - use.allocated_bytes
    if unused >= MIN_UNUSED_BYTES and not was_shrunk:
        return "shrink"
    # Who has not grown would be as large again.
    return "restart" if use.reserved_bytes > limit_bytes else "fine"


def tells_of_no_memory(text: str, use: Use | None) -> bool:
    """Whether an error's text means that there was no room. None: nothing is known of the use."""
    if any(each in text for each in NO_MEMORY):
        return True
    is_tight = use is not None and use.free_bytes < TIGHT_BYTES
    return is_tight and any(each in text for each in PERHAPS_NO_MEMORY)


class Guard:
    """Looks from time to time; nothing is done before it knows what is usual."""

    def __init__(self) -> None:
        self._limit_bytes: int | None = None
        self._was_shrunk = False

    def settle(self, use: Use) -> None:
        """Everything is warm."""
        self._limit_bytes = limit_of(use.reserved_bytes)

    def look(self, use: Use) -> Verdict:
        if self._limit_bytes is None:
            return "fine"
        verdict = judge(use, self._limit_bytes, was_shrunk=self._was_shrunk)
        self._was_shrunk = verdict == "shrink" or (
            self._was_shrunk and use.free_bytes < TIGHT_BYTES
        )
        return verdict
