"""The v2 inference protocol (KServe, Triton) as bytes: infer requests in, answers out. Pure.

JSON, with the binary tensor extension: the JSON part comes first, raw little-endian tensors follow
in the order of the inputs. Every error names its input.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from penstock.config import ModelConfig
from penstock.errors import InvalidRequest, Unsupported
from penstock.types import (
    DATATYPES,
    Array,
    Buffer,
    Datatype,
    Parameter,
    ReplySink,
    Request,
    RequestedOutput,
    Response,
    Tensor,
    TensorSpec,
    num_elements,
    pack_bytes,
    split_bytes,
)
from penstock.wire import json_errors
from penstock.wire.json_errors import JsonList

MAX_TENSORS = 1024
MAX_FORMS = 1024
MAX_FORM_BYTES = 4096
MAX_SHAPE = 1 << 62
MAX_RANK = 32
# Per output. Classes are formatted while all other requests wait; clients show only a few.
MAX_CLASSES = 1000
RESERVED = "triton_"
MIN_INT, MAX_INT = -(1 << 63), (1 << 64) - 1


class _Input(msgspec.Struct):
    name: str
    shape: tuple[int, ...]
    datatype: str
    parameters: dict[str, Parameter] = {}
    data: msgspec.Raw = msgspec.Raw()


class InferBody(msgspec.Struct):
    """The JSON of an inference request."""

    inputs: list[_Input]
    outputs: list[RequestedOutput] = []
    id: str = ""
    parameters: dict[str, Parameter] = {}


class IndexBody(msgspec.Struct):
    """The JSON of a request for the repository's index."""

    ready: bool = False


class LoadBody(msgspec.Struct):
    """The JSON of a request to load a model."""

    parameters: dict[str, msgspec.Raw] | None = None


class UnloadBody(msgspec.Struct):
    """The JSON of a request to unload a model. Its parameters are ignored."""

    parameters: dict[str, msgspec.Raw] | None = None


