"""Infer messages of a known form are read as protobuf reads them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from penstock.types import Request, Response, Tensor
from penstock.wire.v2_pb import parse_infer
from penstock.wire.v2_pb_templates import PbCodec, stream_answer, stream_error, varint


class Nobody:
    def respond(self, request: Request, answer: object, final: bool) -> None:
        raise AssertionError("nothing is answered here")


def message(*tensors: bytes, model: str = "m", outputs: tuple[str, ...] = (), **fields: Any) -> Any:
    made = service_pb2.ModelInferRequest(model_name=model, **fields)
    for number, data in enumerate(tensors):
        made.inputs.add(name=f"x{number}", datatype="UINT8", shape=[len(data)])
        made.raw_input_contents.append(data)
    for name in outputs:
        made.outputs.add(name=name)
    return made


def learn(codec: PbCodec, data: bytes) -> Request:
    made, raw = parse_infer(data)
    return codec.decode(made, raw, data, Nobody(), 0.0)


def described(request: Request) -> object:
    inputs = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs]
    outputs = [(each.name, each.parameters) for each in request.outputs]
    return request.id, inputs, outputs, request.parameters


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.data())
def test_a_known_form_is_filled_with_other_tensors(tensors: list[bytes], data: st.DataObject):
    codec = PbCodec()
    first = message(*tensors, outputs=("y",), model_version="3").SerializeToString()
    request = learn(codec, first)
    others = [data.draw(st.binary(min_size=len(t), max_size=len(t))) for t in tensors]
    again = message(*others, outputs=("y",), model_version="3").SerializeToString()
    for buffer in (again, memoryview(again)):
        form = codec.find(buffer)
        assert form is not None
        assert (form.model_name, form.model_version) == ("m", "3")
        filled = form.fill(buffer, Nobody(), 0.0)
        assert described(filled) == described(learn(PbCodec(), again))
        assert filled.form is request.form is form


@pytest.mark.parametrize(
    "other",
    [
        message(b"1234", model="n"),
        message(b"12345"),
        message(b"12", b"34"),
        message(b"1234", id="a"),
        message(b"1234", outputs=("y",)),
    ],
)
def test_another_form_is_not_taken_for_it(other):
    codec = PbCodec()
    learn(codec, message(b"1234").SerializeToString())
    assert codec.find(other.SerializeToString()) is None


def test_messages_with_an_id_or_parameters_have_no_form():
    for fields in ({"id": "a"}, {"parameters": {"priority": {"int64_param": 1}}}):
        codec = PbCodec()
        data = message(b"1234", **fields).SerializeToString()
        assert learn(codec, data).form is None
        assert codec.find(data) is None


def test_tensors_hidden_in_another_field_are_not_taken_for_the_tensors():
    """The tail looks like the message's tensor, but is the content of an unknown field."""
    codec, tensor = PbCodec(), b"\x3a\x041234"
    plain = message(b"1234").SerializeToString()
    unknown = varint(100 << 3 | 2) + varint(len(tensor)) + tensor
    learn(codec, plain + unknown)
    assert codec.find(plain + unknown) is None
    twice = message(b"1234")
    assert learn(codec, twice.SerializeToString()).form is not None


def test_messages_of_one_length_are_told_apart():
    codec = PbCodec()
    messages = [message(b"1234", model=name).SerializeToString() for name in "abcdefgh"]
    for data in messages:
        learn(codec, data)
    found = [codec.find(data) for data in messages]
    names = [form.model_name for form in found if form is not None]
    assert names == list("abcd"), "a few of each length"


@given(st.text(max_size=5), st.lists(st.binary(max_size=200), max_size=3))
def test_answers_are_those_of_protobuf(id: str, tensors: list[bytes]):
    codec = PbCodec()
    request = Request(Nobody(), [], 0.0, id=id)
    request.form = object()
    outputs = [Tensor(f"y{i}", "UINT8", (len(t),), t) for i, t in enumerate(tensors)]
    response = Response("m", "1", outputs, {"a": 1, "b": "c"})
    response.form = object()
    for _ in range(2):
        data = b"".join(codec.encode(request, response))
        answer = service_pb2.ModelInferResponse.FromString(data)
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", id)
        assert [(y.name, y.datatype, list(y.shape)) for y in answer.outputs] == [
            (y.name, y.datatype, list(y.shape)) for y in outputs
        ]
        assert list(answer.raw_output_contents) == tensors
        assert answer.parameters["a"].int64_param == 1
        streamed = service_pb2.ModelStreamInferResponse.FromString(
            b"".join(stream_answer(codec.encode(request, response)))
        )
        assert streamed.infer_response.parameters.pop("triton_final_response").bool_param
        assert streamed.infer_response == answer


def test_errors_of_streams():
    for id in ("", "seven"):
        data = b"".join(stream_error(id, "why: é"))
        answer = service_pb2.ModelStreamInferResponse.FromString(data)
        assert (answer.error_message, answer.infer_response.id) == ("why: é", id)
        assert answer.infer_response.parameters["triton_final_response"].bool_param


@given(st.integers(0, 1 << 40))
def test_varints_are_those_of_protobuf(value: int):
    data = service_pb2.InferTensorContents(uint64_contents=[value]).SerializeToString()
    # A tag, the length, and the number.
    assert varint(value) == data[2:]
