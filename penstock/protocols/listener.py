"""The listening side of a protocol: accepts connections, sweeps for time-outs, closes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from penstock.config import HttpLimits

SWEEP_S = 1.0
# Connections swept in one loop iteration: sweeping 10,000 at once would block the loop for 10 ms,
# and closing a thousand of them for 50 ms.
SWEEP_SLICE = 32
# Connections that may wait to be accepted.
BACKLOG = 4096
# Time for clients that have connected, or have sent a part of a message, to send the rest.
SETTLE_S = 0.5
# Iterations of the event loop in which everything is read that has arrived.
SETTLE_TURNS = 3


class Swept(Protocol):
    """A connection, as its listener sees it. `is_running`: it owes an answer. `is_receiving`: it
    has not received anything yet, or a part of a message."""

    @property
    def is_running(self) -> bool: ...

    @property
    def is_receiving(self) -> bool: ...

    def sweep(self, now: float) -> None:
        """Enforce time-outs; called about once a second."""

    def close(self) -> None:
        """Close after all written data is sent."""

    def abort(self) -> None: ...


class Listener:
    """Owns the connections of one port. Each server implements `connect`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._connections: set[Swept] = set()
        self._loop = asyncio.get_running_loop()
        # Not the loop's clock: uvloop's has millisecond resolution.
        self.now: Callable[[], float] = time.monotonic
        self._listeners: list[asyncio.Server] = []
        # For new connections.
        self.tls: ssl.SSLContext | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @abstractmethod
    def connect(self) -> asyncio.Protocol:
        """Make the protocol of a new connection, which calls `add` and `remove`."""

    async def start(
        self, host: str, port: int, shares_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen and return the port, which differs from the given one if that was 0. With
        `shares_port` others may listen there too, and the kernel distributes connections."""
        self.tls = tls
        listener = await self._listen(host=host, port=port, reuse_port=shares_port or None)
        self._listeners = [listener]
        self._sweeper = self._loop.create_task(self._sweep())
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def start_on(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept connections from a socket that is bound and listens already."""
        self.tls = tls
        self._listeners = [await self._listen(sock=sock)]
        self._sweeper = self._loop.create_task(self._sweep())

    async def replace_tls(self, tls: ssl.SSLContext) -> None:
        """Use this context for new connections. Connections waiting to be accepted stay in the
        kernel's queue, which belongs to the sockets, not to the listeners. Needs uvloop: asyncio's
        own loop drops connections that it has accepted but not started."""
        self.tls = tls
        old, sockets = self._listeners, self._duplicates()
        for listener in old:
            listener.close()
        self._listeners = [await self._listen(sock=each) for each in sockets]

    async def _listen(self, **where: Any) -> asyncio.Server:
        timeout_s = self.limits.header_timeout_s if self.tls else None
        return await self._loop.create_server(
            self.connect,
            backlog=BACKLOG,
            ssl=self.tls,
            ssl_handshake_timeout=timeout_s,
            **where,
        )

    def _duplicates(self) -> list[socket.socket]:
        """Return the listening sockets; they stay open when their listeners close."""
        return [socket.socket(fileno=os.dup(each.fileno())) for each in self.listeners]

    @property
    def listeners(self) -> list[socket.socket]:
        return [each for listener in self._listeners for each in listener.sockets]

    async def settle(self) -> None:
        """Accept the connections that wait and no others, and answer what clients have sent. A
        socket that is closed with unread bytes, or before it was accepted, is reset."""
        accepted = self._accept_last()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                connecting = (
                    self._loop.connect_accepted_socket(self.connect, each, ssl=self.tls)
                    for each in accepted
                )
                await asyncio.gather(*connecting, return_exceptions=True)
                for _ in range(SETTLE_TURNS):
                    await asyncio.sleep(0)
                while any(each.is_running or each.is_receiving for each in self._connections):
                    await asyncio.sleep(0.005)

    def _accept_last(self) -> list[socket.socket]:
        """Stop listening; return the connections that waited until then."""
        sockets = self._duplicates()
        for listener in self._listeners:
            listener.close()
        accepted = []
        for each in sockets:
            each.setblocking(False)
            with each, contextlib.suppress(OSError):
                while True:
                    accepted.append(each.accept()[0])
        for each in accepted:
            each.setblocking(False)
        return accepted

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.close()
        for _ in range(100):
            if not self._connections:
                break
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        for listener in self._listeners:
            await listener.wait_closed()

    @property
    def num_running(self) -> int:
        return sum(connection.is_running for connection in self._connections)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def add(self, connection: Swept) -> bool:
        if len(self._connections) >= self.limits.max_connections:
            return False
        self._connections.add(connection)
        return True

    def remove(self, connection: Swept) -> None:
        self._connections.discard(connection)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            connections = list(self._connections)
            for begin in range(0, len(connections), SWEEP_SLICE):
                now = self.now()
                for connection in connections[begin : begin + SWEEP_SLICE]:
                    connection.sweep(now)
                await asyncio.sleep(0)
