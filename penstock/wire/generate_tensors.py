"""Triton's generate extension for models of tensors: one JSON object to a request, and each answer
to one. Pure.

A key that is the name of an input becomes that tensor, any other a parameter; both may also be in
`parameters`. A value is a tensor of a single element, or a list of them, for a batch of one row.
Outputs of one element are values, others flat lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import numpy as np

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, PenstockError
from penstock.types import (
    DATATYPES,
    Array,
    Buffer,
    Parameter,
    Response,
    Tensor,
    TensorSpec,
    num_elements,
    pack_bytes,
    to_array,
)
from penstock.wire.v2_request import MAX_INT, MAX_RANK, MIN_INT, wrong_input

ONE_ONLY = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)
# Triton's words for a value of another kind than the input's, by numpy's kind.
WRONG_KINDS = {
    "O": "attempt to access JSON non-string as string",
    "b": "attempt to access JSON non-boolean as boolean",
    "i": "attempt to access JSON non-signed-integer as signed-integer",
    "u": "attempt to access JSON non-unsigned-integer as unsigned-integer",
    "f": "attempt to access JSON non-number as number",
}
NOT_IN_JSON = ("FP16", "BF16")

_encode = msgspec.json.Encoder().encode


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object; a key may come twice."""


@dataclass(slots=True)
class GeneratedInputs:
    """What a request says."""

    id: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)


def read(body: Buffer, config: ModelConfig) -> GeneratedInputs:
    """Parse a request to a model."""
    found = GeneratedInputs()
    specs = {spec.name: spec for spec in config.inputs}
    for name, value in _parse(body):
        if name == "id" and name not in specs:
            if not isinstance(value, str):
                raise InvalidRequest("id: expected a string", "id")
            found.id = value
        elif name == "parameters" and name not in specs:
            if not isinstance(value, _Pairs):
                raise InvalidRequest("parameters: expected an object", "parameters")
            for inner, each in value:
                _add(found, specs, inner, each, config.max_batch_size > 0)
        else:
            _add(found, specs, name, value, config.max_batch_size > 0)
    return found


def _parse(body: Buffer) -> _Pairs:
    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number of JSON")

    try:
        text = bytes(body).decode()
        found = json.loads(text, object_pairs_hook=_Pairs, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from None
    if not isinstance(found, _Pairs):
        raise InvalidRequest("the body is not a JSON object")
    return found


def _add(
    found: GeneratedInputs,
    specs: Mapping[str, TensorSpec],
    name: str,
    value: object,
    has_batch: bool,
) -> None:
    """Add a member as the tensor of this name, or as a parameter."""
    spec = specs.get(name)
    if spec is not None:
        if name in found.tensors:
            raise InvalidRequest(f"input '{name}' already exists in request")
        found.tensors[name] = _to_tensor(spec, value, has_batch)
        return
    if not isinstance(value, bool | int | float | str):
        kinds = "It should be either 'int', 'double', 'bool', or 'string'."
        raise InvalidRequest(f"parameter '{name}' has invalid type. {kinds}")
    if isinstance(value, int) and not MIN_INT <= value <= MAX_INT:
        raise InvalidRequest(f"parameter '{name}' does not fit 64 bits")
    found.parameters[name] = value


def _to_tensor(spec: TensorSpec, value: object, has_batch: bool) -> Tensor:
    if spec.datatype in NOT_IN_JSON:
        text = f"{spec.datatype} has no JSON form; use /infer with binary data"
        raise wrong_input(spec.name, text)
    given: list[int] = []
    level: list[object] = [value]
    # Nested lists have to be regular.
    while level and any(type(each) is list for each in level):
        sizes = {len(each) if type(each) is list else -1 for each in level}
        if len(sizes) > 1 or len(given) == MAX_RANK:
            raise wrong_input(spec.name, "its lists have different lengths, or too many levels")
        given.append(sizes.pop())
        level = [each for row in level if isinstance(row, list) for each in row]
    data = _pack(spec, level)
    return Tensor(spec.name, spec.datatype, _fit(spec, given, len(level), has_batch), data)


def _pack(spec: TensorSpec, values: Sequence[object]) -> Buffer:
    dtype = DATATYPES[spec.datatype].numpy
    kinds: Mapping[str, tuple[type, ...]] = {"O": (str,), "b": (bool,), "f": (int, float)}
    accepted = kinds.get(dtype.kind, (int,))
    for each in values:
        if not isinstance(each, accepted) or (isinstance(each, bool) and dtype.kind != "b"):
            raise wrong_input(spec.name, WRONG_KINDS[dtype.kind])
    if dtype.kind == "O":
        try:
            texts = [str(each).encode() for each in values]
        except UnicodeEncodeError:
            raise wrong_input(spec.name, "a string is not valid Unicode") from None
        return pack_bytes(np.array(texts, dtype=np.object_))
    try:
        with np.errstate(over="ignore"):
            array: Array = np.array(values, dtype=dtype)
    except OverflowError:
        raise wrong_input(spec.name, f"a value does not fit {spec.datatype}") from None
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise wrong_input(spec.name, f"a value does not fit {spec.datatype}")
    return array.tobytes()


def _fit(spec: TensorSpec, given: Sequence[int], count: int, has_batch: bool) -> tuple[int, ...]:
    """Return the shape of a value: as it is nested, if it has all dimensions or all but the batch;
    else that of one row with so many elements, as far as that is clear."""
    full = len(spec.shape) + has_batch
    if len(given) == full and full > 1:
        return tuple(given)
    if len(given) == len(spec.shape) > 1:
        return (1, *given)
    shape = [1 if size == -1 else size for size in spec.shape]
    variable = [axis for axis, size in enumerate(spec.shape) if size == -1]
    if variable:
        rest = num_elements(shape)
        if rest and count % rest == 0:
            shape[variable[-1]] = count // rest
    if num_elements(shape) != count:
        expected = f"expected {list(spec.shape)}"
        raise wrong_input(spec.name, f"{count} elements; {expected}, or nested lists of that shape")
    return (1, *shape) if has_batch else tuple(shape)


@dataclass(frozen=True, slots=True)
class GeneratedAnswers:
    """Encodes the answers to one request, whole or as events."""

    id: str

    def whole(self, answer: Response) -> bytes:
        """Return an answer as JSON; BackendFailed if an output has no JSON form."""
        found: dict[str, object] = {"id": self.id} if self.id else {}
        found |= {"model_name": answer.model_name, "model_version": answer.model_version}
        found |= answer.parameters or {}
        found |= {tensor.name: _to_json(tensor) for tensor in answer.outputs}
        return _encode(found)

    def event(self, answer: Response) -> bytes:
        return b"data: " + self.whole(answer) + b"\n\n"

    def error(self, error: PenstockError) -> bytes:
        return b"data: " + _encode({"error": str(error)}) + b"\n\n"


def _to_json(tensor: Tensor) -> object:
    if tensor.datatype in NOT_IN_JSON:
        text = f"{tensor.datatype} has no JSON form; use /infer with binary data"
        raise BackendFailed(f"output '{tensor.name}': {text}")
    values = to_array(tensor).ravel().tolist()
    if tensor.datatype == "BYTES":
        try:
            values = [each.decode() for each in values]
        except UnicodeDecodeError:
            text = "its bytes are not UTF-8; use /infer with binary data"
            raise BackendFailed(f"output '{tensor.name}': {text}") from None
    return values[0] if len(values) == 1 else values
