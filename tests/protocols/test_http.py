"""The HTTP server: framing, limits, time-outs, order, cancellation and drain."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import HttpLimits
from penstock.protocols import http, listener
from penstock.protocols.http import LINGER_S, Connection, Exchange
from penstock.protocols.http_reader import MAX_KNOWN_HEAD_BYTES, SCREEN_BYTES, normalize_path
from penstock.protocols.http_server import HttpServer

OK = b"HTTP/1.1 200 OK\r\n"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every asynchronous test runs on both kinds of event loop."""
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_factory")
        loops = [asyncio.new_event_loop, uvloop.new_event_loop]
        metafunc.parametrize("loop_factory", loops, ids=["asyncio", "uvloop"])


@pytest.fixture
def quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "SWEEP_S", 0.02)


def get(path: str = "/a", *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: x", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def post(body: bytes = b"", path: str = "/a", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chunked(*parts: bytes, path: str = "/a", end: bytes = b"0\r\n\r\n") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


class Echo:
    """Answers at once with the path and the body, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, bytes]] = []

    def __call__(self, exchange: Exchange) -> None:
        self.seen.append((exchange.head.path, bytes(exchange.body)))
        exchange.reply(200, b"", (exchange.head.path, b" ", exchange.body))


class Hold:
    """Keeps exchanges until the test answers them."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Exchange] = asyncio.Queue()

    def __call__(self, exchange: Exchange) -> None:
        self.arrived.put_nowait(exchange)


class Wire:
    """A transport that only writes down: bytes arrive exactly as the test cuts them."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    write_eof = close

    def get_extra_info(self, name: str) -> object:
        return self  # As if it used TLS: it has no socket to write to.

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def attach(server: HttpServer) -> tuple[Connection, Wire]:
    wire = Wire()
    connection = Connection(server)
    connection.connection_made(wire)  # type: ignore[arg-type]
    return connection, wire


def error_of(body: bytes) -> str:
    [(key, text)] = json.loads(body).items()
    assert key == "error"
    assert isinstance(text, str) and text
    return text


# Messages.


async def test_a_request_is_answered_and_the_connection_stays_open(serve: Any) -> None:
    async with serve(Echo()) as served, served.connect() as client:
        for number in range(3):
            await client.send(post(b"body %d" % number))
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"/a body %d" % number)
            assert "connection" not in answer.headers


async def test_a_handler_sees_method_path_query_and_lower_case_headers(serve: Any) -> None:
    hold = Hold()
    async with serve(hold) as served, served.connect() as client:
        await client.send(get("/a%20b?c=d?e&f", "X-Mixed-Case:  spaced\t"))
        exchange = await hold.arrived.get()
        assert exchange.head.method == b"GET"
        assert exchange.head.path == b"/a%20b"
        assert exchange.head.query == b"c=d?e&f"
        assert exchange.head.headers[b"x-mixed-case"].strip() == b"spaced"
        assert exchange.head.content_length == 0
        assert bytes(exchange.body) == b""
        exchange.reply(200, b"", ())
        await client.answer()


async def test_status_headers_and_length_are_written(serve: Any) -> None:
    def teapot(exchange: Exchange) -> None:
        exchange.reply(418, b"X-A: b\r\n", (b"short", memoryview(b" and stout"), bytearray(b"!")))

    async with serve(teapot) as served:
        answer = await served.ask(get())
    assert answer.status == 418
    assert answer.headers == {"x-a": "b", "content-length": "16"}
    assert answer.body == b"short and stout!"


async def test_only_the_first_reply_counts(serve: Any) -> None:
    def twice(exchange: Exchange) -> None:
        exchange.reply(200, b"", (b"one",))
        exchange.reply(500, b"", (b"two",))

    async with serve(twice) as served, served.connect() as client:
        await client.send(get() + get())
        assert [(await client.answer()).body for _ in range(2)] == [b"one", b"one"]


async def test_one_byte_at_a_time_is_as_good_as_all_at_once() -> None:
    server = HttpServer(Echo(), HttpLimits())
    connection, wire = attach(server)
    for byte in post(b"body") + chunked(b"ab", b"c") + get("/b"):
        connection.data_received(bytes([byte]))
    assert wire.sent.count(OK) == 3
    assert [wire.sent.find(part) > 0 for part in (b"/a body", b"/a abc", b"/b ")] == [True] * 3


async def test_pipelined_requests_are_answered_in_order(serve: Any) -> None:
    async with serve(Echo()) as served, served.connect() as client:
        await client.send(b"".join(post(b"%d" % number) for number in range(50)))
        for number in range(50):
            assert (await client.answer()).body == b"/a %d" % number


async def test_pipelined_requests_run_one_after_the_other(serve: Any) -> None:
    hold = Hold()
    async with serve(hold) as served, served.connect() as client:
        await client.send(get("/1") + get("/2"))
        first = await hold.arrived.get()
        assert hold.arrived.empty()
        first.reply(200, b"", (b"one",))
        second = await hold.arrived.get()
        assert second.head.path == b"/2"
        second.reply(200, b"", (b"two",))
        assert [(await client.answer()).body for _ in range(2)] == [b"one", b"two"]


async def test_many_more_pipelined_requests_than_are_buffered_are_all_answered(serve: Any) -> None:
    class Alternating(Hold):
        def __call__(self, exchange: Exchange) -> None:
            if exchange.head.path == b"/slow":
                super().__call__(exchange)
            else:
                exchange.reply(200, b"", (b"quick",))

    hold = Alternating()
    async with serve(hold) as served, served.connect() as client:
        for _ in range(4):
            await client.send((get("/slow") + get() * 30) * 2)
        for _ in range(8):
            (await hold.arrived.get()).reply(200, b"", (b"slow",))
            assert (await client.answer()).body == b"slow"
            for _ in range(30):
                assert (await client.answer()).body == b"quick"


async def test_a_long_pipeline_behind_a_slow_request_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.http")
    hold = Hold()
    echo = Echo()
    server = HttpServer(lambda e: (hold if e.head.path == b"/slow" else echo)(e), HttpLimits())
    connection, wire = attach(server)
    connection.data_received(get("/slow") + get() * 2000)
    hold.arrived.get_nowait().reply(200, b"", ())
    assert wire.sent.count(OK) == 2001


async def test_head_gets_the_length_and_no_body(serve: Any) -> None:
    async with serve(Echo()) as served, served.connect() as client:
        await client.send(get().replace(b"GET", b"HEAD") + get("/b"))
        answer = await client.answer("HEAD")
        assert answer.headers["content-length"] == "3"
        assert (await client.answer()).body == b"/b "


async def test_empty_lines_before_a_request_are_skipped(serve: Any) -> None:
    async with serve(Echo()) as served, served.connect() as client:
        await client.send(b"\r\n\r\n" + get("/1") + b"\r\n" + get("/2"))
        assert [(await client.answer()).body for _ in range(2)] == [b"/1 ", b"/2 "]


async def test_connection_close_is_honoured(serve: Any) -> None:
    echo = Echo()
    async with serve(echo) as served:
        answer, rest = await served.last_words(get("/1", "Connection: close") + get("/2"))
    assert answer.headers["connection"] == "close"
    assert (answer.body, rest) == (b"/1 ", b"")
    assert [path for path, _ in echo.seen] == [b"/1"]


async def test_http_1_0_closes_and_needs_no_host(serve: Any) -> None:
    async with serve(Echo()) as served:
        answer, rest = await served.last_words(b"GET /a HTTP/1.0\r\n\r\n")
    assert (answer.status, answer.body, rest) == (200, b"/a ", b"")
    assert answer.headers["connection"] == "close"


# Bodies.


async def test_a_chunked_body_is_put_together(serve: Any) -> None:
    async with serve(Echo()) as served, served.connect() as client:
        await client.send(chunked(b"ab", b"c" * 100_000, b"d"))
        assert (await client.answer()).body == b"/a ab" + b"c" * 100_000 + b"d"
        await client.send(chunked().replace(b"0\r\n\r\n", b"2;ext=1\r\nxy\r\n0\r\n\r\n"))
        assert (await client.answer()).body == b"/a xy"


async def test_a_body_of_one_byte_chunks_is_put_together(serve: Any) -> None:
    count = 100_000
    async with serve(Echo()) as served:
        answer = await served.ask(chunked(*[b"x"] * count))
    assert answer.body == b"/a " + b"x" * count


@pytest.mark.parametrize("endless", [b"5;", b"0\r\nX: ", b"0\r\n"])
async def test_lines_between_chunks_that_do_not_end_are_refused(serve: Any, endless: bytes) -> None:
    echo = Echo()
    async with serve(echo) as served:
        answer, rest = await served.last_words(chunked(end=endless + b"a" * 2_000_000))
    assert (answer.status, rest, echo.seen) == (400, b"", [])
    assert "chunks" in error_of(answer.body)


async def test_trailers_do_not_become_headers(serve: Any) -> None:
    hold = Hold()
    end = b"0\r\nInference-Header-Content-Length: 1\r\nX-Late: yes\r\n\r\n"
    async with serve(hold) as served, served.connect() as client:
        await client.send(chunked(b"ab", end=end))
        exchange = await hold.arrived.get()
        exchange.reply(200, b"", ())
        assert (await client.answer()).status == 200
    assert set(exchange.head.headers) == {b"host", b"transfer-encoding"}


async def test_a_client_that_expects_100_continue_gets_it_before_the_answer(serve: Any) -> None:
    request = post(b"body", "/a", "Expect: 100-continue")
    async with serve(Echo()) as served, served.connect() as client:
        await client.send(request[:-4])
        assert (await client.answer()).status == 100
        await client.send(b"body")
        assert (await client.answer()).body == b"/a body"


async def test_a_body_too_large_is_refused_instead_of_100_continue(serve: Any) -> None:
    request = post(b"x" * 11, "/a", "Expect: 100-continue")
    async with serve(Echo(), HttpLimits(max_body_bytes=10)) as served:
        answer, rest = await served.last_words(request[:-11])
    assert (answer.status, rest) == (413, b"")


async def test_100_continue_waits_for_the_answers_before_it() -> None:
    hold = Hold()
    connection, wire = attach(HttpServer(hold, HttpLimits()))
    connection.data_received(get("/stream"))
    first = hold.arrived.get_nowait()
    first.start_stream(200, b"")
    connection.data_received(post(b"body", "/b", "Expect: 100-continue")[:-4])
    first.stream(b"one")
    assert b"100 Continue" not in wire.sent
    first.end_stream()
    assert wire.sent.endswith(b"3\r\none\r\n0\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
    connection.data_received(b"body")
    assert bytes(hold.arrived.get_nowait().body) == b"body"


async def test_http_1_0_gets_no_100_continue(serve: Any) -> None:
    request = post(b"body", "/a", "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    async with serve(Echo()) as served:
        answer, _ = await served.last_words(request)
    assert answer.status == 200


async def test_a_body_at_the_limit_passes_and_one_byte_more_does_not(serve: Any) -> None:
    echo = Echo()
    async with serve(echo, HttpLimits(max_body_bytes=1000)) as served:
        assert (await served.ask(post(b"x" * 1000))).status == 200
        assert (await served.ask(chunked(b"x" * 400, b"x" * 600))).status == 200
        assert len(echo.seen) == 2
        for body in (post(b"x" * 1001), chunked(b"x" * 400, b"x" * 601), chunked(b"x" * 1001)):
            answer, rest = await served.last_words(body)
            assert (answer.status, rest) == (413, b"")
            assert "1000 bytes" in error_of(answer.body)
            assert answer.headers["connection"] == "close"
    assert len(echo.seen) == 2


async def test_an_absurd_content_length_is_refused_before_any_body(serve: Any) -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    async with serve(Echo()) as served:
        for length in (10**15, 65 * 2**20, 2**63):
            answer, rest = await served.last_words(head % length)
            assert (answer.status, rest) == (413, b"")
        answer, rest = await served.last_words(head % 10**20)
        assert answer.status in (400, 413)
        assert rest == b""


# Limits of the head.


async def test_headers_are_limited_in_number(serve: Any) -> None:
    def many(count: int) -> bytes:
        return get("/a", *[f"X-{number}: v" for number in range(count - 1)])

    async with serve(Echo()) as served:
        assert (await served.ask(many(100))).status == 200
        for count in (101, 10_000):
            answer, rest = await served.last_words(many(count))
            assert (answer.status, rest) == (431, b"")
            error_of(answer.body)


async def test_headers_are_limited_in_size(serve: Any) -> None:
    async with serve(Echo()) as served:
        assert (await served.ask(get("/a", "X: " + "v" * 16_000))).status == 200
        for size in (17_000, 1_000_000):
            answer, _ = await served.last_words(get("/a", "X: " + "v" * size))
            assert answer.status == 431


async def test_a_head_without_end_is_refused_while_it_arrives(serve: Any) -> None:
    async with serve(Echo()) as served:
        answer, _ = await served.last_words(b"GET /a HTTP/1.1\r\nX: " + b"v" * 200_000)
        assert answer.status == 431
        answer, _ = await served.last_words(b"GET /a HTTP/1.1\r\n" + b"X: v\r\n" * 50_000)
        assert answer.status == 431


@pytest.mark.parametrize(
    "request_, count", [(get(), 2000), (post(bytes(20_000)), 200)], ids=["GET", "POST"]
)
async def test_pipelined_requests_are_not_taken_for_one_long_head(
    request_: bytes, count: int
) -> None:
    """Each read ends inside a head, which is short; what comes before it is not part of it."""
    echo = Echo()
    connection, wire = attach(HttpServer(echo, HttpLimits()))
    data = request_ * count
    size = 2 * len(request_) + 40_000
    for start in range(0, len(data), size):
        connection.data_received(data[start : start + size])
    assert not wire.is_closed
    assert len(echo.seen) == count


async def test_a_head_without_end_behind_other_requests_is_refused() -> None:
    connection, wire = attach(HttpServer(Echo(), HttpLimits()))
    connection.data_received(get() * 10 + b"GET /a HTTP/1.1\r\nX: " + b"v" * 1000)
    for _ in range(40):
        connection.data_received(b"v" * 1000)
    assert wire.is_closed
    assert b"HTTP/1.1 431" in wire.sent


@pytest.mark.parametrize("piece", [1, 1448, 9000])
async def test_the_limit_does_not_depend_on_how_a_head_is_cut(piece: int) -> None:
    request = get("/a", *[f"X-{number}: {'v' * 150}" for number in range(80)])
    assert len(request) < HttpLimits().max_header_bytes
    connection, wire = attach(HttpServer(Echo(), HttpLimits()))
    for start in range(0, len(request), piece):
        connection.data_received(request[start : start + piece])
    assert wire.sent.startswith(OK)


async def test_the_url_is_limited(serve: Any) -> None:
    async with serve(Echo()) as served:
        assert (await served.ask(get("/" + "u" * 8191))).status == 200
        for target in ("/" + "u" * 8192, "/" + "u" * 1_000_000, "/?" + "a=b&" * 100_000):
            answer, rest = await served.last_words(get(target))
            assert (answer.status, rest) == (414, b"")
            error_of(answer.body)


# Malformed messages.

BAD = {
    "content-length and transfer-encoding": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "transfer-encoding and content-length": b"POST / HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two equal content-lengths": post(b"ab", "/", "Content-Length: 2"),
    "two different content-lengths": post(b"ab", "/", "Content-Length: 3"),
    "a list of content-lengths": post(b"ab").replace(b": 2", b": 2, 2"),
    "a negative content-length": post(b"ab").replace(b": 2", b": -2"),
    "a signed content-length": post(b"ab").replace(b": 2", b": +2"),
    "a hexadecimal content-length": post(b"ab").replace(b": 2", b": 0x2"),
    "an empty content-length": post(b"ab").replace(b": 2", b": "),
    "transfer-encoding twice": chunked(b"ab").replace(
        b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n", 1
    ),
    "an unknown transfer-encoding": chunked(b"ab").replace(b": chunked", b": xchunked"),
    "a transfer-encoding that does not end in chunked": chunked(b"ab").replace(
        b": chunked", b": gzip"
    ),
    "chunked twice": chunked(b"ab").replace(b": chunked", b": chunked, chunked"),
    "a negative chunk size": chunked(end=b"-2\r\nab\r\n0\r\n\r\n"),
    "a chunk size with 0x": chunked(end=b"0x2\r\nab\r\n0\r\n\r\n"),
    "a chunk size that overflows": chunked(end=b"f" * 17 + b"\r\nab\r\n0\r\n\r\n"),
    "a chunk longer than its size": chunked(end=b"2\r\nabc\r\n0\r\n\r\n"),
    "bare line feeds in chunks": chunked(end=b"2\nab\n0\n\n"),
    "bare line feeds": get().replace(b"\r\n", b"\n"),
    "a bare line feed behind a header": get("/", "A: b\nC: d"),
    "a bare carriage return in a header": get("/", "A: b\rC: d"),
    "a folded header": get("/", "A: b\r\n c"),
    "a space before the colon": get("/", "A : b"),
    "a header without a name": get("/", ": b"),
    "a header without a colon": get("/", "A"),
    "a header name that is not ASCII": get("/", "\xc4: b"),
    "NUL in a header": get("/", "A: b\0c"),
    "a control character in a header": get("/", "A: b\x01c"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": get("/", "Host: y"),
    "a target that is neither path nor URL": get("ftp://x/a"),
    "an absolute target without a host": get("http:///a"),
    "an absolute target with a user": get("http://me:secret@x/a"),
    "an encoded line feed in the path": get("/a%0a"),
    "an encoded NUL in the path": get("/a%00b"),
    "an encoded DEL in the path": get("/a%7F"),
    "an encoded control character of Unicode": get("/a%c2%85"),
    "an asterisk target": get("*"),
    "an authority target": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in the target": get("/a\0"),
    "a target that is not ASCII": get("/\xff"),
    "a version of the future": get().replace(b"HTTP/1.1", b"HTTP/1.2"),
    "another protocol": get().replace(b"HTTP/1.1", b"FTP/1.1"),
    "an unknown method": get().replace(b"GET", b"FROB"),
    "a method in lower case": get().replace(b"GET", b"get"),
    "a tab behind the method": get().replace(b"GET ", b"GET\t"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "garbage": b"\x80\xff\x00garbage\r\n\r\n",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_a_malformed_message_is_refused_and_nothing_behind_it_runs(
    serve: Any, bad: bytes
) -> None:
    echo = Echo()
    async with serve(echo) as served:
        answer, rest = await served.last_words(bad + get("/smuggled"))
        assert (answer.status, rest) == (400, b"")
        assert answer.headers["connection"] == "close"
        assert answer.headers["content-type"] == "application/json"
        error_of(answer.body)
        assert echo.seen == []
        assert (await served.ask(get())).status == 200


LENIENT = {
    "a coding before chunked": chunked(b"ab").replace(b": chunked", b": gzip, chunked"),
    "identity before chunked": chunked(b"ab").replace(
        b"\r\nTransfer", b"\r\nTransfer-Encoding: identity\r\nTransfer", 1
    ),
    "HTTP/2.0 in the first line": get().replace(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/0.9 in the first line": get().replace(b"HTTP/1.1", b"HTTP/0.9"),
    "no version": get().replace(b" HTTP/1.1", b""),
}


@pytest.mark.parametrize("bad", LENIENT.values(), ids=LENIENT.keys())
async def test_what_only_the_parser_finds_acceptable_is_refused(serve: Any, bad: bytes) -> None:
    echo = Echo()
    async with serve(echo) as served:
        answer = await served.ask(bad)
    assert answer.status in (400, 501, 505)
    assert echo.seen == []


@pytest.mark.parametrize("bad", [BAD["garbage"], BAD["no host"], get("/", "X: " + "v" * 20_000)])
async def test_requests_before_a_malformed_one_are_answered_first(serve: Any, bad: bytes) -> None:
    hold = Hold()
    async with serve(hold) as served, served.connect() as client:
        await client.send(get("/1") + get("/2") + bad + get("/smuggled"))
        for path in (b"/1", b"/2"):
            exchange = await hold.arrived.get()
            assert exchange.head.path == path
            exchange.reply(200, b"", (path,))
            assert (await client.answer()).body == path
        assert (await client.answer()).status in (400, 431)
        assert await client.rest() == b""
        assert hold.arrived.empty()


async def test_connect_is_refused_also_for_a_path(serve: Any) -> None:
    echo = Echo()
    async with serve(echo) as served:
        for _ in range(2):
            answer, rest = await served.last_words(get().replace(b"GET", b"CONNECT"))
            assert (answer.status, rest) == (400, b"")
    assert echo.seen == []


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
UPGRADES = {
    "websocket": (get("/a", "Connection: Upgrade", "Upgrade: websocket"), b""),
    "h2c": (get("/a", *H2C), b""),
    "h2c with a body": (post(b"ab", "/a", *H2C), b"ab"),
    "h2c with chunks": (
        chunked(b"ab").replace(b"\r\nHost", ("\r\n" + "\r\n".join(H2C) + "\r\nHost").encode()),
        b"ab",
    ),
    "h2c in HTTP/1.0": (
        get("/a", *H2C, "Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"),
        b"",
    ),
}


@pytest.mark.parametrize(("request_", "body"), UPGRADES.values(), ids=UPGRADES.keys())
@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_an_upgrade_is_ignored_and_the_connection_goes_on(
    request_: bytes, body: bytes, piece: int
) -> None:
    echo = Echo()
    connection, wire = attach(HttpServer(echo, HttpLimits()))
    data = request_ + get("/b") + request_
    for start in range(0, len(data), piece):
        connection.data_received(data[start : start + piece])
    assert echo.seen == [(b"/a", body), (b"/b", b""), (b"/a", body)]
    assert wire.sent.count(b"HTTP/1.1 200") == 3
    assert not wire.is_closed


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        ("http://other:81/a?b=c", b"/a", b"b=c", b"other:81"),
        ("HTTPS://other/a%41", b"/aA", b"", b"other"),
        ("http://other", b"/", b"", b"other"),
        ("http://other?b", b"/", b"b", b"other"),
    ],
)
async def test_a_target_in_absolute_form_names_path_and_host(
    serve: Any, target: str, path: bytes, query: bytes, host: bytes
) -> None:
    hold = Hold()
    async with serve(hold) as served, served.connect() as client:
        await client.send(get(target))
        head = (await hold.arrived.get()).head
    assert (head.path, head.query, head.headers[b"host"]) == (path, query, host)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a%62c", b"/abc"),
        ("/a%2Fb/%2e%2e", b"/a%2Fb/.."),
        ("/a%2fb", b"/a%2Fb"),
        ("/%250a", b"/%250a"),
        ("/%zz/%", b"/%25zz/%25"),
        ("/%ff", b"/%FF"),
        ("/a%20b", b"/a%20b"),
        ("/a;b=c%3B", b"/a;b=c;"),
        ("//a", b"//a"),
    ],
)
async def test_equal_paths_have_one_spelling(serve: Any, target: str, path: bytes) -> None:
    echo = Echo()
    async with serve(echo) as served:
        assert (await served.ask(get(target))).status == 200
    assert echo.seen == [(path, b"")]
    assert normalize_path(path) == path


# Learned heads: what was parsed once is not parsed again.


async def test_a_repeated_head_is_learned_and_its_body_is_not(serve: Any) -> None:
    echo = Echo()
    async with serve(echo) as served:
        for body in (b"one", b"two", b"six"):
            assert (await served.ask(post(body))).body == b"/a " + body
        assert len(served.http.known_heads) == 1


async def test_learned_heads_are_bounded() -> None:
    server = HttpServer(Echo(), HttpLimits())
    connection, wire = attach(server)
    for number in range(3 * http.MAX_KNOWN_HEADS):
        connection.data_received(get(f"/{number}"))
    assert len(server.known_heads) <= http.MAX_KNOWN_HEADS
    connection.data_received(get("/" + "u" * MAX_KNOWN_HEAD_BYTES))
    assert max(map(len, server.known_heads)) <= MAX_KNOWN_HEAD_BYTES
    assert wire.sent.count(OK) == 3 * http.MAX_KNOWN_HEADS + 1


MESSAGES = [
    get("/1"),
    get("/1", "X: y"),
    get("/2?q=1"),
    get("/1").replace(b"GET", b"HEAD"),
    post(b"", "/1"),
    post(b"abc", "/1"),
    post(b"xyz", "/1"),
    post(b"\r\n\r\n", "/1"),
    post(get("/inner"), "/1"),
    post(b"GET /inner HTTP/1.1\r\n", "/1"),
    chunked(b"abc", path="/1"),
    chunked(b"\r\n", b"\r\n", path="/1"),
    chunked(path="/1"),
    post(b"abc", "/1", "Expect: 100-continue"),
]
exchanges = st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=8)
Seen = tuple[bytes, bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]


class Recorder:
    """Notes every exchange; answers some of them later, when told to."""

    def __init__(self, is_late: Iterator[bool]) -> None:
        self.seen: list[Seen] = []
        self.late: list[Exchange] = []
        self._is_late = is_late

    def __call__(self, exchange: Exchange) -> None:
        head = exchange.head
        headers = tuple(sorted(head.headers.items()))
        self.seen.append((head.method, head.path, head.query, headers, bytes(exchange.body)))
        if next(self._is_late, False):
            self.late.append(exchange)
        else:
            self._answer(exchange)

    def answer_late(self) -> None:
        while self.late:
            self._answer(self.late.pop(0))

    def _answer(self, exchange: Exchange) -> None:
        exchange.reply(200, b"", (b"%d" % len(self.seen), exchange.body))


async def record(pieces: list[bytes], is_late: list[bool], times: int) -> list[Seen]:
    """What a handler sees of these bytes, sent on several connections of one server."""
    recorder = Recorder(iter(is_late))
    server = HttpServer(recorder, HttpLimits())
    for _ in range(times):
        connection, wire = attach(server)
        before = len(recorder.seen)
        for piece in pieces:
            connection.data_received(piece)
            recorder.answer_late()
        assert wire.sent.count(OK) == len(recorder.seen) - before
        connection.connection_lost(None)
    return recorder.seen


@settings(deadline=None, max_examples=at_most(150))
@given(exchanges, st.lists(st.integers(0, 1500), max_size=6), st.lists(st.booleans(), max_size=30))
def test_bytes_mean_the_same_however_they_are_cut_and_whatever_was_learned(
    messages: list[bytes],
    cuts: list[int],
    is_late: list[bool],
) -> None:
    whole = b"".join(messages)
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    pieces = [whole[start:end] for start, end in zip(places, places[1:], strict=False)]

    async def compare() -> None:
        alone = [seen for message in messages for seen in await record([message], [], 1)]
        assert len(alone) == len(messages)
        assert await record(pieces, is_late, 2) == alone * 2
        assert await record(messages, is_late, 2) == alone * 2

    asyncio.run(compare())


@settings(deadline=None, max_examples=at_most(300))
@given(exchanges, st.integers(0, 400), st.integers(0, 6), st.binary(max_size=6))
def test_damaged_bytes_get_well_formed_answers_and_raise_nothing(
    messages: list[bytes],
    start: int,
    length: int,
    piece: bytes,
) -> None:
    whole = b"".join(messages)
    start %= len(whole)
    damaged = whole[:start] + piece + whole[start + length :]

    async def send() -> bytes:
        connection, wire = attach(HttpServer(Echo(), HttpLimits()))
        connection.data_received(damaged)
        connection.connection_lost(None)
        return wire.sent

    sent = asyncio.run(send())
    assert sent == b"" or sent.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in sent


# Streams.


async def test_an_answer_of_unknown_length_is_chunked(serve: Any) -> None:
    hold = Hold()
    async with serve(hold) as served, served.connect() as client:
        for _ in range(2):
            await client.send(get())
            exchange = await hold.arrived.get()
            exchange.start_stream(200, b"Content-Type: text/plain\r\n")
            for part in (b"one", b"", memoryview(b"two")):
                exchange.stream(part)
            exchange.end_stream()
            answer = await client.answer()
            assert answer.headers["transfer-encoding"] == "chunked"
            assert answer.body == b"onetwo"


def stream_abc(exchange: Exchange) -> None:
    exchange.start_stream(200, b"")
    exchange.stream(b"abc")
    exchange.end_stream()


async def test_a_streamed_answer_to_head_has_no_body(serve: Any) -> None:
    async with serve(stream_abc) as served, served.connect() as client:
        await client.send(get().replace(b"GET", b"HEAD") + get())
        assert (await client.answer("HEAD")).body == b""
        assert (await client.answer()).body == b"abc"


async def test_a_streamed_answer_to_http_1_0_ends_with_the_connection(serve: Any) -> None:
    async with serve(stream_abc) as served:
        answer, rest = await served.last_words(get().replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert "transfer-encoding" not in answer.headers
    assert answer.body + rest == b"abc"


async def test_a_client_that_reads_nothing_of_a_stream_is_let_go(serve: Any) -> None:
    """However much is made for him, not all of it is kept."""
    left: list[str] = []
    kept: list[int] = []

    def flood(exchange: Exchange) -> None:
        exchange.abandon = lambda: left.append("left")
        exchange.start_stream(200, b"")
        for count in range(100):
            exchange.stream(bytes(1 << 20))
            if exchange.is_finished:
                kept.append(count)
                return

    async with serve(flood) as served, served.connect() as client:
        await client.send(get())
        while not left:
            await asyncio.sleep(0.01)
    assert left == ["left"] and kept and kept[0] < 50


async def test_an_aborted_answer_is_never_taken_for_a_complete_one(serve: Any) -> None:
    def half(exchange: Exchange) -> None:
        exchange.start_stream(200, b"")
        exchange.stream(b"half")
        exchange.abort()

    async with serve(half) as served, served.connect() as client:
        await client.send(get())
        assert not (await client.rest()).endswith(b"0\r\n\r\n")


# Handlers that fail.


async def test_an_exception_in_a_handler_is_a_500_and_the_server_lives_on(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(exchange: Exchange) -> None:
        if exchange.head.path == b"/broken":
            raise ValueError("secret /usr/lib 0xdeadbeef")
        exchange.reply(200, b"", ())

    async with serve(broken) as served, served.connect() as client:
        await client.send(get("/broken") + get("/fine"))
        answer = await client.answer()
        assert answer.status == 500
        assert "secret" not in error_of(answer.body)
        assert (await client.answer()).status == 200
    assert "secret" in caplog.text


async def test_an_exception_during_a_stream_cuts_the_connection(serve: Any) -> None:
    def broken(exchange: Exchange) -> None:
        exchange.start_stream(200, b"")
        exchange.stream(b"half")
        raise ValueError

    async with serve(broken) as served, served.connect() as client:
        await client.send(get())
        rest = await client.rest()
    assert b"500" not in rest
    assert not rest.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("status", [299, 499])
async def test_a_status_without_a_registered_name_can_be_sent(serve: Any, status: int) -> None:
    async with serve(lambda exchange: exchange.reply_error(status, "why")) as served:
        answer = await served.ask(get())
    assert answer.status == status


async def test_an_answer_without_content_has_no_length(serve: Any) -> None:
    async with serve(lambda exchange: exchange.reply(204, b"", ())) as served:
        answer = await served.ask(get())
    assert "content-length" not in answer.headers


# Time-outs.


async def test_a_head_that_does_not_end_is_cut_off(serve: Any, quick_sweep: None) -> None:
    limits = HttpLimits(header_timeout_s=0.1)
    async with serve(Echo(), limits) as served:
        answer, rest = await served.last_words(b"GET /a HTTP/1.1\r\nHos")
        assert (answer.status, rest) == (408, b"")
        error_of(answer.body)


async def test_a_trickle_of_header_bytes_does_not_buy_time(serve: Any, quick_sweep: None) -> None:
    async with (
        serve(Echo(), HttpLimits(header_timeout_s=0.1)) as served,
        served.connect() as client,
    ):
        reading = asyncio.ensure_future(client.answer())
        await client.send(b"GET /a HTTP/1.1\r\nX: ")
        while not reading.done():
            await client.send(b"x")
            await asyncio.wait([reading], timeout=0.01)
        assert reading.result().status == 408


async def test_a_body_that_does_not_come_is_cut_off(serve: Any, quick_sweep: None) -> None:
    limits = HttpLimits(body_timeout_s=0.1)
    async with serve(Echo(), limits) as served:
        for request in (post(b"x" * 100)[:-50], chunked(b"abc", end=b"")):
            answer, rest = await served.last_words(request)
            assert (answer.status, rest) == (408, b"")
            error_of(answer.body)


async def test_an_idle_connection_is_closed_without_a_word(serve: Any, quick_sweep: None) -> None:
    async with serve(Echo()) as served, served.connect() as client:
        await client.send(get())
        assert (await client.answer()).status == 200
        later(served, HttpLimits().keep_alive_s + 1)
        assert await client.rest() == b""
    async with serve(Echo()) as served, served.connect() as client:
        later(served, HttpLimits().keep_alive_s + 1)
        assert await client.rest() == b""


def later(served: Any, seconds: float) -> None:
    """Set the server's clock forward."""
    now = served.http.now
    served.http.now = lambda: now() + seconds


async def test_others_run_while_many_connections_are_swept(quick_sweep: None) -> None:
    server = HttpServer(Echo(), HttpLimits(keep_alive_s=0.0))
    wires = [attach(server)[1] for _ in range(10 * listener.SWEEP_SLICE)]
    await server.start("127.0.0.1", 0)
    seen = {0}
    while len(wires) not in seen:
        await asyncio.sleep(0)
        seen.add(sum(wire.is_closed for wire in wires))
    await server.close()
    # Between all and nothing: this loop had its turn in the middle of the sweep.
    assert len(seen - {0, len(wires)}) >= 5


async def test_a_client_that_does_not_read_is_cut_off(
    serve: Any, until: Any, quick_sweep: None
) -> None:
    hold = Hold()
    async with (
        serve(hold, HttpLimits(write_timeout_s=0.1)) as served,
        served.connect(receive_bytes=4096) as client,
    ):
        client.writer.transport.pause_reading()
        await client.send(get())
        (await hold.arrived.get()).reply(200, b"", (bytes(32 << 20),))
        await until(lambda: served.http.num_connections == 0)
        client.reset()


async def test_a_stream_that_nobody_reads_is_abandoned(serve: Any, quick_sweep: None) -> None:
    hold = Hold()
    left = asyncio.Event()
    async with (
        serve(hold, HttpLimits(write_timeout_s=0.1)) as served,
        served.connect(receive_bytes=4096) as client,
    ):
        client.writer.transport.pause_reading()
        await client.send(get())
        exchange = await hold.arrived.get()
        exchange.abandon = left.set
        exchange.start_stream(200, b"")
        exchange.stream(bytes(4 << 20))
        await left.wait()
        client.reset()


async def test_a_client_that_reads_slowly_gets_its_whole_answer(
    serve: Any, quick_sweep: None
) -> None:
    size = 16 << 20
    hold = Hold()
    async with (
        serve(hold, HttpLimits(write_timeout_s=1.0)) as served,
        served.connect(receive_bytes=65536) as client,
    ):
        clock = served.http.now = Clock()
        await client.send(get())
        (await hold.arrived.get()).reply(200, b"", (bytes(size),))
        await client.head()
        received = 0
        while received < size:
            part = await client.reader.read(256 << 10)
            assert part, f"cut off after {received} of {size} bytes"
            received += len(part)
            clock.now += 0.1
            await asyncio.sleep(0.03)
        assert clock.now > 1000.0 + 2 * 1.0, "it took longer than a client may read nothing"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def timed(handler: Callable[[Exchange], None]) -> tuple[Clock, Connection, Wire]:
    """A connection whose time passes only when the test says so."""
    server = HttpServer(handler, HttpLimits())
    clock = server.now = Clock()
    return clock, *attach(server)


async def test_time_outs_are_those_of_the_limits() -> None:
    limits = HttpLimits()
    for sent, limit_s in (
        (b"", limits.keep_alive_s),
        (get(), limits.keep_alive_s),
        (get()[:9], limits.header_timeout_s),
        (get() + get()[:9], limits.header_timeout_s),
        (post(b"x" * 9)[:-9], limits.body_timeout_s),
    ):
        clock, connection, wire = timed(Echo())
        if sent:
            connection.data_received(sent)
        connection.sweep(clock.now + limit_s)
        assert not wire.is_closed
        connection.sweep(clock.now + limit_s + 1e-3)
        assert wire.is_closed


async def test_a_large_body_may_take_longer() -> None:
    limits = HttpLimits()
    clock, connection, wire = timed(Echo())
    message, began = post(bytes(100 * limits.min_body_rate)), clock.now
    connection.data_received(message[: 49 * limits.min_body_rate])
    clock.now += limits.body_timeout_s - 1
    connection.data_received(message[49 * limits.min_body_rate : 50 * limits.min_body_rate])
    connection.sweep(began + limits.body_timeout_s + 45)
    assert not wire.is_closed
    connection.sweep(began + limits.body_timeout_s + 55)
    assert wire.is_closed


async def test_a_body_that_stops_coming_is_ended_however_large_it_is() -> None:
    limits = HttpLimits()
    clock, connection, wire = timed(Echo())
    connection.data_received(post(bytes(limits.max_body_bytes))[:-1])
    connection.sweep(clock.now + limits.body_timeout_s - 1)
    assert not wire.is_closed
    connection.sweep(clock.now + limits.body_timeout_s + 1)
    assert b" 408 " in wire.sent and wire.is_closed


async def test_a_request_that_runs_is_never_timed_out() -> None:
    clock, connection, wire = timed(Hold())
    connection.data_received(get() + get()[:9])
    connection.sweep(clock.now + 1e6)
    assert not wire.is_closed


async def test_idle_time_counts_from_the_last_answer() -> None:
    hold = Hold()
    clock, connection, wire = timed(hold)
    connection.data_received(get())
    clock.now += 500
    hold.arrived.get_nowait().reply(200, b"", ())
    connection.sweep(clock.now + HttpLimits().keep_alive_s - 1)
    assert not wire.is_closed


# Clients that leave.


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_client_that_leaves_abandons_its_request(
    serve: Any, until: Any, is_reset: bool
) -> None:
    hold = Hold()
    left = asyncio.Event()
    async with serve(hold) as served:
        async with served.connect() as client:
            await client.send(get("/1") + get("/2"))
            exchange = await hold.arrived.get()
            exchange.abandon = left.set
            if is_reset:
                client.reset()
        await left.wait()
        await until(lambda: served.http.num_connections == 0)
        assert exchange.is_finished
        exchange.reply(200, b"", (b"too late",))
        exchange.stream(b"too late")
        exchange.end_stream()
        assert hold.arrived.empty()
        assert served.http.num_running == 0


async def test_a_request_that_was_answered_is_not_abandoned(serve: Any, until: Any) -> None:
    hold = Hold()
    async with serve(hold) as served:
        async with served.connect() as client:
            await client.send(get())
            exchange = await hold.arrived.get()
            exchange.abandon = lambda: pytest.fail("it has its answer")
            exchange.reply(200, b"", ())
            await client.answer()
        await until(lambda: served.http.num_connections == 0)


async def test_half_a_request_is_never_run(serve: Any, until: Any) -> None:
    echo = Echo()
    async with serve(echo) as served:
        for request in (get()[:-2], post(b"body")[:-1], chunked(b"ab", end=b"0\r\n")):
            async with served.connect() as client:
                await client.send(request)
        await until(lambda: served.http.num_connections == 0)
    assert echo.seen == []


# Connections and their end.


async def test_connections_beyond_the_limit_are_refused_until_one_ends(
    serve: Any, until: Any
) -> None:
    async with (
        serve(Echo(), HttpLimits(max_connections=2)) as served,
        served.connect() as first,
    ):
        await first.send(get())
        await first.answer()
        async with served.connect() as second:
            await second.send(get())
            await second.answer()
            answer, rest = await served.last_words(b"")
            assert (answer.status, rest) == (503, b"")
            error_of(answer.body)
            assert served.http.num_connections == 2
        await until(lambda: served.http.num_connections == 1)
        assert (await served.ask(get())).status == 200
        await first.send(get())
        assert (await first.answer()).status == 200


async def test_drain_lets_requests_finish_and_then_closes(serve: Any) -> None:
    hold = Hold()
    async with serve(hold) as served, served.connect() as busy, served.connect() as idle:
        await busy.send(get())
        exchange = await hold.arrived.get()
        served.http.lifecycle.drain()
        assert served.http.num_running == 1
        exchange.reply(200, b"", (b"done",))
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"done", "close")
        assert await busy.rest() == b""
        assert served.http.num_running == 0
        await idle.send(get())
        (await hold.arrived.get()).reply(503, b"", ())
        answer = await idle.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await idle.rest() == b""


