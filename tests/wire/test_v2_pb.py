"""Protobuf messages to requests and answers to messages: what is kept, what is refused, how."""

import json
from typing import Any

import numpy as np
import pytest
from doubles import RecordingSink
from example_counts import at_most
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.grpc import service_pb2

from penstock.errors import InvalidRequest, PenstockError, TooLarge
from penstock.types import (
    DATATYPES,
    RegionPlace,
    Request,
    Response,
    from_array,
    num_elements,
    split_bytes,
    to_array,
)
from penstock.wire.v2 import Codec
from penstock.wire.v2_pb import (
    CONTENTS,
    MAX_TYPED,
    decode_infer,
    parse,
    parse_infer,
    set_parameter,
    split_raw,
)
from penstock.wire.v2_pb_templates import PbCodec

INPUT = service_pb2.ModelInferRequest.InferInputTensor
OUTPUT = service_pb2.ModelInferRequest.InferRequestedOutputTensor
FIXED = sorted(DATATYPES.keys() - {"BYTES"})


def message(*inputs: Any, raw: tuple[bytes, ...] = (), **fields: Any) -> Any:
    return service_pb2.ModelInferRequest(
        model_name="m", inputs=list(inputs), raw_input_contents=list(raw), **fields
    )


def tensor(name: str = "x", datatype: str = "FP32", shape: Any = (2,), **contents: Any) -> Any:
    item = INPUT(name=name, datatype=datatype, shape=shape)
    if contents:
        item.contents.CopyFrom(service_pb2.InferTensorContents(**contents))
    return item


def decode(wire: Any) -> Request:
    """By way of bytes, as it really comes."""
    copy = parse(service_pb2.ModelInferRequest, wire.SerializeToString())
    return decode_infer(copy, RecordingSink(), 1.0)


def encoded(request: Request, response: Response) -> Any:
    return service_pb2.ModelInferResponse.FromString(b"".join(PbCodec().encode(request, response)))


def refusal(wire: Any, kind: type[PenstockError] = InvalidRequest) -> str:
    with pytest.raises(PenstockError) as caught:
        decode(wire)
    assert type(caught.value) is kind
    return str(caught.value)


RAW = np.array([1, 2], dtype="<f4").tobytes()


# What is kept


@settings(max_examples=at_most(200))
@given(st.data(), st.sampled_from(FIXED))
def test_raw_tensors_come_and_go_bit_by_bit(data: st.DataObject, datatype: str) -> None:
    array = data.draw(
        hnp.arrays(DATATYPES[datatype].numpy, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
    )
    sent = from_array("x", datatype, array)
    request = decode(message(tensor("x", datatype, array.shape), raw=(bytes(sent.data),), id="é"))
    (received,) = request.inputs
    assert (received.name, received.datatype, received.shape) == ("x", datatype, array.shape)
    assert bytes(received.data) == bytes(sent.data)

    answer = encoded(request, Response("m", "1", [received]))
    assert (answer.id, answer.model_name, answer.model_version) == ("é", "m", "1")
    (output,) = answer.outputs
    assert (output.name, output.datatype, tuple(output.shape)) == ("x", datatype, array.shape)
    assert list(answer.raw_output_contents) == [bytes(sent.data)]
    assert not output.HasField("contents")


@settings(max_examples=at_most(200))
@given(st.data(), st.sampled_from(sorted(CONTENTS.keys() - {"BYTES"})))
def test_typed_contents_are_the_same_as_raw(data: st.DataObject, datatype: str) -> None:
    array = data.draw(hnp.arrays(DATATYPES[datatype].numpy, st.integers(1, 300)))
    item = tensor("x", datatype, array.shape, **{CONTENTS[datatype]: array.tolist()})
    (received,) = decode(message(item)).inputs
    np.testing.assert_array_equal(to_array(received), array)


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_bytes_elements_may_hold_anything(elements: list[bytes]) -> None:
    item = tensor("x", "BYTES", [len(elements)], bytes_contents=elements)
    (received,) = decode(message(item)).inputs
    assert split_bytes(received.data) == elements
    (again,) = decode(
        message(tensor("x", "BYTES", [len(elements)]), tensor("y"), raw=(received.data, RAW))
    ).inputs[:1]
    assert split_bytes(again.data) == elements


@given(
    st.dictionaries(
        st.text(max_size=5).map(lambda text: f"own_{text}"),
        st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=5),
        max_size=3,
    )
)
def test_parameters_of_every_kind_come_and_go(parameters: dict[str, Any]) -> None:
    wire = message(tensor(), raw=(RAW,))
    for name, value in parameters.items():
        set_parameter(wire.parameters[name], value)
    request = decode(wire)
    assert (request.parameters or {}) == parameters
    answer = encoded(request, Response("m", "1", [], request.parameters))
    kinds = {name: each.WhichOneof("parameter_choice") for name, each in answer.parameters.items()}
    assert {n: getattr(answer.parameters[n], kind) for n, kind in kinds.items()} == parameters


