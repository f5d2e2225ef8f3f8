"""Infer messages of the same form, read and written without protobuf's objects. Pure.

Clients send the same message again and again, with other tensors. Protobuf writes its fields in the
order of their numbers, and `raw_input_contents` is the last: all bytes before it are the form.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from penstock.types import Buffer, RegionPlace, ReplySink, Request, Response, Tensor
from penstock.wire.v2_pb import RAW_INPUT, Proto, decode_infer, set_parameter
from penstock.wire.v2_templates import region_parameters

# Cached forms, by the length of their messages, and forms of the same length.
MAX_FORMS = 256
MAX_SAME_LENGTH = 4
MAX_FORM_BYTES = 4096
# grpc_service.proto: ModelInferResponse.id and .raw_output_contents, and
# ModelStreamInferResponse.infer_response.
_RAW_INPUT = bytes((RAW_INPUT,))
_ID, _RAW_OUTPUT, _INFER_RESPONSE = b"\x1a", b"\x32", b"\x12"


def _mark(is_final: bool) -> bytes:
    """A part of a ModelInferResponse that says whether it is the last answer to its request."""
    mark = service_pb2.ModelInferResponse()
    set_parameter(mark.parameters["triton_final_response"], is_final)
    data: bytes = mark.SerializeToString()
    return data


FINAL, NOT_FINAL = _mark(True), _mark(False)


def varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


class InferForm:
    """The common part of messages: what precedes the tensors, and where those are."""

    __slots__ = (
        "_heads",
        "_inputs",
        "_prefix",
        "_prefix_bytes",
        "model_name",
        "model_version",
        "outputs",
        "uses_regions",
    )

    def __init__(self, message: Proto, request: Request, prefix: bytes) -> None:
        self.model_name: str = message.model_name
        self.model_version: str = message.model_version
        self.outputs = request.outputs
        self.uses_regions = request.uses_regions
        self._prefix, self._prefix_bytes = prefix, len(prefix)
        # The bytes before each tensor but the first, whose own are in the prefix.
        self._heads: list[tuple[int, int, bytes]] = []
        self._inputs: list[tuple[str, str, tuple[int, ...], int, int, RegionPlace | None]] = []
        position = len(prefix)
        is_first = True
        for tensor in request.inputs:
            nbytes, form = len(tensor.data), (tensor.name, tensor.datatype, tensor.shape)
            if tensor.place is not None:
                self._inputs.append((*form, position, position, tensor.place))
                continue
            if not is_first:
                head = _RAW_INPUT + varint(nbytes)
                self._heads.append((position, position + len(head), head))
                position += len(head)
            end = position + nbytes
            self._inputs.append((*form, position, end, None))
            position, is_first = end, False

    def fits(self, data: Buffer) -> bool:
        """Tell whether a message of the right length has this form."""
        if data[: self._prefix_bytes] != self._prefix:
            return False
        return all([data[start:end] == head for start, end, head in self._heads])

    def fill(self, data: Buffer, sink: ReplySink, received: float) -> Request:
        inputs = [
            Tensor(name, datatype, shape, data[start:end], place)
            for name, datatype, shape, start, end, place in self._inputs
        ]
        request = Request(sink, inputs, received, outputs=self.outputs)
        request.form = self
        request.uses_regions = self.uses_regions
        return request


class PbCodec:
    """Decodes requests and encodes answers; caches forms and answers' heads, within bounds."""

    def __init__(self) -> None:
        self._forms: dict[int, list[InferForm]] = {}
        self._heads: dict[object, bytes] = {}

    def find(self, data: Buffer) -> InferForm | None:
        """Return the form of a message, if it is known."""
        for form in self._forms.get(len(data), ()):
            if form.fits(data):
                return form
        return None

    def decode(
        self, message: Proto, raw: Sequence[Buffer], data: Buffer, sink: ReplySink, received: float
    ) -> Request:
        """Decode a message whose form is not known, and remember its form if it is a plain one.
        `message` and `raw` are what `parse_infer` returned for `data`."""
        request = decode_infer(message, sink, received, raw)
        if (raw or _is_all_placed(request)) and not message.id and not message.parameters:
            self._remember(message, request, data)
        return request

    def _remember(self, message: Proto, request: Request, data: Buffer) -> None:
        if any(output.parameters and output.place is None for output in request.outputs):
            return
        sent = [len(tensor.data) for tensor in request.inputs if tensor.place is None]
        tails = [_RAW_INPUT + varint(nbytes) for nbytes in sent] or [b""]
        num_tail = sum(sent) + sum(map(len, tails))
        start = len(data) - num_tail
        if not 0 <= start <= MAX_FORM_BYTES:
            return
        form = InferForm(message, request, bytes(data[: start + len(tails[0])]))
        if not form.fits(data) or not _has_no_tensors(bytes(data[:start])):
            return
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        same = self._forms.setdefault(len(data), [])
        if len(same) < MAX_SAME_LENGTH:
            same.append(form)
            request.form = form

    def encode(self, request: Request, response: Response) -> list[Buffer]:
        """Return the parts of a ModelInferResponse; tensors are not copied."""
        has_form = request.form is not None and response.form is not None
        head = self._heads.get(response.form) if has_form else None
        if head is None:
            head = _encode_head(response)
            if has_form:
                if len(self._heads) >= MAX_FORMS:
                    self._heads.clear()
                self._heads[response.form] = head
        parts: list[Buffer] = [head]
        if request.id:
            parts.append(_encode_id(request.id))
        for tensor in response.outputs:
            parts += (_RAW_OUTPUT + varint(len(tensor.data)), tensor.data)
        return parts


def _is_all_placed(request: Request) -> bool:
    """Whether all inputs are in a client's memory."""
    return request.uses_regions and all(each.place is not None for each in request.inputs)


def stream_answer(parts: Sequence[Buffer], is_final: bool = True) -> list[Buffer]:
    """Return the parts of a ModelStreamInferResponse with this ModelInferResponse."""
    mark = FINAL if is_final else NOT_FINAL
    length = sum(map(len, parts)) + len(mark)
    return [_INFER_RESPONSE + varint(length), *parts, mark]


def stream_error(id: str, text: str) -> list[Buffer]:
    """Return the parts of a ModelStreamInferResponse with an error."""
    message: bytes = service_pb2.ModelStreamInferResponse(error_message=text).SerializeToString()
    return [message, *stream_answer([_encode_id(id)] if id else [])]


def _encode_id(id: str) -> bytes:
    data = id.encode()
    return _ID + varint(len(data)) + data


def _encode_head(response: Response) -> bytes:
    output = service_pb2.ModelInferResponse.InferOutputTensor
    message = service_pb2.ModelInferResponse(
        model_name=response.model_name,
        model_version=response.model_version,
        outputs=[output(name=t.name, datatype=t.datatype, shape=t.shape) for t in response.outputs],
    )
    for tensor, described in zip(response.outputs, message.outputs, strict=True):
        if tensor.place is not None:
            for key, each in region_parameters(tensor.place).items():
                set_parameter(described.parameters[key], each)
    for name, value in (response.parameters or {}).items():
        set_parameter(message.parameters[name], value)
    data: bytes = message.SerializeToString()
    return data


def _has_no_tensors(prefix: bytes) -> bool:
    """Tell whether these bytes are a message of their own without raw tensors: then those that
    follow are the message's tensors, and not part of another field."""
    try:
        return not service_pb2.ModelInferRequest.FromString(prefix).raw_input_contents
    except DecodeError:
        return False
