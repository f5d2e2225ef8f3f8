"""One connection: answers of every form, cut anywhere, are read as what they are."""

import pytest

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets.http_client import HttpClient
from penstock.benchmark.targets.http_connection import (
    MAX_HEAD_BYTES,
    MAX_KNOWN_HEADS,
    AnswerReader,
    ClientConnection,
)
from penstock.benchmark.targets.http_messages import parse_url

URL = parse_url("http://server:8000/")
OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 5\r\n\r\nhello"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 16\r\n\r\n" + b'{"error":"full"}'
CHUNKED = (
    OK + b"Transfer-Encoding: chunked\r\n\r\n4;ext=1\r\nhell\r\n1\r\no\r\n0\r\nTrailer: 1\r\n\r\n"
)


class Socket:
    """Stands for the transport and its socket."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_open = True

    def get_extra_info(self, name: str) -> "Socket":
        return self

    def setsockopt(self, *option: int) -> None:
        pass

    def write(self, data: bytes) -> None:
        assert self.is_open
        self.written.append(data)

    def close(self) -> None:
        self.is_open = False

    abort = close


class Wire:
    """A connection of a client, the exchange under way on it, and the test as its server."""

    def __init__(self, read=None) -> None:
        self.time = 100.0
        self.client = HttpClient(URL, 60.0, 1, read, now=lambda: self.time)
        self.socket = Socket()
        self.ended: list[TimedExchange] = []
        self.connection = ClientConnection(self.client)
        self.connection.connection_made(self.socket)
        self.client.release(self.connection)

    def ask(self) -> TimedExchange:
        exchange = TimedExchange(self.time, b"question", self.ended.append)
        self.client.send(exchange)
        return exchange

    def answer(self, *pieces: bytes) -> TimedExchange:
        """One exchange, answered by these pieces, a second after each other."""
        exchange = self.ask()
        for piece in pieces:
            self.time += 1.0
            if piece:
                self.connection.data_received(piece)
        return exchange


class Kept:
    """A reader that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.num_ended = 0

    def head(self, status, headers) -> None:
        assert not self.status
        self.status, self.headers = status, dict(headers)

    def chunk(self, data: bytes) -> None:
        assert self.status and not self.num_ended
        self.body += data

    def end(self) -> str | None:
        self.num_ended += 1
        return None


# Answer, failure, whether the connection can be used again.
ANSWERS = {
    "length": (PLAIN, None, True),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", None, True),
    "chunked": (CHUNKED, None, True),
    "created": (b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}", None, True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", None, True),
    "after continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, None, True),
    "after hints": (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + PLAIN, None, True),
    "close": (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", None, False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", None, False),
    "busy": (BUSY, "status 503: full", True),
    "redirect": (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "status 302", True),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", "status 304", True),
    "page": (
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 13\r\n\r\n<html></html>",
        "status 502",
        True,
    ),
}


@pytest.mark.parametrize("answer, failure, is_kept", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "seen before"])
def test_an_answer_may_be_cut_anywhere(answer, failure, is_kept, is_known):
    for cut in range(len(answer) + 1):
        wire = Wire()
        if is_known and is_kept:
            assert wire.answer(answer).failure == failure
        exchange = wire.answer(answer[:cut], answer[cut:])
        assert exchange.failure == failure, cut
        assert wire.ended.count(exchange) == 1, cut
        assert exchange.done == wire.time - (cut == len(answer)), cut
        assert wire.socket.is_open == is_kept


