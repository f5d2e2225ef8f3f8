"""The JSON of one v2 infer request, read and checked in full, and raw bodies. Pure.

`v2.Codec` reads a request here unless it knows its form. Every error names its input.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import msgspec
import numpy as np

from penstock.config import ModelConfig
from penstock.errors import InvalidRequest
from penstock.types import (
    DATATYPES,
    REGION,
    REGION_BYTES,
    REGION_OFFSET,
    Array,
    Buffer,
    Datatype,
    Parameter,
    RegionPlace,
    ReplySink,
    Request,
    RequestedOutput,
    Tensor,
    num_elements,
    pack_bytes,
)
from penstock.wire import json_errors
from penstock.wire.json_errors import JsonList
from penstock.wire.v2_templates import DATA, FORMATS, MAX_PACKED, element_types, flat_lists, packer

MAX_TENSORS = 1024
MAX_SHAPE = 1 << 62
MAX_RANK = 32
# Per output. Classes are formatted while all other requests wait; clients show only a few.
MAX_CLASSES = 1000
# Characters, as in Triton.
MAX_SEQUENCE_ID = 128
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


_SECOND_ID = re.compile(rb'"id"\s*:')
_decode = msgspec.json.Decoder(InferBody).decode


def read_infer(
    head: Buffer, tail: memoryview, sink: ReplySink, received: float
) -> tuple[InferBody, Request]:
    """Return the JSON as it was parsed, and the request that it makes with the tensors after it."""
    try:
        wire = _decode(head)
        request = _make_request(wire, tail, sink, received)
        # The decoder does not validate what it skips.
        if not isinstance(head, bytes) or not head.isascii():
            str(head, "utf-8")
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(head, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None
    return wire, request


def _make_request(wire: InferBody, tail: memoryview, sink: ReplySink, received: float) -> Request:
    if len(wire.inputs) > MAX_TENSORS or len(wire.outputs) > MAX_TENSORS:
        raise InvalidRequest(f"more than {MAX_TENSORS} inputs or outputs")
    for name, value in wire.parameters.items():
        # No frame and no other protocol can hold them.
        if isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
            raise InvalidRequest(f"parameter '{name}' does not fit 64 bits")
    inputs: list[Tensor] = []
    position = 0
    for item in wire.inputs:
        place = None
        if not item.parameters:
            data = _from_json(item)
        elif REGION in item.parameters:
            data, place = b"", _region_input(item)
        else:
            position, data = _binary(item, tail, position)
        inputs.append(Tensor(item.name, item.datatype, item.shape, data, place))
    if position != len(tail):
        raise InvalidRequest(
            f"unexpected additional input data: {len(tail) - position} bytes are left behind "
            f"the last binary tensor"
        )
    request = Request(sink, inputs, received, id=wire.id, outputs=wire.outputs)
    has_places = check_outputs(wire.outputs)
    request.uses_regions = has_places or any(each.place is not None for each in inputs)
    if wire.parameters:
        apply_parameters(request, wire.parameters)
    return request


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
            raise wrong_input(spec.name, f"a raw request is one string, not {shape}")
        data, shape = struct.pack("<I", len(body)) + bytes(body), [1] * len(shape)
    elif shape.count(-1) > 1:
        text = f"a raw request cannot fill two variable dimensions of {shape}"
        raise wrong_input(spec.name, text)
    elif -1 in shape:
        fixed = num_elements([size for size in shape if size != -1]) * itemsize
        if len(body) % fixed:
            raise wrong_input(spec.name, f"{len(body)} bytes do not fill {shape}")
        shape[shape.index(-1)] = len(body) // fixed
    full = (1, *shape) if config.max_batch_size > 0 else tuple(shape)
    request = Request(sink, [Tensor(spec.name, spec.datatype, full, data)], received)
    request.prefers_binary = True
    return request


def is_plain(wire: InferBody, id: str, around: bytes) -> bool:
    """Whether the leading id is the one that counts: no second one, and no key is escaped."""
    return wire.id == id and b"\\" not in around and _SECOND_ID.search(around) is None


def has_one_list(wire: InferBody, data: bytes, around: bytes) -> bool:
    """Whether the one input is this flat list of numbers and nothing else is called data: then
    another list in its place changes only the values."""
    if len(wire.inputs) != 1 or b'"data"' in around[around.find(DATA) + len(DATA) :]:
        return False
    (item,) = wire.inputs
    size = num_elements(item.shape)
    is_plain = item.datatype in FORMATS and 0 < size <= MAX_PACKED
    return is_plain and bytes(item.data) == data.strip() and data.count(b"[") == 1


def _binary(item: _Input, tail: memoryview, position: int) -> tuple[int, Buffer]:
    """Return the data of an input with parameters, usually `binary_data_size`."""
    size = item.parameters.get("binary_data_size")
    if size is None:
        return position, _from_json(item)
    if not _is_count(size):
        raise wrong_input(item.name, f"binary_data_size must be a number of bytes, got {size!r}")
    if item.data:
        text = f"input '{item.name}' has both 'data' and 'binary_data_size'; expected one of them"
        raise InvalidRequest(text)
    end = position + size
    if end > len(tail):
        left = f"only {len(tail) - position} bytes are left in the request body"
        raise wrong_input(item.name, f"binary_data_size {size} but {left}")
    check_shape(item.name, item.shape)
    return end, tail[position:end]


def _region_input(item: _Input) -> RegionPlace:
    if item.data or "binary_data_size" in item.parameters:
        text = "has both data and a shared memory region; expected one of them"
        raise wrong_input(item.name, text)
    return region_input(item.name, item.shape, item.datatype, item.parameters)


def region_input(
    name: str, shape: Sequence[int], datatype: str, parameters: Mapping[str, Parameter]
) -> RegionPlace:
    """Return the place that the parameters of an input name, in a client's shared memory."""
    known_datatype(name, datatype)
    check_shape(name, shape)
    return read_place(f"input '{name}'", parameters)


