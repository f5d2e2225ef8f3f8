"""A worker that ran out of memory is replaced if it does not get the memory back."""

import mmap
from pathlib import Path

import pytest

from penstock.serving.worker_load import MemoryLimit, read_private_bytes

MIB = 1 << 20


def reason_at(kept_mib: int, *errors: str) -> str:
    """After a load that took 200 of 500 MiB, with this much in use after the batch."""
    readings = iter((200 * MIB, kept_mib * MIB))
    return MemoryLimit(500 * MIB, lambda: next(readings)).restart_reason(errors)


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError: ",
        "numpy: Unable to allocate 32.0 MiB for an array",
        "DefaultCPUAllocator: can't allocate memory",
        "std::bad_alloc",
    ],
)
def test_a_worker_that_keeps_most_of_its_memory_is_replaced(error: str):
    assert reason_at(351, "ok", error) == (
        "it ran out of memory and keeps 351 MiB of the 500 MiB that "
        "parameters.penstock.memory_bytes allows"
    )


def test_a_worker_that_got_its_memory_back_stays():
    assert reason_at(350, "MemoryError: ") == ""


def test_other_errors_replace_no_worker():
    assert reason_at(499, "ValueError: 13 is not a number") == ""
    assert reason_at(499) == ""


def test_a_model_that_fills_its_limit_from_the_start_stays():
    """A replacement would be as full."""
    readings = iter((500 * MIB, 500 * MIB))
    limit = MemoryLimit(500 * MIB, lambda: next(readings))
    assert limit.restart_reason(("MemoryError: ",)) == ""


def test_private_memory_is_what_the_kernel_counts(tmp_path: Path):
    before = read_private_bytes()
    with mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert 32 * MIB < read_private_bytes() - before < 96 * MIB
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t  9 kB\nVmData:\t  12 kB\n")
    assert read_private_bytes(tmp_path / "status") == 12 * 1024
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert read_private_bytes(tmp_path / "status") == 0
