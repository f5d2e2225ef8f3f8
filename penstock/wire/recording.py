"""Recorded requests and answers as the bytes of a segment file. Pure.

A segment begins with MAGIC and a header; records follow. A record is a fixed prefix (magic, two
lengths, CRC-32), a description in MessagePack, and the bytes of its tensors, one after the other. A
record that is cut off, as by a crash, or damaged ends its segment: readers skip the rest.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.types import Buffer, Parameter, Tensor

SUFFIX = ".rec"
MAGIC = b"PENREC1\n"
# Magic, bytes of the description, bytes of the tensors, CRC-32 of both.
_PREFIX = struct.Struct("<4sIQI")
_RECORD = b"REC1"
_LENGTH = struct.Struct("<I")
# The status of a request that was answered; of others, the kind of their error.
OK = "ok"


class SegmentHeader(msgspec.Struct, array_like=True, frozen=True):
    """What all records of a segment share. `share` of the requests were recorded."""

    model: str
    shard: int
    share: float
    # Unix time.
    created: float


class RecordedTensor(msgspec.Struct, array_like=True, frozen=True):
    """Description of a tensor. The values of a redacted one are not in the file."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int
    is_redacted: bool = False


class RecordedRequest(msgspec.Struct, array_like=True, frozen=True):
    """One request and its answer. `data` of the tensors, inputs first, follows in the file."""

    # Unix time.
    arrived: float
    id: str
    version: str
    # OK, or the class of the error.
    status: str
    latency_s: float
    # A digest of the API key's digest; empty if no key is required.
    caller: str
    parameters: dict[str, Parameter] = {}
    inputs: tuple[RecordedTensor, ...] = ()
    outputs: tuple[RecordedTensor, ...] = ()
    # Of a language model: what was asked, as `penstock.data` reads it, and the text of each choice.
    # None: redacted.
    asked: dict[str, Any] | None = None
    texts: tuple[str, ...] | None = None
    num_tokens: tuple[int, int] = (0, 0)


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_encode = msgspec.msgpack.Encoder().encode
_headers = msgspec.msgpack.Decoder(SegmentHeader)
_records = msgspec.msgpack.Decoder(RecordedRequest)


def describe(tensor: Tensor, *, is_redacted: bool = False) -> RecordedTensor:
    nbytes = 0 if is_redacted else len(tensor.data)
    return RecordedTensor(tensor.name, tensor.datatype, tuple(tensor.shape), nbytes, is_redacted)


def encode_header(header: SegmentHeader) -> bytes:
    encoded = _encode(header)
    return b"".join((MAGIC, _LENGTH.pack(len(encoded)), encoded))


def encode_description(record: RecordedRequest) -> bytes:
    """Encode a record without the bytes of its tensors. ValueError if it has an integer of more
    than 64 bits, or nests too deeply, as JSON of clients may."""
    try:
        return _encode(record)
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"cannot be recorded: {error}") from None


def encode_record(description: bytes, data: Sequence[Buffer]) -> list[Buffer]:
    """Return the parts of a record, to be written together. `data` are the bytes of its tensors."""
    crc = zlib.crc32(description)
    num_bytes = 0
    for each in data:
        crc = zlib.crc32(each, crc)
        num_bytes += len(each)
    prefix = _PREFIX.pack(_RECORD, len(description), num_bytes, crc)
    return [prefix + description, *data]


def decode_header(view: memoryview) -> tuple[SegmentHeader, int] | None:
    """Return the header of a segment and where its records begin; None if it is not complete."""
    start = len(MAGIC) + _LENGTH.size
    if len(view) < start or view[: len(MAGIC)] != MAGIC:
        return None
    (length,) = _LENGTH.unpack_from(view, len(MAGIC))
    try:
        return _headers.decode(view[start : start + length]), start + length
    except msgspec.DecodeError:
        return None


def decode_records(view: memoryview, start: int) -> Iterator[tuple[RecordedRequest, int]]:
    """Yield the records from `start` on, each with the place of its tensors' bytes. Ends at the
    first that is cut off or damaged."""
    while start + _PREFIX.size <= len(view):
        magic, length, num_bytes, crc = _PREFIX.unpack_from(view, start)
        description = start + _PREFIX.size
        data = description + length
        end = data + num_bytes
        if magic != _RECORD or end > len(view) or zlib.crc32(view[description:end]) != crc:
            return
        try:
            yield _records.decode(view[description:data]), data
        except msgspec.DecodeError:
            return
        start = end
