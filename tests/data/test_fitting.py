"""What fits an input, what is cast, and what is refused in which words."""

import base64

import numpy as np
import pytest

from penstock.data.fitting import DataMismatch, example, examples
from penstock.types import Array, TensorSpec, pack_bytes


def spec(datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec("x", datatype, shape)


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", [1, 2], np.array([1, 2], np.float32)),
        ("FP32", [True, False], np.array([1, 0], np.float32)),
        ("FP32", np.array([1.5, 2.5]), np.array([1.5, 2.5], np.float32)),
        ("FP16", [0.5, 0.25], np.array([0.5, 0.25], np.float16)),
        ("INT8", [-128, 127], np.array([-128, 127], np.int8)),
        ("UINT64", [0, 2**64 - 1], np.array([0, 2**64 - 1], np.uint64)),
        ("INT64", [True, False], np.array([1, 0], np.int64)),
        ("BOOL", [True, False], np.array([True, False])),
        ("BOOL", [1, 0], np.array([True, False])),
        ("BF16", [1.0, -2.0], np.array([0x3F80, 0xC000], np.uint16)),
        ("BYTES", ["é", "b\0"], np.array(["é".encode(), b"b\0"], np.object_)),
        ("BYTES", np.array(["a", "bc"]), np.array([b"a", b"bc"], np.object_)),
    ],
)
def test_what_loses_nothing_is_cast(datatype: str, value: object, expected: Array) -> None:
    array = example(spec(datatype, 2), value)
    assert array.dtype == expected.dtype
    assert array.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("datatype", "value", "problem"),
    [
        ("INT32", [1.0, 2.0], "floats cannot be cast to INT32"),
        ("INT8", [1, 128], "a value does not fit INT8"),
        ("UINT8", [1, -1], "a value does not fit UINT8"),
        ("BOOL", [1, 2], "a value does not fit BOOL"),
        ("BOOL", [0.0, 1.0], "floats cannot be cast to BOOL"),
        ("FP16", [1.0, 1e6], "a value does not fit FP16"),
        ("FP32", ["1", "2"], "strings cannot be cast to FP32"),
        ("FP32", [1.0, None], "object cannot be cast to FP32"),
        ("INT64", [1, 2**70], "object cannot be cast to INT64"),
        ("BYTES", [1, 2], "expected strings, got int"),
        ("BYTES", np.array([1, 2]), "integers cannot be cast to BYTES; expected strings"),
        ("BYTES", ["a", "\ud800"], "a string is not valid Unicode"),
        ("FP32", [1.0, 2.0, 3.0], "shape [3] does not fit [2]"),
        ("FP32", 1.0, "shape [] does not fit [2]"),
        ("FP32", [[1.0], [2.0, 3.0]], "lists of different lengths"),
        ("FP32", {"data": [1, 2]}, 'must have "content"'),
        ("FP32", {"shape": [2]}, 'must have "content"'),
        ("FP32", {"content": [1, 2], "shape": [3]}, "shape [3] needs 3 elements, got 2"),
        ("FP32", {"content": [1, 2], "shape": ["2"]}, '"shape" must be a list of whole numbers'),
        ("FP32", {"b64": "not base64!"}, '"b64" is not base64'),
        ("FP32", {"b64": 5}, '"b64" is not base64'),
        ("FP32", {"b64": "AAA="}, '"b64" of 2 bytes is no FP32'),
        ("BYTES", {"b64": "AAA="}, '"b64" of 2 bytes is no BYTES'),
    ],
)
def test_what_does_not_fit_is_named(datatype: str, value: object, problem: str) -> None:
    with pytest.raises(DataMismatch) as caught:
        example(spec(datatype, 2), value)
    assert str(caught.value).startswith("input 'x': ")
    assert problem in str(caught.value)


def test_infinities_that_were_given_stay() -> None:
    assert example(spec("FP16", 2), [np.inf, 1.0]).tolist() == [np.inf, 1.0]


def test_a_flat_list_fills_a_fixed_shape_row_by_row() -> None:
    assert example(spec("INT32", 2, 3), [1, 2, 3, 4, 5, 6]).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_flat_list_says_nothing_about_a_variable_shape() -> None:
    with pytest.raises(DataMismatch, match=r"shape \[4\] does not fit \[-1, 2\]"):
        example(spec("INT32", -1, 2), [1, 2, 3, 4])


@pytest.mark.parametrize("shape", [(1,), (-1,)])
def test_one_value_is_a_tensor_of_one_element(shape: tuple[int, ...]) -> None:
    assert example(spec("BYTES", *shape), "text").tolist() == [b"text"]


def test_one_value_is_a_tensor_without_dimensions() -> None:
    array = example(spec("FP32"), 2.5)
    assert array.shape == ()
    assert array == 2.5


def test_an_empty_list_is_an_empty_tensor_of_any_type() -> None:
    assert example(spec("INT64", -1), []).dtype == np.int64


@pytest.mark.parametrize("wrap", [lambda b64: {"b64": b64}, lambda b64: {"content": {"b64": b64}}])
@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        ("INT16", np.array([1, -2], "<i2").tobytes(), [1, -2]),
        ("BF16", np.array([0x3F80, 0x4000], "<u2").tobytes(), [0x3F80, 0x4000]),
        ("BYTES", pack_bytes(np.array([b"a", b"bc"], np.object_)), [b"a", b"bc"]),
    ],
)
def test_base64_holds_bytes_as_on_the_wire(wrap, datatype, data, expected) -> None:
    value = wrap(base64.b64encode(data).decode())
    assert example(spec(datatype, 2), value).tolist() == expected


def test_a_shape_that_is_given_wins() -> None:
    value = {"content": [1, 2, 3, 4, 5, 6], "shape": [3, 2]}
    assert example(spec("INT32", -1, -1), value).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_many_examples_are_fitted_at_once() -> None:
    array = examples(spec("FP32", 3), np.arange(6).reshape(2, 3))
    assert array.dtype == np.float32
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_many_examples_name_the_shape_of_one() -> None:
    with pytest.raises(
        DataMismatch, match=r"^input 'x': shape \[3, 224\] does not fit \[3, 224, 224\]$"
    ):
        examples(spec("FP32", 3, 224, 224), np.zeros((5, 3, 224)))


def test_arrays_are_contiguous_and_little_endian() -> None:
    array = examples(spec("INT32", 3), np.arange(6, dtype=">i4").reshape(3, 2).T)
    assert array.flags.c_contiguous
    assert array.dtype == np.dtype("<i4")
    assert array.tolist() == [[0, 2, 4], [1, 3, 5]]
