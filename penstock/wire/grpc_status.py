"""gRPC over HTTP/2: status codes, timeouts, and the header fields of answers. Pure.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import re

from penstock.errors import InvalidRequest
from penstock.wire.hpack import Field

# The place of a status is its number.
_STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
NUMBERS = {name: b"%d" % number for number, name in enumerate(_STATUSES)}
# A flag that the message is compressed, and its length.
PREFIX_BYTES = 5
# A status travels in headers, whose length clients limit.
MAX_DETAILS = 2000
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_UNSAFE = re.compile(rb"[^\x20-\x24\x26-\x7e]")

ENCODINGS = (b"identity", b"deflate", b"gzip")
_START = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b",".join(ENCODINGS)),
)
OK: tuple[Field, ...] = ((b"grpc-status", b"0"),)
# The head of an answer, by the encoding of its messages.
HEADS: dict[bytes, tuple[Field, ...]] = {
    encoding: _START if encoding == b"identity" else (*_START, (b"grpc-encoding", encoding))
    for encoding in ENCODINGS
}
# Fields that every answer repeats.
REPEATED: tuple[Field, ...] = (*HEADS[b"gzip"][1:], *HEADS[b"deflate"][3:], *OK)


def trailers(status: str, text: str) -> tuple[Field, ...]:
    """Return the fields that end an answer with this status and text."""
    message = _UNSAFE.sub(lambda byte: b"%%%02X" % byte[0][0], text[:MAX_DETAILS].encode())
    return ((b"grpc-status", NUMBERS[status]), (b"grpc-message", message))


def only_trailers(status: str, text: str) -> tuple[Field, ...]:
    """Return the fields of an answer without messages."""
    return (*_START, *trailers(status, text))


def read_timeout(value: bytes) -> float:
    """Return the seconds of a grpc-timeout header."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        text = value[:20].decode("latin-1")
        raise InvalidRequest(f"grpc-timeout '{text}'; expected up to 8 digits and one of HMSmun")
    return int(match[1]) * _UNITS_S[match[2]]


def prefix(length: int, is_compressed: bool = False) -> bytes:
    return bytes((is_compressed,)) + length.to_bytes(4)
