"""The v2 codec: what is a valid infer request, what its tensors are, how answers look."""

import json
import struct
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from example_counts import at_most
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import InvalidRequest, PenstockError, Unsupported
from penstock.types import (
    DATATYPES,
    CallbackSink,
    RegionPlace,
    Request,
    RequestedOutput,
    Response,
    Tensor,
    TensorSpec,
    num_elements,
    pack_bytes,
    split_bytes,
)
from penstock.wire.documented import describe_tensors
from penstock.wire.statuses import encode_error
from penstock.wire.v2 import Codec
from penstock.wire.v2_request import MAX_CLASSES, MAX_TENSORS
from penstock.wire.v2_templates import encode_answer

SINK = CallbackSink(lambda request, answer: None)
INTEGERS = ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"]
JSON_TYPES = ["BOOL", *INTEGERS, "FP32", "FP64", "BYTES"]
BINARY_TYPES = [*JSON_TYPES, "FP16", "BF16"]
DEEP = 100_000
quick = settings(deadline=None, max_examples=at_most(200))


def encoded(request: Request, response: Response, is_binary: bool) -> Any:
    request.prefers_binary = is_binary
    return encode_answer(request, response)


class Decoded(NamedTuple):
    request: Request
    is_binary: bool


def decode(body: bytes, json_bytes: int | None = None) -> Decoded:
    """Decoded twice by one codec: what it remembers must not change the result."""
    codec = Codec()
    first = codec.decode_infer(body, json_bytes, SINK, 7.0)
    again = codec.decode_infer(body, json_bytes, SINK, 7.0)
    assert described(again) == described(first)
    return Decoded(again, again.prefers_binary)


def described(request: Request) -> Any:
    return (
        request.prefers_binary,
        [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs],
        [(output.name, output.parameters) for output in request.outputs],
        (request.id, request.parameters, request.priority, request.timeout_s),
    )


def text_of(message: Any) -> bytes:
    return json.dumps(message).encode()


def given_data(data: Any, datatype: str = "INT32", shape: Any = (1,), name: str = "x") -> Any:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def given_size(size: Any, datatype: str = "INT32", shape: Any = (1,), name: str = "x") -> Any:
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": list(shape), "parameters": parameters}


def one_input(datatype: str, shape: str, data: str) -> bytes:
    """A request written by hand, for JSON that no encoder would write."""
    fields = f'"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}'
    return f'{{"inputs":[{{{fields}}}]}}'.encode()


def with_field(name: str, value: str) -> bytes:
    """A valid request with one more field at its top."""
    return one_input("INT32", "[1]", "[1]")[:-1] + f',"{name}":{value}}}'.encode()


def decode_json(*inputs: Any, **fields: Any) -> Decoded:
    return decode(text_of({"inputs": list(inputs), **fields}))


def decode_binary(tail: bytes, *inputs: Any, **fields: Any) -> Decoded:
    head = text_of({"inputs": list(inputs), **fields})
    return decode(head + tail, len(head))


def values_of(tensor: Tensor) -> list[Any]:
    return np.frombuffer(tensor.data, DATATYPES[tensor.datatype].numpy).tolist()


def refusal(body: bytes, json_bytes: int | None = None) -> str:
    """The text with which a request is refused as the client's fault."""
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        decode(body, json_bytes)
    return str(caught.value)


def names_input(text: str) -> bool:
    return "input 'x'" in text or "$.inputs[0]" in text


def tensor_of(name: str, datatype: str, array: Any) -> Tensor:
    shape = np.shape(array)
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, pack_bytes(np.array(array, dtype=np.object_)))
    return Tensor(
        name, datatype, shape, np.asarray(array, dtype=DATATYPES[datatype].numpy).tobytes()
    )


def request_for(*outputs: RequestedOutput, id: str = "") -> Request:
    return Request(SINK, [], 0.0, id=id, outputs=outputs)


def answer_json(*tensors: Tensor, request: Request | None = None) -> Any:
    head, tail = encoded(request or request_for(), Response("m", "1", tensors), False)
    assert not tail
    return json.loads(head)


# Decoding JSON.


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("INT8", [-128, 127]),
        ("INT16", [-(2**15), 2**15 - 1]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 2**16 - 1]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("FP32", [-1.5, 3.4028234663852886e38]),
        ("FP64", [5e-324, 1.7976931348623157e308]),
    ],
)
def test_json_carries_the_whole_range_of_a_datatype(datatype: str, values: list[Any]) -> None:
    [tensor] = decode_json(given_data(values, datatype, [2])).request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, (2,))
    assert values_of(tensor) == values


def test_json_strings_become_length_prefixed_utf8() -> None:
    [tensor] = decode_json(given_data(["", "a\0b", "ü😀"], "BYTES", [3])).request.inputs
    assert split_bytes(tensor.data) == [b"", b"a\0b", "ü😀".encode()]


def test_integers_are_valid_floats() -> None:
    [tensor] = decode_json(given_data([1, 2.5], "FP32", [2])).request.inputs
    assert values_of(tensor) == [1.0, 2.5]


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4, 5, 6],
        [[1, 2, 3], [4, 5, 6]],
        [[1, 2], [3, 4], [5, 6]],
        [[1, 2, 3, 4, 5, 6]],
        [[[[1, 2, 3, 4, 5, 6]]]],
        [[1], [2], [3], [4], [5], [6]],
        [[[1, 2, 3]], [[4, 5, 6]]],
    ],
)
def test_data_may_be_flat_or_in_any_regular_nesting(data: list[Any]) -> None:
    [tensor] = decode_json(given_data(data, "INT16", [2, 3])).request.inputs
    assert tensor.shape == (2, 3)
    assert values_of(tensor) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("shape", "data"),
    [([0], []), ([2, 0], [[], []]), ([2, 0], [[]]), ([0, 2], []), ([3, 0, 2], [[], [], []])],
)
def test_a_tensor_may_have_no_elements(shape: list[int], data: list[Any]) -> None:
    [tensor] = decode_json(given_data(data, "FP32", shape)).request.inputs
    assert tensor.shape == tuple(shape)
    assert bytes(tensor.data) == b""


def test_a_scalar_has_an_empty_shape_and_one_element() -> None:
    [tensor] = decode_json(given_data([5], "INT64", [])).request.inputs
    assert tensor.shape == ()
    assert values_of(tensor) == [5]


def test_a_surrogate_pair_is_one_character() -> None:
    body = one_input("BYTES", "[1]", r'["\ud83d\ude00"]')
    [tensor] = decode(body).request.inputs
    assert split_bytes(tensor.data) == ["😀".encode()]


