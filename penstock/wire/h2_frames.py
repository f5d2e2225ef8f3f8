"""Frames of HTTP/2 (RFC 9113): types, flags, error codes, and how to write and check them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
# The high 16 and the low 8 bits of the length, the type, the flags, and the stream.
FRAME_HEAD = struct.Struct(">HBBBI")
_NUMBER, _SETTING = struct.Struct(">I"), struct.Struct(">HI")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Of a stream number, a window, or an increment of one.
MAX_NUMBER = (1 << 31) - 1
# Window of a stream and of the connection, and payload of a frame, if nothing else is said.
DEFAULT_WINDOW = (1 << 16) - 1
DEFAULT_FRAME_BYTES = 1 << 14
MAX_FRAME_BYTES = (1 << 24) - 1

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6


class H2Error(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Violation(Exception):
    """The peer broke the protocol; the connection ends with GOAWAY and this code and text."""

    def __init__(self, code: H2Error, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamViolation(Exception):
    """The peer broke the protocol on one stream, which ends with RST_STREAM."""

    def __init__(self, code: H2Error, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return FRAME_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frame_head(len(payload), kind, flags, stream) + payload


def settings(values: Mapping[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(*item) for item in values.items()]))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(increment))


def reset(stream: int, code: H2Error) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: H2Error, text: str = "") -> bytes:
    payload = _NUMBER.pack(last_stream) + _NUMBER.pack(code) + text.encode()
    return frame(GOAWAY, 0, 0, payload)


def read_number(payload: bytes) -> int:
    """Return the 31-bit number of a WINDOW_UPDATE."""
    return int.from_bytes(payload) & MAX_NUMBER


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings in their order; Violation if a value is not allowed (section 6.5.2)."""
    if len(payload) % _SETTING.size:
        raise Violation(H2Error.FRAME_SIZE_ERROR, "SETTINGS of a length that 6 does not divide")
    found = list(_SETTING.iter_unpack(payload))
    for name, value in found:
        if name == ENABLE_PUSH and value > 1:
            raise Violation(H2Error.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}; expected 0 or 1")
        if name == INITIAL_WINDOW_SIZE and value > MAX_NUMBER:
            text = f"INITIAL_WINDOW_SIZE is {value}; expected at most {MAX_NUMBER}"
            raise Violation(H2Error.FLOW_CONTROL_ERROR, text)
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            text = f"MAX_FRAME_SIZE is {value}; expected {DEFAULT_FRAME_BYTES} to {MAX_FRAME_BYTES}"
            raise Violation(H2Error.PROTOCOL_ERROR, text)
    return found


def strip_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of a HEADERS frame without padding and priority (section 6.2)."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Violation(H2Error.FRAME_SIZE_ERROR, "a padded frame without its padding length")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise Violation(H2Error.PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[start:end] if (start, end) != (0, len(payload)) else payload


@dataclass(slots=True)
class Allowance:
    """How many frames without use a peer may still send: resets, pings, settings, empty frames.
    Time and finished calls refill it, so that only a flood uses it up."""

    now: float
    rate: float = 500.0
    limit: float = 5000.0
    # Refill for each finished call.
    per_call: float = 10.0
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limit

    def use(self, now: float) -> None:
        """Count one frame; Violation if there were too many."""
        if self.left < 1:
            self.left = min(self.limit, self.left + self.rate * (now - self.now))
            self.now = now
            if self.left < 1:
                raise Violation(H2Error.ENHANCE_YOUR_CALM, "too many frames without use")
        self.left -= 1

    def earn(self) -> None:
        self.left = min(self.limit, self.left + self.per_call)
