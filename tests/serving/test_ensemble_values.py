"""What conditions read in tensors, and the tensors that defaults become."""

import numpy as np
import pytest

from penstock.config import TensorDefault
from penstock.errors import BackendFailed
from penstock.repository.ensemble_parameters import parse_condition
from penstock.serving.ensemble_values import all_hold, make_default
from penstock.types import TensorSpec, from_array, to_array


def tensor(datatype, value, shape=(1, 1)):
    dtype = {"BYTES": np.object_, "BOOL": np.bool_, "FP16": np.float16}.get(datatype, np.int64)
    dtype = np.float64 if datatype.startswith("FP") else dtype
    return from_array("t", datatype, np.full(shape, value, dtype))


@pytest.mark.parametrize(
    ("datatype", "value", "condition", "expected"),
    [
        ("BOOL", True, "t", True),
        ("BOOL", False, "t", False),
        ("BOOL", False, "not t", True),
        ("INT64", -3, "t < -2", True),
        ("UINT8", 255, "t == 255", True),
        ("FP16", 0.5, "t >= 0.5 and t <= 0.5", True),
        ("FP32", 0.5, "t > 0.5", False),
        ("FP64", 1e300, "t != 0", True),
        ("BYTES", b"de", 't == "de"', True),
        ("BYTES", "größer", 't != "größer"', False),
    ],
)
def test_conditions_read_every_datatype(datatype, value, condition, expected):
    given = tensor(datatype, value)
    assert all_hold(parse_condition(condition), {"t": given}) is expected


def test_bf16_is_read_as_a_number():
    bits = np.array([0x4049], np.uint16)  # 3.140625
    given = from_array("t", "BF16", bits)
    assert all_hold(parse_condition("t > 3.14 and t < 3.15"), {"t": given})


def test_defaults_are_read_too():
    assert all_hold(parse_condition("t > 2"), {"t": TensorDefault(value=3.0)})
    with pytest.raises(BackendFailed, match="'t' is empty; a condition reads one element"):
        all_hold(parse_condition("t > 2"), {"t": TensorDefault()})


def test_a_condition_that_cannot_be_decided_is_an_error():
    with pytest.raises(BackendFailed, match=r"'t' has shape \[1, 2\]; a condition reads one"):
        all_hold(parse_condition("t"), {"t": tensor("FP32", 1, (1, 2))})
    with pytest.raises(BackendFailed, match="'t' is NaN"):
        all_hold(parse_condition("t > 0"), {"t": tensor("FP32", np.nan)})


@pytest.mark.parametrize(
    ("datatype", "value", "dims", "expected"),
    [
        ("FP32", 0.5, (2,), [[0.5, 0.5]] * 3),
        ("INT8", -1.0, (-1,), [[-1]] * 3),
        ("BOOL", 1.0, (1,), [[True]] * 3),
        ("BYTES", "no", (1,), [[b"no"]] * 3),
        ("FP32", None, (-1, 4), []),
        ("BYTES", None, (-1,), []),
    ],
)
def test_a_default_fills_the_declared_shape(datatype, value, dims, expected):
    made = make_default(
        TensorDefault(value=value), TensorSpec("t", datatype, dims), 3, has_batch=True
    )
    array = to_array(made)
    dims = tuple(max(size, 0) if value is None else abs(size) for size in dims)
    assert (made.name, made.datatype, array.shape) == ("t", datatype, (3, *dims))
    assert array.size == 0 if not expected else array.tolist() == expected


def test_a_default_without_a_batch():
    made = make_default(TensorDefault(value=2.0), TensorSpec("t", "BF16", (2,)), 1, has_batch=False)
    assert made.shape == (2,)
    assert to_array(made).tolist() == [0x4000, 0x4000]