def test_unknown_fields_are_ignored() -> None:
    assert decode(with_field("comment", '{"any": [1, null]}')).request.inputs[0].name == "x"


def test_the_json_part_may_be_a_view_of_a_larger_buffer() -> None:
    body = bytearray(text_of({"inputs": [given_data([3])]}))
    assert values_of(Codec().decode_infer(memoryview(body), None, SINK, 0.0).inputs[0]) == [3]


# Decoding binary tensors.


@pytest.mark.parametrize("datatype", BINARY_TYPES)
def test_binary_tensors_keep_their_bits(datatype: str) -> None:
    itemsize = DATATYPES[datatype].itemsize or 8
    tail = bytes(range(3 * itemsize)) if datatype != "BYTES" else pack_bytes(np.array([b"\xff\0"]))
    shape = [3] if datatype != "BYTES" else [1]
    [tensor] = decode_binary(tail, given_size(len(tail), datatype, shape)).request.inputs
    assert (tensor.datatype, tensor.shape) == (datatype, tuple(shape))
    assert bytes(tensor.data) == tail


def test_binary_tensors_follow_in_the_order_of_the_inputs_and_json_ones_lie_between() -> None:
    first, json_one, second = decode_binary(
        b"aaaabb",
        given_size(4, "INT32", [1], "first"),
        given_data([9], "INT8", [1], "json"),
        given_size(2, "INT16", [1], "second"),
    ).request.inputs
    assert (bytes(first.data), bytes(second.data)) == (b"aaaa", b"bb")
    assert values_of(json_one) == [9]


def test_a_request_may_have_no_inputs_and_say_how_long_its_json_is() -> None:
    body = b'{"inputs": []}'
    for json_bytes in (None, len(body)):
        assert decode(body, json_bytes).request.inputs == []


def test_a_binary_tensor_may_be_empty() -> None:
    [tensor] = decode_binary(b"", given_size(0, "FP32", [0, 4])).request.inputs
    assert bytes(tensor.data) == b""


def test_parameters_of_an_input_do_not_forbid_json_data() -> None:
    item = {**given_data([1]), "parameters": {"note": "kept out of the way"}}
    assert values_of(decode_json(item).request.inputs[0]) == [1]


# The request around the tensors.


def test_id_and_arrival_are_kept() -> None:
    request = decode_json(given_data([1]), id="é-42").request
    assert request.id == "é-42"
    assert request.timings.received == 7.0


def test_without_outputs_all_are_wanted_as_json() -> None:
    decoded = decode_json(given_data([1]))
    assert list(decoded.request.outputs) == []
    assert decoded.is_binary is False


def test_outputs_keep_their_order_and_parameters() -> None:
    outputs = [{"name": "b", "parameters": {"binary_data": True}}, {"name": "a"}]
    asked = decode_json(given_data([1]), outputs=outputs).request.outputs
    assert [(each.name, dict(each.parameters)) for each in asked] == [
        ("b", {"binary_data": True}),
        ("a", {}),
    ]


def test_priority_and_timeout_are_understood_and_the_rest_is_kept_for_the_model() -> None:
    parameters = {"priority": 2, "timeout": 1500, "k": "v", "f": 1.5, "b": True, "i": -3}
    decoded = decode_json(given_data([1]), parameters={**parameters, "binary_data_output": True})
    request = decoded.request
    assert decoded.is_binary is True
    assert request.priority == 2
    assert request.timeout_s == pytest.approx(0.0015)
    assert request.parameters == {"k": "v", "f": 1.5, "b": True, "i": -3}


def test_no_priority_and_no_timeout_mean_the_models_defaults() -> None:
    for parameters in ({}, {"priority": 0, "timeout": 0}):
        request = decode_json(given_data([1]), parameters=parameters).request
        assert (request.priority, request.timeout_s, request.parameters) == (0, None, None)


def test_binary_data_output_may_be_refused_explicitly() -> None:
    assert decode_json(given_data([1]), parameters={"binary_data_output": False}).is_binary is False


# Round trips.

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def json_values(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BOOL":
        return st.booleans()
    if datatype == "BYTES":
        return st.text()
    if datatype in ("FP32", "FP64"):
        width = 32 if datatype == "FP32" else 64
        return st.floats(allow_nan=False, allow_infinity=False, width=width)
    limits = np.iinfo(DATATYPES[datatype].numpy)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def json_tensors(draw: st.DrawFn) -> tuple[Tensor, Any]:
    """A tensor that JSON can carry, and its elements as a flat or nested list."""
    datatype = draw(st.sampled_from(JSON_TYPES))
    shape = draw(shapes)
    count = num_elements(shape)
    values = draw(st.lists(json_values(datatype), min_size=count, max_size=count))
    if datatype == "BYTES":
        data = b"".join(struct.pack("<I", len(v.encode())) + v.encode() for v in values)
    else:
        data = np.array(values, dtype=DATATYPES[datatype].numpy).tobytes()
    nesting = draw(st.sampled_from([(count,), shape, shape[::-1], (1, *shape), (*shape, 1)]))
    return Tensor("x", datatype, shape, data), _nest(values, nesting or (count,))


def _nest(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return values
    step = num_elements(shape[1:])
    return [_nest(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


@st.composite
def binary_tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(BINARY_TYPES))
    shape = draw(shapes)
    count = num_elements(shape)
    itemsize = DATATYPES[datatype].itemsize
    if itemsize is None:
        items = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
        data = b"".join(struct.pack("<I", len(item)) + item for item in items)
    else:
        data = draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
    return Tensor("x", datatype, shape, data)


@quick
@given(json_tensors())
def test_what_json_says_is_what_the_tensor_holds(case: tuple[Tensor, Any]) -> None:
    tensor, data = case
    [decoded] = decode_json(given_data(data, tensor.datatype, tensor.shape)).request.inputs
    assert decoded.shape == tensor.shape
    assert bytes(decoded.data) == bytes(tensor.data)


@quick
@given(json_tensors())
def test_a_json_answer_sent_back_as_a_request_has_the_same_bits(case: tuple[Tensor, Any]) -> None:
    tensor, _ = case
    [output] = answer_json(tensor)["outputs"]
    [decoded] = decode_json(output).request.inputs
    assert (decoded.name, decoded.datatype, decoded.shape) == ("x", tensor.datatype, tensor.shape)
    assert bytes(decoded.data) == bytes(tensor.data)


@quick
@given(st.lists(binary_tensors(), min_size=1, max_size=4))
def test_a_binary_answer_sent_back_as_a_request_has_the_same_bits(tensors: list[Tensor]) -> None:
    head, tail = encoded(request_for(), Response("m", "1", tensors), True)
    body = text_of({"inputs": json.loads(head)["outputs"]})
    decoded = decode(body + b"".join(tail), len(body)).request.inputs
    for before, after in zip(tensors, decoded, strict=True):
        assert (before.datatype, before.shape) == (after.datatype, after.shape)
        assert bytes(before.data) == bytes(after.data)


# Malformed tensors.


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ("[2,2]", "[[1,2],[3]]"),
        ("[2,2]", "[[1,2],[3,4,5]]"),
        ("[2,2]", "[[1,2],3,4]"),
        ("[2,2]", "[1,2,[3,4]]"),
        ("[2,2]", "[[1,2],[[3,4]]]"),
        ("[2,2]", "[[1],[2,3,4]]"),
        ("[2,2]", "[[],[1,2,3,4]]"),
        ("[2,2]", "[[1,2,3,4],[]]"),
        ("[2,2]", "[[[1,2],[3]],[[4]]]"),
        ("[2,2]", "[[1,2],[3,[4]]]"),
        ("[1]", "[[],1]"),
        ("[1]", "[1,[]]"),
    ],
)
def test_ragged_data_is_refused(shape: str, data: str) -> None:
    error = refusal(one_input("INT32", shape, data))
    assert names_input(error)
    assert "ragged" in str(error)


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ("[2]", "[1]"),
        ("[2]", "[1,2,3]"),
        ("[]", "[]"),
        ("[0]", "[1]"),
        ("[2,2]", "[[1,2]]"),
        ("[2,2]", "[[1,2,3],[4,5,6]]"),
        ("[2]", "[[]]"),
    ],
)
def test_a_wrong_number_of_elements_is_refused(shape: str, data: str) -> None:
    assert names_input(refusal(one_input("INT32", shape, data)))


