"""The v2 inference protocol (KServe, Triton) as bytes: infer requests in, answers out. Pure.

JSON, with the binary tensor extension: the JSON part comes first, raw little-endian tensors follow
in the order of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import InvalidRequest
from penstock.types import (
    DATATYPES,
    REGION,
    Array,
    Buffer,
    ReplySink,
    Request,
    Response,
    Tensor,
    TensorSpec,
    num_elements,
    pack_bytes,
)
from penstock.wire.v2_request import has_one_list, is_plain, read_infer
from penstock.wire.v2_templates import DATA, AnswerTemplate, InferTemplate, encode_answer

MAX_FORMS = 1024
MAX_FORM_BYTES = 4096


NAMES_REGION = b'"%b"' % REGION.encode()
_ID_KEY = b'{"id":'
_ID = _ID_KEY + b'"'


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
        wire, request = read_infer(head, tail, sink, received)
        if is_plain(wire, id, rest) and not any(item.data for item in wire.inputs):
            self._remember(rest, request)
        return request

    def find_form(self, head: bytes, num_tail: int) -> tuple[str, InferTemplate] | None:
        """Return the id and the form of a request by its JSON part, if tensors of this many bytes
        in all follow it and the form is known."""
        id, rest = _split_id(head)
        form = self._forms.get(rest)
        is_usable = form is not None and form.num_bytes == num_tail and not form.uses_regions
        return (id, form) if form is not None and is_usable else None

    def _decode_json(self, body: Buffer, sink: ReplySink, received: float) -> Request:
        if len(body) > MAX_FORM_BYTES:
            return read_infer(body, memoryview(b""), sink, received)[1]
        body = bytes(body)
        id, rest = _split_id(body)
        start = rest.find(DATA) + len(DATA)
        end = rest.find(b"]", start) + 1
        around = rest[:start] + rest[end:]
        form = self._forms.get(around)
        if form is not None:
            request = form.fill_json(id, rest[start:end], sink, received)
            if request is not None:
                return request
        if NAMES_REGION in rest:
            # Without data there is nothing to cut out.
            return self.decode_infer(body, len(body), sink, received)
        wire, request = read_infer(body, memoryview(b""), sink, received)
        if is_plain(wire, id, around) and has_one_list(wire, rest[start:end], around):
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
        `specs` are the model's outputs, for class labels; None: classes are computed already."""
        template = None
        has_form = request.form is not None and response.form is not None
        if has_form:
            template = self._templates.get(response.form)
        if template is None:
            if specs is not None and wants_classes(request):
                return encode_answer(request, classified(request, response, specs))
            if not has_form:
                return encode_answer(request, response)
            template = AnswerTemplate(request, response)
            if len(self._templates) >= MAX_FORMS:
                self._templates.clear()
            self._templates[response.form] = template
        # A request with a form has a plain id.
        return template.fill(_ID + request.id.encode() + b'",' if request.id else b"{", response)


def classified(request: Request, response: Response, specs: Sequence[TensorSpec]) -> Response:
    """Apply the classification extension: give the k best classes of outputs that request it."""
    labels = {spec.name: spec.labels for spec in specs}
    counts = {each.name: each.parameters.get("classification", 0) for each in request.outputs}
    # A response of a decoupled model may have some of the outputs only.
    outputs = [
        _classes(tensor, int(counts[tensor.name]), labels.get(tensor.name, ()))
        if counts.get(tensor.name)
        else tensor
        for tensor in response.outputs
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


def wants_classes(request: Request) -> bool:
    return any("classification" in output.parameters for output in request.outputs)


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
