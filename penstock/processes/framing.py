"""Messages over pipes and stream sockets: an eight-byte length, then the body."""

from __future__ import annotations

import asyncio
import socket
import struct

LENGTH = struct.Struct("<Q")


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def send(sock: socket.socket, body: bytes) -> None:
    sock.sendall(LENGTH.pack(len(body)))
    sock.sendall(body)


def receive(sock: socket.socket) -> bytearray | None:
    """Return the next body; None if the other side has closed."""
    head = _receive_exactly(sock, LENGTH.size)
    return None if head is None else _receive_exactly(sock, LENGTH.unpack(head)[0])


async def read(stream: asyncio.StreamReader) -> bytes | None:
    """Return the next body; None if the other side has closed."""
    try:
        (size,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
        return await stream.readexactly(size)
    except asyncio.IncompleteReadError:
        return None


def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        count = sock.recv_into(view[position:])
        if count == 0:
            return None
        position += count
    return data