def read_place(where: str, parameters: Mapping[str, Parameter]) -> RegionPlace:
    """Read the place of a tensor; InvalidRequest begins with `where`."""
    region = parameters[REGION]
    if not isinstance(region, str) or not region:
        raise InvalidRequest(f"{where}: {REGION} must be the name of a region, got {region!r:.40}")
    size, offset = parameters.get(REGION_BYTES), parameters.get(REGION_OFFSET, 0)
    if size is None:
        raise InvalidRequest(f"{where}: {REGION} needs {REGION_BYTES} too")
    for key, value in ((REGION_BYTES, size), (REGION_OFFSET, offset)):
        if not _is_count(value) or value > MAX_SHAPE:
            raise InvalidRequest(f"{where}: {key} must be a number of bytes, got {value!r:.40}")
    assert _is_count(size) and _is_count(offset)
    return RegionPlace(region, offset, size)


def _from_json(item: _Input) -> Buffer:
    datatype = known_datatype(item.name, item.datatype)
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
    check_count(item.name, item.shape, len(values), "'data'")
    if kind == "O":
        try:
            encoded: Array = np.array([v.encode() for v in values] or [], dtype=np.object_)
        except UnicodeEncodeError:
            raise wrong_input(item.name, "a string is not valid Unicode") from None
        return pack_bytes(encoded)
    if not values:
        return b""
    try:
        return _pack(datatype, values)
    except (OverflowError, struct.error):
        raise wrong_input(item.name, f"a value does not fit {item.datatype}") from None


def _pack(datatype: Datatype, values: JsonList) -> Buffer:
    """Pack numbers, a few faster than numpy; OverflowError or struct.error if one does not fit."""
    if len(values) <= MAX_PACKED:
        assert datatype.itemsize is not None
        return packer(datatype, len(values) * datatype.itemsize).pack(*values)
    with np.errstate(over="ignore"):
        array = np.array(values, dtype=datatype.numpy)
    if datatype.numpy.kind == "f" and not np.isfinite(array).all():
        raise OverflowError
    return array.data.cast("B")


def _elements(item: _Input, kind: str) -> JsonList:
    """Return the elements of `data` in row-major order, from a flat or nested list."""
    try:
        return flat_lists[kind](item.data)
    except json_errors.UNREADABLE as flat_error:
        # Not a flat list of the right type: nested, or invalid.
        try:
            level = msgspec.json.decode(item.data)
        except json_errors.UNREADABLE:
            raise wrong_input(item.name, "'data' cannot be parsed") from None
        if not isinstance(level, list) or not any(isinstance(each, list) for each in level):
            raise _wrong_values(item, flat_error) from None
    return _flatten(item, level, element_types[kind])


def _flatten(item: _Input, level: JsonList, element: type) -> JsonList:
    """Flatten regular nesting: at each depth all are lists of one length, or none is. As in Triton,
    the nesting need not match the shape; the number of elements is checked later."""
    while any(isinstance(each, list) for each in level):
        sizes = {len(each) if isinstance(each, list) else None for each in level}
        if len(sizes) > 1:
            expected = f"expected {num_elements(item.shape)} elements in one list, or in nested"
            raise wrong_input(item.name, f"'data' is ragged; {expected} lists of equal lengths")
        level = [each for row in level for each in row]
    try:
        return msgspec.convert(level, list[element])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise _wrong_values(item, error) from None


