"""Answers as bytes in a cache that other servers share, and back. Pure.

What is read was written by a server of any age, or by somebody else: bytes that are not an answer
to just this request are none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.serving.answer_store import StoredAnswer, StoredTensor
from penstock.types import DATATYPES, Parameter, TensorSpec, num_elements, split_bytes

# Increment it when an older reader would misinterpret a newer answer.
FORMAT = 1


class SharedTensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class SharedAnswer(msgspec.Struct, array_like=True, frozen=True):
    """`digest` is that of the request, so that no mix-up of values goes unnoticed."""

    format: int
    digest: bytes
    tensors: tuple[SharedTensor, ...]
    parameters: dict[str, Parameter] | None
    has_form: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SharedAnswer)


def encode(digest: bytes, answer: StoredAnswer) -> bytes:
    tensors = [SharedTensor(t.name, t.datatype, t.shape, t.data) for t in answer.tensors]
    parameters = None if answer.parameters is None else dict(answer.parameters)
    return _encoder.encode(
        SharedAnswer(FORMAT, digest, tuple(tensors), parameters, answer.has_form)
    )


def decode(data: bytes, digest: bytes, outputs: Sequence[TensorSpec]) -> StoredAnswer | None:
    """Return the answer to the request with this digest; None if it is none with these outputs."""
    try:
        found = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if found.format != FORMAT or found.digest != digest or len(found.tensors) != len(outputs):
        return None
    if not all(map(_fits, found.tensors, outputs)):
        return None
    tensors = [StoredTensor(t.name, t.datatype, t.shape, t.data) for t in found.tensors]
    return StoredAnswer(tuple(tensors), found.parameters, found.has_form)


def _fits(tensor: SharedTensor, spec: TensorSpec) -> bool:
    is_named = (tensor.name, tensor.datatype) == (spec.name, spec.datatype)
    if not is_named or min(tensor.shape, default=0) < 0:
        return False
    size, itemsize = num_elements(tensor.shape), DATATYPES[spec.datatype].itemsize
    if itemsize is not None:
        return size * itemsize == len(tensor.data)
    try:
        return len(split_bytes(tensor.data)) == size
    except ValueError:
        return False
