"""One client connection over HTTP/1.1: one exchange at a time.

A good answer whose head was seen before is only counted, without keeping its body; all others are
parsed by httptools and passed to an `AnswerReader`. Knows nothing of other connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets.http_messages import Causes, server_timing

if TYPE_CHECKING:
    from penstock.benchmark.targets.http_client import HttpClient

# A server may have closed a connection that was idle for this long just as the next request was
# sent; if no byte of an answer came, the request is retried on another connection.
STALE_S = 1.0
MAX_HEAD_BYTES = 65_536
# Limit on an error's body.
MAX_KEPT_BYTES = 65_536
MAX_KNOWN_HEADS = 256
MAX_KNOWN_HEAD_BYTES = 1024
LOST = "connection lost"
CUT = "stream cut"

_PARSING = -1


class AnswerReader(Protocol):
    """Reads one answer as it arrives. `end` returns why the answer is bad, or None. It is not
    called if the connection is lost or times out first."""

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Take the head; names are lower case."""

    def chunk(self, data: bytes) -> None:
        """Take part of the decoded body, as the network happens to split it."""

    def end(self) -> str | None: ...


Read = Callable[[TimedExchange], AnswerReader]


class StatusReader:
    """Judges an answer by its status: 2xx is good. Also records `Server-Timing`."""

    def __init__(self, exchange: TimedExchange, causes: Causes) -> None:
        self._exchange = exchange
        self._causes = causes
        self._kept = bytearray()
        self._status = 0

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        timing = headers.get(b"server-timing")
        if timing is not None:
            self._exchange.phases = server_timing(timing)

    def chunk(self, data: bytes) -> None:
        if not 200 <= self._status < 300 and len(self._kept) < MAX_KEPT_BYTES:
            self._kept += data

    def end(self) -> str | None:
        return None if 200 <= self._status < 300 else self._cause()

    def _cause(self) -> str:
        return self._causes.of(self._status, bytes(self._kept))


class ClientConnection(asyncio.Protocol):
    """One socket: idle, or with one exchange in flight. It calls the client's `release` when it can
    take the next exchange, and `lost` when it never can again."""

    def __init__(self, client: HttpClient) -> None:
        self.exchange: TimedExchange | None = None
        self._now = client.now
        self._idle_since = client.now()
        self._client = client
        self._known = client.known_heads
        self._transport: asyncio.Transport
        self._write: Callable[[bytes], None]
        self._is_gone = False
        # Bytes left of a body that is only counted; 0 before an answer; or _PARSING.
        self._left = 0
        # State of the answer being parsed.
        self._parser = httptools.HttpResponseParser(self)
        self._reader: AnswerReader | None = None
        self._first_data = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = self._status = 0
        self._keeps_alive = self._ends_with_connection = False
        self._is_complete = self._has_excess = False

    def start(self, exchange: TimedExchange) -> None:
        """Send an exchange; the connection must be idle."""
        self.exchange = exchange
        exchange.sent = self._now()
        self._write(exchange.item)

    def fail(self, text: str) -> None:
        """Fail the exchange in flight, if any, and drop the connection."""
        exchange, self.exchange = self.exchange, None
        self._reader = None
        self._is_gone = True
        self._transport.abort()
        self._client.lost(self)
        if exchange is not None:
            exchange.end(self._now(), text)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._write = self._transport.write
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_gone:
            return
        exchange = self.exchange
        if exchange is not None and self._left == 0 and exchange.sent - self._idle_since > STALE_S:
            self.exchange = None
            self._client.take_back(exchange)
        self.fail(CUT if exchange is not None and exchange.stream is not None else LOST)

    def eof_received(self) -> None:
        if self._left == _PARSING and self._ends_with_connection:
            self._complete()
        else:
            self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.fail("")  # Data without a request.
            return
        left = self._left
        if left == 0:
            end = data.find(b"\r\n\r\n") + 4
            length = self._known.get(data[:end])
            if length is None:
                self._begin(data)
                return
            left = end + length
        elif left == _PARSING:
            self._parse(data)
            return
        left -= len(data)
        if left > 0:
            self._left = left
            return
        exchange.done = self._idle_since = self._now()
        self._left = 0
        self.exchange = None
        if left == 0:
            self._client.release(self)
        else:
            self._drop()
        exchange.finish(exchange)

    def _begin(self, data: bytes) -> None:
        """Begin an answer that has to be parsed."""
        self._left = _PARSING
        self._first_data = data
        self._headers = {}
        self._head_bytes = 0
        self._ends_with_connection = self._is_complete = self._has_excess = False
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        if self._reader is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # A bug in a reader: report it as one, not as the server's fault.
            self.fail(f"internal error: {error.__context__!r}")
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._is_complete:
                self.fail("the answer is not HTTP/1.1")
                return
            self._has_excess = True
        if self._is_complete:
            self._complete()
        elif self._reader is None and self._head_bytes > MAX_HEAD_BYTES:
            self.fail(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._has_excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # Ignore trailers of a chunked body.
        if self._reader is None:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
        if status < 200 or self._is_complete:
            return
        assert self.exchange is not None
        headers = self._headers
        self._status = status
        self._keeps_alive = self._parser.should_keep_alive()
        has_length = not headers.keys().isdisjoint((b"content-length", b"transfer-encoding"))
        self._ends_with_connection = not has_length and status not in (204, 304)
        self._reader = self._client.read(self.exchange)
        self._reader.head(status, headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None and not self._is_complete:
            self._reader.chunk(data)

    def on_message_complete(self) -> None:
        # "100 Continue" and other interim answers have no reader.
        if self._reader is not None:
            self._is_complete = True

    def _complete(self) -> None:
        exchange, reader = self.exchange, self._reader
        assert exchange is not None and reader is not None
        exchange.done = self._idle_since = self._now()
        exchange.failure = reader.end()
        self.exchange = self._reader = None
        self._left = 0
        if self._has_excess or not self._keeps_alive:
            self._drop()
        else:
            self._remember()
            self._client.release(self)
        exchange.finish(exchange)

    def _remember(self) -> None:
        """Remember a good answer's head with its length: the next such answer is not parsed."""
        data, headers = self._first_data, self._headers
        end = data.find(b"\r\n\r\n") + 4
        self._first_data = b""
        if (
            self._client.remembers_heads
            and 4 <= end <= MAX_KNOWN_HEAD_BYTES
            # Not an interim answer that came before.
            and data.startswith(b"HTTP/1.1 %d " % self._status)
            and 200 <= self._status < 300
            and self._status != 204
            and b"content-length" in headers
            and b"server-timing" not in headers
        ):
            if len(self._known) >= MAX_KNOWN_HEADS:
                self._known.clear()
            self._known[data[:end]] = int(headers[b"content-length"])

    def _drop(self) -> None:
        """Close an idle connection for good."""
        self._is_gone = True
        self._transport.close()
        self._client.lost(self)