def test_priority_and_timeout_move_into_the_request() -> None:
    wire = message(tensor(), raw=(RAW,))
    set_parameter(wire.parameters["priority"], 2)
    set_parameter(wire.parameters["timeout"], 1500)
    request = decode(wire)
    assert (request.priority, request.timeout_s, request.parameters) == (2, 0.0015, None)


def test_outputs_are_asked_for_by_name() -> None:
    request = decode(message(tensor(), raw=(RAW,), outputs=[OUTPUT(name="b"), OUTPUT(name="a")]))
    assert [output.name for output in request.outputs] == ["b", "a"]


def test_an_empty_tensor_needs_no_contents() -> None:
    (received,) = decode(message(tensor(shape=[0, 4]))).inputs
    assert (received.shape, received.data) == ((0, 4), b"")


def test_fields_that_we_do_not_know_are_ignored() -> None:
    data = message(tensor(), raw=(RAW,)).SerializeToString() + b"\xfa\x3f\x03abc"
    assert decode(parse(service_pb2.ModelInferRequest, data)).inputs[0].data == RAW


# What is refused


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (
            message(tensor("x", fp32_contents=[1, 2]), raw=(RAW,)),
            "contents field must not be specified when using raw_input_contents for 'x' for model",
        ),
        (message(raw=(RAW,)), "expected 0 raw_input_contents, one for each input, got 1"),
        (message(tensor("x"), tensor("y"), raw=(RAW,)), "got 1: input 'y' has none"),
        (message(tensor("x"), raw=(RAW, RAW)), "expected 1 raw_input_contents"),
        (message(tensor("x", "FP32", [2], int_contents=[1, 2])), "belong in fp32_contents, not in"),
        (message(tensor("x", fp32_contents=[1])), "input 'x': shape [2] needs 2 elements, fp32_"),
        (message(tensor("x")), "needs 2 elements, fp32_contents has 0"),
        (message(tensor("x", shape=[-1]), raw=(RAW,)), "input 'x': shape [-1] has a negative"),
        (message(tensor("x", shape=[-1], fp32_contents=[1])), "input 'x': shape [-1] has a neg"),
        (message(tensor("x", shape=[2**62, 2]), raw=(RAW,)), "input 'x': shape"),
        (message(tensor("x", shape=[2**63 - 1]), raw=(RAW,)), "input 'x': shape"),
        (message(tensor("x", shape=[2**32, 2**32]), raw=(RAW,)), "input 'x': shape"),
        (message(tensor("x", shape=[2**4, 2**60 + 2], fp32_contents=[1])), "input 'x': shape"),
        (message(tensor("x", shape=[-(2**63), 2]), raw=(RAW,)), "has a negative dimension"),
        (message(tensor("x", shape=[0, -1]), raw=(RAW,)), "has a negative dimension"),
        (message(tensor("x", shape=[1] * 33), raw=(RAW,)), "33 dimensions"),
        (message(tensor("x", "BYTES", [2], bytes_contents=[b"a"])), "needs 2 elements, bytes_con"),
        (message(tensor("x", "BOOL", [1], int_contents=[1])), "input 'x': BOOL elements belong in"),
        (message(tensor("x", "UINT8", [1], uint_contents=[256])), "a value does not fit UINT8"),
        (message(tensor("x", "INT16", [1], int_contents=[-32769])), "a value does not fit INT16"),
        (message(tensor("x", "", [1], int_contents=[1])), "input 'x': unknown datatype ''"),
        (
            message(tensor("x", "INT64", [1], int64_contents=[1], int_contents=[1])),
            "input 'x': INT64 elements belong in int64_contents, not in int_contents",
        ),
        (
            message(tensor("x"), tensor("y", fp32_contents=[1, 2]), raw=(RAW, RAW)),
            "raw_input_contents for 'y' for model",
        ),
        (message(tensor("x", "FP16", fp32_contents=[1, 2])), "FP16 has no typed contents"),
        (message(tensor("x", "BF16", fp32_contents=[1, 2])), "BF16 has no typed contents"),
        (message(tensor("x", "FP4", fp32_contents=[1, 2])), "unknown datatype 'FP4'"),
        (message(tensor("x", "INT8", int_contents=[1, 128])), "a value does not fit INT8"),
        (message(tensor("x", "UINT16", uint_contents=[1, 65536])), "a value does not fit UINT16"),
        (
            message(tensor(), raw=(RAW,), outputs=[OUTPUT(name="y"), OUTPUT(name="y")]),
            "output 'y' already exists in request",
        ),
        (message(*[tensor()] * 1025), "more than 1024 inputs or outputs"),
    ],
)
def test_malformed_requests_are_told_what_is_wrong(wire: Any, words: str) -> None:
    assert words in refusal(wire)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("priority", -1, InvalidRequest),
        ("priority", True, InvalidRequest),
        ("timeout", "soon", InvalidRequest),
        ("binary_data_output", 1, InvalidRequest),
        ("triton_enable_empty_final_response", "true", InvalidRequest),
        ("triton_other", True, InvalidRequest),
        ("sequence_id", 1.5, InvalidRequest),
        ("sequence_id", -1, InvalidRequest),
        ("sequence_start", 1, InvalidRequest),
    ],
)
def test_known_parameters_are_checked(name: str, value: Any, kind: type[PenstockError]) -> None:
    wire = message(tensor(), raw=(RAW,))
    set_parameter(wire.parameters[name], value)
    assert f"parameter '{name}'" in refusal(wire, kind)


