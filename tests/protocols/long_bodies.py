"""A handler whose long bodies lie in several pieces of memory."""

from __future__ import annotations

import random

from penstock.protocols.http import Exchange
from penstock.protocols.http_reader import MessageHead


def post(body: bytes, *headers: str, path: str = "/a") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Parts:
    """A body in pieces of 100,000 bytes, each in a buffer of its own."""

    buffer = None

    def __init__(self, length: int) -> None:
        sizes = [100_000] * (length // 100_000) + [length % 100_000]
        self._parts = [bytearray(size) for size in sizes if size]
        self._part = self._start = 0
        self.num_received = 0
        self.is_dropped = self.is_moved = False

    def room(self) -> memoryview:
        return memoryview(self._parts[self._part])[self._start :]

    def fill(self, num_bytes: int) -> None:
        self.num_received += num_bytes
        self._start += num_bytes
        if self._start == len(self._parts[self._part]):
            self._part, self._start = self._part + 1, 0

    def move_out(self) -> None:
        self.is_moved = True

    def drop(self) -> None:
        self.is_dropped = True

    @property
    def whole(self) -> bytes:
        return b"".join(self._parts)


class Receiver:
    """Answers with the body; `bodies` are the long ones, by whatever end they came to."""

    def __init__(self) -> None:
        self.bodies: list[Parts] = []
        self.exchanges: list[Exchange] = []
        self.is_holding = False

    def prepare(self, head: MessageHead) -> Parts | None:
        if head.path != b"/a" or head.content_length is None:
            return None
        self.bodies.append(Parts(head.content_length))
        return self.bodies[-1]

    def __call__(self, exchange: Exchange) -> None:
        long = exchange.long
        body = bytes(exchange.body)
        if isinstance(long, Parts):
            assert not body and not long.is_dropped
            body = long.whole
        if self.is_holding:
            self.exchanges.append(exchange)
        else:
            exchange.reply(200, b"", (body,))


def bytes_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)
