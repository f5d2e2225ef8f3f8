"""Batch sizes grow and are halved, on GPUs that are none."""

import pytest

from penstock.optimizer.batch_growth import LARGEST, BatchGrowth

PLANNED = (1, 8, 32, 128, 256)


def sizes_of(growth: BatchGrowth, fits: int, row_us: float, fixed_us: float) -> list[int]:
    """The sizes that are tried on a GPU with memory for this many rows."""
    tried = []
    while (size := growth.next()) is not None:
        tried.append(size)
        assert len(tried) < 30
        if size > fits:
            growth.ran_out(size)
        else:
            growth.worked(size, (fixed_us + row_us * size) / 1e6)
    return tried


def test_what_fills_the_gpu_grows_no_further() -> None:
    assert sizes_of(BatchGrowth(PLANNED), 10_000, row_us=20, fixed_us=100) == list(PLANNED)


def test_what_leaves_it_idle_grows_until_rows_get_no_cheaper() -> None:
    tried = sizes_of(BatchGrowth(PLANNED), 10_000, row_us=1, fixed_us=1000)
    assert tried[5:] == [512, 1024, 2048, 4096]
    assert sizes_of(BatchGrowth(PLANNED), 10_000, row_us=1, fixed_us=60)[5:] == [512, 1024, 2048]


def test_nothing_is_larger_than_the_largest() -> None:
    assert max(sizes_of(BatchGrowth(PLANNED), 10**9, row_us=0.001, fixed_us=1000)) == LARGEST


@pytest.mark.parametrize(
    ("fits", "after", "best"),
    [
        # 128 ran out: 64 fits.
        (100, [64], 64),
        # 128, 64: 32 worked before.
        (40, [64], 32),
        # 256 ran out, and its half has worked.
        (200, [], 128),
        # While growing: 512 ran out, and 256 has worked.
        (300, [], 256),
    ],
)
def test_out_of_memory_it_is_halved(fits: int, after: list[int], best: int) -> None:
    growth = BatchGrowth(PLANNED)
    tried = sizes_of(growth, fits, row_us=1, fixed_us=1000)
    first = next(size for size in tried if size > fits)
    assert tried[tried.index(first) + 1 :] == after
    assert max(growth.seconds) == best


def test_halving_goes_on_to_one_row() -> None:
    growth = BatchGrowth((64,))
    assert sizes_of(growth, 3, row_us=1, fixed_us=1) == [64, 32, 16, 8, 4, 2]
    growth = BatchGrowth((64,))
    assert sizes_of(growth, 0, row_us=1, fixed_us=1)[-1] == 1
    assert not growth.seconds


def test_a_model_that_takes_fewer_rows_is_not_asked_for_more() -> None:
    tried = sizes_of(BatchGrowth((1, 8, 48), most=48), 10_000, row_us=1, fixed_us=1000)
    assert tried == [1, 8, 48]
