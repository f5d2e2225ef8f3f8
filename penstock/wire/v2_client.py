"""A v2 inference over HTTP as its client sees it: tensors to bytes, an answer to arrays. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

import msgspec
import numpy as np

from penstock.errors import BackendFailed
from penstock.types import DATATYPES, Array, RequestedOutput, Tensor, from_array, to_array
from penstock.wire.v2_templates import region_parameters

HEAD_LENGTH = "Inference-Header-Content-Length"
_REGION_PATH = "/v2/systemsharedmemory/region"


class Values(msgspec.Struct, array_like=True):
    """A tensor in messages between processes; BYTES with lengths, as on the wire."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, name: str, datatype: str, array: Array) -> Values:
        return cls(name, datatype, array.shape, bytes(from_array(name, datatype, array).data))

    def array(self) -> Array:
        return to_array(Tensor(self.name, self.datatype, self.shape, self.data))


class _Parameters(msgspec.Struct):
    # None: the tensor is in shared memory, and has this many bytes there.
    binary_data_size: int | None = None
    shared_memory_byte_size: int = 0


class _BinaryOutput(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: _Parameters


class _BinaryAnswer(msgspec.Struct):
    outputs: list[_BinaryOutput]


class _JsonOutput(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[object]

    def array(self) -> Array:
        if self.datatype == "BYTES":
            return np.array(self.data, np.object_).reshape(self.shape)
        return np.array(self.data, DATATYPES[self.datatype].numpy).reshape(self.shape)


class _JsonAnswer(msgspec.Struct):
    outputs: list[_JsonOutput]


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_answers = msgspec.json.Decoder(_BinaryAnswer)
_json_answers = msgspec.json.Decoder(_JsonAnswer)


def region_path(name: str, action: str) -> str:
    """Return the path to `register` or `unregister` a region of shared memory."""
    return f"{_REGION_PATH}/{quote(name, safe='')}/{action}"


def encode_region(key: str, nbytes: int) -> bytes:
    """Return the body that registers shared memory of this key."""
    return msgspec.json.encode({"key": key, "offset": 0, "byte_size": nbytes})


def encode_infer(
    tensors: Sequence[Tensor | Values], outputs: Sequence[RequestedOutput] = ()
) -> tuple[int, bytes]:
    """Return the head's length and the whole binary request, which asks for binary outputs; for all
    of them, unless `outputs` names some."""
    inputs = [
        {
            "name": each.name,
            "datatype": each.datatype,
            "shape": list(each.shape),
            "parameters": {"binary_data_size": len(each.data)}
            if isinstance(each, Values) or each.place is None
            else region_parameters(each.place),
        }
        for each in tensors
    ]
    body: dict[str, object] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if outputs:
        body["outputs"] = outputs
    head = msgspec.json.encode(body)
    return len(head), head + b"".join(each.data for each in tensors)


def decode_answer(
    head_length: int, body: bytes, places: Mapping[str, memoryview] | None = None
) -> dict[str, Array]:
    """Return outputs by name from an answer whose tensors are all binary, or in shared memory at
    these places."""
    return {each.name: to_array(each) for each in _binary_outputs(head_length, body, places)}


def decode_outputs(head_length: int, body: bytes) -> list[Tensor]:
    """Return the outputs of an answer, binary or, without a head, in JSON."""
    if head_length:
        return list(_binary_outputs(head_length, body, None))
    try:
        outputs = _json_answers.decode(body).outputs
        return [
            from_array(each.name, each.datatype, each.array())
            for each in outputs
            if each.datatype in DATATYPES
        ]
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise BackendFailed(f"the server's answer cannot be read: {error}") from None


def _binary_outputs(
    head_length: int, body: bytes, places: Mapping[str, memoryview] | None
) -> Iterator[Tensor]:
    try:
        answer = _answers.decode(body[:head_length])
    except msgspec.DecodeError as error:
        raise BackendFailed(f"the server's answer cannot be read: {error}") from None
    position = head_length
    for each in answer.outputs:
        nbytes = each.parameters.binary_data_size
        if nbytes is not None:
            data = memoryview(body)[position : position + nbytes]
            position += nbytes
        elif places is not None and each.name in places:
            data = places[each.name][: each.parameters.shared_memory_byte_size]
        else:
            raise BackendFailed(f"the server's answer has no data for output '{each.name}'")
        yield Tensor(each.name, each.datatype, tuple(each.shape), data)
