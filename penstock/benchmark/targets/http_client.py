"""An HTTP/1.1 client for load: one request in flight per connection, connections on demand.

A request is bytes ready to write; the answer goes to the exchange, through an `AnswerReader` if one
is given. Lives on one event loop. `HttpTarget` adds what targets over HTTP share.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Counters, TargetSpec, http_messages
from penstock.benchmark.targets.http_connection import LOST, ClientConnection, Read, StatusReader
from penstock.benchmark.targets.http_messages import Causes, HttpAnswer, Url
from penstock.errors import ConfigError

SWEEP_S = 1.0
# Connections opened in parallel: fewer than a server's accept backlog.
MAX_OPENING = 64
ASK_TIMEOUT_S = 10.0
MAX_MODELS_TOLD = 20
CANCELLED = "cancelled"


class NoAnswer(Exception):
    """No answer came; the text says why, as `TimedExchange.failure` would."""


class HttpClient:
    """Connections to one server. `read` makes the reader of each answer; without it answers are
    judged by their status, and good ones are hardly parsed.

    An exchange that finds no idle connection is queued. Each queued exchange has a connection being
    opened for it, up to `max_connections` in all; a failed attempt fails the oldest queued
    exchange.
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
        self._causes = Causes()
        self.read: Read = read or (lambda exchange: StatusReader(exchange, self._causes))
        self.remembers_heads = read is None
        # Heads of good answers, with the length of the body that follows.
        self.known_heads: dict[bytes, int] = {}
        # Exchanges that found all connections busy and no more allowed.
        self.num_waited = 0
        self._url = url
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._host = url.host
        self._tls = ssl.create_default_context() if url.is_tls else None
        self._connections: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []
        self._waiting: deque[TimedExchange] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def open(self, num_connections: int) -> None:
        """Open up to `num_connections`, at most the maximum; ConfigError if it fails. Undoes
        `cancel` and `close`."""
        self._is_closed = False
        missing = min(num_connections, self._max_connections) - len(self._connections)
        try:
            for start in range(0, missing, MAX_OPENING):
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(MAX_OPENING, missing - start)):
                        group.create_task(self._connect())
        except* OSError as errors:
            text = connect_failure(errors.exceptions[0], self._timeout_s)
            problem = f"{self._url.text}: the server cannot be reached: {text}"
            if self._connections:
                problem += f", after {len(self._connections)} connections"
            raise ConfigError([problem]) from None

    def send(self, exchange: TimedExchange) -> None:
        if self._idle:
            self._idle.pop().start(exchange)
        else:
            self._wait(exchange)

    async def cancel(self) -> None:
        """Close all connections; exchanges in flight fail as cancelled."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self._idle.clear()
        while self._waiting:
            self._waiting.popleft().end(self.now(), CANCELLED)
        for connection in list(self._connections):
            connection.fail(CANCELLED)
        # The loop closes the sockets in its next iteration.
        await asyncio.sleep(0)

    async def close(self) -> None:
        await self.cancel()

    def sweep(self) -> None:
        """Fail timed-out exchanges. Called about once a second while connections are open."""
        limit = self.now() - self._timeout_s
        text = f"no answer within {self._timeout_s:g} s"
        for connection in list(self._connections):
            if connection.exchange is not None and connection.exchange.sent < limit:
                connection.fail(text)
        while self._waiting and self._waiting[0].sent < limit:
            self._waiting.popleft().end(self.now(), text)

    # Called by connections.

    def release(self, connection: ClientConnection) -> None:
        if self._waiting:
            connection.start(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def take_back(self, exchange: TimedExchange) -> None:
        """Put an exchange that never reached the server back at the front of the queue."""
        self._waiting.appendleft(exchange)

    def _wait(self, exchange: TimedExchange) -> None:
        # For the timeout; set again when it is sent.
        exchange.sent = self.now()
        if self._is_closed:
            # Deferred, since `finish` may send the next exchange.
            asyncio.get_running_loop().call_soon(exchange.end, exchange.sent, CANCELLED)
            return
        self._waiting.append(exchange)
        if self._num_allowed <= 0:
            self.num_waited += 1
        self._grow()

    @property
    def _num_allowed(self) -> int:
        return self._max_connections - len(self._connections) - len(self._connecting)

    def _grow(self) -> None:
        if self._is_closed:
            return
        while self._num_allowed > 0 and len(self._connecting) < len(self._waiting):
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
            self._waiting.popleft().end(self.now(), failure)
        self._grow()

    async def _connect(self) -> None:
        """Open a connection; OSError when that fails."""
        self._start_timer()
        name = self._url.host if self._tls is not None else None
        place = (self._host, self._url.port)
        async with asyncio.timeout(self._timeout_s):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: ClientConnection(self), *place, ssl=self._tls, server_hostname=name
            )
        if self._is_closed or transport.is_closing():
            transport.abort()
            raise ConnectionResetError
        # Resolve the name once: later connections go to the address that answered.
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


def connect_failure(error: BaseException, timeout_s: float) -> str:
    """Describe why connecting failed, in the same words for the same cause."""
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
    if getattr(error, "errno", None) == errno.EMFILE:
        return "no connection: too many open files here (raise ulimit -n)"
    return f"no connection: {(getattr(error, 'strerror', None) or str(error)).lower()}"


async def ask(url: Url, message: bytes, timeout_s: float = ASK_TIMEOUT_S) -> HttpAnswer:
    """Send one request on its own connection; NoAnswer if it fails."""
    answer = HttpAnswer()
    client = HttpClient(url, timeout_s, 1, lambda _: answer)
    done = asyncio.Event()
    exchange = TimedExchange(client.now(), message, lambda _: done.set())
    try:
        client.send(exchange)
        await done.wait()
    finally:
        await client.close()
    if exchange.failure is not None:
        raise NoAnswer(exchange.failure)
    return answer


class HttpTarget(HttpClient):
    """Headers and questions to the server; a target adds `describe` and `encode`."""

    load_s: float | None = None

    def __init__(self, spec: TargetSpec, url: Url, read: Read | None = None) -> None:
        super().__init__(url, spec.timeout_s, spec.max_connections, read)
        self._spec = spec
        self._headers = dict(spec.headers)
        if spec.api_key and "authorization" not in map(str.lower, spec.headers):
            self._headers["Authorization"] = f"Bearer {spec.api_key}"
        http_messages.check_headers(self._headers)

    async def counters(self) -> Counters | None:
        return None

    async def _ask(
        self, path: str, body: bytes | None = None, timeout_s: float = ASK_TIMEOUT_S
    ) -> HttpAnswer:
        """Ask the server, by POST if there is a body; ConfigError if it does not answer, or
        requires a key."""
        origin, method = self._url.origin, "GET" if body is None else "POST"
        message = http_messages.request_bytes(self._url, method, path, self._headers, body or b"")
        try:
            answer = await ask(self._url, message, timeout_s)
        except NoAnswer as error:
            raise ConfigError([f"{origin}: the server cannot be reached: {error}"]) from None
        if answer.status in (401, 403):
            text = f"{answer.error_text}; give a key by --api-key or PENSTOCK_API_KEY"
            raise ConfigError([f"{origin}: {text}"])
        return answer


def list_models(names: Iterable[str], otherwise: str) -> str:
    """List the models of a server, the first ones if there are many."""
    found = sorted(set(names))
    listed = ", ".join(found[:MAX_MODELS_TOLD]) or otherwise
    return listed + (", …" if len(found) > MAX_MODELS_TOLD else "")