class _Output(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: msgspec.Raw | None = None


class _InferAnswer(msgspec.Struct):
    """Without the id, which is prepended."""

    model_name: str
    model_version: str
    outputs: list[_Output]
    parameters: Mapping[str, Parameter] | msgspec.UnsetType = msgspec.UNSET


_ID_KEY = b'{"id":'
_ID = _ID_KEY + b'"'
_SECOND_ID = re.compile(rb'"id"\s*:')
_DATA = b'"data":'
# Placeholder for data in a template; no JSON text contains it.
_HOLE = msgspec.Raw(b"\0")


class _Error(msgspec.Struct):
    error: str


_FORMATS = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip
MAX_PACKED = 256
_packers: dict[tuple[str, int], struct.Struct] = {}

_decode = msgspec.json.Decoder(InferBody).decode
_encode = msgspec.json.Encoder().encode

# Types of JSON elements and decoders of lists of them, by numpy's kind letter ('O' is BYTES).
_element_types: Mapping[str, type] = {"b": bool, "i": int, "u": int, "f": float, "O": str}
_flat_lists: Mapping[str, Callable[[Buffer], JsonList]] = {
    kind: msgspec.json.Decoder(list[element]).decode  # type: ignore[valid-type]
    for kind, element in _element_types.items()
}


class InferTemplate:
    """The common part of requests that differ only in their id and tensor values.

    Clients send the same JSON again and again; its parse is cached under the bytes around the id
    and, where the first tensor is JSON, around its data.
    """

    __slots__ = (
        "_inputs",
        "_pack",
        "_parameters",
        "_priority",
        "_read_list",
        "_timeout_s",
        "outputs",
        "prefers_binary",
    )

    def __init__(self, request: Request) -> None:
        self.prefers_binary = request.prefers_binary
        self.outputs = request.outputs
        self._parameters = request.parameters
        self._priority = request.priority
        self._timeout_s = request.timeout_s
        self._inputs = [(t.name, t.datatype, t.shape, len(t.data)) for t in request.inputs]
        _, name, _, nbytes = self._inputs[0]
        if name in _FORMATS:
            self._read_list = _flat_lists[DATATYPES[name].numpy.kind]
            self._pack = _packer(DATATYPES[name], nbytes).pack

    def fill(self, id: str, tail: Buffer, sink: ReplySink, received: float) -> Request | None:
        """Make a request of this form; None if the tensors after the JSON have other sizes."""
        inputs: list[Tensor] = []
        start = 0
        for name, datatype, shape, nbytes in self._inputs:
            end = start + nbytes
            inputs.append(Tensor(name, datatype, shape, tail[start:end]))
            start = end
        if start != len(tail):
            return None
        request = Request(sink, inputs, received, id=id, outputs=self.outputs)
        request.form = self
        request.parameters = self._parameters
        request.priority = self._priority
        request.timeout_s = self._timeout_s
        request.prefers_binary = self.prefers_binary
        return request

    def fill_json(self, id: str, data: bytes, sink: ReplySink, received: float) -> Request | None:
        """Make a request whose only tensor is the JSON `data`; None if it does not fit."""
        try:
            packed = self._pack(*self._read_list(data))
        except (msgspec.DecodeError, OverflowError, struct.error):
            return None
        return self.fill(id, packed, sink, received)


class AnswerTemplate:
    """The JSON of answers that differ only in their id and tensor values: literal pieces, with the
    data of the non-binary outputs between them."""

    __slots__ = ("_pieces", "_wants_binary")

    def __init__(self, request: Request, response: Response) -> None:
        asked, is_binary = request.outputs, request.prefers_binary
        self._wants_binary = [
            bool(asked[index].parameters.get("binary_data", is_binary)) if asked else is_binary
            for index in range(len(response.outputs))
        ]
        outputs = [
            _Output(t.name, t.datatype, t.shape, {"binary_data_size": len(t.data)})
            if wants_binary
            else _Output(t.name, t.datatype, t.shape, None, _HOLE)
            for t, wants_binary in zip(response.outputs, self._wants_binary, strict=True)
        ]
        answer = _InferAnswer(response.model_name, response.model_version, outputs)
        if response.parameters is not None:
            answer.parameters = response.parameters
        self._pieces = _encode(answer)[1:].split(bytes(_HOLE))

    def fill(self, id: bytes, response: Response) -> tuple[bytes, list[Buffer]]:
        """Encode an answer; `id` is its start: a brace, and the id if there is one."""
        pieces = self._pieces
        if len(pieces) == 1:
            return id + pieces[0], [tensor.data for tensor in response.outputs]
        parts = [id, pieces[0]]
        tail: list[Buffer] = []
        for tensor, wants_binary in zip(response.outputs, self._wants_binary, strict=True):
            if wants_binary:
                tail.append(tensor.data)
            else:
                parts.append(_to_json(tensor))
                parts.append(pieces[len(parts) // 2])
        return b"".join(parts), tail


class Codec:
    """Decodes requests and encodes answers; caches forms and templates, within bounds."""

    def __init__(self) -> None:
        self._forms: dict[bytes, InferTemplate] = {}
        self._templates: dict[object, AnswerTemplate] = {}

    def decode_infer(
        self, body: Buffer, json_bytes: int | None, sink: ReplySink, received: float
    ) -> Request:
        """Decode a request. `json_bytes`: length of the JSON part; None if nothing follows it."""
        if json_bytes is None:
            return self._decode_json(body, sink, received)
        view = memoryview(body)
        head, tail = bytes(view[:json_bytes]), view[json_bytes:]
        id, rest = _split_id(head)
        form = self._forms.get(rest)
        if form is not None:
            request = form.fill(id, tail, sink, received)
            if request is not None:
                return request
        wire, request = _read(head, tail, sink, received)
        if _is_plain(wire, id, rest) and not any(item.data for item in wire.inputs):
            self._remember(rest, request)
        return request

    def _decode_json(self, body: Buffer, sink: ReplySink, received: float) -> Request:
        if len(body) > MAX_FORM_BYTES:
            return _read(body, memoryview(b""), sink, received)[1]
        body = bytes(body)
        id, rest = _split_id(body)
        start = rest.find(_DATA) + len(_DATA)
        end = rest.find(b"]", start) + 1
        around = rest[:start] + rest[end:]
        form = self._forms.get(around)
        if form is not None:
            request = form.fill_json(id, rest[start:end], sink, received)
            if request is not None:
                return request
        wire, request = _read(body, memoryview(b""), sink, received)
        if _is_plain(wire, id, around) and _has_one_list(wire, rest[start:end], around):
            self._remember(around, request)
        return request

    def _remember(self, key: bytes, request: Request) -> None:
        if len(key) > MAX_FORM_BYTES or not request.inputs:
            return
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[key] = request.form = InferTemplate(request)

    def encode_answer(
        self, request: Request, response: Response, specs: Sequence[TensorSpec] | None = ()
    ) -> tuple[bytes, list[Buffer]]:
        """Return the JSON part and the raw tensors after it (none when every output is JSON).
        `specs` are the model's outputs, for class labels; None when requested classes are already
        computed."""
        template = None
        has_form = request.form is not None and response.form is not None
        if has_form:
            template = self._templates.get(response.form)
        if template is None:
            if specs is not None and _wants_classes(request):
                return encode_answer(request, classified(request, response, specs))
            if not has_form:
                return encode_answer(request, response)
            template = AnswerTemplate(request, response)
            if len(self._templates) >= MAX_FORMS:
                self._templates.clear()
            self._templates[response.form] = template
        # A request with a form has a plain id.
        return template.fill(_ID + request.id.encode() + b'",' if request.id else b"{", response)


def encode_answer(request: Request, response: Response) -> tuple[bytes, list[Buffer]]:
    """Encode as `Codec.encode_answer` does, without caching."""
    start = b'{"id":' + _encode(request.id) + b"," if request.id else b"{"
    return AnswerTemplate(request, response).fill(start, response)


def classified(request: Request, response: Response, specs: Sequence[TensorSpec]) -> Response:
    """Apply the classification extension: give the k best classes of outputs that request it."""
    labels = {spec.name: spec.labels for spec in specs}
    outputs = [
        _classes(tensor, int(output.parameters["classification"]), labels.get(tensor.name, ()))
        if "classification" in output.parameters
        else tensor
        for output, tensor in zip(request.outputs, response.outputs, strict=True)
    ]
    return Response(response.model_name, response.model_version, outputs, response.parameters)


def _classes(tensor: Tensor, count: int, labels: Sequence[str]) -> Tensor:
    """Return `value:index[:label]` of the largest values of each row, best first."""
    if tensor.datatype in ("BYTES", "BF16", "BOOL"):
        raise InvalidRequest(f"output '{tensor.name}': {tensor.datatype} cannot be classified")
    rows = np.frombuffer(tensor.data, dtype=DATATYPES[tensor.datatype].numpy)
    full = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    rows = rows.reshape(full[0], num_elements(full[1:]))
    count = min(count, rows.shape[1])
    texts: list[bytes] = []
    for row in rows:
        for index in _best(row, count):
            value = f"{row[index]:f}" if rows.dtype.kind == "f" else str(row[index])
            label = f":{labels[index]}" if index < len(labels) else ""
            texts.append(f"{value}:{index}{label}".encode())
    shape = (tensor.shape[0], count) if len(tensor.shape) > 1 else (count,)
    return Tensor(tensor.name, "BYTES", shape, pack_bytes(np.array(texts, dtype=np.object_)))


def _best(values: Array, count: int) -> Array:
    """Return the indices of the largest values, best first; ties by position, NaN last."""
    keys = -values.astype(np.float64)
    if count == len(keys):
        return np.argsort(keys, kind="stable")
    last = np.partition(keys, count - 1)[count - 1]
    # Include all ties with the last one. Negated so that NaN passes: it never compares greater.
    candidates = np.flatnonzero(~(keys > last))
    return candidates[np.argsort(keys[candidates], kind="stable")[:count]]


def _wants_classes(request: Request) -> bool:
    return any("classification" in output.parameters for output in request.outputs)


def decode_raw(body: Buffer, config: ModelConfig, sink: ReplySink, received: float) -> Request:
    """Decode a body that is just the bytes of the model's one input, for a batch of one."""
    if len(config.inputs) != 1:
        raise InvalidRequest(
            f"a raw request needs a model with one input; '{config.name}' has {len(config.inputs)}"
        )
    (spec,) = config.inputs
    data: Buffer = body
    shape = list(spec.shape)
    itemsize = DATATYPES[spec.datatype].itemsize
    if itemsize is None:
        if any(size not in (-1, 1) for size in shape):
            raise InvalidRequest(f"input '{spec.name}': a raw request is one string, not {shape}")
        data, shape = struct.pack("<I", len(body)) + bytes(body), [1] * len(shape)
    elif shape.count(-1) > 1:
        raise InvalidRequest(
            f"input '{spec.name}': a raw request cannot fill two variable dimensions of {shape}"
        )
    elif -1 in shape:
        fixed = num_elements([size for size in shape if size != -1]) * itemsize
        if len(body) % fixed:
            raise InvalidRequest(f"input '{spec.name}': {len(body)} bytes do not fill {shape}")
        shape[shape.index(-1)] = len(body) // fixed
    full = (1, *shape) if config.max_batch_size > 0 else tuple(shape)
    request = Request(sink, [Tensor(spec.name, spec.datatype, full, data)], received)
    request.prefers_binary = True
    return request


def _split_id(head: bytes) -> tuple[str, bytes]:
    """Split off a leading plain-text id and return it with the rest; otherwise no id and the whole
    head. A head that is not an object gives an empty rest, so that it cannot match a cached one."""
    if head.startswith(_ID_KEY):
        start = 7 if head.startswith(b'"', 6) else 8 if head.startswith(b' "', 6) else 0
        if start:
            end = head.find(b'"', start)
            id = head[start:end].decode("latin-1")
            if id and id.isascii() and id.isprintable() and "\\" not in id:
                return id, head[end:]
    return "", head if head.startswith(b"{") else b""


def _is_plain(wire: InferBody, id: str, around: bytes) -> bool:
    """Whether the leading id is the one that counts: no second one, and no key is escaped."""
    return wire.id == id and b"\\" not in around and _SECOND_ID.search(around) is None


def _has_one_list(wire: InferBody, data: bytes, around: bytes) -> bool:
    """Whether the one input is this flat list of numbers and nothing else is called data: then
    another list in its place changes only the values."""
    if len(wire.inputs) != 1 or b'"data"' in around[around.find(_DATA) + len(_DATA) :]:
        return False
    (item,) = wire.inputs
    size = num_elements(item.shape)
    is_plain = item.datatype in _FORMATS and 0 < size <= MAX_PACKED
    return is_plain and bytes(item.data) == data.strip() and data.count(b"[") == 1


def _read(
    head: Buffer, tail: memoryview, sink: ReplySink, received: float
) -> tuple[InferBody, Request]:
    wire = _parse(head)
    request = _decode_parsed(wire, tail, sink, received)
    # The decoder does not validate what it skips.
    text = bytes(head) if isinstance(head, memoryview) else head
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("failed to parse the request JSON: not UTF-8") from None
    return wire, request


def _decode_parsed(wire: InferBody, tail: memoryview, sink: ReplySink, received: float) -> Request:
    inputs: list[Tensor] = []
    position = 0
    for item in wire.inputs:
        if item.parameters:
            position, data = _binary(item, tail, position)
        else:
            data = _from_json(item)
        inputs.append(Tensor(item.name, item.datatype, item.shape, data))
    if position != len(tail):
        raise InvalidRequest(
            f"unexpected additional input data: {len(tail) - position} bytes are left behind "
            f"the last binary tensor"
        )
    request = Request(sink, inputs, received, id=wire.id, outputs=wire.outputs)
    if wire.outputs:
        check_outputs(wire.outputs)
    if wire.parameters:
        apply_parameters(request, wire.parameters)
    return request


def _parse(head: Buffer) -> InferBody:
    try:
        wire = _decode(head)
    except json_errors.UNREADABLE as error:
        raise InvalidRequest(
            f"failed to parse the request JSON: {json_errors.explain(head, error)}"
        ) from None
    if len(wire.inputs) > MAX_TENSORS or len(wire.outputs) > MAX_TENSORS:
        raise InvalidRequest(f"more than {MAX_TENSORS} inputs or outputs")
    _check_integers(wire.parameters)
    return wire


def encode_error(text: str) -> bytes:
    return _encode(_Error(text))


def _binary(item: _Input, tail: memoryview, position: int) -> tuple[int, Buffer]:
    """Return the data of an input with parameters, usually `binary_data_size`."""
    if "shared_memory_region" in item.parameters:
        raise Unsupported(f"input '{item.name}': shared memory regions are not supported")
    size = item.parameters.get("binary_data_size")
    if size is None:
        return position, _from_json(item)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidRequest(
            f"input '{item.name}': binary_data_size must be a number of bytes, got {size!r}"
        )
    if item.data:
        raise InvalidRequest(
            f"input '{item.name}' has both 'data' and 'binary_data_size'; expected one of them"
        )
    end = position + size
    if end > len(tail):
        raise InvalidRequest(
            f"input '{item.name}': binary_data_size {size} but only {len(tail) - position} "
            "bytes are left in the request body"
        )
    check_shape(item.name, item.shape)
    return end, tail[position:end]


def _from_json(item: _Input) -> Buffer:
    datatype = DATATYPES.get(item.datatype)
    if datatype is None:
        raise InvalidRequest(
            f"input '{item.name}': unknown datatype '{item.datatype}'; "
            f"expected one of {', '.join(DATATYPES)}"
        )
    if item.datatype in ("FP16", "BF16"):
        raise InvalidRequest(
            f"sending {item.datatype} data via JSON is not supported. "
            f"Please use the binary data format for input '{item.name}'"
        )
    if not item.data:
        raise InvalidRequest(f"input '{item.name}' has neither 'data' nor 'binary_data_size'")
    check_shape(item.name, item.shape)
    kind = datatype.numpy.kind
    values = _elements(item, kind)
    expected = num_elements(item.shape)
    if len(values) != expected:
        raise InvalidRequest(
            f"input '{item.name}': shape {list(item.shape)} needs {expected} elements, "
            f"'data' has {len(values)}"
        )
    if kind == "O":
        try:
            encoded: Array = np.array([v.encode() for v in values] or [], dtype=np.object_)
        except UnicodeEncodeError:
            raise InvalidRequest(f"input '{item.name}': a string is not valid Unicode") from None
        return pack_bytes(encoded)
    if not expected:
        return b""
    try:
        return _pack(datatype, values)
    except (OverflowError, struct.error):
        raise InvalidRequest(f"input '{item.name}': a value does not fit {item.datatype}") from None


def _pack(datatype: Datatype, values: JsonList) -> Buffer:
    """Pack numbers; few of them several times faster than numpy. OverflowError or struct.error if
    one does not fit."""
    if len(values) <= MAX_PACKED:
        assert datatype.itemsize is not None
        return _packer(datatype, len(values) * datatype.itemsize).pack(*values)
    with np.errstate(over="ignore"):
        array = np.array(values, dtype=datatype.numpy)
    if datatype.numpy.kind == "f" and not np.isfinite(array).all():
        raise OverflowError
    return array.data.cast("B")


def _packer(datatype: Datatype, nbytes: int) -> struct.Struct:
    key = (datatype.name, nbytes)
    packer = _packers.get(key)
    if packer is None:
        assert datatype.itemsize is not None
        count = nbytes // datatype.itemsize
        packer = _packers[key] = struct.Struct(f"<{count}{_FORMATS[datatype.name]}")
    return packer


def _elements(item: _Input, kind: str) -> JsonList:
    """Return the elements of `data` in row-major order, from a flat or nested list."""
    try:
        return _flat_lists[kind](item.data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as flat_error:
        # Not a flat list of the right type: nested, or invalid.
        try:
            level = msgspec.json.decode(item.data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise InvalidRequest(f"input '{item.name}': 'data' cannot be parsed") from None
        if not isinstance(level, list) or not any(isinstance(each, list) for each in level):
            raise InvalidRequest(
                f"input '{item.name}': 'data' does not hold {item.datatype} values: {flat_error}"
            ) from None
    return _flatten(item, level, _element_types[kind])


def _flatten(item: _Input, level: JsonList, element: type) -> JsonList:
    """Flatten regular nesting: at each depth all are lists of one length, or none is. As in Triton,
    the nesting need not match the shape; the number of elements is checked later."""
    while level and isinstance(level[0], list):
        size = len(level[0])
        if not all(isinstance(each, list) and len(each) == size for each in level):
            raise _ragged(item)
        level = [each for row in level for each in row]
    if any(isinstance(each, list) for each in level):
        raise _ragged(item)
    try:
        return msgspec.convert(level, list[element])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"input '{item.name}': 'data' does not hold {item.datatype} values: {error}"
        ) from None


def _ragged(item: _Input) -> InvalidRequest:
    return InvalidRequest(
        f"input '{item.name}': 'data' is ragged; expected {num_elements(item.shape)} elements in "
        "one list, or in nested lists of equal lengths"
    )


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Reject sizes that are invalid for any model; the planner checks them against the model."""
    if len(shape) > MAX_RANK:
        raise InvalidRequest(
            f"input '{name}': a shape of {len(shape)} dimensions; at most {MAX_RANK}"
        )
    total = 1
    for size in shape:
        if size > MAX_SHAPE:
            raise InvalidRequest(f"input '{name}': shape {list(shape)} is too large")
        if size < 0:
            raise InvalidRequest(f"input '{name}': shape {list(shape)} has a negative dimension")
        total *= size
    if total > MAX_SHAPE:
        raise InvalidRequest(f"input '{name}': shape {list(shape)} is too large")


def check_outputs(outputs: Sequence[RequestedOutput]) -> None:
    seen: set[str] = set()
    for output in outputs:
        if output.name in seen:
            raise InvalidRequest(f"output '{output.name}' already exists in request")
        seen.add(output.name)
        if output.parameters:
            _check_output(output)


def _check_output(output: RequestedOutput) -> None:
    if "shared_memory_region" in output.parameters:
        raise Unsupported(f"output '{output.name}': shared memory regions are not supported")
    classes = output.parameters.get("classification", 1)
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise InvalidRequest(
            f"output '{output.name}': parameter 'classification' must be a number of classes, "
            f"at least 1; got {classes!r:.40}"
        )
    if classes > MAX_CLASSES:
        raise InvalidRequest(
            f"output '{output.name}': parameter 'classification' asks for {classes} classes; "
            f"at most {MAX_CLASSES}"
        )
    if not isinstance(output.parameters.get("binary_data", False), bool):
        raise InvalidRequest(
            f"output '{output.name}': parameter 'binary_data' must be true or false"
        )


def _check_integers(parameters: Mapping[str, Parameter]) -> None:
    """Reject integers beyond 64 bits: no frame and no other protocol can hold them."""
    for name, value in parameters.items():
        if isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
            raise InvalidRequest(f"parameter '{name}' does not fit 64 bits")


def apply_parameters(request: Request, parameters: dict[str, Parameter]) -> None:
    """Move the parameters that Penstock understands into the request. Names that begin with triton_
    are reserved, as in Triton."""
    for name in parameters:
        if name.startswith(RESERVED):
            raise InvalidRequest(
                f"parameter '{name:.100}': names that begin with '{RESERVED}' are reserved"
            )
    is_binary = parameters.pop("binary_data_output", False)
    if not isinstance(is_binary, bool):
        raise InvalidRequest("parameter 'binary_data_output' must be true or false")
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if parameters.get(name):
            raise Unsupported(f"parameter '{name}': sequences are not supported")
    priority = parameters.pop("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
        raise InvalidRequest(f"parameter 'priority' must be an integer from 0, got {priority!r}")
    timeout = parameters.pop("timeout", 0)
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise InvalidRequest(f"parameter 'timeout' must be microseconds, got {timeout!r}")
    request.priority = priority
    request.timeout_s = timeout / 1e6 if timeout else None
    request.parameters = parameters or None
    request.prefers_binary = is_binary


def _to_json(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        try:
            return _encode([element.decode() for element in split_bytes(tensor.data)])
        except UnicodeDecodeError:
            raise InvalidRequest(_json_cannot(tensor, "an element that is not UTF-8")) from None
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidRequest(_json_cannot(tensor, f"{tensor.datatype} values"))
    if len(tensor.data) <= MAX_PACKED:
        text = _encode(_packer(DATATYPES[tensor.datatype], len(tensor.data)).unpack(tensor.data))
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