@pytest.mark.parametrize("shape", ["[1]", "[1,1]"])
@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT32", "true"),
        ("INT32", "1.5"),
        ("INT32", "1.0"),
        ("INT32", '"1"'),
        ("INT32", "null"),
        ("UINT64", "{}"),
        ("FP32", "true"),
        ("FP32", '"1.0"'),
        ("FP64", "null"),
        ("BOOL", "1"),
        ("BOOL", "0.0"),
        ("BOOL", '"true"'),
        ("BYTES", "1"),
        ("BYTES", "true"),
        ("BYTES", "null"),
        ("BYTES", '{"a": "b"}'),
    ],
)
def test_values_of_another_type_are_refused(datatype: str, value: str, shape: str) -> None:
    data = f"[{value}]" if shape == "[1]" else f"[[{value}]]"
    assert names_input(refusal(one_input(datatype, shape, data)))


@pytest.mark.parametrize("data", ["1", '"abc"', "{}", "null", "true"])
def test_data_that_is_not_a_list_is_refused(data: str) -> None:
    assert names_input(refusal(one_input("INT32", "[1]", data)))


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("UINT8", "300"),
        ("UINT8", "-1"),
        ("INT8", "128"),
        ("INT8", "-129"),
        ("UINT16", "65536"),
        ("INT16", "-32769"),
        ("UINT32", "4294967296"),
        ("INT32", "2147483648"),
        ("UINT64", str(2**64)),
        ("UINT64", "-1"),
        ("INT64", str(2**63)),
        ("INT64", "1" + "0" * 5000),
        ("FP32", "1e39"),
        ("FP32", "-1e39"),
        ("FP64", "1e999"),
        ("FP64", "1" + "0" * 400),
        ("FP64", "-1" + "0" * 5000),
    ],
)
def test_values_that_do_not_fit_are_refused(datatype: str, value: str) -> None:
    assert names_input(refusal(one_input(datatype, "[1]", f"[{value}]")))
    assert names_input(refusal(one_input(datatype, "[1,1]", f"[[{value}]]")))


@pytest.mark.parametrize(
    "literal", ["NaN", "Infinity", "-Infinity", "nan", "inf", "1.", "01", "+1"]
)
def test_number_literals_that_are_not_json_are_refused(literal: str) -> None:
    refusal(one_input("FP32", "[1]", f"[{literal}]"))


@pytest.mark.parametrize(
    "shape",
    [
        "[-1]",
        "[-1,-1]",
        "[16,1152921504606846978]",
        "[4,1152921504606846978]",
        "[9223372036854775808]",
        "[18446744073709551617]",
        "[4294967296,4294967296]",
        "[2147483648]",
        "[1.0]",
        "[1.5]",
        "[1e0]",
        '["1"]',
        "[true]",
        "[null]",
        "[[1]]",
        "1",
        '"1"',
        "null",
        "{}",
    ],
)
def test_impossible_shapes_are_refused_for_json_data(shape: str) -> None:
    assert names_input(refusal(one_input("INT32", shape, "[1]")))


@pytest.mark.parametrize(
    "shape", [[-1], [-1, -1], [16, 2**60 + 2], [4, 2**60 + 2], [2**63], [2**64 + 1], [1.0], [True]]
)
def test_impossible_shapes_are_refused_for_binary_data(shape: list[Any]) -> None:
    head = text_of({"inputs": [given_size(4, "INT32", shape)]})
    assert names_input(refusal(head + b"abcd", len(head)))


@pytest.mark.parametrize("shape", [[2**80, 0], [0, 2**64], [10**60, 0, 1]])
def test_a_zero_does_not_excuse_a_size_beyond_64_bits(shape: list[int]) -> None:
    assert names_input(refusal(text_of({"inputs": [given_data([], "INT32", shape)]})))


@pytest.mark.parametrize("rank", [33, 1000, 50_000])
def test_a_shape_of_high_rank_is_refused(rank: int) -> None:
    text = refusal(text_of({"inputs": [given_data([1], shape=[1] * rank)]}))
    assert names_input(text)
    assert len(text) < 1000


def test_a_long_shape_of_huge_sizes_costs_no_time() -> None:
    body = text_of({"inputs": [given_data([1], shape=[4 * 10**18] * 20_000)]})
    began = time.thread_time()
    refusal(body)
    assert time.thread_time() - began < 0.2


def test_an_unknown_datatype_is_refused() -> None:
    for datatype in ("FP8", "fp32", "", "STRING", "TYPE_FP32"):
        text = refusal(one_input(datatype, "[1]", "[1]"))
        assert names_input(text)
        assert "datatype" in text


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_cannot_be_json(datatype: str) -> None:
    text = refusal(one_input(datatype, "[1]", "[1.0]"))
    assert names_input(text)
    assert datatype in text


@pytest.mark.parametrize("size", [-1, -(2**63), 1.5, 4.0, True, "4", None, [4], {}])
def test_a_binary_size_that_is_not_a_count_is_refused(size: Any) -> None:
    head = text_of({"inputs": [given_size(size)]})
    assert names_input(refusal(head + b"abcd", len(head)))


