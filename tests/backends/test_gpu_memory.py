"""When a GPU's memory is put in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.gpu_memory import (
    GROWTH,
    MIN_GROWTH_BYTES,
    MIN_UNUSED_BYTES,
    TIGHT_BYTES,
    Guard,
    Use,
    judge,
    limit_of,
    tells_of_no_memory,
)

GIB = 1 << 30
ROOM = 10 * GIB
SIZES = st.integers(0, 200 * GIB)


@pytest.mark.parametrize(
    ("use", "was_shrunk", "verdict"),
    [
        # With room on the GPU, whatever it holds.
        (Use(GIB, 50 * GIB, ROOM), False, "fine"),
        (Use(GIB, 50 * GIB, TIGHT_BYTES), True, "fine"),
        # Full, and it could give something back.
        (Use(GIB, 2 * GIB, TIGHT_BYTES - 1), False, "shrink"),
        (Use(GIB, 50 * GIB, 0), False, "shrink"),
        # It has, and holds more than it should.
        (Use(GIB, 5 * GIB, 0), True, "restart"),
        # It leaks: there is nothing to give back.
        (Use(5 * GIB, 5 * GIB, 0), False, "restart"),
        # Others have filled the GPU.
        (Use(GIB, GIB, 0), False, "fine"),
        (Use(GIB, 4 * GIB, 0), True, "fine"),
        (Use(GIB, GIB + MIN_UNUSED_BYTES - 1, 0), False, "fine"),
    ],
)
def test_what_is_done(use: Use, was_shrunk: bool, verdict: str) -> None:
    assert judge(use, 4 * GIB, was_shrunk=was_shrunk) == verdict


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_every_library_has_its_own_words_for_no_memory(text: str) -> None:
    assert tells_of_no_memory(text, None)
    assert tells_of_no_memory(text, Use(GIB, GIB, ROOM))


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    ],
)
def test_what_may_mean_something_else_is_believed_of_a_full_gpu_only(text: str) -> None:
    assert tells_of_no_memory(text, Use(GIB, GIB, TIGHT_BYTES - 1))
    assert not tells_of_no_memory(text, Use(GIB, GIB, TIGHT_BYTES))
    assert not tells_of_no_memory(text, None)


def test_other_trouble_is_other_trouble() -> None:
    for text in ("CUDA error: an illegal memory access was encountered", "shape mismatch", ""):
        assert not tells_of_no_memory(text, Use(GIB, GIB, 0))


def test_the_mark_is_above_what_it_had() -> None:
    assert limit_of(0) == MIN_GROWTH_BYTES
    assert limit_of(100 * GIB) == 100 * GIB * (1 + GROWTH)


def test_nothing_is_done_before_everything_is_warm() -> None:
    assert Guard().look(Use(50 * GIB, 60 * GIB, 0)) == "fine"


def test_it_gives_back_once_as_long_as_the_gpu_is_full() -> None:
    guard = Guard()
    guard.settle(Use(GIB, 2 * GIB, ROOM))
    full = Use(GIB, 2 * GIB, 0)
    assert [guard.look(full) for _ in range(3)] == ["shrink", "fine", "fine"]
    assert guard.look(Use(GIB, 2 * GIB, ROOM)) == "fine"
    assert guard.look(full) == "shrink"


def test_one_that_has_outgrown_itself_is_replaced() -> None:
    guard = Guard()
    guard.settle(Use(GIB, 2 * GIB, ROOM))
    pieces = Use(GIB, 6 * GIB, 0)
    assert [guard.look(pieces) for _ in range(2)] == ["shrink", "restart"]


@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_nobody_is_replaced_who_has_not_grown(
    allocated: int, kept: int, free: int, settled: int, was_shrunk: bool
) -> None:
    use = Use(allocated, allocated + kept, free)
    verdict = judge(use, limit_of(settled), was_shrunk=was_shrunk)
    if use.reserved_bytes <= settled or free >= TIGHT_BYTES:
        assert verdict != "restart"
    if verdict == "shrink":
        assert kept >= MIN_UNUSED_BYTES and not was_shrunk
