"""HTTP/2 frame by frame: what the protocol allows, what breaks it, and floods."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from h2_client import (
    SETTINGS,
    STREAM,
    UNARY,
    block,
    call,
    connected,
    data,
    head,
    headers,
    make_server,
    message,
    raw_client,
)

from penstock.config import GrpcConfig, HttpLimits
from penstock.protocols import h2 as connections
from penstock.protocols import h2_data
from penstock.protocols.gate import Gate
from penstock.protocols.grpc_call import RpcHead, UnaryCall
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.h2 import MAX_STREAMS, H2Connection
from penstock.protocols.h2_data import CONNECTION_WINDOW, FRAME_BYTES, STREAM_WINDOW
from penstock.protocols.h2_stream import H2Stream
from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import H2Error, frame, settings, window_update
from penstock.wire.hpack import TABLE_BYTES, HpackDecoder

OK = (b"grpc-status", b"0")


async def check_alive(client: Any, number: int) -> None:
    client.send(call(number, b"still here"))
    fields, body = await client.answer(number)
    assert OK in fields and body == message(b"still here")


async def test_a_call_is_answered_and_the_server_announces_its_limits():
    async with connected() as client:
        first = await client.read()
        assert (first.kind, first.flags, first.number) == (h2.SETTINGS, 0, 0)
        assert dict(h2.read_settings(first.payload)) == {
            h2.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            h2.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            h2.MAX_FRAME_SIZE: FRAME_BYTES,
            h2.MAX_HEADER_LIST_SIZE: 16 * 1024,
        }
        client.send(call(1))
        fields, body = await client.answer(1)
        assert fields == [
            (b":status", b"200"),
            (b"content-type", b"application/grpc"),
            (b"grpc-accept-encoding", b"identity,deflate,gzip"),
            OK,
        ]
        assert body == message(b"hello")


async def test_the_second_answer_repeats_no_text():
    async with connected() as client:
        for number in (1, 3):
            client.send(call(number))
            await client.answer(number)
        lengths = [len(each.payload) for each in client.seen if each.kind == h2.HEADERS]
        assert lengths[0] > 20 and lengths[2:] == [3, 1]


@pytest.mark.parametrize("size", [0, 1])
async def test_a_client_without_a_table_gets_literals(size: int):
    async with connected(settings({h2.HEADER_TABLE_SIZE: size})) as client:
        client.decoder = HpackDecoder(1 << 16, max_table_bytes=size)
        for number in (1, 3, 5):
            client.send(call(number))
            assert OK in (await client.answer(number))[0]
            assert client.decoder.table == ()
        client.decoder = HpackDecoder(1 << 16)
        client.decoder.decode(b"\x20")
        client.send(settings({h2.HEADER_TABLE_SIZE: TABLE_BYTES}))
        for number in (7, 9):
            client.send(call(number))
            assert OK in (await client.answer(number))[0]
        assert len(client.decoder.table) == 3


async def test_bytes_mean_the_same_wherever_they_are_cut():
    sent = (
        call(1)
        + headers(3, head(STREAM))
        + frame(h2.DATA, h2.PADDED, 3, b"\x03" + message(b"one") + bytes(3))
        + data(3, message(b"two") + message(b"three")[:4], 0)
        + data(3, message(b"three")[4:])
        + frame(99, 0xFF, 7, b"unknown")
    )
    async with connected() as client:
        for byte in sent:
            client.send(bytes((byte,)))
            await client.drain()
        fields, body = await client.answer(1)
        assert OK in fields and body == message(b"hello")
        fields, body = await client.answer(3)
        assert OK in fields
        assert body == message(b"one") + message(b"two") + message(b"three")


async def test_heads_may_have_priority_padding_and_continuations():
    fields = block(head())
    priority = b"\x80\0\0\0\x10"
    async with connected() as client:
        flags = h2.END_HEADERS | h2.PADDED | h2.HAS_PRIORITY
        client.send(frame(h2.HEADERS, flags, 1, b"\x05" + priority + fields + bytes(5)))
        client.send(data(1, message(b"a")))
        assert (await client.answer(1))[1] == message(b"a")
        client.send(frame(h2.HEADERS, 0, 3, fields[:7]), frame(h2.CONTINUATION, 0, 3, fields[7:9]))
        client.send(frame(h2.CONTINUATION, h2.END_HEADERS, 3, fields[9:]))
        client.send(data(3, message(b"b")))
        assert (await client.answer(3))[1] == message(b"b")


async def test_trailers_of_the_client_end_its_request():
    async with connected() as client:
        client.send(headers(1), data(1, message(b"a"), 0))
        client.send(headers(1, [(b"x", b"y")], h2.END_HEADERS | h2.END_STREAM))
        assert (await client.answer(1))[1] == message(b"a")


async def test_pings_are_answered_and_unknown_frames_ignored():
    async with connected() as client:
        client.send(frame(h2.PING, 0, 0, b"12345678"), frame(250, 255, 5, b"what"))
        assert (await client.until(h2.PING, 0, h2.ACK)).payload == b"12345678"
        client.send(frame(h2.PRIORITY, 0, 9, bytes(5)), frame(h2.GOAWAY, 0, 0, bytes(8)))
        await check_alive(client, 1)


# What breaks the protocol.

LONG = h2.frame_head(FRAME_BYTES + 1, h2.DATA, 0, 1)
VIOLATIONS: dict[str, tuple[bytes, H2Error]] = {
    "DATA on stream 0": (data(0, b"a"), H2Error.PROTOCOL_ERROR),
    "DATA on an idle stream": (data(5, b"a"), H2Error.PROTOCOL_ERROR),
    "HEADERS on stream 0": (headers(0), H2Error.PROTOCOL_ERROR),
    "HEADERS on an even stream": (headers(2), H2Error.PROTOCOL_ERROR),
    "CONTINUATION alone": (frame(h2.CONTINUATION, 4, 1), H2Error.PROTOCOL_ERROR),
    "a frame between HEADERS and CONTINUATION": (
        frame(h2.HEADERS, 0, 1, b"\x83") + frame(h2.PING, 0, 0, bytes(8)),
        H2Error.PROTOCOL_ERROR,
    ),
    "DATA between HEADERS and CONTINUATION": (
        frame(h2.HEADERS, 0, 1, b"\x83") + data(1, b""),
        H2Error.PROTOCOL_ERROR,
    ),
    "CONTINUATION of another stream": (
        frame(h2.HEADERS, 0, 1, b"\x83") + frame(h2.CONTINUATION, 4, 3, b"\x86"),
        H2Error.PROTOCOL_ERROR,
    ),
    "a block that is malformed": (frame(h2.HEADERS, 4, 1, b"\xff"), H2Error.COMPRESSION_ERROR),
    "padding beyond HEADERS": (
        frame(h2.HEADERS, 4 | h2.PADDED, 1, b"\x09abc"),
        H2Error.PROTOCOL_ERROR,
    ),
    "no padding length": (frame(h2.HEADERS, 4 | h2.PADDED, 1), H2Error.FRAME_SIZE_ERROR),
    "padding beyond DATA": (
        headers(1) + frame(h2.DATA, h2.PADDED, 1, b"\x04abc"),
        H2Error.PROTOCOL_ERROR,
    ),
    "padded DATA without length": (
        headers(1) + frame(h2.DATA, h2.PADDED, 1),
        H2Error.PROTOCOL_ERROR,
    ),
    "a frame that is too long": (headers(1) + LONG, H2Error.FRAME_SIZE_ERROR),
    "a PING that is too long": (
        h2.frame_head(FRAME_BYTES + 1, h2.PING, 0, 0),
        H2Error.FRAME_SIZE_ERROR,
    ),
    "SETTINGS on a stream": (frame(h2.SETTINGS, 0, 1), H2Error.PROTOCOL_ERROR),
    "SETTINGS of 5 bytes": (frame(h2.SETTINGS, 0, 0, bytes(5)), H2Error.FRAME_SIZE_ERROR),
    "SETTINGS with ACK and content": (
        frame(h2.SETTINGS, h2.ACK, 0, bytes(6)),
        H2Error.FRAME_SIZE_ERROR,
    ),
    "ENABLE_PUSH 2": (settings({h2.ENABLE_PUSH: 2}), H2Error.PROTOCOL_ERROR),
    "a window of 2^31": (settings({h2.INITIAL_WINDOW_SIZE: 1 << 31}), H2Error.FLOW_CONTROL_ERROR),
    "frames of 16383": (settings({h2.MAX_FRAME_SIZE: 16383}), H2Error.PROTOCOL_ERROR),
    "frames of 2^24": (settings({h2.MAX_FRAME_SIZE: 1 << 24}), H2Error.PROTOCOL_ERROR),
    "PING of 7 bytes": (frame(h2.PING, 0, 0, bytes(7)), H2Error.FRAME_SIZE_ERROR),
    "PING on a stream": (frame(h2.PING, 0, 1, bytes(8)), H2Error.PROTOCOL_ERROR),
    "RST_STREAM of 3 bytes": (
        headers(1) + frame(h2.RST_STREAM, 0, 1, bytes(3)),
        H2Error.FRAME_SIZE_ERROR,
    ),
    "RST_STREAM of an idle stream": (h2.reset(1, H2Error.CANCEL), H2Error.PROTOCOL_ERROR),
    "RST_STREAM of stream 0": (h2.reset(0, H2Error.CANCEL), H2Error.PROTOCOL_ERROR),
    "PRIORITY of stream 0": (frame(h2.PRIORITY, 0, 0, bytes(5)), H2Error.PROTOCOL_ERROR),
    "PUSH_PROMISE": (frame(h2.PUSH_PROMISE, 4, 1, bytes(4)), H2Error.PROTOCOL_ERROR),
    "GOAWAY on a stream": (frame(h2.GOAWAY, 0, 1, bytes(8)), H2Error.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 0": (window_update(0, 0), H2Error.PROTOCOL_ERROR),
    "WINDOW_UPDATE of 3 bytes": (
        frame(h2.WINDOW_UPDATE, 0, 0, bytes(3)),
        H2Error.FRAME_SIZE_ERROR,
    ),
    "WINDOW_UPDATE of an idle stream": (window_update(1, 1), H2Error.PROTOCOL_ERROR),
    "a window beyond 2^31 - 1": (window_update(0, (1 << 31) - 1), H2Error.FLOW_CONTROL_ERROR),
    "windows of streams beyond 2^31 - 1": (
        headers(1) + window_update(1, 1 << 30) + settings({h2.INITIAL_WINDOW_SIZE: (1 << 31) - 1}),
        H2Error.FLOW_CONTROL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_violations_end_the_connection_with_their_code(name: str):
    sent, code = VIOLATIONS[name]
    async with connected() as client:
        client.send(sent)
        found = await client.goaway()
        assert found.code == code
        assert len(found.payload) > 8, "and a text that says why"


@pytest.mark.parametrize(
    "first", [frame(h2.PING, 0, 0, bytes(8)), headers(1), data(1, b""), frame(77, 0, 0)]
)
async def test_the_first_frame_must_be_settings(first: bytes):
    async with connected(first) as client:
        assert (await client.goaway()).code == H2Error.PROTOCOL_ERROR


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"hello", b"PRI * HTTP/2.1\r\n\r\n"])
async def test_what_is_not_http_2_is_refused(sent: bytes):
    server = make_server()
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert b"expected the preface of HTTP/2" in await reader.read()
    writer.close()
    await server.close()


async def test_http_1_is_told_that_this_is_not_its_port():
    server = make_server()
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.read()
    assert b"HTTP/1.1 400 " in answer and b"speaks gRPC over HTTP/2" in answer
    writer.close()
    await server.close()


MALFORMED: dict[str, list[tuple[bytes, bytes]]] = {
    "no path": [(b":method", b"POST"), (b":scheme", b"http")],
    "an empty path": [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")],
    "no method": [(b":path", b"/"), (b":scheme", b"http")],
    "no scheme": [(b":path", b"/"), (b":method", b"POST")],
    "a path twice": [*head(), (b":path", b"/")],
    "a late pseudo-header": [(b"a", b"b"), *head()],
    "a pseudo-header of answers": [(b":status", b"200"), *head()],
    "capitals": [*head(), (b"Content-Length", b"3")],
    "a line feed": [*head(), (b"a", b"b\nc")],
    "NUL": [*head(), (b"a", b"\0")],
    "a space in front": [*head(), (b"a", b" b")],
    "a space in a name": [*head(), (b"a b", b"c")],
    "no name": [*head(), (b"", b"c")],
    "connection": [*head(), (b"connection", b"close")],
    "transfer-encoding": [*head(), (b"transfer-encoding", b"chunked")],
    "te": [*head(), (b"te", b"gzip")],
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_head_ends_its_stream_alone(name: str):
    async with connected() as client:
        client.send(headers(1, MALFORMED[name]))
        assert (await client.until(h2.RST_STREAM, 1)).code == H2Error.PROTOCOL_ERROR
        await check_alive(client, 3)


async def test_frames_after_the_end_of_a_request():
    async with connected() as client:
        client.send(headers(1), data(1, message(b"never")), data(1, b"more"))
        assert (await client.until(h2.RST_STREAM, 1)).code == H2Error.STREAM_CLOSED
        client.send(headers(3), data(3, message(b"never")), headers(3))
        assert (await client.until(h2.RST_STREAM, 3)).code == H2Error.STREAM_CLOSED
        client.send(headers(5), headers(5))
        assert (await client.until(h2.RST_STREAM, 5)).code == H2Error.PROTOCOL_ERROR
        client.send(headers(7), frame(h2.PRIORITY, 0, 7, bytes(4)))
        assert (await client.until(h2.RST_STREAM, 7)).code == H2Error.FRAME_SIZE_ERROR
        client.send(headers(9), window_update(9, 0))
        assert (await client.until(h2.RST_STREAM, 9)).code == H2Error.PROTOCOL_ERROR
        client.send(headers(11), window_update(11, (1 << 31) - 1))
        assert (await client.until(h2.RST_STREAM, 11)).code == H2Error.FLOW_CONTROL_ERROR
        await check_alive(client, 13)


async def test_late_frames_of_a_closed_stream_are_ignored():
    """The client may not know yet that its stream is over."""
    async with connected() as client:
        client.send(headers(1, head("/no/such")))
        assert (b"grpc-status", b"12") in (await client.answer(1))[0]
        assert (await client.until(h2.RST_STREAM, 1)).code == H2Error.NO_ERROR
        client.send(data(1, bytes(1000), 0), window_update(1, 5), headers(1, [(b"a", b"b")], 5))
        client.send(h2.reset(1, H2Error.CANCEL))
        await check_alive(client, 3)


# Limits.


async def test_no_more_than_so_many_streams_at_a_time():
    async with connected() as client:
        for number in range(1, 2 * MAX_STREAMS, 2):
            client.send(headers(number))
        client.send(headers(2 * MAX_STREAMS + 1))
        found = await client.until(h2.RST_STREAM)
        assert (found.number, found.code) == (2 * MAX_STREAMS + 1, H2Error.REFUSED_STREAM)
        client.send(data(1, message(b"a")))
        assert (await client.answer(1))[1] == message(b"a")
        await check_alive(client, 2 * MAX_STREAMS + 3)


FLOODS: dict[str, Any] = {
    "PING": lambda n: frame(h2.PING, 0, 0, bytes(8)),
    "SETTINGS": lambda n: SETTINGS,
    "PRIORITY": lambda n: frame(h2.PRIORITY, 0, 5, bytes(5)),
    "unknown": lambda n: frame(99, 0, 0),
    "WINDOW_UPDATE": lambda n: window_update(0, 1),
    "empty DATA": lambda n: (headers(1) if n == 0 else b"") + data(1, b"", 0),
    "resets": lambda n: headers(2 * n + 1) + h2.reset(2 * n + 1, H2Error.CANCEL),
    "resets that we send": lambda n: headers(2 * n + 1, [(b":path", b"/")]),
    "DATA of closed streams": lambda n: (
        headers(1) + h2.reset(1, H2Error.CANCEL) if n == 0 else b""
    ) + data(1, b"", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
async def test_floods_end_the_connection(name: str):
    # Time stands still, so that it refills nothing.
    connection, wire = attach()
    for start in range(0, 20_000, 500):
        connection.data_received(b"".join(FLOODS[name](n) for n in range(start, start + 500)))
        if wire.is_closed:
            break
    assert 1500 < start < 15_000
    text = b"too many frames without use"
    assert wire.sent.endswith(H2Error.ENHANCE_YOUR_CALM.to_bytes(4) + text)
    connection.connection_lost(None)


async def test_calls_refill_what_frames_without_use_take():
    """As many pings as calls, which is what some clients send, are no flood."""
    connection, wire = attach()
    connection.data_received(window_update(0, 1 << 30))
    for number in range(1, 40_001, 2):
        connection.data_received(call(number) + frame(h2.PING, 0, 0, bytes(8)))
    assert not wire.is_closed
    assert wire.sent.count(b"hello") == 20_000
    connection.connection_lost(None)


async def test_a_flood_of_continuations_ends_the_connection():
    for payload in (b"", bytes(2000)):
        async with connected() as client:
            client.send(frame(h2.HEADERS, 0, 1, block(head())))
            client.send(*(frame(h2.CONTINUATION, 0, 1, payload) for _ in range(100)))
            assert (await client.goaway()).code == H2Error.ENHANCE_YOUR_CALM


async def test_a_block_that_is_too_long_is_refused_by_its_head():
    async with connected() as client:
        client.send(h2.frame_head(100_000, h2.HEADERS, 4, 1))
        assert (await client.goaway()).code == H2Error.ENHANCE_YOUR_CALM


async def test_headers_that_are_too_large_are_refused_and_the_connection_goes_on():
    bomb = [*head(), *((b"a", b"b" * 4000) for _ in range(5))]
    many = [*head(), *((b"a%d" % n, b"") for n in range(200))]
    async with connected() as client:
        client.send(headers(1, bomb))
        fields, _ = await client.answer(1)
        assert (b"grpc-status", b"3") in fields
        assert "the headers exceed" in dict(fields)[b"grpc-message"].decode()
        client.send(headers(3, many))
        fields, _ = await client.answer(3)
        assert dict(fields)[b"grpc-message"] == b"there are more than 100 headers"
        await check_alive(client, 5)


# Flow control.


async def test_an_answer_waits_for_the_window_of_its_stream():
    async with connected(settings({h2.INITIAL_WINDOW_SIZE: 3})) as client:
        client.send(call(1, b"0123456789"))
        frames = await client.sync()
        assert [each.payload for each in frames if each.kind == h2.DATA] == [bytes(3)]
        client.send(window_update(1, 4))
        frames = await client.sync()
        assert [len(each.payload) for each in frames if each.kind == h2.DATA] == [4]
        # The change applies to the open stream too, whose window was used up.
        client.send(settings({h2.INITIAL_WINDOW_SIZE: 1000}))
        await client.until(h2.HEADERS, 1, h2.END_STREAM)
        body = b"".join(each.payload for each in client.seen if each.kind == h2.DATA)
        assert body == message(b"0123456789")


async def test_a_window_may_become_negative():
    async with connected(settings({h2.INITIAL_WINDOW_SIZE: 10})) as client:
        client.send(call(1, bytes(30)))
        await client.until(h2.DATA, 1)
        client.send(settings({h2.INITIAL_WINDOW_SIZE: 0}), window_update(1, 10))
        assert not [each for each in await client.sync() if each.kind == h2.DATA]
        client.send(window_update(1, 25))
        await client.until(h2.HEADERS, 1, h2.END_STREAM)
        body = b"".join(each.payload for each in client.seen if each.kind == h2.DATA)
        assert body == message(bytes(30))


async def test_answers_share_the_window_of_the_connection():
    """All bytes arrive, and in no frame larger than the client takes."""
    async with connected(settings({h2.INITIAL_WINDOW_SIZE: 1 << 20})) as client:
        for number in (1, 3, 5):
            client.send(call(number, bytes(50_000)))
        received, ended = {1: 0, 3: 0, 5: 0}, set()
        while ended != {1, 3, 5}:
            found = await client.read()
            if found.kind == h2.DATA:
                assert len(found.payload) <= h2.DEFAULT_FRAME_BYTES
                received[found.number] += len(found.payload)
                client.send(window_update(0, len(found.payload)))
            elif found.kind == h2.HEADERS and found.flags & h2.END_STREAM:
                ended.add(found.number)
        assert set(received.values()) == {50_005}


async def test_a_reset_frees_what_waits_for_a_window():
    async with connected(settings({h2.INITIAL_WINDOW_SIZE: 0})) as client:
        client.send(call(1, bytes(1000)))
        await client.sync()
        client.send(h2.reset(1, H2Error.CANCEL), window_update(1, 5000))
        client.send(settings({h2.INITIAL_WINDOW_SIZE: 100}))
        frames = await client.sync()
        assert not [each for each in frames if each.kind in (h2.DATA, h2.HEADERS)]
        await check_alive(client, 3)


async def test_windows_are_extended_only_when_half_is_used():
    async with connected(server=make_server(max_message_bytes=1 << 25)) as client:
        await client.sync()
        client.send(headers(1), data(1, message(bytes(200_000))))
        frames = await client.sync()
        assert not [each for each in frames if each.kind == h2.WINDOW_UPDATE]
        part, length = 1 << 17, 1 << 24
        client.send(settings({h2.INITIAL_WINDOW_SIZE: 1 << 25}), window_update(0, 1 << 25))
        client.send(headers(3), data(3, b"\0" + length.to_bytes(4), 0))
        granted = {0: 0, 3: STREAM_WINDOW - 5}
        sent, num_updates = 0, 0
        while sent < length:
            while granted[3] < part:
                found = await client.until(h2.WINDOW_UPDATE)
                granted[found.number] += h2.read_number(found.payload)
                num_updates += 1
            client.send(data(3, bytes(part), h2.END_STREAM if sent + part == length else 0))
            granted[3] -= part
            sent += part
        fields, body = await client.answer(3)
        assert OK in fields and len(body) == length + 5
        assert num_updates <= 2 * length // STREAM_WINDOW + 3


class Paused(UnaryCall):
    """A call that wants no data."""

    __slots__ = ()

    def __init__(self, server: GrpcServer, stream: H2Stream, head: RpcHead) -> None:
        super().__init__(server, stream, head)
        stream.pause()


async def test_more_data_than_the_window_of_a_stream():
    server = GrpcServer({UNARY: Paused}, GrpcConfig(), Gate(), HttpLimits())
    connection, wire = attach(server)
    connection.data_received(headers(1) + data(1, b"\0" + (1 << 25).to_bytes(4), 0))
    for _ in range(STREAM_WINDOW // FRAME_BYTES):
        assert wire.sent == b""
        connection.data_received(data(1, bytes(FRAME_BYTES), 0))
    assert wire.sent == h2.reset(1, H2Error.FLOW_CONTROL_ERROR) and not wire.is_closed
    connection.connection_lost(None)


async def test_more_data_than_the_window_of_the_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(h2_data, "CONNECTION_WINDOW", 10)
    connection, wire = attach()
    connection.data_received(headers(1) + data(1, bytes(11), 0))
    assert wire.is_closed and b"more data than the connection's window" in wire.sent
    connection.connection_lost(None)


class Wire:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


def attach(server: GrpcServer | None = None, sent: bytes = SETTINGS) -> tuple[H2Connection, Wire]:
    """A connection at time 0, at which the clock stands."""
    server = server or make_server()
    server.now = lambda: 0.0
    connection, wire = H2Connection(server), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    connection.data_received(h2.PREFACE + sent)
    wire.sent = b""
    return connection, wire


async def test_messages_that_fill_the_memory_come_one_by_one():
    connection, wire = attach(make_server(max_message_bytes=4 << 20))
    half, prefix = bytes(STREAM_WINDOW // 2), b"\0" + (3 << 20).to_bytes(4)

    def grants() -> list[int]:
        """The streams that may go on since the last look."""
        found, rest = [], wire.sent
        wire.sent = b""
        while rest:
            length, number = int.from_bytes(rest[:3]), int.from_bytes(rest[5:9])
            if rest[3] == h2.WINDOW_UPDATE and number:
                found.append(number)
            rest = rest[9 + length :]
        return found

    def go_on(number: int, payload: bytes, flags: int = 0) -> None:
        for start in range(0, len(payload), FRAME_BYTES):
            part = payload[start : start + FRAME_BYTES]
            is_last = start + FRAME_BYTES >= len(payload)
            connection.data_received(data(number, part, flags if is_last else 0))

    numbers = list(range(1, 21, 2))
    for number in numbers:
        connection.data_received(headers(number) + data(number, prefix, 0))
        go_on(number, half)
    allowed = grants()
    assert allowed[:4] == [1, 3, 5, 7] and len(allowed) < len(numbers)
    # The first one goes on to its end, which lets others go on.
    left = (3 << 20) - len(half)
    while left:
        part = min(left, len(half))
        left -= part
        go_on(1, bytes(part), 0 if left else h2.END_STREAM)
        assert left == 0 or grants()[:1] == [1]
    assert 3 in grants() or connection.is_running
    connection.connection_lost(None)


# Time and the end.


async def test_a_client_that_says_nothing_is_cut_off():
    connection, wire = attach(make_server(HttpLimits(header_timeout_s=5)), b"")
    connection.sweep(4.0)
    assert not wire.is_closed
    connection.sweep(6.0)
    assert wire.is_closed
    connection.connection_lost(None)


async def test_a_head_that_does_not_end_is_cut_off():
    connection, wire = attach(make_server(HttpLimits(header_timeout_s=5)))
    connection.data_received(frame(h2.HEADERS, 0, 1, b"\x83"))
    connection.sweep(4.0)
    assert not wire.is_closed
    connection.sweep(6.0)
    assert wire.is_closed
    connection.connection_lost(None)


@pytest.mark.parametrize("sent", [b"\0\0", b"\0\0\1\0\0" + bytes(6000), message(b"all of it")])
async def test_a_message_that_does_not_end_is_given_up(sent: bytes):
    limits = HttpLimits(body_timeout_s=5, min_body_rate=1000)
    connection, wire = attach(make_server(limits))
    connection.data_received(headers(1) + data(1, sent, 0))
    connection.data_received(headers(3, head(STREAM)))
    allowed_s = 5 + len(sent) / 1000
    connection.sweep(allowed_s - 0.1)
    assert wire.sent == b""
    connection.sweep(allowed_s + 0.1)
    assert wire.sent == h2.reset(1, H2Error.CANCEL), "a stream without a message may wait"
    connection.connection_lost(None)


@pytest.mark.parametrize("answers", [True, False])
async def test_an_idle_client_is_asked_whether_it_is_alive(answers: bool):
    server = make_server()
    connection, wire = attach(server)
    now = connections.IDLE_S + 1
    connection.sweep(now)
    assert wire.sent == frame(h2.PING, 0, 0, b"penstock") and not wire.is_closed
    server.now = lambda: now
    if answers:
        connection.data_received(frame(h2.PING, h2.ACK, 0, b"penstock"))
    connection.sweep(now + connections.PING_S + 1)
    assert wire.is_closed is not answers
    connection.connection_lost(None)


async def test_a_client_that_reads_nothing_is_cut_off():
    connection, wire = attach(make_server(HttpLimits(write_timeout_s=5)))
    connection.pause_writing()
    connection.data_received(call(1))
    assert wire.sent.count(b"hello") == 0, "the answer waits"
    connection.sweep(1.0)
    connection.sweep(4.0)
    assert not wire.is_closed
    connection.resume_writing()
    assert wire.sent.count(b"hello") == 1
    connection.pause_writing()
    connection.sweep(8.0)
    connection.sweep(20.0)
    assert wire.is_closed
    connection.connection_lost(None)


async def test_a_server_that_goes_away_answers_what_is_open():
    server = make_server()
    async with connected(server=server) as client:
        client.send(headers(1))
        await client.sync()
        server.go_away()
        found = await client.until(h2.GOAWAY)
        assert (found.code, found.payload[:4]) == (H2Error.NO_ERROR, b"\x7f\xff\xff\xff")
        client.send(data(1, message(b"a")))
        assert (await client.answer(1))[1] == message(b"a")
        closing = asyncio.ensure_future(server.close())
        found = await client.goaway()
        assert (found.code, found.payload[:4]) == (H2Error.NO_ERROR, b"\0\0\0\x01")
        await closing


async def test_too_many_connections_are_refused():
    server = make_server(HttpLimits(max_connections=1))
    async with connected(server=server) as client:
        await client.sync()
        port = server.listeners[0].getsockname()[1]
        async with raw_client(server, port) as other:
            assert (await other.goaway()).code == H2Error.ENHANCE_YOUR_CALM
        await check_alive(client, 1)


async def test_the_windows_are_those_that_are_announced():
    async with connected() as client:
        found = await client.until(h2.WINDOW_UPDATE, 0)
        assert h2.DEFAULT_WINDOW + h2.read_number(found.payload) == CONNECTION_WINDOW
