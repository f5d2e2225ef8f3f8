"""The common part of v2 infer requests, and of answers, that differ only in ids and tensor values.

Clients send the same JSON again and again, so `v2.Codec` parses and lays it out once. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from penstock.errors import InvalidRequest
from penstock.types import (
    DATATYPES,
    REGION,
    REGION_BYTES,
    REGION_OFFSET,
    Buffer,
    Datatype,
    Parameter,
    RegionPlace,
    ReplySink,
    Request,
    Response,
    Tensor,
    split_bytes,
)
from penstock.wire.json_errors import JsonList

DATA = b'"data":'
# Placeholder for data in a template; no JSON text contains it.
_HOLE = msgspec.Raw(b"\0")
FORMATS = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip
MAX_PACKED = 256
_packers: dict[tuple[str, int], struct.Struct] = {}
_encode = msgspec.json.Encoder().encode
# Types of JSON elements and decoders of lists of them, by numpy's kind letter ('O' is BYTES).
element_types: Mapping[str, type] = {"b": bool, "i": int, "u": int, "f": float, "O": str}
flat_lists: Mapping[str, Callable[[Buffer], JsonList]] = {
    kind: msgspec.json.Decoder(list[element]).decode  # type: ignore[valid-type]
    for kind, element in element_types.items()
}


class _Output(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str | int] | None = None
    data: msgspec.Raw | None = None


class _InferAnswer(msgspec.Struct):
    """Without the id, which is prepended."""

    model_name: str
    model_version: str
    outputs: list[_Output]
    parameters: Mapping[str, Parameter] | msgspec.UnsetType = msgspec.UNSET


class InferTemplate:
    """The common part of requests, cached under the bytes around the id and, where the first tensor
    is JSON, around its data."""

    __slots__ = (
        "_inputs", "_pack", "_parameters", "_priority", "_read_list", "_timeout_s", "num_bytes",
        "outputs", "prefers_binary", "uses_regions",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.prefers_binary = request.prefers_binary
        self.outputs = request.outputs
        self._parameters = request.parameters
        self._priority = request.priority
        self._timeout_s = request.timeout_s
        self.uses_regions = request.uses_regions
        self._inputs = [(t.name, t.datatype, t.shape, len(t.data), t.place) for t in request.inputs]
        self.num_bytes = sum(len(t.data) for t in request.inputs)
        _, name, _, nbytes, _ = self._inputs[0]
        if name in FORMATS:
            self._read_list = flat_lists[DATATYPES[name].numpy.kind]
            self._pack = packer(DATATYPES[name], nbytes).pack

    def fill(self, id: str, tail: Buffer, sink: ReplySink, received: float) -> Request | None:
        """Make a request of this form; None if the tensors after the JSON have other sizes."""
        inputs: list[Tensor] = []
        start = 0
        for name, datatype, shape, nbytes, place in self._inputs:
            end = start + nbytes
            inputs.append(Tensor(name, datatype, shape, tail[start:end], place))
            start = end
        if start != len(tail):
            return None
        return self._make(id, inputs, sink, received)

    def fill_parts(
        self, id: str, parts: Sequence[Buffer], sink: ReplySink, received: float
    ) -> Request:
        """Make a request of this form whose tensors lie in several places."""
        inputs = [
            Tensor(name, datatype, shape, data)
            for (name, datatype, shape, _, _), data in zip(self._inputs, parts, strict=True)
        ]
        return self._make(id, inputs, sink, received)

    def _make(self, id: str, inputs: list[Tensor], sink: ReplySink, received: float) -> Request:
        request = Request(sink, inputs, received, id=id, outputs=self.outputs)
        request.form = self
        request.parameters = self._parameters
        request.priority = self._priority
        request.timeout_s = self._timeout_s
        request.prefers_binary = self.prefers_binary
        request.uses_regions = self.uses_regions
        return request

    def fill_json(self, id: str, data: bytes, sink: ReplySink, received: float) -> Request | None:
        """Make a request whose only tensor is the JSON `data`; None if it does not fit."""
        try:
            packed = self._pack(*self._read_list(data))
        except (msgspec.DecodeError, OverflowError, struct.error):
            return None
        return self.fill(id, packed, sink, received)


class AnswerTemplate:
    """The JSON of answers: literal pieces, with the data of the outputs that are JSON between them.
    Outputs in a client's memory have no data."""

    __slots__ = ("_is_json", "_pieces", "_wants_binary")

    def __init__(self, request: Request, response: Response) -> None:
        asked, is_binary = request.outputs, request.prefers_binary
        self._wants_binary = [
            tensor.place is None
            and (
                bool(asked[index].parameters.get("binary_data", is_binary)) if asked else is_binary
            )
            for index, tensor in enumerate(response.outputs)
        ]
        self._is_json = [
            tensor.place is None and not wants_binary
            for tensor, wants_binary in zip(response.outputs, self._wants_binary, strict=True)
        ]
        outputs = [
            _Output(t.name, t.datatype, t.shape, None, _HOLE)
            if is_json
            else _Output(t.name, t.datatype, t.shape, _output_parameters(t))
            for t, is_json in zip(response.outputs, self._is_json, strict=True)
        ]
        answer = _InferAnswer(response.model_name, response.model_version, outputs)
        if response.parameters is not None:
            answer.parameters = response.parameters
        self._pieces = _encode(answer)[1:].split(bytes(_HOLE))

    def fill(self, id: bytes, response: Response) -> tuple[bytes, list[Buffer]]:
        """Encode an answer; `id` is its start: a brace, and the id if there is one."""
        pieces = self._pieces
        if len(pieces) == 1:
            tail = [t.data for t in response.outputs if t.place is None]
            return id + pieces[0], tail
        parts = [id, pieces[0]]
        tail = []
        flags = zip(response.outputs, self._wants_binary, self._is_json, strict=True)
        for tensor, wants_binary, is_json in flags:
            if wants_binary:
                tail.append(tensor.data)
            elif is_json:
                parts.append(_to_json(tensor))
                parts.append(pieces[len(parts) // 2])
        return b"".join(parts), tail


def region_parameters(place: RegionPlace) -> dict[str, str | int]:
    """Return the parameters of a tensor in a client's memory."""
    named: dict[str, str | int] = {REGION: place.region, REGION_BYTES: place.nbytes}
    return {**named, REGION_OFFSET: place.offset} if place.offset else named


def _output_parameters(tensor: Tensor) -> dict[str, str | int]:
    if tensor.place is not None:
        return region_parameters(tensor.place)
    return {"binary_data_size": len(tensor.data)}


def encode_answer(request: Request, response: Response) -> tuple[bytes, list[Buffer]]:
    """Encode as `Codec.encode_answer` does, without caching."""
    start = b'{"id":' + _encode(request.id) + b"," if request.id else b"{"
    return AnswerTemplate(request, response).fill(start, response)


def _to_json(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        try:
            return _encode([element.decode() for element in split_bytes(tensor.data)])
        except UnicodeDecodeError:
            raise InvalidRequest(_json_cannot(tensor, "an element that is not UTF-8")) from None
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidRequest(_json_cannot(tensor, f"{tensor.datatype} values"))
    if len(tensor.data) <= MAX_PACKED:
        text = _encode(packer(DATATYPES[tensor.datatype], len(tensor.data)).unpack(tensor.data))
    else:
        text = _encode(np.frombuffer(tensor.data, dtype=DATATYPES[tensor.datatype].numpy).tolist())
    # The encoder writes NaN and infinity as null.
    if b"null" in text:
        raise InvalidRequest(_json_cannot(tensor, "NaN or infinite values"))
    return text


def _json_cannot(tensor: Tensor, what: str) -> str:
    return (
        f"output '{tensor.name}' has {what}, which JSON cannot carry; "
        "ask for it with the parameter binary_data"
    )


def packer(datatype: Datatype, nbytes: int) -> struct.Struct:
    key = (datatype.name, nbytes)
    packer = _packers.get(key)
    if packer is None:
        assert datatype.itemsize is not None
        count = nbytes // datatype.itemsize
        packer = _packers[key] = struct.Struct(f"<{count}{FORMATS[datatype.name]}")
    return packer
