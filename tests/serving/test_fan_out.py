"""Rows of a request: divided, sent within limits, and joined in their order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import FanOutLimits
from penstock.errors import BackendFailed, TooLarge
from penstock.serving.fan_out import FanOut, SplitInput, split_batch, split_rows
from penstock.types import Tensor, TensorSpec, from_array, to_array


def rows_of(array, datatype="INT64"):
    return from_array("crops", datatype, np.asarray(array))


LIMITS = FanOutLimits()


def split(*inputs, limits=LIMITS, has_batch=False):
    """`inputs` are the dims of the member's input, the tensor, and whether it is split."""
    found = [
        (TensorSpec(f"x{n}", tensor.datatype, dims), tensor, is_split)
        for n, (dims, tensor, is_split) in enumerate(inputs)
    ]
    return split_rows(found, limits, has_batch=has_batch)


def echo(fan, *, has_batch=True):
    """Answer all rows with their first input."""
    while (row := fan.next_row()) is not None:
        data = fan.row(row, has_batch=has_batch)[0]
        fan.take(row, [Tensor("y", data.datatype, data.shape, data.data)], has_batch=has_batch)
    assert fan.is_complete
    [joined] = fan.join([TensorSpec("y", "INT64", (2,))])
    return to_array(joined)


@pytest.mark.parametrize("takes_batch", [True, False])
def test_each_row_is_a_request_of_its_own(takes_batch):
    crops = np.arange(6).reshape(3, 2)
    fan = split(((2,), rows_of(crops), True))
    first = fan.row(1, has_batch=takes_batch)[0]
    assert first.name == "x0"
    assert to_array(first).tolist() == ([[2, 3]] if takes_batch else [2, 3])
    assert echo(fan, has_batch=takes_batch).tolist() == crops.tolist()


def test_rows_of_a_batch_keep_both_dimensions():
    crops = np.arange(24).reshape(2, 3, 4)
    fan = split(((4,), rows_of(crops), True), has_batch=True)
    assert fan.num_rows == 6
    assert echo(fan).tolist() == crops.tolist()


def test_a_batching_member_may_have_made_the_rows():
    crops = np.arange(6).reshape(1, 3, 2)
    assert echo(split(((2,), rows_of(crops), True))).tolist() == crops[0].tolist()


def test_other_inputs_go_to_all_rows():
    crops, scale = np.arange(6).reshape(3, 2), np.array([[7]])
    fan = split(((2,), rows_of(crops), True), ((1,), rows_of(scale), False))
    shared = [to_array(fan.row(row, has_batch=True)[1]).tolist() for row in range(3)]
    assert shared == [[[7]]] * 3


def test_rows_of_a_batch_get_what_is_of_their_batch_row():
    crops, scale = np.arange(12).reshape(2, 3, 2), np.array([[7], [8]])
    fan = split(((2,), rows_of(crops), True), ((1,), rows_of(scale), False), has_batch=True)
    shared = [to_array(fan.row(row, has_batch=True)[1]).item() for row in range(6)]
    assert shared == [7, 7, 7, 8, 8, 8]


def test_texts_are_divided_by_their_lengths():
    words = np.array([[b"", b"a"], [b"\xff" * 300, b"bc"], [b"d", b""]], np.object_)
    fan = split(((2,), rows_of(words, "BYTES"), True))
    assert echo(fan).tolist() == words.tolist()


def test_without_rows_the_outputs_are_empty():
    fan = split(((2,), rows_of(np.zeros((0, 2), np.int64)), True))
    assert fan.next_row() is None and fan.is_complete
    specs = [TensorSpec("y", "FP32", (10,)), TensorSpec("z", "BYTES", (-1, 4))]
    joined = fan.join(specs)
    assert [(each.name, each.shape, bytes(each.data)) for each in joined] == [
        ("y", (0, 10), b""),
        ("z", (0, 0, 4), b""),
    ]