@pytest.mark.parametrize("size", ["5", str(2**31), str(2**63), str(2**64 + 4), "1" + "0" * 5000])
def test_a_binary_size_beyond_the_body_is_refused(size: str) -> None:
    head = text_of({"inputs": [given_size(0)]}).replace(b": 0", b": " + size.encode())
    assert names_input(refusal(head + b"abcd", len(head)))


def test_the_second_binary_tensor_cannot_take_the_bytes_of_the_first() -> None:
    head = text_of({"inputs": [given_size(4, name="first"), given_size(4)]})
    assert names_input(refusal(head + b"abcdefg", len(head)))


def test_bytes_behind_the_last_tensor_are_refused() -> None:
    head = text_of({"inputs": [given_size(3)]})
    assert "1 byte" in refusal(head + b"abcd", len(head))
    head = text_of({"inputs": [given_data([1])]})
    assert "4 byte" in refusal(head + b"abcd", len(head))


def test_bytes_behind_the_json_of_a_plain_request_are_refused() -> None:
    refusal(text_of({"inputs": [given_data([1])]}) + b"abcd")
    refusal(text_of({"inputs": [given_size(4)]}) + b"abcd")


def test_data_and_binary_data_together_are_refused() -> None:
    item = {**given_size(4), "data": [1]}
    head = text_of({"inputs": [item]})
    assert names_input(refusal(head + b"abcd", len(head)))


def test_an_input_without_any_data_is_refused() -> None:
    bare = {"name": "x", "datatype": "INT32", "shape": [1]}
    for item in (bare, {**bare, "parameters": {}}, {**bare, "parameters": {"note": 1}}):
        assert names_input(refusal(text_of({"inputs": [item]})))


def in_region(nbytes: object = 4, **more: object) -> dict[str, object]:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": nbytes, **more}
    return {"name": "x", "datatype": "INT32", "shape": [1], "parameters": region}


def test_inputs_in_shared_memory_have_a_place_and_no_data() -> None:
    request, _ = decode(text_of({"inputs": [in_region(shared_memory_offset=64)]}))
    (tensor,) = request.inputs
    assert tensor.place == RegionPlace("r", 64, 4) and not tensor.data and tensor.nbytes == 4
    assert request.uses_regions


def test_tensors_in_shared_memory_and_in_the_body_are_told_apart() -> None:
    codec = Codec()
    for data in (b"abcd", b"efgh"):  # The second time, the form is known.
        items = [in_region(), {**given_size(4), "name": "y"}, {**in_region(), "name": "z"}]
        head = text_of({"id": "7", "inputs": items})
        request = codec.decode_infer(head + data, len(head), SINK, 0.0)
        assert [bytes(each.data) for each in request.inputs] == [b"", data, b""]
        assert [each.place is None for each in request.inputs] == [False, True, False]
        assert request.id == "7" and request.uses_regions
        assert codec.find_form(head, 4) is None, "its tensors are not received into rows"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (in_region(-1), "shared_memory_byte_size must be a number of bytes, got -1"),
        (in_region(True), "shared_memory_byte_size must be"),
        (in_region(None), "needs shared_memory_byte_size"),
        (in_region("4"), "shared_memory_byte_size must be"),
        (in_region(shared_memory_offset=1 << 63), "shared_memory_offset must be"),
        (in_region(shared_memory_offset=0.5), "shared_memory_offset must be"),
        (in_region(shared_memory_region=7), "must be the name of a region"),
        (in_region(shared_memory_region=""), "must be the name of a region"),
        (in_region(binary_data_size=4), "expected one of them"),
        ({**in_region(), "data": [1]}, "expected one of them"),
        ({**in_region(), "shape": [-1]}, "negative"),
        ({**in_region(), "datatype": "INT33"}, "unknown datatype"),
    ],
)
def test_a_wrong_place_in_shared_memory_is_refused(item: dict[str, object], words: str) -> None:
    item["parameters"] = {k: v for k, v in item["parameters"].items() if v is not None}
    text = refusal(text_of({"inputs": [item]}))
    assert words in text and "'x'" in text


# Malformed requests.


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"1",
        b'"inputs"',
        b"{",
        b"{}",
        b'{"inputs":null}',
        b'{"inputs":{}}',
        b'{"inputs":[null]}',
        b'{"inputs":[[]]}',
        b'{"inputs":[{}]}',
        b'{"inputs":["x"]}',
        b"{'inputs':[]}",
        b'{"inputs":[],}',
        b'{"inputs":[]} {}',
        b"\x00",
        b"\x80abc",
    ],
)
def test_what_is_not_a_request_is_refused(body: bytes) -> None:
    refusal(body)
    refusal(body, len(body))


@pytest.mark.parametrize("field", ["name", "datatype", "shape"])
def test_every_field_of_an_input_is_needed_and_none_may_be_null(field: str) -> None:
    item = given_data([1])
    assert names_input(refusal(text_of({"inputs": [{**item, field: None}]})))
    del item[field]
    assert names_input(refusal(text_of({"inputs": [item]})))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "null"),
        ("id", "7"),
        ("parameters", "null"),
        ("parameters", "[]"),
        ("parameters", '{"a":null}'),
        ("parameters", '{"a":[1]}'),
        ("parameters", '{"a":{"b":1}}'),
        ("parameters", '{"a":1e999}'),
        ("outputs", "null"),
        ("outputs", "{}"),
        ("outputs", "[null]"),
        ("outputs", "[{}]"),
        ("outputs", '[{"name":null}]'),
        ("outputs", '[{"name":1}]'),
        ("outputs", '[{"name":"y","parameters":null}]'),
    ],
)
def test_fields_of_the_wrong_type_are_refused(field: str, value: str) -> None:
    assert field in refusal(with_field(field, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "-1"),
        ("priority", "1.5"),
        ("priority", '"1"'),
        ("priority", "true"),
        ("timeout", "-1"),
        ("timeout", "1.5"),
        ("timeout", '"100"'),
        ("timeout", "false"),
        ("binary_data_output", "1"),
        ("binary_data_output", '"true"'),
    ],
)
def test_parameters_of_the_protocol_have_a_type(name: str, value: str) -> None:
    assert name in refusal(with_field("parameters", f'{{"{name}":{value}}}'))


def test_a_number_that_python_would_not_print_is_refused() -> None:
    for name in ("timeout", "priority", "free"):
        refusal(with_field("parameters", f'{{"{name}":1{"0" * 5000}}}'))


