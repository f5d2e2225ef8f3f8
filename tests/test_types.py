"""Tensors as bytes and arrays, and the law that a request is answered exactly once."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BackendFailed, PenstockError
from penstock.types import (
    DATATYPES,
    CallbackSink,
    Request,
    Response,
    Tensor,
    TensorSpec,
    from_array,
    num_elements,
    pack_bytes,
    split_bytes,
    to_array,
)

FIXED = [name for name in DATATYPES if name != "BYTES"]
SIZES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
    "BYTES": None,
}
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def objects(elements: list[bytes]) -> np.ndarray:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def test_datatypes_are_those_of_the_v2_protocol_with_their_sizes() -> None:
    assert {name: datatype.itemsize for name, datatype in DATATYPES.items()} == SIZES
    assert all(str(datatype) == name == datatype.name for name, datatype in DATATYPES.items())
    assert all(DATATYPES[name].numpy.byteorder in "<|=" for name in FIXED)


# BYTES


def test_each_element_follows_its_length_in_four_little_endian_bytes() -> None:
    packed = pack_bytes(objects([b"ab", b"", b"\0\xff!"]))
    assert packed == b"\2\0\0\0ab" + b"\0\0\0\0" + b"\3\0\0\0\0\xff!"


def test_elements_are_packed_in_row_major_order() -> None:
    array = objects([b"a", b"b", b"c", b"d"]).reshape(2, 2)
    assert split_bytes(pack_bytes(array)) == [b"a", b"b", b"c", b"d"]
    assert split_bytes(pack_bytes(array.T)) == [b"a", b"c", b"b", b"d"]


def test_text_is_packed_as_utf8() -> None:
    assert split_bytes(pack_bytes(np.array(["é", "ab"]))) == ["é".encode(), b"ab"]
    assert split_bytes(pack_bytes(np.array(["é"], np.object_))) == ["é".encode()]


@given(st.lists(st.binary(max_size=40)))
def test_bytes_survive_packing_and_splitting(elements: list[bytes]) -> None:
    assert split_bytes(pack_bytes(objects(elements))) == elements


@given(st.lists(st.binary(max_size=10), min_size=1), st.data())
def test_a_truncated_buffer_is_refused_or_ends_between_two_elements(
    elements: list[bytes], data: st.DataObject
) -> None:
    packed = pack_bytes(objects(elements))
    size = data.draw(st.integers(0, len(packed) - 1))
    ends = [len(pack_bytes(objects(elements[:n]))) for n in range(len(elements) + 1)]
    if size in ends:
        assert split_bytes(packed[:size]) == elements[: ends.index(size)]
    else:
        with pytest.raises(ValueError, match=r"\d+ bytes"):
            split_bytes(packed[:size])


@given(st.binary(max_size=200))
def test_any_bytes_split_into_elements_or_raise_value_error(data: bytes) -> None:
    try:
        elements = split_bytes(data)
    except ValueError:
        return
    assert pack_bytes(objects(elements)) == data


def test_a_length_of_four_gigabytes_is_refused_without_taking_the_memory() -> None:
    with pytest.raises(ValueError, match="4294967295"):
        split_bytes(b"\xff\xff\xff\xff")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_can_be_split(kind: type) -> None:
    assert split_bytes(kind(b"\1\0\0\0x")) == [b"x"]


# Tensors and arrays


@pytest.mark.parametrize("datatype", FIXED)
@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_arrays_survive_becoming_tensors(datatype: str, shape: tuple[int, ...], seed: int) -> None:
    dtype = DATATYPES[datatype].numpy
    raw = np.random.default_rng(seed).bytes(num_elements(shape) * dtype.itemsize)
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape) if raw else np.empty(shape, dtype)
    tensor = from_array("x", datatype, array)
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, shape)
    assert bytes(tensor.data) == raw
    back = to_array(tensor)
    assert (back.dtype, back.shape, back.tobytes()) == (dtype, shape, raw)


@given(st.lists(st.binary(max_size=5), min_size=6, max_size=6))
def test_arrays_of_bytes_survive_becoming_tensors(elements: list[bytes]) -> None:
    array = objects(elements).reshape(2, 3)
    tensor = from_array("x", "BYTES", array)
    assert tensor.shape == (2, 3)
    back = to_array(tensor)
    assert back.dtype == np.object_
    assert back.tolist() == array.tolist()


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_an_empty_array_of_bytes_keeps_its_shape(shape: tuple[int, ...]) -> None:
    assert to_array(from_array("x", "BYTES", np.empty(shape, np.object_))).shape == shape


def test_tensor_data_is_little_endian_and_contiguous_whatever_the_array_was() -> None:
    big_endian = np.arange(6, dtype=">i4").reshape(2, 3)
    expected = np.arange(6, dtype="<i4").reshape(2, 3)
    assert bytes(from_array("x", "INT32", big_endian).data) == expected.tobytes()
    assert bytes(from_array("x", "INT32", expected.T).data) == expected.T.tobytes()
    assert bytes(from_array("x", "INT32", expected[:, ::2]).data) == expected[:, ::2].tobytes()


def test_length_of_tensor_data_is_its_bytes() -> None:
    assert len(from_array("x", "FP64", np.zeros((2, 3))).data) == 48


def test_array_of_a_fixed_datatype_is_a_view_of_the_tensor() -> None:
    buffer = bytearray(8)
    array = to_array(Tensor("x", "UINT32", (2,), buffer))
    buffer[0] = 5
    assert array.tolist() == [5, 0]


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("FP32", (2,), bytes(7)),
        ("FP32", (2,), bytes(12)),
        ("FP32", (2,), b""),
        ("INT64", (), b""),
        ("BYTES", (2,), b"\1\0\0\0a" * 3),
        ("BYTES", (3,), b"\1\0\0\0a" * 2),
        pytest.param(
            "BYTES",
            (3,),
            b"\1\0\0\0a",
        ),
        ("BYTES", (2,), b""),
    ],
)
def test_data_that_does_not_fill_the_shape_is_refused(
    datatype: str, shape: tuple[int, ...], data: bytes
) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        to_array(Tensor("x", datatype, shape, data))


# Specifications


def test_spec_is_fixed_when_every_row_takes_the_same_bytes() -> None:
    assert TensorSpec("x", "FP32", (2, 3)).is_fixed
    assert TensorSpec("x", "FP32", ()).is_fixed
    assert not TensorSpec("x", "FP32", (2, -1)).is_fixed
    assert not TensorSpec("x", "BYTES", (2, 3)).is_fixed


@pytest.mark.parametrize("datatype", FIXED)
def test_row_takes_its_elements_times_their_size(datatype: str) -> None:
    size = SIZES[datatype]
    assert size is not None
    assert TensorSpec("x", datatype, (-1, 3)).row_bytes((5, 3)) == 15 * size
    assert TensorSpec("x", datatype, ()).row_bytes(()) == size


# Requests


def answered(request_id: str = "a") -> tuple[Request, list[Response | PenstockError]]:
    answers: list[Response | PenstockError] = []
    sink = CallbackSink(lambda request, answer: answers.append(answer))
    return Request(sink, (), 0.0, id=request_id), answers


final_or_not = st.tuples(st.booleans(), st.booleans())


@given(st.lists(final_or_not))
def test_a_request_gets_answers_up_to_one_final_and_nothing_after_it(
    attempts: list[tuple[bool, bool]],
) -> None:
    request, answers = answered()
    expected = []
    for is_error, is_final in attempts:
        was_done = request.is_done
        answer = BackendFailed("broke") if is_error else Response("model", "1", ())
        assert request.respond(answer, final=is_final) is not was_done
        if not was_done:
            expected.append(answer)
        assert request.is_done == (was_done or is_final)
    assert answers == expected


def test_respond_is_final_unless_said_otherwise() -> None:
    request, answers = answered()
    assert request.respond(Response("model", "1", ()))
    assert not request.respond(BackendFailed("too late"))
    assert len(answers) == 1


def test_a_sink_that_answers_again_is_not_heard() -> None:
    delivered = []

    def deliver(request: Request, answer: Response | PenstockError) -> None:
        delivered.append(answer)
        assert not request.respond(BackendFailed("again"))

    Request(CallbackSink(deliver), (), 0.0).respond(Response("model", "1", ()))
    assert len(delivered) == 1


def test_a_request_says_whether_it_is_done() -> None:
    request, _ = answered("abc")
    assert re.search("abc.*open", repr(request))
    request.respond(BackendFailed("broke"))
    assert re.search("abc.*done", repr(request))