def test_typed_elements_are_limited_and_raw_ones_are_not() -> None:
    def elements(name: str, count: int) -> Any:
        return tensor(name, "BOOL", [count], bool_contents=bytes(count))

    half = MAX_TYPED // 2
    assert len(decode(message(elements("x", half), elements("y", half))).inputs) == 2
    text = refusal(message(elements("x", half), elements("y", half + 1)), TooLarge)
    assert text.startswith(f"input 'y': {half + 1} more typed elements")
    assert "raw_input_contents" in text
    raw = message(tensor("x", "BOOL", [MAX_TYPED + 1]), raw=(bytes(MAX_TYPED + 1),))
    assert len(decode(raw).inputs[0].data) == MAX_TYPED + 1


def test_a_parameter_without_a_value_is_refused() -> None:
    wire = message(tensor(), raw=(RAW,))
    wire.parameters["empty"].SetInParent()
    assert refusal(wire) == "parameter 'empty' has no value"


def in_region(item: Any, nbytes: int | None, offset: int | None = None) -> Any:
    set_parameter(item.parameters["shared_memory_region"], "r")
    for key, value in (("byte_size", nbytes), ("offset", offset)):
        if value is not None:
            set_parameter(item.parameters[f"shared_memory_{key}"], value)
    return item


def test_tensors_in_shared_memory_have_places_and_no_data() -> None:
    output = in_region(OUTPUT(name="y"), 8, 64)
    shared = in_region(tensor("b"), 16)
    request = decode(message(tensor("a"), shared, tensor("c"), raw=(RAW, RAW), outputs=[output]))
    assert [each.name for each in request.inputs] == ["a", "b", "c"]
    assert [each.place for each in request.inputs] == [None, RegionPlace("r", 0, 16), None]
    assert [bytes(each.data) for each in request.inputs] == [RAW, b"", RAW]
    assert request.outputs[0].place == RegionPlace("r", 64, 8)
    assert request.uses_regions and not decode(message(tensor(), raw=(RAW,))).uses_regions


def test_wrong_places_are_refused() -> None:
    needs = "input 'x': shared_memory_region needs shared_memory_byte_size too"
    assert refusal(message(in_region(tensor(), None))) == needs
    assert "shared_memory_offset must be" in refusal(message(in_region(tensor(), 4, -1)))
    output = in_region(OUTPUT(name="y"), None)
    assert "output 'y'" in refusal(message(tensor(), raw=(RAW,), outputs=[output]))
    typed = in_region(tensor(), 4)
    typed.contents.fp32_contents.append(1.0)
    assert "expected one of them" in refusal(message(typed))


