"""Batches of rows that stay where the caller has them."""

import gc

import numpy as np
import pytest

from penstock.serving import held_rows
from penstock.serving.held_rows import HeldBatch, HeldRows
from penstock.types import TensorSpec

VALUES = np.arange(20, dtype=np.float32).reshape(10, 2)


def test_adjacent_rows_of_the_same_arrays_are_one_piece_without_a_copy() -> None:
    arrays, others = {"x": VALUES}, {"x": VALUES}
    bounds = [(0, 1), (1, 3), (3, 4), (6, 7), (5, 6)]
    parts = [HeldRows(arrays, *each) for each in bounds] + [HeldRows(others, 6, 7)]
    pieces = HeldBatch([1, 2, 1, 1, 1, 1], parts).pieces
    assert [len(piece["x"]) for piece in pieces] == [4, 1, 1, 1]
    assert all(np.shares_memory(piece["x"], VALUES) for piece in pieces)
    joined = np.concatenate([piece["x"] for piece in pieces])
    np.testing.assert_array_equal(joined, VALUES[[0, 1, 2, 3, 6, 5, 6]])


def test_a_batch_is_found_as_long_as_somebody_has_it() -> None:
    first, second = (HeldBatch([n], [HeldRows({"x": VALUES}, 0, n)]) for n in (1, 2))
    assert held_rows.find(first.number) is first and held_rows.find(second.number) is second
    number = first.number
    del first
    gc.collect()
    with pytest.raises(KeyError):
        held_rows.find(number)


@pytest.mark.parametrize("size", [2, 5000])
def test_outputs_are_split_into_memory_of_their_own(size: int) -> None:
    values = np.arange(4 * size, dtype=np.float32).reshape(4, size)
    found = HeldBatch([1, 2, 1]).split(values)
    assert [len(each) for each in found] == [1, 2, 1]
    np.testing.assert_array_equal(np.concatenate(found), values)
    assert not any(np.shares_memory(each, values) for each in found)
    kept = [each if each.base is None else each.base for each in found]
    assert max(each.nbytes for each in kept) <= max(held_rows.MAX_TOGETHER_BYTES, 2 * size * 4)
    (alone,) = HeldBatch([4]).split(values)
    assert alone.base is None and not np.shares_memory(alone, values)


@pytest.mark.parametrize("values", [["a", b"\xff"], np.array([b"a", b"\xff"])])
def test_texts_become_bytes(values: object) -> None:
    array = np.asarray(values, dtype=object) if isinstance(values, list) else values
    found = held_rows.private(TensorSpec("y", "BYTES", (2,)), array)
    assert found.tolist() == [b"a", b"\xff"] and not np.shares_memory(found, array)
