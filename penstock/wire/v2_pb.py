"""The v2 inference protocol as Triton's protobuf messages: infer requests in, answers out, and
the other way round for clients. Pure.

Tensors arrive raw (`raw_input_contents`) or typed (`contents`), never both, and leave raw. Every
error names its input, with the same text as in `wire.v2_request` where both can fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock.errors import BackendFailed, InvalidRequest, TooLarge
from penstock.types import (
    REGION,
    REGION_BYTES,
    Array,
    Buffer,
    Parameter,
    ReplySink,
    Request,
    RequestedOutput,
    Tensor,
    num_elements,
    pack_bytes,
    to_array,
)
from penstock.wire.v2_request import (
    MAX_TENSORS,
    apply_parameters,
    check_count,
    check_outputs,
    check_shape,
    known_datatype,
    region_input,
    wrong_input,
)
from penstock.wire.v2_templates import region_parameters

# Protobuf's generated classes have no types.
Proto: TypeAlias = Any
# grpc_service.proto, InferTensorContents: the field of each datatype.
CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents", "BYTES": "bytes_contents",
    "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents",
    "UINT32": "uint_contents", "UINT64": "uint64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
# grpc_service.proto: the tag of ModelInferRequest.raw_input_contents.
RAW_INPUT, LENGTH_DELIMITED = 0x3A, 2
# Protobuf parses shorter messages whole.
MIN_SPLIT_BYTES = 1 << 14
# Typed elements per request: converting them one by one delays all other requests.
MAX_TYPED = 4 << 20
# Far more than clients send; what is larger only costs time.
MAX_ID = 1 << 16
MAX_PARAMETERS = 1024
# Requests an empty final answer, for models that may send none or several.
_KINDS = {bool: "bool", int: "int64", float: "double", str: "string"}
WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"


def parse(message_type: Proto, data: bytes) -> Proto:
    """Parse a message of the given type; InvalidRequest if the bytes are not one."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        name = message_type.DESCRIPTOR.name
        raise InvalidRequest(f"failed to parse the {name}: {error}") from None


def parse_infer(data: Buffer) -> tuple[Proto, Sequence[Buffer]]:
    """Parse a ModelInferRequest; return it and its raw tensors. Those of a long message are views
    of `data`, and not in the message: protobuf would copy them, twice."""
    if len(data) >= MIN_SPLIT_BYTES:
        split = split_raw(memoryview(data))
        if split is not None:
            return parse(service_pb2.ModelInferRequest, split[0]), split[1]
    message = parse(service_pb2.ModelInferRequest, bytes(data))
    return message, message.raw_input_contents


def split_raw(data: memoryview) -> tuple[bytes, list[Buffer]] | None:
    """Split a message into its `raw_input_contents` and all other fields; None if it is malformed,
    or has fields of a kind that is not expected here."""
    rest: list[Buffer] = []
    raw: list[Buffer] = []
    position, end = 0, len(data)
    try:
        while position < end:
            start = position
            if data[position] & 7 != LENGTH_DELIMITED or data[position] > 0x7F:
                return None
            tag = data[position]
            length, position = _read_varint(data, position + 1)
            stop = position + length
            if stop > end:
                return None
            if tag == RAW_INPUT:
                raw.append(data[position:stop])
            else:
                rest.append(data[start:stop])
            position = stop
    except IndexError:
        return None
    return b"".join(rest), raw


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return a length and the position after it; IndexError if it does not end in five bytes."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IndexError


def decode_infer(
    message: Proto, sink: ReplySink, received: float, raw: Sequence[Buffer] | None = None
) -> Request:
    """Make a request; `raw` are the tensors of `parse_infer`."""
    if raw is None:
        raw = message.raw_input_contents
    if len(message.inputs) > MAX_TENSORS or len(message.outputs) > MAX_TENSORS:
        raise InvalidRequest(f"more than {MAX_TENSORS} inputs or outputs")
    if len(message.id) > MAX_ID or len(message.parameters) > MAX_PARAMETERS:
        limits = f"{MAX_ID} characters and {MAX_PARAMETERS} parameters"
        raise TooLarge(f"the id or the parameters are too large; expected at most {limits}")
    placed = {
        index: _region_tensor(item)
        for index, item in enumerate(message.inputs)
        if item.parameters and REGION in item.parameters
    }
    items = [item for index, item in enumerate(message.inputs) if index not in placed]
    inputs = _raw(items, raw, message.model_name) if raw else _typed(items)
    for index, tensor in placed.items():
        inputs.insert(index, tensor)
    outputs = [RequestedOutput(o.name, _parameters(o.parameters)) for o in message.outputs]
    has_places = check_outputs(outputs)
    request = Request(sink, inputs, received, id=message.id, outputs=outputs)
    request.uses_regions = has_places or bool(placed)
    if message.parameters:
        parameters = _parameters(message.parameters)
        wants_empty = parameters.pop(WANTS_EMPTY_FINAL, False)
        if not isinstance(wants_empty, bool):
            raise InvalidRequest(f"parameter '{WANTS_EMPTY_FINAL}' must be true or false")
        request.wants_empty_final = wants_empty
        apply_parameters(request, parameters)
    return request


def set_parameter(target: Proto, value: Parameter) -> None:
    kind = "uint64" if isinstance(value, int) and value >= 1 << 63 else _KINDS[type(value)]
    setattr(target, f"{kind}_param", value)