def test_outputs_may_be_asked_for_as_classes() -> None:
    output = OUTPUT(name="y")
    set_parameter(output.parameters["classification"], 3)
    (asked,) = decode(message(tensor(), raw=(RAW,), outputs=[output])).outputs
    assert asked.parameters == {"classification": 3}
    for wrong in (0, -1, "3", True, 1.5):
        set_parameter(output.parameters["classification"], wrong)
        text = refusal(message(tensor(), raw=(RAW,), outputs=[output]))
        assert "output 'y': parameter 'classification' must be a number of classes" in text
        assert text.endswith(f"; got {wrong!r}")
    set_parameter(output.parameters["classification"], 1001)
    assert "output 'y': parameter 'classification' asks for 1001 classes" in refusal(
        message(tensor(), raw=(RAW,), outputs=[output])
    )


@pytest.mark.parametrize("value", [True, False])
def test_the_wish_for_an_empty_final_answer_is_not_the_models_business(value: bool) -> None:
    wire = message(tensor(), raw=(RAW,))
    set_parameter(wire.parameters["triton_enable_empty_final_response"], value)
    assert decode(wire).parameters is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\x0a\x05abc",
        b"\x0a\x02\xff\xfe",  # A name that is not UTF-8.
        b"\xfb\x3f" * 100_000,  # Groups inside groups.
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="failed to parse the ModelInferRequest"):
        parse(service_pb2.ModelInferRequest, data)


def survives(data: bytes) -> None:
    """Either a request whose tensors are what they say, or a refusal that can be shown."""
    try:
        wire = parse(service_pb2.ModelInferRequest, data)
        request = decode_infer(wire, RecordingSink(), 1.0)
    except PenstockError as error:
        assert str(error)
        return
    assert len(request.inputs) == len(wire.inputs)
    for item, received in zip(wire.inputs, request.inputs, strict=True):
        assert (received.name, received.shape) == (item.name, tuple(item.shape))
        assert min(received.shape, default=0) >= 0
        if wire.raw_input_contents or received.datatype == "BYTES":
            continue
        itemsize = DATATYPES[received.datatype].itemsize
        assert len(received.data) == num_elements(received.shape) * itemsize


@settings(max_examples=at_most(300))
@given(st.binary(max_size=60))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    survives(data)