def test_of_a_batch_without_rows_the_batch_stays():
    fan = split(((2,), rows_of(np.zeros((3, 0, 2), np.int64)), True), has_batch=True)
    assert fan.is_complete
    assert fan.join([TensorSpec("y", "FP32", (10,))])[0].shape == (3, 0, 10)


def test_too_many_rows_are_refused():
    crops = rows_of(np.zeros((5, 2), np.int64))
    with pytest.raises(TooLarge, match=r"'crops' has 5 rows; at most 4 \(penstock.fan_out_limit\)"):
        split(((2,), crops, True), limits=FanOutLimits(4))
    assert split(((2,), crops, True), limits=FanOutLimits(5)).num_rows == 5


def test_tensors_that_are_split_together_have_as_many_rows():
    crops, boxes = rows_of(np.zeros((3, 2), np.int64)), rows_of(np.zeros((2, 4), np.int64))
    boxes.name = "boxes"
    with pytest.raises(BackendFailed, match="'crops' has 3 and 'boxes' has 2 rows"):
        split(((2,), crops, True), ((4,), boxes, True))


@pytest.mark.parametrize(
    ("shape", "has_batch"), [((2,), False), ((3, 2), True), ((2, 3, 2), False)]
)
def test_a_tensor_without_rows_is_refused(shape, has_batch):
    with pytest.raises(BackendFailed, match="as input 'x0' is of each row"):
        split(((2,), rows_of(np.zeros(shape, np.int64)), True), has_batch=has_batch)


def test_outputs_of_different_shapes_are_not_joined():
    fan = split(((2,), rows_of(np.zeros((3, 2), np.int64)), True))
    fan.take(0, [rows_of(np.zeros((1, 4), np.int64))], has_batch=True)
    with pytest.raises(BackendFailed, match=r"has shape \[5\] for row 2 and \[4\] for another"):
        fan.take(2, [rows_of(np.zeros((1, 5), np.int64))], has_batch=True)
    with pytest.raises(BackendFailed, match=r"has shape \[2, 4\] for one row"):
        fan.take(1, [rows_of(np.zeros((2, 4), np.int64))], has_batch=True)


def test_rows_that_wait_outlive_borrowed_memory():
    memory = bytearray(np.arange(6).tobytes())
    fan = FanOut([SplitInput("x", "INT64", (2,), 3, memoryview(memory))], (3,), 1)
    assert fan.next_row() == 0
    fan.keep()
    memory[:] = bytes(len(memory))
    assert to_array(fan.row(2, has_batch=False)[0]).tolist() == [4, 5]


@given(st.data())
def test_rows_are_sent_in_order_within_the_limit_and_joined_in_order(data):
    """Whatever the order of the answers."""
    num_rows, limit = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 8))
    values = np.arange(num_rows * 2).reshape(num_rows, 2)
    fan = split(((2,), rows_of(values), True), limits=FanOutLimits(100, limit))
    sent, open_rows = [], []
    while not fan.is_complete:
        while (row := fan.next_row()) is not None:
            sent.append(row)
            open_rows.append(row)
        assert 0 < len(open_rows) <= limit
        row = open_rows.pop(data.draw(st.integers(0, len(open_rows) - 1)))
        [tensor] = fan.row(row, has_batch=True)
        fan.take(row, [Tensor("y", "INT64", tensor.shape, tensor.data)], has_batch=True)
    assert sent == list(range(num_rows)) and not open_rows
    assert to_array(fan.join([TensorSpec("y", "INT64", (2,))])[0]).tolist() == values.tolist()


def test_a_batch_is_divided_into_its_rows():
    images, words = np.arange(6).reshape(3, 2), np.array([[b"a"], [b""], [b"ccc"]], np.object_)
    fan = split_batch([from_array("i", "INT64", images), from_array("w", "BYTES", words)])
    found = [[to_array(each).tolist() for each in fan.row(n, has_batch=True)] for n in range(3)]
    assert found == [[[[0, 1]], [[b"a"]]], [[[2, 3]], [[b""]]], [[[4, 5]], [[b"ccc"]]]]
