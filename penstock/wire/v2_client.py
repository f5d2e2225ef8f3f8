"""A v2 inference over HTTP as its client sees it: tensors to bytes, an answer to arrays. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.errors import BackendFailed
from penstock.types import Array, Tensor, from_array, to_array

HEAD_LENGTH = "Inference-Header-Content-Length"


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
    binary_data_size: int


class _BinaryOutput(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: _Parameters


class _BinaryAnswer(msgspec.Struct):
    outputs: list[_BinaryOutput]


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_answers = msgspec.json.Decoder(_BinaryAnswer)


def encode_infer(tensors: Sequence[Tensor | Values]) -> tuple[int, bytes]:
    """Return the head's length and the whole binary request, which asks for binary outputs."""
    inputs = [
        {
            "name": each.name,
            "datatype": each.datatype,
            "shape": list(each.shape),
            "parameters": {"binary_data_size": len(each.data)},
        }
        for each in tensors
    ]
    head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return len(head), head + b"".join(each.data for each in tensors)


def decode_answer(head_length: int, body: bytes) -> dict[str, Array]:
    """Return outputs by name from an answer whose tensors are all binary."""
    try:
        answer = _answers.decode(body[:head_length])
    except msgspec.DecodeError as error:
        raise BackendFailed(f"the server's answer cannot be read: {error}") from None
    found = {}
    position = head_length
    for each in answer.outputs:
        end = position + each.parameters.binary_data_size
        tensor = Tensor(each.name, each.datatype, tuple(each.shape), body[position:end])
        found[each.name] = to_array(tensor)
        position = end
    return found