names = st.text(max_size=8)
values = (
    st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
shapes = st.lists(st.integers(-2, 4) | st.integers(-(2**63), 2**63 - 1), max_size=4)
contents = st.one_of(
    *(
        st.builds(lambda name, items: {name: items}, st.just(name), st.lists(kind, max_size=6))
        for name, kind in {
            "bool_contents": st.booleans(),
            "int_contents": st.integers(-(2**31), 2**31 - 1),
            "int64_contents": st.integers(-(2**63), 2**63 - 1),
            "uint_contents": st.integers(0, 2**32 - 1),
            "uint64_contents": st.integers(0, 2**64 - 1),
            "fp32_contents": st.floats(width=32),
            "fp64_contents": st.floats(),
            "bytes_contents": st.binary(max_size=6),
        }.items()
    )
)


@st.composite
def wires(draw: st.DrawFn) -> Any:
    """Messages with every field set to something, sensible or not."""
    wire = message(id=draw(names), model_version=draw(names))
    for _ in range(draw(st.integers(0, 3))):
        datatype = draw(st.sampled_from(sorted(DATATYPES)) | names)
        item = tensor(draw(names), datatype, draw(shapes), **(draw(contents | st.just({}))))
        for name, value in draw(st.dictionaries(names, values, max_size=2)).items():
            set_parameter(item.parameters[name], value)
        wire.inputs.append(item)
    for name in draw(st.lists(names, max_size=2)):
        output = wire.outputs.add(name=name)
        if draw(st.booleans()):
            set_parameter(output.parameters["classification"], draw(values))
    known = st.sampled_from(("priority", "timeout", "sequence_id", "binary_data_output"))
    for name, value in draw(st.dictionaries(names | known, values, max_size=3)).items():
        set_parameter(wire.parameters[name], value)
    wire.raw_input_contents.extend(draw(st.lists(st.binary(max_size=20), max_size=3)))
    return wire


@settings(max_examples=at_most(300))
@given(wires())
def test_messages_of_any_content_do_no_harm(wire: Any) -> None:
    survives(wire.SerializeToString())


@settings(max_examples=at_most(300))
@given(wires(), st.data())
def test_messages_that_are_cut_or_changed_do_no_harm(wire: Any, data: st.DataObject) -> None:
    mutant = bytearray(wire.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if not mutant:
            return
        position = data.draw(st.integers(0, len(mutant) - 1))
        match data.draw(st.sampled_from(("cut", "change", "insert", "remove"))):
            case "cut":
                del mutant[position:]
            case "change":
                mutant[position] = data.draw(st.integers(0, 255))
            case "insert":
                mutant[position:position] = data.draw(st.binary(max_size=4))
            case "remove":
                del mutant[position : position + 4]
    survives(bytes(mutant))


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, Any]:
    datatype = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    if datatype != "BYTES":
        return datatype, draw(hnp.arrays(DATATYPES[datatype].numpy, shape))
    array = np.empty(shape, dtype=np.object_)
    array[...] = b""
    for index in np.ndindex(shape):
        array[index] = draw(st.binary(max_size=5))
    return datatype, array


@settings(max_examples=at_most(200))
@given(
    st.lists(arrays(), min_size=1, max_size=3),
    st.lists(st.sampled_from("abc"), unique=True, max_size=3),
    st.none() | st.integers(1, 9),
    st.dictionaries(st.sampled_from(("own", "other")), values, max_size=2),
    st.integers(0, 5),
    st.integers(0, 10**6),
)
def test_both_protocols_say_the_same(
    tensors: list[tuple[str, Any]],
    outputs: list[str],
    num_classes: int | None,
    own: dict[str, Any],
    priority: int,
    timeout: int,
) -> None:
    sent = [from_array(f"x{i}", datatype, array) for i, (datatype, array) in enumerate(tensors)]
    parameters = {**own, "priority": priority, "timeout": timeout}
    asked = {} if num_classes is None else {"classification": num_classes}

    wire = message(
        *(tensor(t.name, t.datatype, t.shape) for t in sent),
        raw=tuple(bytes(t.data) for t in sent),
        id="é",
    )
    for name, value in parameters.items():
        set_parameter(wire.parameters[name], value)
    for name in outputs:
        output = wire.outputs.add(name=name)
        for key, value in asked.items():
            set_parameter(output.parameters[key], value)
    head = json.dumps(
        {
            "id": "é",
            "inputs": [
                {
                    "name": t.name,
                    "datatype": t.datatype,
                    "shape": list(t.shape),
                    "parameters": {"binary_data_size": len(t.data)},
                }
                for t in sent
            ],
            "outputs": [{"name": name, "parameters": asked} for name in outputs],
            "parameters": parameters,
        }
    ).encode()
    body = head + b"".join(bytes(t.data) for t in sent)
    over_http = Codec().decode_infer(body, len(head), RecordingSink(), 1.0)
    assert facts(decode(wire)) == facts(over_http)


def facts(request: Request) -> tuple[Any, ...]:
    return (
        request.id,
        [(t.name, t.datatype, tuple(t.shape), bytes(t.data)) for t in request.inputs],
        [(output.name, output.parameters) for output in request.outputs],
        request.parameters,
        request.priority,
        request.timeout_s,
    )


def test_long_messages_are_split_without_copies() -> None:
    data = bytes(range(256)) * 100
    for fields in ({}, {"id": "seven"}):
        wire = message(tensor("x", "UINT8", [len(data)]), raw=(data,), **fields)
        parsed, (raw,) = parse_infer(wire.SerializeToString())
        assert isinstance(raw, memoryview) and raw == data
        assert not parsed.raw_input_contents
        (received,) = decode_infer(parsed, RecordingSink(), 0.0, [raw]).inputs
        assert bytes(received.data) == data


@given(st.lists(st.binary(max_size=30), max_size=4), st.text(max_size=5), st.booleans())
def test_a_split_message_is_the_whole_one(contents: list[bytes], id: str, is_first: bool) -> None:
    tensors = service_pb2.ModelInferRequest(raw_input_contents=contents).SerializeToString()
    wire = message(tensor(), id=id)
    rest = wire.SerializeToString()
    split = split_raw(memoryview(tensors + rest if is_first else rest + tensors))
    assert split is not None
    assert split[0] == rest
    assert [bytes(each) for each in split[1]] == contents


@given(st.binary(max_size=60))
def test_what_is_split_parses_as_the_whole(data: bytes) -> None:
    split = split_raw(memoryview(data))
    try:
        whole = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        if split is not None:
            with pytest.raises(DecodeError):
                service_pb2.ModelInferRequest.FromString(split[0])
        return
    if split is not None:
        parts = service_pb2.ModelInferRequest.FromString(split[0])
        parts.raw_input_contents.extend(bytes(each) for each in split[1])
        assert parts == whole