def _wrong_values(item: _Input, error: Exception) -> InvalidRequest:
    return wrong_input(item.name, f"'data' does not hold {item.datatype} values: {error}")


def wrong_input(name: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"input '{name}': {text}")


def known_datatype(name: str, datatype: str) -> Datatype:
    """Return the datatype of an input by its name on the wire."""
    found = DATATYPES.get(datatype)
    if found is None:
        expected = f"expected one of {', '.join(DATATYPES)}"
        raise wrong_input(name, f"unknown datatype '{datatype}'; {expected}")
    return found


def check_count(name: str, shape: Sequence[int], num_given: int, where: str) -> None:
    expected = num_elements(shape)
    if num_given != expected:
        needs = f"shape {list(shape)} needs {expected} elements"
        raise wrong_input(name, f"{needs}, {where} has {num_given}")


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Reject sizes that are invalid for any model; the planner checks them against the model."""
    if len(shape) > MAX_RANK:
        raise wrong_input(name, f"a shape of {len(shape)} dimensions; at most {MAX_RANK}")
    if min(shape, default=0) < 0:
        raise wrong_input(name, f"shape {list(shape)} has a negative dimension")
    if max(shape, default=0) > MAX_SHAPE or num_elements(shape) > MAX_SHAPE:
        raise wrong_input(name, f"shape {list(shape)} is too large")


def check_outputs(outputs: Sequence[RequestedOutput]) -> bool:
    """Check the requested outputs; return whether any has a place in a client's memory."""
    seen: set[str] = set()
    has_places = False
    for output in outputs:
        if output.name in seen:
            raise InvalidRequest(f"output '{output.name}' already exists in request")
        seen.add(output.name)
        if output.parameters:
            _check_output(output)
            has_places = has_places or REGION in output.parameters
    return has_places


def _check_output(output: RequestedOutput) -> None:
    if REGION in output.parameters:
        read_place(f"output '{output.name}'", output.parameters)
        if "classification" in output.parameters:
            text = "classes cannot be written to shared memory; ask for one of them"
            raise InvalidRequest(f"output '{output.name}': {text}")
    where = f"output '{output.name}': parameter"
    classes = output.parameters.get("classification", 1)
    if not _is_count(classes) or classes < 1:
        expected = f"must be a number of classes, at least 1; got {classes!r:.40}"
        raise InvalidRequest(f"{where} 'classification' {expected}")
    if classes > MAX_CLASSES:
        text = f"'classification' asks for {classes} classes; at most {MAX_CLASSES}"
        raise InvalidRequest(f"{where} {text}")
    if not isinstance(output.parameters.get("binary_data", False), bool):
        raise InvalidRequest(f"{where} 'binary_data' must be true or false")


def _is_count(value: Parameter) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_sequence(parameters: dict[str, Parameter]) -> None:
    """Check the parameters of a request in a sequence. They stay: the model's queue reads them, and
    Python models see them."""
    id = parameters.get("sequence_id", 0)
    if isinstance(id, str):
        if len(id) > MAX_SEQUENCE_ID:
            text = f"of {len(id)} characters; at most {MAX_SEQUENCE_ID}"
            raise InvalidRequest(f"parameter 'sequence_id': a string {text}")
    elif not _is_count(id) or id >= 1 << 64:
        expected = "must be an unsigned 64-bit integer or a string"
        raise InvalidRequest(f"parameter 'sequence_id' {expected}, got {id!r:.40}")
    for name in ("sequence_start", "sequence_end"):
        if not isinstance(value := parameters.get(name, False), bool):
            raise InvalidRequest(f"parameter '{name}' must be true or false, got {value!r:.40}")


def apply_parameters(request: Request, parameters: dict[str, Parameter]) -> None:
    """Move the parameters that Penstock understands into the request. Names that begin with triton_
    are reserved, as in Triton."""
    for name in parameters:
        if name.startswith(RESERVED):
            text = f"parameter '{name:.100}': names that begin with '{RESERVED}' are reserved"
            raise InvalidRequest(text)
    is_binary = parameters.pop("binary_data_output", False)
    if not isinstance(is_binary, bool):
        raise InvalidRequest("parameter 'binary_data_output' must be true or false")
    _check_sequence(parameters)
    priority = parameters.pop("priority", 0)
    if not _is_count(priority):
        raise InvalidRequest(f"parameter 'priority' must be an integer from 0, got {priority!r}")
    timeout = parameters.pop("timeout", 0)
    if not _is_count(timeout):
        raise InvalidRequest(f"parameter 'timeout' must be microseconds, got {timeout!r}")
    request.priority = priority
    request.timeout_s = timeout / 1e6 if timeout else None
    request.parameters = parameters or None
    request.prefers_binary = is_binary