@pytest.mark.parametrize("answer, failure, is_kept", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_may_come_byte_by_byte(answer, failure, is_kept):
    wire = Wire()
    for _ in range(2 if is_kept else 1):
        exchange = wire.answer(*(bytes([byte]) for byte in answer))
        assert exchange.failure == failure
        assert exchange.done == wire.time
        assert wire.socket.is_open == is_kept


def test_a_reader_sees_the_same_however_it_is_cut():
    for answer in (PLAIN, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN):
        for cut in range(len(answer) + 1):
            readers: list[Kept] = []

            def read(exchange: TimedExchange, readers=readers) -> AnswerReader:
                readers.append(Kept())
                return readers[-1]

            wire = Wire(read)
            wire.answer(answer[:cut], answer[cut:])
            wire.answer(answer[:cut], answer[cut:])
            assert [(each.status, each.body, each.num_ended) for each in readers] == [
                (200, b"hello", 1)
            ] * 2
            assert all(b"trailer" not in each.headers for each in readers)


def test_a_head_that_was_seen_before_is_not_parsed_again():
    wire = Wire()
    wire.answer(PLAIN)
    assert list(wire.client.known_heads.values()) == [5]
    wire.answer(OK + b"Content-Length: 6\r\n\r\nlonger")
    assert sorted(wire.client.known_heads.values()) == [5, 6]
    # The same head with another body, and large ones over many reads.
    assert wire.answer(PLAIN[:-5], b"w", b"orld").failure is None
    assert len(wire.client.known_heads) == 2
    assert wire.socket.is_open


def test_a_large_answer_is_remembered_though_it_comes_in_parts():
    wire = Wire()
    head = OK + b"Content-Length: 300000\r\n\r\n"
    for _ in range(2):
        exchange = wire.answer(head + bytes(100_000), bytes(100_000), bytes(100_000))
        assert exchange.failure is None and exchange.done == wire.time
    assert wire.client.known_heads == {head: 300_000}


@pytest.mark.parametrize(
    "answer",
    [
        BUSY,
        CHUNKED,
        OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi",
        OK + b"Server-Timing: total;dur=1\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        # It has no body, whatever it says.
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        OK + b"X: " + b"x" * 2000 + b"\r\nContent-Length: 2\r\n\r\nhi",
    ],
)
def test_only_plain_good_heads_are_remembered(answer):
    wire = Wire()
    wire.answer(answer)
    assert len(wire.ended) == 1
    assert wire.client.known_heads == {}


def test_the_number_of_remembered_heads_is_bounded():
    wire = Wire()
    for number in range(2 * MAX_KNOWN_HEADS):
        wire.answer(OK + b"X: %d\r\nContent-Length: 2\r\n\r\nhi" % number)
        assert len(wire.client.known_heads) <= MAX_KNOWN_HEADS
    assert all(exchange.failure is None for exchange in wire.ended)


def test_server_timing_is_taken_along_each_time():
    wire = Wire()
    for number in (1, 2):
        exchange = wire.answer(
            OK + b"Server-Timing: queue;dur=%d.5, total;dur=9\r\nContent-Length: 0\r\n\r\n" % number
        )
        assert exchange.phases == {"queue": pytest.approx(number / 1e3 + 0.0005), "total": 0.009}
    assert wire.answer(PLAIN).phases is None
    hints = b"HTTP/1.1 103 Early Hints\r\nServer-Timing: early;dur=1\r\n\r\n"
    assert wire.answer(hints + PLAIN).phases is None


def test_the_end_of_the_connection_may_be_the_end_of_the_answer():
    wire = Wire()
    exchange = wire.answer(OK + b"\r\nhel", b"lo")
    assert not wire.ended
    wire.connection.eof_received()
    assert exchange.failure is None
    assert not wire.socket.is_open
    wire.connection.connection_lost(None)
    assert wire.ended == [exchange]


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, BUSY, OK + b"\r\nhello"])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_answer_that_is_cut_off_has_failed(answer, is_known):
    for cut in range(1, len(answer)):
        wire = Wire()
        if is_known and b"\r\nhello" not in answer:
            wire.answer(answer)
        exchange = wire.answer(answer[:cut])
        wire.connection.connection_lost(ConnectionResetError())
        assert exchange.failure == "connection lost"
        assert wire.ended.count(exchange) == 1


def test_a_connection_that_ends_before_any_answer_is_lost():
    wire = Wire()
    exchange = wire.ask()
    wire.connection.eof_received()
    wire.connection.connection_lost(None)
    assert exchange.failure == "connection lost"
    assert wire.ended == [exchange]


@pytest.mark.parametrize(
    "answer",
    [
        b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x80",  # HTTP/2, as a gRPC server begins.
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_not_http_fails_in_words(answer):
    wire = Wire()
    assert wire.answer(answer).failure == "the answer is not HTTP/1.1"
    assert not wire.socket.is_open
    assert len(wire.ended) == 1


def test_a_head_without_end_is_given_up():
    wire = Wire()
    exchange = wire.answer(OK, *[b"X-%d: %b\r\n" % (i, b"x" * 1000) for i in range(60)])
    assert not wire.ended
    for _ in range(10):
        if not wire.ended:
            wire.connection.data_received(b"Y: " + b"y" * 1000 + b"\r\n")
    assert exchange.failure == f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes"
    assert not wire.socket.is_open


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("excess", [b"x", PLAIN])
def test_more_than_was_asked_for_ends_the_connection(is_known, excess):
    wire = Wire()
    if is_known:
        wire.answer(PLAIN)
    exchange = wire.answer(PLAIN + excess)
    assert exchange.failure is None
    assert wire.ended.count(exchange) == 1
    assert not wire.socket.is_open


def test_what_nobody_asked_for_ends_the_connection():
    wire = Wire()
    wire.connection.data_received(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
    assert not wire.socket.is_open
    assert not wire.ended


def test_a_bug_of_a_reader_is_told_as_such():
    class Broken(Kept):
        def chunk(self, data: bytes) -> None:
            raise RuntimeError("oops")

    wire = Wire(lambda exchange: Broken())
    exchange = wire.ask()
    with pytest.raises(Exception, match="on_body"):
        wire.connection.data_received(PLAIN)
    assert exchange.failure == "internal error: RuntimeError('oops')"
    assert wire.ended == [exchange]
