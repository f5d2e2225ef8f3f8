"""When an answer agrees with a recorded one."""

import numpy as np
import pytest

from penstock.benchmark.agreement import Agreement, agrees
from penstock.serving.padding import bf16_bits
from penstock.types import Array, Tensor, from_array


def tensor(array: Array, datatype: str = "FP32", name: str = "y") -> Tensor:
    return from_array(name, datatype, array)


FLOATS = np.array([[100.0, -1.0, 0.0]], np.float32)


@pytest.mark.parametrize("datatype, least", [("FP64", 1e-6), ("FP32", 1e-3), ("FP16", 1e-2)])
def test_floats_agree_up_to_a_share_of_the_largest(datatype: str, least: float) -> None:
    expected = [tensor(FLOATS, datatype)]
    assert agrees([tensor(FLOATS + 90 * least, datatype)], expected)
    assert not agrees([tensor(FLOATS + 130 * least, datatype)], expected)


def test_bf16_is_compared_as_floats() -> None:
    expected = [tensor(bf16_bits(FLOATS), "BF16")]
    assert agrees([tensor(bf16_bits(FLOATS + 4), "BF16")], expected)
    assert not agrees([tensor(bf16_bits(FLOATS + 10), "BF16")], expected)


def test_not_finite_values_must_be_the_same() -> None:
    odd = np.array([[np.nan, np.inf, 1.0]], np.float32)
    assert agrees([tensor(odd)], [tensor(odd)])
    assert not agrees([tensor(np.array([[0.0, np.inf, 1.0]], np.float32))], [tensor(odd)])
    assert not agrees([tensor(odd)], [tensor(np.array([[0.0, 5.0, 1.0]], np.float32))])
    assert not agrees([tensor(np.array([[np.nan, -np.inf, 1.0]], np.float32))], [tensor(odd)])


def test_everything_else_must_be_equal() -> None:
    numbers, texts = np.array([[3, 4]]), np.array([[b"a", b""]], object)
    assert agrees([tensor(numbers, "INT64")], [tensor(numbers, "INT64")])
    assert not agrees([tensor(numbers + 1, "INT64")], [tensor(numbers, "INT64")])
    assert agrees([tensor(texts, "BYTES")], [tensor(texts, "BYTES")])
    assert not agrees([tensor(texts[:, ::-1], "BYTES")], [tensor(texts, "BYTES")])


def test_names_shapes_and_datatypes_must_be_the_same() -> None:
    expected = [tensor(FLOATS)]
    assert not agrees([], expected)
    assert not agrees([tensor(FLOATS, name="z")], expected)
    assert not agrees([tensor(FLOATS.T)], expected)
    assert not agrees([tensor(FLOATS, "FP64")], expected)
    assert agrees([tensor(FLOATS), tensor(FLOATS, name="more")], expected)


def test_counts_add_up() -> None:
    first, second = Agreement(), Agreement()
    first.count([tensor(FLOATS)], [tensor(FLOATS)])
    first.count(None, [tensor(FLOATS)])
    second.count([tensor(-FLOATS)], [tensor(FLOATS)])
    second.add(first)
    assert second == Agreement(3, 1)
