"""An HTTP/1.1 client for load: one request under way per connection, connections on demand.

A request is bytes that are ready to write; its answer goes to the exchange. A good answer whose
head was seen before is counted, not parsed, and nobody keeps its body; everything else goes through
httptools, to a `Reader`. Knows nothing of models. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import httptools

from penstock.benchmark.exchange import Exchange
from penstock.benchmark.targets.http_messages import Answer, Causes, Url, server_timing
from penstock.errors import ConfigError

SWEEP_S = 1.0
# A connection that was idle for so long may have been given up by its server while the next request
# was on its way; if nothing of an answer came, the request is sent again on another one.
STALE_S = 1.0
MAX_HEAD_BYTES = 65_536
# Of an answer that is an error.
MAX_KEPT_BYTES = 65_536
MAX_ANSWER_BYTES = 64 << 20
MAX_KNOWN_HEADS = 256
MAX_KNOWN_HEAD_BYTES = 1024
# Connections that are made at the same time: fewer than a server lets wait to be accepted.
MAX_OPENING = 64
ASK_TIMEOUT_S = 10.0
CANCELLED = "cancelled"
LOST = "connection lost"

_PARSING = -1


class NoAnswer(Exception):
    """Why there is none, in words, as an exchange says it."""


class Reader(Protocol):
    """Makes something of one answer while it comes. What `end` returns is why it is no good answer,
    if so. When the connection is lost or the time is up before, `end` is not called."""

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Names are lower case."""
        ...

    def chunk(self, data: bytes) -> None:
        """Part of the decoded body, as the network happens to cut it."""
        ...

    def end(self) -> str | None: ...


Read = Callable[[Exchange], Reader]


class StatusReader:
    """Judges an answer by its status: 2xx is good. Takes along what `Server-Timing` says."""

    __slots__ = ("_causes", "_exchange", "_kept", "_status")

    def __init__(self, exchange: Exchange, causes: Causes) -> None:
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
        if 200 <= self._status < 300:
            return None
        return self._causes.of(self._status, bytes(self._kept))


