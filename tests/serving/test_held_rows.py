"""Batches of rows that stay where the caller has them."""

import gc

import numpy as np
import pytest

from penstock.serving import held_rows
from penstock.serving.held_rows import HeldBatch, HeldRows

VALUES = np.arange(20, dtype=np.float32).reshape(10, 2)


def test_adjacent_rows_of_the_same_arrays_are_one_piece_without_a_copy() -> None:
    arrays, others = {"x": VALUES}, {"x": VALUES}
    bounds = [(0, 1), (1, 3), (3, 4), (6, 7), (5, 6)]
    parts = [HeldRows(arrays, *each) for each in bounds] + [HeldRows(others, 6, 7)]
    pieces = HeldBatch(parts).pieces
    assert [len(piece["x"]) for piece in pieces] == [4, 1, 1, 1]
    assert all(np.shares_memory(piece["x"], VALUES) for piece in pieces)
    joined = np.concatenate([piece["x"] for piece in pieces])
    np.testing.assert_array_equal(joined, VALUES[[0, 1, 2, 3, 6, 5, 6]])


def test_a_batch_is_found_as_long_as_somebody_has_it() -> None:
    first, second = (HeldBatch([HeldRows({"x": VALUES}, 0, n)]) for n in (1, 2))
    assert held_rows.find(first.number) is first and held_rows.find(second.number) is second
    number = first.number
    del first
    gc.collect()
    with pytest.raises(KeyError):
        held_rows.find(number)
