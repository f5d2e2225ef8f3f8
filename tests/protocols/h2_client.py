"""An HTTP/2 client on which the test writes every frame itself, and a gRPC server that echoes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.config import GrpcConfig, HttpLimits
from penstock.protocols.gate import Gate
from penstock.protocols.grpc_call import GrpcCall, UnaryCall
from penstock.protocols.grpc_server import GrpcServer
from penstock.types import Buffer
from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import H2Error, frame
from penstock.wire.hpack import Field, HpackDecoder, HpackEncoder

UNARY = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SETTINGS = frame(h2.SETTINGS, 0, 0)
SYNC = b"in sync!"


class EchoOnce(UnaryCall):
    __slots__ = ()

    def run(self, data: Buffer) -> None:
        if data != b"never":
            self.reply([data])


class EchoAll(GrpcCall):
    __slots__ = ()

    def message(self, data: Buffer) -> None:
        self.send([data])

    def ended(self) -> None:
        self.end()


def make_server(limits: HttpLimits | None = None, **config: object) -> GrpcServer:
    settings = GrpcConfig(**config)  # type: ignore[arg-type]
    methods = {UNARY: EchoOnce, STREAM: EchoAll}
    return GrpcServer(methods, settings, Gate(), limits or HttpLimits())


def head(path: str = UNARY, *more: Field) -> tuple[Field, ...]:
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    )


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(data).to_bytes(4) + data


def block(fields: Sequence[Field]) -> bytes:
    return HpackEncoder().encode(tuple(fields))


def headers(number: int, fields: Sequence[Field] = head(), flags: int = h2.END_HEADERS) -> bytes:
    return frame(h2.HEADERS, flags, number, block(fields))


def data(number: int, payload: bytes, flags: int = h2.END_STREAM) -> bytes:
    return frame(h2.DATA, flags, number, payload)


def call(number: int, payload: bytes = b"hello", fields: Sequence[Field] = head()) -> bytes:
    return headers(number, fields) + data(number, message(payload))


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    number: int
    payload: bytes
    # Of HEADERS.
    fields: Sequence[Field] = ()

    @property
    def code(self) -> H2Error:
        """Of RST_STREAM and GOAWAY."""
        start = 4 if self.kind == h2.GOAWAY else 0
        return H2Error(int.from_bytes(self.payload[start : start + 4]))


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.decoder = HpackDecoder(1 << 16)
        # All frames, in their order.
        self.seen: list[Frame] = []

    def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))

    async def drain(self) -> None:
        await self._writer.drain()

    async def read(self) -> Frame | None:
        """The next frame; None at the end of the connection."""
        try:
            start = await self._reader.readexactly(h2.HEAD_BYTES)
            payload = await self._reader.readexactly(int.from_bytes(start[:3]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        # All blocks are decoded, or the tables would differ.
        fields = self.decoder.decode(payload) if start[3] == h2.HEADERS else ()
        found = Frame(start[3], start[4], int.from_bytes(start[5:9]), payload, fields)
        self.seen.append(found)
        return found

    async def until(self, kind: int, number: int | None = None, flags: int = 0) -> Frame:
        while (found := await self.read()) is not None:
            is_flagged = flags & found.flags == flags
            if found.kind == kind and number in (None, found.number) and is_flagged:
                return found
        raise AssertionError(f"no frame of type {kind}; seen: {self.seen}")

    async def sync(self) -> list[Frame]:
        """The frames until the server has handled all that was sent."""
        before = len(self.seen)
        self.send(frame(h2.PING, 0, 0, SYNC))
        await self.until(h2.PING, 0, h2.ACK)
        return self.seen[before:-1]

    async def answer(self, number: int) -> tuple[list[Field], bytes]:
        """All fields of an answer, and its data."""
        fields: list[Field] = []
        body = b""
        while (found := await self.read()) is not None:
            if found.kind == h2.HEADERS and found.number == number:
                fields += found.fields
            elif found.kind == h2.DATA and found.number == number:
                body += found.payload
            elif found.kind == h2.RST_STREAM and found.number == number:
                raise AssertionError(f"reset: {found.code!r}")
            if found.number == number and found.kind == h2.HEADERS and found.flags & h2.END_STREAM:
                return fields, body
        raise AssertionError("the connection ended")

    async def goaway(self) -> Frame:
        """The server ends the connection."""
        found = await self.until(h2.GOAWAY)
        assert await self.read() is None
        return found

    async def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def raw_client(
    server: GrpcServer, port: int, settings: bytes = SETTINGS
) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = RawClient(reader, writer)
    client.send(h2.PREFACE, settings)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def connected(
    settings: bytes = SETTINGS, server: GrpcServer | None = None
) -> AsyncIterator[RawClient]:
    server = server or make_server()
    port = await server.start("127.0.0.1", 0)
    try:
        async with raw_client(server, port, settings) as client:
            yield client
    finally:
        await server.close()