def test_a_timeout_that_no_float_can_hold_is_refused() -> None:
    refusal(with_field("parameters", f'{{"timeout":1{"0" * 400}}}'))


@pytest.mark.parametrize("name", ["timeout", "priority"])
def test_a_parameter_of_the_protocol_beyond_64_bits_is_refused(name: str) -> None:
    refusal(with_field("parameters", f'{{"{name}":{2**64}}}'))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**30])
def test_a_free_parameter_beyond_64_bits_is_refused(value: int) -> None:
    refusal(with_field("parameters", f'{{"free":{value}}}'))


@pytest.mark.parametrize("name", ["triton_", "triton_x", "triton_enable_empty_final_response"])
def test_parameters_that_triton_reserves_are_refused(name: str) -> None:
    error = refusal(with_field("parameters", json.dumps({name: True, "mine": 1})))
    assert name in str(error) and "reserved" in str(error)


@pytest.mark.parametrize("name", ["Triton_x", "my_triton_x", "triton"])
def test_parameters_that_are_not_reserved_pass(name: str) -> None:
    body = with_field("parameters", json.dumps({name: 1}))
    assert decode(body).request.parameters == {name: 1}


@pytest.mark.parametrize("id", [5, 2**64 - 1, "a", "a" * 128, 0, ""])
def test_parameters_of_sequences_stay_for_the_queue(id: int | str) -> None:
    given = {"sequence_id": id, "sequence_start": True, "sequence_end": False}
    assert decode_json(given_data([1]), parameters=given).request.parameters == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_id", -1),
        ("sequence_id", 2**64),
        ("sequence_id", 1.5),
        ("sequence_id", True),
        ("sequence_id", "a" * 129),
        ("sequence_start", 1),
        ("sequence_end", "true"),
    ],
)
def test_parameters_of_sequences_are_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        decode_json(given_data([1]), parameters={name: value})


def test_the_same_output_twice_is_refused() -> None:
    text = refusal(with_field("outputs", '[{"name":"y"},{"name":"z"},{"name":"y"}]'))
    assert "output 'y' already exists in request" in text


def test_a_flood_of_outputs_or_inputs_is_refused() -> None:
    names = [{"name": str(number)} for number in range(50_000)]
    assert str(MAX_TENSORS) in refusal(with_field("outputs", json.dumps(names)))
    inputs = [given_data([1], name=str(number)) for number in range(MAX_TENSORS + 1)]
    assert str(MAX_TENSORS) in refusal(text_of({"inputs": inputs}))


@pytest.mark.parametrize("value", ['"false"', '"true"', "1", "0", "1.5"])
def test_binary_data_of_an_output_is_true_or_false(value: str) -> None:
    output = f'[{{"name":"y","parameters":{{"binary_data":{value}}}}}]'
    assert "binary_data" in refusal(with_field("outputs", output))


def test_an_output_may_have_a_place_in_shared_memory() -> None:
    places = '"shared_memory_region":"r","shared_memory_byte_size":4'

    def asked(parameters: str) -> bytes:
        return with_field("outputs", f'[{{"name":"y","parameters":{{{parameters}}}}}]')

    request, _ = decode(asked(places))
    assert request.outputs[0].place == RegionPlace("r", 0, 4) and request.uses_regions
    assert "'y': classes" in refusal(asked(places + ',"classification":2'))
    assert "shared_memory_byte_size too" in refusal(asked('"shared_memory_region":"r"'))


def test_answers_in_shared_memory_have_no_data() -> None:
    place = RegionPlace("r", 64, 8)
    outputs = [
        Tensor("in", "INT32", (1, 2), b"", place),
        Tensor("out", "INT32", (1, 1), b"abcd"),
    ]
    for prefers_binary in (True, False):
        request = Request(SINK, [], 0.0)
        request.prefers_binary = prefers_binary
        head, tail = encode_answer(request, Response("m", "1", outputs))
        told = json.loads(head)["outputs"]
        assert told[0]["parameters"] == {
            "shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 64
        }  # fmt: skip
        assert "data" not in told[0]
        assert tail == ([b"abcd"] if prefers_binary else [])
    head, tail = encode_answer(request, Response("m", "1", outputs[:1]))
    assert not tail and "data" not in json.loads(head)["outputs"][0]


@pytest.mark.parametrize("count", ["0", "-1", "true", "1.5", '"3"'])
def test_a_number_of_classes_is_at_least_one(count: str) -> None:
    assert "'y'" in refusal(
        with_field("outputs", f'[{{"name":"y","parameters":{{"classification":{count}}}}}]')
    )


def test_a_number_of_classes_has_a_limit() -> None:
    def asking(count: int) -> bytes:
        return with_field("outputs", f'[{{"name":"y","parameters":{{"classification":{count}}}}}]')

    (output,) = decode(asking(MAX_CLASSES)).request.outputs
    assert output.parameters == {"classification": MAX_CLASSES}
    assert refusal(asking(MAX_CLASSES + 1)) == (
        "output 'y': parameter 'classification' asks for 1001 classes; at most 1000"
    )


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
        elements=st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, np.nan, np.inf, -np.inf]),
    ),
    st.integers(1, 14),
)
def test_of_equal_values_the_first_is_the_best_and_nan_comes_last(values: Any, count: int) -> None:
    request = request_for(RequestedOutput("y", {"classification": count}))
    response = Response("m", "1", [tensor_of("y", "FP32", values)])
    (output,) = json.loads(Codec().encode_answer(request, response)[0])["outputs"]
    told = [int(text.split(":")[1]) for text in output["data"]]
    best = np.argsort(-values, axis=1, kind="stable")[:, :count]
    assert told == best.ravel().tolist()


@pytest.mark.parametrize(
    ("datatype", "values", "labels", "classes"),
    [
        ("FP32", [[1.5, 3, -2]], ("a", "b", "c"), [["3.000000:1:b", "1.500000:0:a"]]),
        ("FP32", [[1, 1, 1]], (), [["1.000000:0", "1.000000:1"]]),
        ("INT32", [[1, 2], [4, 3]], ("a",), [["2:1", "1:0:a"], ["4:0:a", "3:1"]]),
        ("UINT8", [5, 7], ("a", "b"), ["7:1:b", "5:0:a"]),
    ],
)
def test_the_best_classes_come_first_with_their_labels(
    datatype: str, values: Any, labels: tuple[str, ...], classes: Any
) -> None:
    request = request_for(RequestedOutput("y", {"classification": 2}))
    response = Response("m", "1", [tensor_of("y", datatype, values)])
    specs = [TensorSpec("y", datatype, (-1,), labels=labels)]
    head, tail = Codec().encode_answer(request, response, specs)
    (output,) = json.loads(head)["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", list(np.shape(classes)))
    assert output["data"] == np.ravel(classes).tolist()
    assert tail == []