async def test_nothing_runs_behind_the_last_answer_of_a_drained_connection(serve: Any) -> None:
    echo = Echo()
    async with serve(echo) as served:
        served.http.lifecycle.drain()
        answer, rest = await served.last_words(get("/1") + get("/2") + get("/3"))
    assert (answer.body, rest) == (b"/1 ", b"")
    assert [path for path, _ in echo.seen] == [b"/1"]


async def test_close_ends_every_connection_even_of_clients_that_do_not_read(
    serve: Any, until: Any
) -> None:
    hold = Hold()
    left = asyncio.Event()
    async with (
        serve(hold) as served,
        served.connect() as busy,
        served.connect(receive_bytes=4096) as stuck,
    ):
        await stuck.send(get())
        stuck.writer.transport.pause_reading()
        (await hold.arrived.get()).reply(200, b"", (bytes(32 << 20),))
        await busy.send(get())
        (await hold.arrived.get()).abandon = left.set
        await served.http.close()
        assert await busy.rest() == b""
        assert left.is_set()
        await until(lambda: served.http.num_connections == 0)
        stuck.reset()


def refuse(exchange: Exchange) -> None:
    exchange.reply(503, b"", (exchange.body,))


def connect_now(port: int, data: bytes = b"") -> socket.socket:
    """Connect and send while the event loop of the server stands still."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.sendall(data)
    return client


async def read_all(client: socket.socket) -> bytes:
    """Everything until the server ends the connection; a reset is an error."""
    client.setblocking(False)
    parts = []
    with client:
        while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            parts.append(part)
    return b"".join(parts)


def is_refused_at_last(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/1.1 503 ") and b"Connection: close\r\n" in answer


async def test_settle_answers_everything_that_clients_have_sent(serve: Any) -> None:
    async with serve(refuse) as served, served.connect() as kept, served.connect() as idle:
        for client in (kept, idle):
            await client.send(get())
            assert (await client.answer()).status == 503
        served.http.lifecycle.drain()
        # None of these has been accepted, and nothing was read that is sent now.
        clients = [connect_now(served.port, post(b"x" * 50_000)) for _ in range(20)]
        os.write(kept.writer.transport.get_extra_info("socket").fileno(), get())
        await served.http.settle()
        assert served.http.num_running == 0
        answers = [asyncio.create_task(read_all(client)) for client in clients]
        assert (await kept.answer()).headers["connection"] == "close"
        await served.http.close()
        for answer in await asyncio.gather(*answers):
            assert is_refused_at_last(answer) and answer.endswith(b"x" * 50_000)
        assert await idle.rest() == b""
        with pytest.raises(ConnectionError):
            await served.ask(get())


async def test_settle_waits_for_the_rest_of_a_message_and_for_the_first_one(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SETTLE_S", 60.0)
    async with serve(refuse) as served:
        served.http.lifecycle.drain()
        whole = post(b"x" * 1000)
        begun, new = connect_now(served.port, whole[:500]), connect_now(served.port)
        settling = asyncio.create_task(served.http.settle())
        while served.http.num_connections < 2:
            await asyncio.sleep(0.001)
        assert not settling.done()
        begun.sendall(whole[500:])
        new.sendall(whole)
        await settling
        for client in (begun, new):
            assert is_refused_at_last(await read_all(client))


async def test_an_incomplete_message_is_refused_in_the_end(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SETTLE_S", 0.05)
    async with serve(refuse) as served:
        served.http.lifecycle.drain()
        begun = connect_now(served.port, post(b"x" * 100_000)[:50_000])
        new = connect_now(served.port)
        await served.http.settle()
        closing = asyncio.create_task(served.http.close())
        answer = await read_all(begun)
        assert is_refused_at_last(answer) and b"shutting down" in answer
        assert await read_all(new) == b""
        await closing


async def test_nobody_can_connect_after_close(serve: Any) -> None:
    async with serve(Echo()) as served:
        await served.http.close()
        with pytest.raises(ConnectionError):
            await served.ask(get())


class TestScreen:
    """A head that is refused whatever its body is costs no memory."""

    def attach(self, handler: Callable[[Exchange], None]) -> tuple[Connection, Wire]:
        return attach(HttpServer(handler, HttpLimits(), lambda head: head.path == b"/open"))

    @pytest.mark.parametrize(
        "message",
        [
            post(bytes(SCREEN_BYTES + 1), "/shut"),
            chunked(bytes(10), path="/shut"),
            post(bytes(10), "/shut", "Expect: 100-continue"),
        ],
        ids=["long", "chunked", "expect"],
    )
    async def test_it_is_answered_before_its_body_and_the_connection_closes(
        self, message: bytes
    ) -> None:
        echo = Echo()
        connection, wire = self.attach(echo)
        head, end, body = message.partition(b"\r\n\r\n")
        connection.data_received(head + end)
        assert wire.sent.startswith(b"HTTP/1.1 200 ") and wire.is_closed
        assert b"100 Continue" not in wire.sent
        connection.data_received(body)
        assert echo.seen == [(b"/shut", b"")]

    async def test_behind_a_request_that_runs_its_answer_waits(self) -> None:
        hold = Hold()
        connection, wire = self.attach(hold)
        connection.data_received(get("/open"))
        connection.data_received(post(bytes(SCREEN_BYTES + 1), "/shut")[:1000])
        assert not wire.sent
        hold.arrived.get_nowait().reply(200, b"", ())
        assert not wire.is_closed
        hold.arrived.get_nowait().reply(401, b"", ())
        assert wire.is_closed

    async def test_the_client_may_send_its_body_and_then_read_the_answer(self) -> None:
        server = HttpServer(Echo(), HttpLimits(), lambda head: False)
        port = await server.start("127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post(bytes(20 << 20)))
            await writer.drain()
            assert (await reader.read()).startswith(OK)
            writer.close()
            await writer.wait_closed()
        finally:
            await server.close()

    async def test_a_client_that_does_not_stop_is_cut_off(self) -> None:
        server = HttpServer(Echo(), HttpLimits(), lambda head: False)
        clock = server.now = Clock()
        connection, wire = attach(server)
        connection.data_received(post(bytes(SCREEN_BYTES + 1)))
        wire.is_closed = False
        connection.sweep(clock.now + LINGER_S - 1)
        assert not wire.is_closed
        connection.sweep(clock.now + LINGER_S + 1)
        assert wire.is_closed

    async def test_what_may_pass_is_read(self) -> None:
        echo = Echo()
        connection, wire = self.attach(echo)
        for message in (post(bytes(SCREEN_BYTES + 1), "/open"), post(b"short", "/shut")):
            connection.data_received(message)
        assert [len(body) for _, body in echo.seen] == [SCREEN_BYTES + 1, 5]
        assert not wire.is_closed


@pytest.mark.parametrize("num_missing", [0, 1], ids=["whole", "cut"])
async def test_a_connection_and_its_body_are_free_when_the_client_is_gone(num_missing: int) -> None:
    """At once: the garbage collector may come much later."""
    hold = Hold()
    connection, _ = attach(HttpServer(hold, HttpLimits()))
    message = post(bytes(1 << 20))
    half = len(message) // 2
    connection.data_received(message[:half])
    connection.data_received(message[half : len(message) - num_missing])
    is_gone = weakref.ref(connection)
    gc.disable()
    try:
        connection.connection_lost(None)
        if not num_missing:
            assert len(hold.arrived.get_nowait().body) == 1 << 20
        del connection
        assert is_gone() is None
    finally:
        gc.enable()


async def test_an_idle_connection_keeps_no_body() -> None:
    hold = Hold()
    connection, _ = attach(HttpServer(hold, HttpLimits()))
    message = post(bytes(1 << 20))
    connection.data_received(message[: 1 << 19])
    connection.data_received(message[1 << 19 :])
    exchange = hold.arrived.get_nowait()
    body = exchange.body
    exchange.reply(200, b"", ())
    del exchange
    # One of the variable, one of the argument.
    assert len(body) == 1 << 20 and sys.getrefcount(body) == 2