def _parameters(wire: Mapping[str, Proto]) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, value in wire.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter '{name}' has no value")
        parameters[name] = getattr(value, kind)
    return parameters


def _region_tensor(item: Proto) -> Tensor:
    if item.HasField("contents"):
        text = "has both contents and a shared memory region; expected one of them"
        raise wrong_input(item.name, text)
    shape, parameters = tuple(item.shape), _parameters(item.parameters)
    place = region_input(item.name, shape, item.datatype, parameters)
    return Tensor(item.name, item.datatype, shape, b"", place)


def _raw(inputs: Sequence[Proto], contents: Sequence[Buffer], model: str) -> list[Tensor]:
    for item in inputs:
        if item.HasField("contents"):
            raise InvalidRequest(
                "contents field must not be specified when using raw_input_contents for "
                f"'{item.name}' for model '{model}'"
            )
    if len(contents) != len(inputs):
        which = (
            f"input '{inputs[len(contents)].name}' has none"
            if len(contents) < len(inputs)
            else f"the last input is '{inputs[-1].name}'"
            if inputs
            else "there are no inputs"
        )
        raise InvalidRequest(
            f"expected {len(inputs)} raw_input_contents, one for each input, "
            f"got {len(contents)}: {which}"
        )
    tensors: list[Tensor] = []
    for item, data in zip(inputs, contents, strict=True):
        shape = tuple(item.shape)
        check_shape(item.name, shape)
        tensors.append(Tensor(item.name, item.datatype, shape, data))
    return tensors


def _typed(inputs: Sequence[Proto]) -> list[Tensor]:
    tensors: list[Tensor] = []
    left = MAX_TYPED
    for item in inputs:
        data = _pack(item, left)
        left -= num_elements(item.shape)
        tensors.append(Tensor(item.name, item.datatype, tuple(item.shape), data))
    return tensors


def _pack(item: Proto, left: int) -> bytes:
    """Return the typed contents of one input, of at most `left` elements, as raw bytes."""
    datatype = known_datatype(item.name, item.datatype)
    field = CONTENTS.get(item.datatype)
    if field is None:
        text = f"{item.datatype} has no typed contents; send it in raw_input_contents"
        raise wrong_input(item.name, text)
    check_shape(item.name, item.shape)
    for given, _ in item.contents.ListFields():
        if given.name != field:
            text = f"{item.datatype} elements belong in {field}, not in {given.name}"
            raise wrong_input(item.name, text)
    values = getattr(item.contents, field)
    check_count(item.name, item.shape, len(values), field)
    if len(values) > left:
        raise TooLarge(
            f"input '{item.name}': {len(values)} more typed elements in a request that may have "
            f"{MAX_TYPED}; send large tensors in raw_input_contents"
        )
    array: Array
    if item.datatype == "BYTES":
        array = np.array(list(values), dtype=np.object_)
        return pack_bytes(array)
    if item.datatype in ("FP32", "FP64"):
        return _packed(item, datatype.numpy.itemsize * len(values))
    try:
        array = np.array(values, dtype=datatype.numpy)
    except OverflowError:
        raise wrong_input(item.name, f"a value does not fit {item.datatype}") from None
    return array.tobytes()


def _packed(item: Proto, nbytes: int) -> bytes:
    """Return the only field of typed contents: on the wire, floats are little-endian and packed.
    For 4 Mi elements this takes 30 ms, and their conversion one by one 280 ms (2 cores)."""
    data: bytes = item.contents.SerializeToString()
    return data[len(data) - nbytes :]


# The client's side.


def make_infer(
    model: str,
    version: str,
    tensors: Sequence[Tensor],
    outputs: Sequence[RequestedOutput] = (),
) -> Proto:
    inputs = service_pb2.ModelInferRequest.InferInputTensor
    asked = service_pb2.ModelInferRequest.InferRequestedOutputTensor
    message = service_pb2.ModelInferRequest(
        model_name=model,
        model_version=version,
        inputs=[inputs(name=t.name, datatype=t.datatype, shape=t.shape) for t in tensors],
        outputs=[asked(name=output.name) for output in outputs],
        raw_input_contents=[bytes(tensor.data) for tensor in tensors if tensor.place is None],
    )
    for tensor, described in zip(tensors, message.inputs, strict=True):
        if tensor.place is not None:
            for key, value in region_parameters(tensor.place).items():
                set_parameter(described.parameters[key], value)
    for output, named in zip(outputs, message.outputs, strict=True):
        for key, given in output.parameters.items():
            set_parameter(named.parameters[key], given)
    return message


def read_answer(message: Proto, places: Mapping[str, memoryview] | None = None) -> dict[str, Array]:
    """Return the outputs of a ModelInferResponse by name, some of which may be in shared memory at
    these places; BackendFailed if they are not raw."""
    outputs, contents = message.outputs, message.raw_output_contents
    if len(outputs) != len(contents):
        raise BackendFailed("the server's answer cannot be read: its tensors are not raw")
    found = {}
    for item, raw in zip(outputs, contents, strict=True):
        data = raw
        if places and REGION in item.parameters:
            data = places[item.name][: item.parameters[REGION_BYTES].int64_param]
        found[item.name] = to_array(Tensor(item.name, item.datatype, tuple(item.shape), data))
    return found
