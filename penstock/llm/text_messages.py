"""Messages between the core and a model's renderer process, which runs its tokenizer and chat
template.

    core → renderer   LoadText, EncodeTexts, EncodeChat, StopText
    renderer → core   TextReady, TextFailed, Encoded, NotEncoded

Texts can be larger than datagrams: a message is split into datagrams, each with one byte that marks
the last one, and `Joiner` puts it together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from penstock.llm.token_bytes import Vocabulary
from penstock.wire.frames import Frame

VERSION = 1
# Payload bytes of a datagram: below the default limit of sockets.
PART_BYTES = 1 << 16
_MORE, _LAST = b"\x00", b"\x01"


class LoadText(Frame, tag="load"):
    """`path` and `is_made_up` are those of the engine's settings."""

    version: int
    path: str
    is_made_up: bool
    parses_special: bool
    # Data that the process may allocate beyond what it holds once loaded.
    memory_bytes: int


class EncodeTexts(Frame, tag="texts"):
    job: int
    texts: list[str]
    # Whether to add the special tokens that the model wants around a text.
    is_whole: bool


class EncodeChat(Frame, tag="chat"):
    """Messages and template options as JSON, as clients sent them."""

    job: int
    messages: bytes
    options: bytes
    max_chars: int


class StopText(Frame, tag="stop"):
    pass


class TextReady(Frame, tag="ready"):
    version: int
    vocabulary: Vocabulary


class TextFailed(Frame, tag="lf"):
    problems: tuple[str, ...]


class Encoded(Frame, tag="done"):
    """Tokens of each text, four bytes each (see `messages.pack_tokens`)."""

    job: int
    tokens: list[bytes]


class NotEncoded(Frame, tag="no"):
    """`kind`: the client's messages are invalid or too large, or the model's files failed."""

    job: int
    kind: Literal["invalid", "too_large", "failed"]
    reason: str


ToRenderer = LoadText | EncodeTexts | EncodeChat | StopText
FromRenderer = TextReady | TextFailed | Encoded | NotEncoded
_to_renderer: msgspec.msgpack.Decoder[ToRenderer] = msgspec.msgpack.Decoder(ToRenderer)
_from_renderer: msgspec.msgpack.Decoder[FromRenderer] = msgspec.msgpack.Decoder(FromRenderer)
decode_to_renderer = _to_renderer.decode
decode_from_renderer = _from_renderer.decode
_encode = msgspec.msgpack.Encoder().encode


def encode(message: ToRenderer | FromRenderer) -> Iterator[bytes]:
    """Yield the datagrams of a message."""
    data = _encode(message)
    for start in range(0, len(data), PART_BYTES):
        end = start + PART_BYTES
        yield (_LAST if end >= len(data) else _MORE) + data[start:end]


class Joiner:
    """Reassembly of datagrams, in the order they were sent."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, datagram: bytes) -> bytes | None:
        """Return the whole message when its last part has arrived, else None."""
        self._parts.append(datagram[1:])
        if datagram[:1] == _MORE:
            return None
        data, self._parts = b"".join(self._parts), []
        return data
