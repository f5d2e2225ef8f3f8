"""Filling up and cutting back loses nothing."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.serving.padding import Pads, cropped, element
from penstock.types import DATATYPES, TensorSpec

NUMBERS = sorted(set(DATATYPES) - {"BYTES"})


def pads(*specs: TensorSpec, axes: tuple[PadAxis, ...], buckets: tuple[int, ...] = (4, 8)) -> Pads:
    config = ModelConfig(
        "m", "1", "null", "", specs, (), 8, BatchPolicy(8), padding=Padding(axes, buckets)
    )
    return Pads(config)


@pytest.mark.parametrize(
    ("length", "bucket"), [(0, None), (1, 4), (4, 4), (5, 8), (8, 8), (9, None)]
)
def test_a_length_goes_to_the_smallest_bucket_that_holds_it(length, bucket):
    x = TensorSpec("x", "FP32", (-1,))
    assert pads(x, axes=(PadAxis("x", 0),)).bucket(length) == bucket


def test_lengths_that_differ_within_a_request_are_not_padded():
    x, y = TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (3, -1))
    both = pads(x, y, axes=(PadAxis("x", 0), PadAxis("y", 1)))
    assert both.length(((5,), (3, 5))) == 5
    assert both.length(((5,), (3, 6))) is None
    assert both.shapes(((5,), (3, 5)), 8) == ((8,), (3, 8))


def counting(*, is_packed: bool, max_tokens: int | None = 30) -> Pads:
    config = ModelConfig(
        "m",
        "1",
        "pytorch",
        "",
        (TensorSpec("x", "INT64", (-1,)),),
        (),
        8,
        BatchPolicy(8, is_dynamic=True, max_tokens=max_tokens),
        padding=Padding((PadAxis("x", 0),), (4, 8)),
        options={"penstock.pack": "tokens"} if is_packed else {},
    )
    return Pads(config)


def test_a_row_counts_what_is_computed_of_it():
    padded, packed = counting(is_packed=False), counting(is_packed=True)
    assert (padded.row_tokens(3, 4), packed.row_tokens(3, 4)) == (4, 3)
    assert padded.row_tokens(9, None) == packed.row_tokens(9, None) == 9
    assert padded.row_tokens(0, None) == 1


def test_times_of_a_warm_up_are_by_the_tokens_that_ran():
    times = {1: 0.1, 2: 0.2, 4: 0.4, 8: 0.5}
    assert counting(is_packed=False).warm_times(times, 8) == {8: 0.1, 16: 0.2, 32: 0.4, 64: 0.5}
    # No more than the budget ran; more rows with as many tokens are a little slower.
    assert counting(is_packed=True).warm_times(times, 8) == {8: 0.1, 16: 0.2, 30: 0.5}
    assert counting(is_packed=True, max_tokens=None).warm_times(times, 8) == times


@given(
    datatype=st.sampled_from(NUMBERS),
    rows=st.integers(1, 3),
    length=st.integers(1, 8),
    before=st.integers(1, 3),
    behind=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_was_written_padded_is_what_is_cut_out(datatype, rows, length, before, behind, seed):
    dtype = DATATYPES[datatype].numpy
    shape, full = (before, length, behind), (before, 8, behind)
    subject = pads(
        TensorSpec("x", datatype, (before, -1, behind)), axes=(PadAxis("x", 1, 1),), buckets=(8,)
    )
    random = np.random.default_rng(seed)
    values = random.integers(0, 2, (rows, *shape)).astype(dtype)
    memory = bytearray(rows * math.prod(full) * dtype.itemsize)
    subject.write(0, memory, values.tobytes(), shape, full)
    padded = np.frombuffer(memory, dtype).reshape(rows, *full)
    np.testing.assert_array_equal(padded, subject.filled(0, values, full))
    np.testing.assert_array_equal(cropped("y", padded, {("y", 1)}, length), values)
    assert (padded[:, :, length:] == element(datatype, 1)).all()
    np.testing.assert_array_equal(cropped("z", padded, {("y", 1)}, length), padded)


def test_inputs_without_a_padded_axis_are_copied_as_they_are():
    x, y = TensorSpec("x", "INT32", (-1,)), TensorSpec("y", "INT32", (2,))
    subject = pads(x, y, axes=(PadAxis("x", 0, 9),))
    memory = bytearray(8)
    subject.write(1, memory, np.array([1, 2], np.int32).tobytes(), (2,), (2,))
    assert np.frombuffer(memory, np.int32).tolist() == [1, 2]


def test_bf16_is_filled_with_its_bits():
    assert element("BF16", 1.0) == 0x3F80
    assert element("FP16", 1.5) == np.float16(1.5)