@pytest.mark.parametrize(("shape", "classes"), [((0, 3), [0, 2]), ((2, 0), [2, 0]), ((0,), [0])])
def test_of_no_values_there_are_no_classes(shape: tuple[int, ...], classes: list[int]) -> None:
    request = request_for(RequestedOutput("y", {"classification": 2}))
    response = Response("m", "1", [Tensor("y", "FP32", shape, b"")])
    (output,) = json.loads(Codec().encode_answer(request, response)[0])["outputs"]
    assert (output["shape"], output["data"]) == (classes, [])


@pytest.mark.parametrize(
    "body",
    [
        with_field("id", '"a","id":"b"'),
        with_field("parameters", '{"k":1,"k":2}'),
        one_input("INT32", '[1],"shape":[1,1]', "[1]"),
        one_input("INT32", "[1]", '[1],"data":[2]'),
    ],
)
def test_of_duplicate_keys_the_last_one_counts(body: bytes) -> None:
    """As with most JSON parsers; to notice them would cost every request a second pass."""
    request = decode(body).request
    (x,) = request.inputs
    last = (request.id, request.parameters, x.shape, values_of(x))
    assert last in [
        ("b", None, (1,), [1]),
        ("", {"k": 2}, (1,), [1]),
        ("", None, (1, 1), [1]),
        ("", None, (1,), [2]),
    ]


def test_only_utf8_without_a_byte_order_mark_is_json() -> None:
    body = one_input("INT32", "[1]", "[1]")
    refusal(b"\xef\xbb\xbf" + body)
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        refusal(body.decode().encode(encoding))


@pytest.mark.parametrize("garbage", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80"])
@pytest.mark.parametrize("place", ["name", "id", "key", "unknown"])
def test_invalid_utf8_around_the_tensors_is_refused(garbage: bytes, place: str) -> None:
    body = one_input("BYTES", "[1]", '["a"]')[:-1] + b',"id":"i","parameters":{"k":1},"more":"m"}'
    old = {"name": b'"x"', "id": b'"i"', "key": b'"k"', "unknown": b'"m"'}[place]
    refusal(body.replace(old, b'"' + garbage + b'"'))


@pytest.mark.parametrize("garbage", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80"])
@pytest.mark.parametrize(("shape", "data"), [("[1]", '["@"]'), ("[1,1]", '[["@"]]')])
def test_invalid_utf8_in_strings_is_refused(garbage: bytes, shape: str, data: str) -> None:
    assert names_input(refusal(one_input("BYTES", shape, data).replace(b"@", garbage)))


@pytest.mark.parametrize(
    "escape", [r"\ud800", r"\udc00", r"\ud800\ud800", r"\udc00\ud800", r"a\ud8"]
)
def test_lone_surrogates_are_refused(escape: str) -> None:
    refusal(one_input("BYTES", "[1]", f'["{escape}"]'))
    refusal(one_input("BYTES", "[1,1]", f'[["{escape}"]]'))
    refusal(with_field("id", f'"{escape}"'))


@pytest.mark.parametrize(("open_", "close"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("is_closed", [True, False])
def test_deep_nesting_is_refused_wherever_it_is(open_: str, close: str, is_closed: bool) -> None:
    deep = open_ * DEEP + "1" + (close * DEEP if is_closed else "")
    refusal(deep.encode())
    refusal(one_input("INT32", "[1]", deep))
    refusal(one_input("INT32", deep, "[1]"))
    refusal(with_field("parameters", deep))
    refusal(with_field("parameters", f'{{"a":{deep}}}'))
    refusal(with_field("outputs", f'[{{"name":"y","parameters":{deep}}}]'))
    refusal(with_field("unknown", deep))


# Whatever arrives, only our own errors leave.

TEMPLATES = [
    text_of(
        {
            "id": "a",
            "inputs": [
                given_data([1, 2, 3, 4], "INT64", [2, 2], "i"),
                given_data([[0.5], [1e30]], "FP32", [2, 1], "f"),
                given_data(["a", "ü"], "BYTES", [2], "s"),
                given_data([True], "BOOL", [1], "b"),
            ],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
            "parameters": {"priority": 1, "timeout": 10, "binary_data_output": True, "k": "v"},
        }
    ),
    text_of({"inputs": [given_size(4, "FP16", [2]), given_size(6, "BYTES", [1], "s")]}),
]
TAILS = [b"", b"\x00\x01\x02\x03" + struct.pack("<I", 2) + b"hi"]
PIECES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from([b"null", b"-1", b"1e999", b"[]", b"{}", b'"', b"[[", b"\\ud800", b"\xff"]),
    st.sampled_from([b"9" * 25, b"9" * 400, b"NaN", b"true", b"0.5", b",", b":", b'"data":[1],']),
)
edits = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 12), PIECES), min_size=1, max_size=4)


def edited(body: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for start, length, piece in changes:
        position = start % (len(body) + 1)
        body = body[:position] + piece + body[position + length :]
    return body


@settings(deadline=None, max_examples=at_most(1500))
@example(0, [(TEMPLATES[0].index(b'"a", "'), 3, b'"\xff"')], 0)
@example(0, [(TEMPLATES[0].index(b"10"), 2, b"9" * 400)], 0)
@given(st.integers(0, 1), edits, st.integers(-2, 2))
def test_a_damaged_request_raises_nothing_but_our_errors(
    which: int, changes: list[tuple[int, int, bytes]], shift: int
) -> None:
    head = edited(TEMPLATES[which], changes)
    body = head + TAILS[which]
    for json_bytes in (None, max(1, min(len(body), len(head) + shift))):
        try:
            decode(body, json_bytes)
        except PenstockError as error:
            assert str(error)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@st.composite
def replaced(draw: st.DrawFn) -> Any:
    """A valid request in which one node of the JSON tree is something else."""
    message = json.loads(TEMPLATES[draw(st.integers(0, 1))])
    node: Any = message
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = draw(st.sampled_from(keys))
        child = node[key]
        if not isinstance(child, dict | list) or not child or draw(st.booleans()):
            node[key] = draw(junk)
            return message
        node = child


@settings(deadline=None, max_examples=at_most(800))
@given(replaced())
def test_a_request_with_a_node_of_another_type_raises_nothing_but_our_errors(message: Any) -> None:
    body = text_of(message)
    for tail, json_bytes in ((b"", None), (TAILS[1], len(body))):
        try:
            decode(body + tail, json_bytes)
        except PenstockError as error:
            assert str(error)


# Answers.


def test_a_json_answer_holds_model_id_and_flat_data() -> None:
    request = request_for(id="42")
    message = answer_json(tensor_of("y", "FP32", [[1.5, 2.0]]), request=request)
    assert message == {
        "model_name": "m",
        "model_version": "1",
        "id": "42",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}],
    }


