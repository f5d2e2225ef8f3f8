"""A bare HTTP client and an HTTP server on one event loop; tests here may be `async def`."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

from penstock.config import HttpLimits
from penstock.protocols.http import Exchange
from penstock.protocols.http_reader import Prepare
from penstock.protocols.http_server import HttpServer

TEST_TIMEOUT_S = 20.0


@pytest.fixture
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The loop on which an `async def` test runs; the one the server uses."""
    return uvloop.new_event_loop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    factory = pyfuncitem.funcargs.get("loop_factory", uvloop.new_event_loop)

    async def limited() -> None:
        async with asyncio.timeout(TEST_TIMEOUT_S):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(limited())
    return True


@dataclass(frozen=True)
class Answer:
    """One parsed response. `headers` are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """A connection on which the test writes every byte itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write; a server that has hung up is no error."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response."""
        line, *fields = (
            (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        )
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        for field in fields:
            name, value = field.split(": ", 1)
            assert name.lower() not in headers, f"{name} is sent twice"
            headers[name.lower()] = value
        return int(status), headers

    async def answer(self, method: str = "GET") -> Answer:
        """The next response, which must be complete and correctly framed."""
        status, headers = await self.head()
        assert not ("content-length" in headers and "transfer-encoding" in headers)
        if method == "HEAD" or status in (204, 304) or status < 200:
            return Answer(status, headers, b"")
        if "content-length" in headers:
            return Answer(
                status, headers, await self.reader.readexactly(int(headers["content-length"]))
            )
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join([part async for part in self.chunks()]))
        assert headers.get("connection") == "close", "an answer without an end"
        return Answer(status, headers, await self.rest())

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            part = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            if not size:
                return
            yield part

    async def rest(self) -> bytes:
        """Everything until the server hangs up."""
        parts = []
        with suppress(ConnectionError):
            while part := await self.reader.read(1 << 16):
                parts.append(part)
        return b"".join(parts)

    def reset(self) -> None:
        """Leave without a goodbye."""
        self.writer.transport.abort()


class Served:
    """A running server."""

    def __init__(self, http: HttpServer, port: int) -> None:
        self.http = http
        self.port = port

    @asynccontextmanager
    async def connect(self, receive_bytes: int | None = None) -> AsyncIterator[Client]:
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(self, data: bytes, method: str = "GET") -> Answer:
        """The answer to what is sent on a connection of its own."""
        async with self.connect() as client:
            await client.send(data)
            return await client.answer(method)

    async def last_words(self, data: bytes) -> tuple[Answer, bytes]:
        """The first answer and all that follows until the server hangs up by itself."""
        async with self.connect() as client:
            await client.send(data)
            return await client.answer(), await client.rest()


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve() -> Serve:
    """`async with serve(handler, limits) as served:` runs a server for the block."""

    @asynccontextmanager
    async def run(
        handler: Callable[[Exchange], None],
        limits: HttpLimits | None = None,
        prepare: Prepare = lambda head: None,
    ) -> AsyncIterator[Served]:
        server = HttpServer(handler, limits or HttpLimits(), prepare=prepare)
        port = await server.start("127.0.0.1", 0)
        try:
            yield Served(server, port)
        finally:
            await server.close()

    return run


@pytest.fixture
def until() -> Callable[..., Any]:
    """`await until(condition)` returns when it holds."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    return wait
