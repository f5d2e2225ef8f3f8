"""Triton's batch inputs and outputs; the values are those of its model_config.proto and of its
L0_batch_input test."""

import numpy as np
import pytest

from penstock.backends.joined_requests import describe, scatter
from penstock.config import BatchInput
from penstock.errors import BackendFailed

REQUESTS = [(1, 2), (1, 4), (1, 1), (1, 3)]
# A request of two rows [3, 1] and one of a row [2, 2].
ITEMS = [(2, 3, 1), (1, 2, 2)]


def made(kind: str, shapes: list[tuple[int, ...]], datatype: str = "FP32") -> np.ndarray:
    return describe(BatchInput(kind, ("n",), datatype, "x"), shapes)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [2, 4, 1, 3]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [2, 6, 7, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 2, 6, 7, 10]),
    ],
)
@pytest.mark.parametrize("datatype", ["FP32", "INT32"])
def test_counts(kind: str, expected: list[int], datatype: str):
    values = made(kind, REQUESTS, datatype)
    assert values.tolist() == expected
    assert values.dtype == {"FP32": np.float32, "INT32": np.int32}[datatype]


def test_the_largest_count_is_a_shape():
    assert made("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", REQUESTS).shape == (4,)


def test_counts_are_those_of_requests_with_all_their_rows():
    assert made("BATCH_ELEMENT_COUNT", ITEMS).tolist() == [6, 4]


def test_shapes_are_those_of_rows():
    assert made("BATCH_ITEM_SHAPE", ITEMS).tolist() == [[3, 1], [3, 1], [2, 2]]
    assert made("BATCH_ITEM_SHAPE_FLATTEN", ITEMS).tolist() == [3, 1, 3, 1, 2, 2]


def test_an_output_is_divided_among_requests():
    parts = scatter("y", np.arange(10), REQUESTS)
    assert [part.tolist() for part in parts] == [[[0, 1]], [[2, 3, 4, 5]], [[6]], [[7, 8, 9]]]


def test_an_output_with_too_many_elements_is_refused():
    with pytest.raises(BackendFailed, match="output 'y': 11 elements, .* have 10"):
        scatter("y", np.arange(11), REQUESTS)