def test_no_id_is_sent_back_when_none_was_given() -> None:
    assert "id" not in answer_json(tensor_of("y", "INT8", [1]))


def test_parameters_of_the_answer_are_sent() -> None:
    response = Response("m", "1", [tensor_of("y", "INT8", [1])], {"final": True})
    head, _ = encoded(request_for(), response, False)
    assert json.loads(head)["parameters"] == {"final": True}


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("INT8", [-128, 127]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("FP32", [0.5, -0.0]),
        ("FP64", [0.1, 1e308]),
        ("BYTES", ["", "a\0b", "ü"]),
    ],
)
def test_every_json_datatype_can_be_answered(datatype: str, values: list[Any]) -> None:
    [output] = answer_json(tensor_of("y", datatype, values))["outputs"]
    assert output["data"] == values
    assert output["shape"] == [len(values)]


def test_an_empty_output_has_empty_data() -> None:
    [output] = answer_json(tensor_of("y", "FP32", np.empty((0, 4))))["outputs"]
    assert (output["shape"], output["data"]) == ([0, 4], [])


def test_binary_outputs_follow_the_json_in_order_with_their_sizes() -> None:
    tensors = [tensor_of("a", "FP16", [1.0, 2.0]), tensor_of("b", "BYTES", [b"\xff\0"])]
    head, tail = encoded(request_for(), Response("m", "1", tensors), True)
    outputs = json.loads(head)["outputs"]
    assert [output["parameters"]["binary_data_size"] for output in outputs] == [4, 6]
    assert all("data" not in output for output in outputs)
    assert b"".join(tail) == bytes(tensors[0].data) + bytes(tensors[1].data)


@pytest.mark.parametrize(
    ("of_request", "of_output", "is_binary"),
    [
        (False, None, False),
        (True, None, True),
        (False, True, True),
        (True, False, False),
    ],
)
def test_what_an_output_says_precedes_what_the_request_says(
    of_request: bool, of_output: bool | None, is_binary: bool
) -> None:
    parameters = {} if of_output is None else {"binary_data": of_output}
    decoded = decode_json(
        given_data([1]),
        outputs=[{"name": "y", "parameters": parameters}],
        parameters={"binary_data_output": of_request},
    )
    response = Response("m", "1", [tensor_of("y", "INT8", [7])])
    head, tail = encoded(decoded.request, response, decoded.is_binary)
    [output] = json.loads(head)["outputs"]
    assert (b"".join(tail) == b"\x07") is is_binary
    assert ("data" in output) is not is_binary


def test_one_answer_may_mix_json_and_binary() -> None:
    asked = (RequestedOutput("a", {"binary_data": True}), RequestedOutput("b"))
    tensors = [tensor_of("a", "INT8", [1]), tensor_of("b", "INT8", [2])]
    head, tail = encoded(request_for(*asked), Response("m", "1", tensors), False)
    first, second = json.loads(head)["outputs"]
    assert first["parameters"] == {"binary_data_size": 1}
    assert second["data"] == [2]
    assert b"".join(tail) == b"\x01"


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_never_written_as_json(datatype: str, value: float) -> None:
    with pytest.raises(PenstockError, match="'y'.*binary"):
        answer_json(tensor_of("y", datatype, [1.0, value]))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_are_never_written_as_json(datatype: str) -> None:
    with pytest.raises(PenstockError, match="'y'.*binary"):
        answer_json(tensor_of("y", datatype, [1]))


def test_strings_that_are_not_utf8_are_never_written_as_json() -> None:
    with pytest.raises(PenstockError, match="'y'.*binary"):
        answer_json(tensor_of("y", "BYTES", [b"ok", b"\xff"]))


def test_an_error_is_an_object_with_one_text() -> None:
    assert json.loads(encode_error('a "quoted"\nü\0')) == {"error": 'a "quoted"\nü\0'}


def test_metadata_shows_the_batch_dimension_where_there_is_one() -> None:
    specs = [TensorSpec("x", "FP32", (3, -1)), TensorSpec("y", "BYTES", ())]
    assert msgspec.to_builtins(describe_tensors(specs, True)) == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]},
        {"name": "y", "datatype": "BYTES", "shape": [-1]},
    ]
    assert [each.shape for each in describe_tensors(specs, False)] == [[3, -1], []]


# What the codec remembers.


def json_request(id: str, data: str, rest: str = "") -> bytes:
    head = f'{{"id":"{id}","inputs":[{{"name":"x","datatype":"FP32","shape":[1,2],"data":'
    return f"{head}{data}}}]{rest}}}".encode()


def binary_request(id: str, size: int = 4) -> bytes:
    tensor = (
        f'{{"name":"x","datatype":"INT32","shape":[1],"parameters":{{"binary_data_size":{size}}}}}'
    )
    return f'{{"id":"{id}","inputs":[{tensor}]}}'.encode()


@pytest.mark.parametrize("id", ["a", "r-17", "", "späť", 'q\\"uote', "back\\\\slash", "\\u0041"])
def test_a_remembered_request_keeps_its_own_id_and_values(id: str) -> None:
    codec = Codec()
    for number in (1, 2, 3):
        head = binary_request(id)
        body = head + number.to_bytes(4, "little")
        request = codec.decode_infer(body, len(head), SINK, 0.0)
        assert (request.id, values_of(request.inputs[0])) == (json.loads(head)["id"], [number])
        request = codec.decode_infer(json_request(id, f"[{number},4]"), None, SINK, 0.0)
        assert (request.id, values_of(request.inputs[0])) == (json.loads(head)["id"], [number, 4])


def test_requests_of_one_form_share_it_and_others_do_not() -> None:
    codec = Codec()

    def form(body: bytes, size: int | None = None) -> object:
        return codec.decode_infer(body, size, SINK, 0.0).form

    first = form(json_request("a", "[1,2]"))
    assert form(json_request("b", "[3, 4]")) is first is not None
    assert form(json_request("b", "[3,4]", ',"parameters":{"priority":1}')) is not first
    head = binary_request("a")
    assert form(head + bytes(4), len(head)) is form(head + b"\1\2\3\4", len(head)) is not None
    assert form(json_request("a", "[[1,2]]")) is None, "nested data are parsed each time"