class Connection(asyncio.Protocol):
    """One socket: idle, or with an exchange under way. Its client hears `release` when it can take
    the next exchange and `lost` when it never will."""

    def __init__(self, client: HttpClient) -> None:
        self.exchange: Exchange | None = None
        self._now = client.now
        self._idle_since = client.now()
        self._client = client
        self._known = client.known_heads
        self._transport: asyncio.Transport | None = None
        self._write: Callable[[bytes], None] = _not_connected
        self._is_gone = False
        # Bytes left of a body that is only counted; 0 before an answer; or _PARSING.
        self._left = 0
        # The answer that is parsed.
        self._parser = httptools.HttpResponseParser(self)
        self._reader: Reader | None = None
        self._first_data = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._status = 0
        self._keeps_alive = False
        self._ends_with_connection = False
        self._is_complete = False
        self._has_excess = False

    def start(self, exchange: Exchange) -> None:
        """Only while idle."""
        self.exchange = exchange
        exchange.sent = self._now()
        self._write(exchange.item)

    def fail(self, text: str) -> None:
        """The exchange under way, if there is one, has failed; the connection is of no use."""
        exchange, self.exchange = self.exchange, None
        self._reader = None
        self._is_gone = True
        if self._transport is not None:
            self._transport.abort()
        self._client.lost(self)
        if exchange is not None:
            self._client.end(exchange, text)

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
        self.fail(LOST)

    def eof_received(self) -> None:
        if self._left == _PARSING and self._ends_with_connection:
            self._complete()
        else:
            self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.fail("")  # Nobody asked.
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

    # An answer that has to be parsed.

    def _begin(self, data: bytes) -> None:
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
            # A reader's bug: told as such, and not as the server's fault.
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
        # Those at the end of a chunked body do not count.
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
        self._ends_with_connection = (
            b"content-length" not in headers
            and b"transfer-encoding" not in headers
            and status not in (204, 304)
        )
        self._reader = self._client.read(self.exchange)
        self._reader.head(status, headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None and not self._is_complete:
            self._reader.chunk(data)

    def on_message_complete(self) -> None:
        # "100 Continue" and its like have no reader.
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
        """The next good answer with this head, which says how long it is, need not be parsed."""
        data, headers = self._first_data, self._headers
        end = data.find(b"\r\n\r\n") + 4
        self._first_data = b""
        if (
            self._client.remembers_heads
            and 4 <= end <= MAX_KNOWN_HEAD_BYTES
            # Not what came before the answer proper.
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
        """Nothing is under way, and nothing will be."""
        self._is_gone = True
        if self._transport is not None:
            self._transport.close()
        self._client.lost(self)


def _not_connected(data: bytes) -> None:
    raise AssertionError("an exchange was given to a connection that is not made")


class HttpClient:
    """Connections to one server. `read` makes the reader of each answer; without it answers are
    judged by their status, and good ones are hardly looked at.

    Who finds no idle connection waits. For each that waits a connection is being made, as long as
    there are fewer than `max_connections`; a failed attempt fails the one that has waited longest.
    """

    def __init__(
        self,
        url: Url,
        timeout_s: float,
        max_connections: int,
        read: Read | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = now
        self.read: Read = read or self._read_status
        self.remembers_heads = read is None
        # Heads of good answers, and the length of the body that follows.
        self.known_heads: dict[bytes, int] = {}
        # Exchanges that found all connections busy and no more allowed.
        self.num_waited = 0
        self._url = url
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._host = url.host
        self._tls = ssl.create_default_context() if url.is_tls else None
        self._causes = Causes()
        self._connections: set[Connection] = set()
        self._idle: list[Connection] = []
        self._waiting: deque[Exchange] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def open(self, num_connections: int) -> None:
        """So many connections, if that many are allowed; ConfigError when they cannot be made."""
        missing = min(num_connections, self._max_connections) - len(self._connections)
        try:
            for start in range(0, missing, MAX_OPENING):
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(MAX_OPENING, missing - start)):
                        group.create_task(self._connect())
        except* OSError as errors:
            text = connect_failure(_first(errors), self._timeout_s)
            problem = f"{self._url.text}: the server cannot be reached: {text}"
            if self._connections:
                problem += f", after {len(self._connections)} connections"
            raise ConfigError([problem]) from None

    def send(self, exchange: Exchange) -> None:
        if self._idle:
            self._idle.pop().start(exchange)
        else:
            self._wait(exchange)

    async def close(self) -> None:
        """What is under way ends as cancelled."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._idle.clear()
        while self._waiting:
            self.end(self._waiting.popleft(), CANCELLED)
        for connection in list(self._connections):
            connection.fail(CANCELLED)
        # The loop closes the sockets in its next turn.
        await asyncio.sleep(0)

    def sweep(self) -> None:
        """Give up what has taken too long. Called about once a second, while anything is open."""
        limit = self.now() - self._timeout_s
        text = f"no answer within {self._timeout_s:g} s"
        late = [
            connection
            for connection in self._connections
            if connection.exchange is not None and connection.exchange.sent < limit
        ]
        for connection in late:
            connection.fail(text)
        while self._waiting and self._waiting[0].sent < limit:
            self.end(self._waiting.popleft(), text)

    # Called by connections.

    def release(self, connection: Connection) -> None:
        if self._waiting:
            connection.start(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def take_back(self, exchange: Exchange) -> None:
        """It reached nobody, and is the next to be sent."""
        self._waiting.appendleft(exchange)

    def end(self, exchange: Exchange, failure: str) -> None:
        exchange.done = self.now()
        exchange.failure = failure
        exchange.finish(exchange)

    # Connections.

    def _wait(self, exchange: Exchange) -> None:
        # For the sweep, until it really leaves.
        exchange.sent = self.now()
        if self._is_closed:
            # Not at once: whoever hears of it may send the next one.
            asyncio.get_running_loop().call_soon(self.end, exchange, CANCELLED)
            return
        self._waiting.append(exchange)
        if self._num_allowed <= 0:
            self.num_waited += 1
        self._grow()

    @property
    def _num_allowed(self) -> int:
        return self._max_connections - len(self._connections) - len(self._connecting)

    def _grow(self) -> None:
        while (
            len(self._connecting) < len(self._waiting)
            and self._num_allowed > 0
            and not self._is_closed
        ):
            task = asyncio.get_running_loop().create_task(self._connect_for_waiting())
            self._connecting.add(task)

    async def _connect_for_waiting(self) -> None:
        failure = None
        try:
            await self._connect()
        except OSError as error:
            failure = connect_failure(error, self._timeout_s)
        finally:
            self._connecting.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        if failure is not None and self._waiting:
            self.end(self._waiting.popleft(), failure)
        self._grow()

    async def _connect(self) -> None:
        """OSError when there is no connection."""
        self._start_timer()
        async with asyncio.timeout(self._timeout_s):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self),
                self._host,
                self._url.port,
                ssl=self._tls,
                server_hostname=self._url.host if self._tls is not None else None,
            )
        if self._is_closed or transport.is_closing():
            transport.abort()
            raise ConnectionResetError
        # The name is looked up once: later connections go to the address that answered.
        self._host = transport.get_extra_info("peername")[0]
        self._connections.add(connection)
        self.release(connection)

    def _start_timer(self) -> None:
        if self._timer is None:
            delay_s = min(SWEEP_S, self._timeout_s / 4)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._start_timer()
        self.sweep()

    def _read_status(self, exchange: Exchange) -> Reader:
        return StatusReader(exchange, self._causes)


def connect_failure(error: BaseException, timeout_s: float) -> str:
    """One spelling per cause."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return LOST
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return f"no connection within {timeout_s:g} s"
    text = getattr(error, "strerror", None) or str(error)
    return f"no connection: {text.lower()}"


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class _Keeper:
    """Keeps all of an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.body = bytearray()

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status, self.headers = status, headers

    def chunk(self, data: bytes) -> None:
        if len(self.body) <= MAX_ANSWER_BYTES:
            self.body += data

    def end(self) -> str | None:
        if len(self.body) > MAX_ANSWER_BYTES:
            return f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
        return None


async def ask(url: Url, message: bytes, timeout_s: float = ASK_TIMEOUT_S) -> Answer:
    """One question, on a connection of its own; NoAnswer in words."""
    keeper = _Keeper()
    client = HttpClient(url, timeout_s, 1, lambda _: keeper)
    done = asyncio.Event()
    exchange = Exchange(client.now(), message, lambda _: done.set())
    try:
        client.send(exchange)
        await done.wait()
    finally:
        await client.close()
    if exchange.failure is not None:
        raise NoAnswer(exchange.failure)
    return Answer(keeper.status, keeper.headers, bytes(keeper.body))
