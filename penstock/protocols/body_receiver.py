"""Receives on a connection that has sent a long body: bodies straight into their memory.

A plain protocol gets bytes, which it has to copy. This one says where the next bytes go: a long
body into its own memory, everything else into a small buffer, so that little of the next body is
read with its head.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from penstock.protocols.http_reader import MessageReader


class PlainReceiver(Protocol):
    """The connection, whose protocol this is otherwise."""

    def data_received(self, data: bytes) -> None: ...
    def body_received(self, num_bytes: int) -> None: ...
    def eof_received(self) -> bool: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    def __init__(
        self,
        transport: asyncio.Transport,
        connection: PlainReceiver,
        reader: MessageReader,
        head_buffer: memoryview,
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._reader = reader
        self._head_buffer = head_buffer
        self._is_active = False

    def start(self) -> None:
        """Receive from now on."""
        if not self._is_active:
            self._is_active = True
            self._transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        long = self._reader.long
        return self._head_buffer if long is None else long.room()

    def buffer_updated(self, nbytes: int) -> None:
        reader, connection = self._reader, self._connection
        if reader.long is not None:
            connection.body_received(nbytes)
            return
        connection.data_received(bytes(self._head_buffer[:nbytes]))
        if reader.long is None and reader.has_head and not reader.at_boundary:
            # A body that the parser reads: small reads would be slow.
            self._is_active = False
            self._transport.set_protocol(cast(asyncio.BaseProtocol, connection))

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