@pytest.mark.parametrize(
    "data",
    [
        "[1]",
        "[1,2,3]",
        "[1,null]",
        "[1,1e39]",
        '[1,"2"]',
        "[1,2",
        "[1,,2]",
        "1",
        "[[1],2]",
        "[true,1]",
    ],
)
def test_wrong_data_in_a_remembered_request_is_refused_as_ever(data: str) -> None:
    codec = Codec()
    codec.decode_infer(json_request("a", "[1,2]"), None, SINK, 0.0)
    with pytest.raises(InvalidRequest) as remembered:
        codec.decode_infer(json_request("a", data), None, SINK, 0.0)
    with pytest.raises(InvalidRequest) as fresh:
        Codec().decode_infer(json_request("a", data), None, SINK, 0.0)
    assert str(remembered.value) == str(fresh.value)


def test_a_second_data_key_is_never_mistaken_for_the_first() -> None:
    codec = Codec()
    for number in (1, 2):
        body = json_request("a", f'[{number},0],"data":[7,8]')
        assert values_of(codec.decode_infer(body, None, SINK, 0.0).inputs[0]) == [7, 8]


def test_what_follows_an_id_is_no_request_by_itself() -> None:
    codec = Codec()
    whole, head = json_request("a", "[1,2]"), binary_request("a")
    codec.decode_infer(whole, None, SINK, 0.0)
    codec.decode_infer(head + bytes(4), len(head), SINK, 0.0)
    for cut in range(1, len(b'{"id":"a",')):
        with pytest.raises(InvalidRequest, match="JSON"):
            codec.decode_infer(whole[cut:], None, SINK, 0.0)
        with pytest.raises(InvalidRequest, match="JSON"):
            codec.decode_infer(head[cut:] + bytes(4), len(head) - cut, SINK, 0.0)


def test_tensors_of_another_size_behind_a_remembered_head_are_refused() -> None:
    codec = Codec()
    head = binary_request("a")
    codec.decode_infer(head + bytes(4), len(head), SINK, 0.0)
    for size in (0, 3, 5, 8):
        with pytest.raises(InvalidRequest):
            codec.decode_infer(head + bytes(size), len(head), SINK, 0.0)


def test_memory_of_the_codec_is_bounded() -> None:
    codec = Codec()
    for number in range(5000):
        body = json_request("a", "[1,2]", f',"parameters":{{"p{number}":1}}')
        assert codec.decode_infer(body, None, SINK, 0.0).parameters == {f"p{number}": 1}


@pytest.mark.parametrize("is_binary", [True, False])
def test_answers_of_one_form_differ_only_in_id_and_values(is_binary: bool) -> None:
    codec = Codec()
    form = object()
    for number in (1, 2):
        request = codec.decode_infer(json_request(f"r{number}", "[1,2]"), None, SINK, 0.0)
        request.prefers_binary = is_binary
        response = Response("m", "3", [tensor_of("y", "INT8", [number])])
        remembered = Response("m", "3", [tensor_of("y", "INT8", [number])])
        remembered.form = form
        head, tail = codec.encode_answer(request, remembered)
        assert (head, tail) == encode_answer(request, response)
        assert json.loads(head)["id"] == f"r{number}"


# One codec sees many clients: whatever it remembers of one, the next is told what a new codec would
# tell it. Requests are alike but for their first list and their id, as the codec expects them, and
# not always as it hopes.

ids = st.sampled_from(
    ["", '"id":"a",', '"id":"b",', '"id": "a",', '"id":"",', '"id":7,', '"id":"\\u0061",']
    + ['"id":"\\"data\\":[1,2]",', '"id":"a","id":"b",', '"id":"ü",', '"data":[1,2],']
)
lists = st.sampled_from(
    ["[1,2]", "[3,4]", "[ 1 , 2 ]", "[1.5,2]", "[1,2", "[1]", "[1,2,3]", "[]", "[[1,2]]", "1"]
    + ["[true,false]", '["a","b"]', '["]","b"]', "[1e39,2]", "[300,1]", "[-1,0]", "null", "{}"]
)
frames = st.builds(
    '{{@"inputs":[{{"name":"x",{}#{},"datatype":"{}","shape":{}}}{}]{}}}'.format,
    st.sampled_from(['"data":', '"data": ', '"data" :', '"parameters":{},"data":']),
    st.sampled_from(
        ["", "", ',"data":[1,2]', ',"data" :[1,2]', ',"more":{"data":[1,2]}', ',"more":[3]', "]"]
        + [',"\\u0064ata":[1,2]', ',"data"\t:[1,2]']
    ),
    st.sampled_from(["FP32", "INT8", "BOOL", "BYTES", "UINT8"]),
    st.sampled_from(["[2]", "[2]", "[1,2]", "[2,1]", "[3]", "[0]"]),
    st.sampled_from(["", "", ',{"name":"z","datatype":"INT8","shape":[1],"data":[1]}']),
    st.sampled_from(
        ["", ',"parameters":{"binary_data_output":true}', ',"parameters":{"priority":2}']
        + [',"id":"b"', ',"id" : "b"', ',"\\u0069d":"b"', ',"parameters":{"id":"b"}']
        + [',"outputs":[{"name":"y"}]', ',"data":[1,2]', ',"parameters":{"data":1}', ","]
    ),
)


def outcome(codec: Codec, body: bytes, json_bytes: int | None) -> Any:
    try:
        return described(codec.decode_infer(body, json_bytes, SINK, 7.0))
    except PenstockError as error:
        return type(error), str(error)


@settings(max_examples=at_most(500))
@given(frames, st.lists(st.tuples(ids, lists), min_size=2, max_size=5))
def test_what_a_codec_remembers_changes_no_answer(
    frame: str, changes: list[tuple[str, str]]
) -> None:
    codec = Codec()
    for id, data in [('"id":"b",', "[1,2]"), *changes]:
        body = frame.replace("@", id).replace("#", data).encode()
        for json_bytes in (None, len(body)):
            assert outcome(codec, body, json_bytes) == outcome(Codec(), body, json_bytes)


@quick
@given(
    json_tensors(), st.lists(st.sampled_from(["", "a", "b-2", "ü", '"']), min_size=2, max_size=4)
)
def test_a_template_writes_what_is_written_without_one(
    case: tuple[Tensor, Any], request_ids: list[str]
) -> None:
    codec, form, (tensor, _) = Codec(), object(), case
    for is_binary in (True, False):
        for id in request_ids:
            body = json.dumps({"id": id, "inputs": [given_data([1], "INT8", [1])]}).encode()
            request = codec.decode_infer(body, None, SINK, 7.0)
            request.prefers_binary = is_binary
            response = Response("m", "1", [tensor])
            response.form = (form, is_binary)
            assert codec.encode_answer(request, response) == encode_answer(request, response)
