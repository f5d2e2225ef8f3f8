"""Rows with NaN or infinity are found by index, and listed in a few words."""

import numpy as np
import pytest

from penstock.data.non_finite import NonFinite, describe, find_non_finite
from penstock.types import Array, TensorSpec


def find(
    datatype: str, column: Array | list[Array | None], name: str = "x"
) -> list[tuple[int, str]]:
    spec = TensorSpec(name, datatype, (-1,))
    found = find_non_finite(spec, column, "data.npz", lambda index: f"row {index}")
    assert {(each.file, each.input) for each in found} <= {("data.npz", name)}
    assert [each.place for each in found] == [f"row {each.index}" for each in found]
    return [(each.index, each.values) for each in found]


def test_one_row_among_many() -> None:
    values = np.random.default_rng(0).normal(size=(3000, 5)).astype(np.float32)
    assert find("FP32", values) == []
    values[1717, 3] = np.nan
    assert find("FP32", values) == [(1717, "NaN")]
    values[2040, 0], values[1717, 0] = -np.inf, np.inf
    assert find("FP32", values) == [(1717, "NaN and infinity"), (2040, "infinity")]


def test_rows_of_different_lengths_and_rows_left_out() -> None:
    rows = [np.ones(3), None, np.array([1.0, np.nan]), np.ones(0)]
    assert find("FP64", rows) == [(2, "NaN")]


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("FP16", np.array([[1, np.inf]], np.float16), [(0, "infinity")]),
        ("INT32", np.array([[1, 2]]), []),
        ("BYTES", np.array([[b"nan"]], object), []),
        ("BF16", np.array([[0x3F80], [0x7F80]], np.uint16), [(1, "infinity")]),
        ("BF16", np.array([[0x3F80], [0xFFC0]], np.uint16), [(1, "NaN")]),
        ("BF16", np.array([[0x3F80], [0xBF80]], np.uint16), []),
    ],
)
def test_every_datatype(datatype: str, values: Array, expected: list[tuple[int, str]]) -> None:
    assert find(datatype, values) == expected


def bad(*indices: int, name: str = "x", values: str = "NaN") -> list[NonFinite]:
    return [NonFinite("data.npz", name, each, f"row {each}", values) for each in indices]


def test_few_places_are_listed_and_the_rest_is_counted() -> None:
    assert describe([]) == []
    assert describe(bad(1717)) == ["data.npz: input 'x' row 1717 has NaN"]
    assert describe(bad(1, 2)) == ["data.npz: input 'x' rows 1 and 2 have NaN"]
    assert describe(bad(1, 2, 3)) == ["data.npz: input 'x' rows 1, 2 and 3 have NaN"]
    assert describe(bad(*range(1700))) == [
        "data.npz: input 'x' rows 0, 1, 2 and 1,697 more have NaN"
    ]


def test_inputs_and_kinds_of_values_are_told_apart() -> None:
    found = [*bad(1), *bad(5, values="NaN and infinity"), *bad(9, name="z", values="infinity")]
    assert describe(found) == [
        "data.npz: input 'x' rows 1 and 5 have NaN or infinity",
        "data.npz: input 'z' row 9 has infinity",
    ]
