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


class Swept(Protocol):
    """A connection, as its listener sees it. `is_running`: it owes an answer."""

    @property
    def is_running(self) -> bool: ...

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
        old = self._listeners
        sockets = [
            socket.socket(fileno=os.dup(each.fileno()))
            for listener in old
            for each in listener.sockets
        ]
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

    @property
    def listeners(self) -> list[socket.socket]:
        return [each for listener in self._listeners for each in listener.sockets]

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
