"""ASGI in front of the HTTP handler: scopes and events in, exchanges out.

The handler, its router and its codecs are those of the server; only the connection is another: the
host application reads and writes the socket. Knows no models and no framework. Lives on the event
loop of the host.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, cast
from urllib.parse import quote

from penstock.config import HttpLimits
from penstock.errors import SHUTTING_DOWN, NotReady
from penstock.protocols.answer_sender import Keep
from penstock.protocols.http import SLOW_BODY_S, Exchange
from penstock.protocols.http_errors import reply_error
from penstock.protocols.http_reader import (
    LONG_BYTES,
    SCREEN_BYTES,
    LongBody,
    MessageHead,
    Rejection,
    add_header,
    body_refusal,
    check_path,
    normalize_path,
)
from penstock.protocols.v2_http import V2Http
from penstock.types import Buffer

# https://asgi.readthedocs.io/en/latest/specs/www.html, version 3.
Event = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client has disconnected before its message was complete."""


class AnswerCut(Exception):
    """An answer cannot be completed. The host closes the connection, so that the client notices."""


class AnswerEvents:
    """The answer to one message on its way to the host: the `Peer` of its exchange. Events wait as
    long as the host does not take them."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._is_cut = False
        self.is_complete = False
        self.num_unsent = 0

    def will_keep_alive(self, head: MessageHead) -> bool:
        """Always true: connections belong to the host."""
        return True

    def begin(self, status: int, headers: Headers) -> None:
        event = {"type": "http.response.start", "status": status, "headers": headers}
        self._events.append(event)

    def write(self, data: bytes) -> None:
        self._add(data, more_body=True)

    def finish(self, data: bytes, keep_alive: bool = True) -> None:
        self.is_complete = True
        self._add(data, more_body=False)

    def finish_long(self, parts: Sequence[Buffer], keep_alive: bool, keep: Keep | None) -> None:
        """Join the parts: an event holds bytes."""
        self.finish(b"".join(parts))

    def abort(self) -> None:
        self._is_cut = True
        self._changed.set()

    def _add(self, data: bytes, more_body: bool) -> None:
        self.num_unsent += len(data)
        event = {"type": "http.response.body", "body": data, "more_body": more_body}
        self._events.append(event)
        self._changed.set()

    async def events(self) -> AsyncIterator[Event]:
        """Yield events as they come, up to the last one. AnswerCut if the answer is aborted."""
        while True:
            while self._events and not self._is_cut:
                event = self._events.popleft()
                yield event
                self.num_unsent -= len(event.get("body", b""))
            if self._is_cut:
                raise AnswerCut("the answer is incomplete")
            if self.is_complete:
                return
            self._changed.clear()
            await self._changed.wait()

    async def send_all(self, send: Send) -> None:
        async for event in self.events():
            await send(event)


class AsgiExchange(Exchange):
    """An exchange whose answer leaves as events instead of bytes of HTTP/1.1."""

    __slots__ = ("_answer",)

    def __init__(
        self, answer: AnswerEvents, head: MessageHead, body: Buffer, long: LongBody | None = None
    ) -> None:
        super().__init__(answer, head, body, time.monotonic(), long)
        self._answer = answer

    def reply(
        self, status: int, headers: bytes, parts: Sequence[Buffer], keep: Keep | None = None
    ) -> None:
        if self.is_finished:
            return
        length = sum(map(len, parts))
        size = [] if status == 204 else [(b"content-length", b"%d" % length)]
        self._answer.begin(status, [*split_headers(headers), *size])
        self.pass_on(b"" if self.head.method == b"HEAD" else b"".join(parts), True)

    def start_stream(self, status: int, headers: bytes) -> None:
        self.is_streaming = True
        # The body has been read; its memory may be reused.
        self.body = b""
        self._answer.begin(status, list(split_headers(headers)))

    def stream(self, part: Buffer) -> None:
        if part and self.head.method != b"HEAD":
            self.pass_part(bytes(part))

    def end_stream(self) -> None:
        self.pass_on(b"", True)


class AsgiHttp:
    """Answers the `http` scopes of an ASGI application with the handler of the HTTP server."""

    def __init__(self, v2: V2Http, limits: HttpLimits) -> None:
        self._v2 = v2
        self._limits = limits
        # Messages that have no complete answer yet.
        self.num_running = 0
        self._exchanges: set[AsgiExchange] = set()

    def close(self) -> None:
        """Answer whatever has no answer yet, when its handlers are gone: 503, or a cut stream."""
        for exchange in list(self._exchanges):
            if exchange.is_finished:
                continue
            if exchange.is_streaming:
                exchange.abort()
            else:
                reply_error(exchange, NotReady(SHUTTING_DOWN))

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one message. A client that leaves cancels its request, as does cancelling this
        coroutine."""
        self.num_running += 1
        try:
            await self._answer(scope, receive, send)
        except ClientGone:
            pass
        finally:
            self.num_running -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        answer = AnswerEvents()
        long: LongBody | None = None
        try:
            head = read_head(scope)
            body, long = await self._read_body(head, receive)
        except Rejection as refusal:
            assert refusal.head is not None
            self._v2.rejected(refusal, began)
            exchange = AsgiExchange(answer, refusal.head, b"")
            exchange.reply_error(refusal.status, str(refusal))
        else:
            exchange = AsgiExchange(answer, head, body, long)
            handle(self._v2, exchange)
        self._exchanges.add(exchange)
        try:
            await exchange_answer(exchange, answer, receive, send)
        finally:
            self._exchanges.discard(exchange)

    async def _read_body(
        self, head: MessageHead, receive: Receive
    ) -> tuple[Buffer, LongBody | None]:
        """Return the body, or the memory of the model that it was received into. A message that the
        gate refuses, and that has a long body, is not read."""
        length = head.content_length
        if length is not None and length > self._limits.max_body_bytes:
            raise body_refusal(self._limits, head)
        if (length is None or length > SCREEN_BYTES) and not self._v2.screen(head):
            return b"", None
        long = self._v2.prepare(head) if length is not None and length > LONG_BYTES else None
        if long is None:
            return await self._collect(head, receive), None
        slow = asyncio.get_running_loop().call_later(SLOW_BODY_S, long.move_out)
        try:
            await self._fill(head, long, receive)
        except BaseException:
            long.drop()
            raise
        finally:
            slow.cancel()
        whole = long.buffer
        return (b"", long) if whole is None else (whole, None)

    async def _collect(self, head: MessageHead, receive: Receive) -> Buffer:
        parts: list[bytes] = []
        num_bytes, has_more = 0, True
        while has_more:
            part, has_more = await next_part(receive)
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > self._limits.max_body_bytes:
                raise body_refusal(self._limits, head)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _fill(self, head: MessageHead, long: LongBody, receive: Receive) -> None:
        """Copy the parts of a body into its memory. Rejection if it is not as long as announced."""
        assert head.content_length is not None
        has_more = True
        while has_more:
            part, has_more = await next_part(receive)
            view = memoryview(part)
            if long.num_received + len(view) > head.content_length:
                raise Rejection(400, "the body is longer than Content-Length", head)
            while len(view):
                room = long.room()
                piece = view[: len(room)]
                room[: len(piece)] = piece
                view = view[len(piece) :]
                long.fill(len(piece))
        if long.num_received < head.content_length:
            raise Rejection(400, "the body is shorter than Content-Length", head)


def handle(v2: V2Http, exchange: AsgiExchange) -> None:
    """Let the handler answer, at once or later."""
    long = exchange.long
    try:
        v2.handle(exchange)
    except Exception:  # Keep serving.
        exchange.reply_bug()
    if long is not None:
        long.drop()
        exchange.long = None


async def exchange_answer(
    exchange: AsgiExchange, answer: AnswerEvents, receive: Receive, send: Send
) -> None:
    """Send the answer of an exchange; abandon it if the client leaves first."""
    watching: asyncio.Task[None] | None = None
    if not answer.is_complete:
        watching = asyncio.create_task(_leave_with_client(exchange, answer, receive))
    try:
        await answer.send_all(send)
    except OSError as error:
        # The host says so that the client has disconnected.
        raise ClientGone from error
    except AnswerCut:
        if watching is not None and watching.done():
            raise ClientGone from None
        raise
    finally:
        if watching is not None:
            watching.cancel()
        if not answer.is_complete:
            leave(exchange)


async def _leave_with_client(
    exchange: AsgiExchange, answer: AnswerEvents, receive: Receive
) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if not answer.is_complete:
        leave(exchange)
        answer.abort()


def leave(exchange: AsgiExchange) -> None:
    """Abandon an exchange, once."""
    exchange.leave()
    exchange.abandon = None


async def next_part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part of a body, and whether more follows."""
    event = await receive()
    if event["type"] == "http.disconnect":
        raise ClientGone
    return event.get("body", b""), event.get("more_body", False)


def read_head(scope: Scope) -> MessageHead:
    """Return the head of a message; Rejection, with the head, if it is ambiguous."""
    headers: dict[bytes, bytes] = {}
    path, query = path_in_app(scope), cast(bytes, scope.get("query_string", b""))
    method = str(scope["method"]).encode("latin-1")
    head = MessageHead(method, path + b"?" + query if query else path, headers)
    for name, value in cast(Iterable[tuple[bytes, bytes]], scope["headers"]):
        try:
            add_header(headers, bytes(name).lower(), bytes(value))
        except Rejection as refusal:
            refusal.head = head
            raise
    if text := check_path(head.path):
        raise Rejection(400, text, head)
    length = headers.get(b"content-length")
    if length is not None:
        if not length.isdigit():
            raise Rejection(400, "Content-Length is not a number", head)
        head.content_length = int(length)
    elif b"transfer-encoding" not in headers and scope.get("http_version", "1.1") in ("1.0", "1.1"):
        head.content_length = 0
    return head


def path_in_app(scope: Scope) -> bytes:
    """Return the percent-encoded path below the place at which the application is mounted. Hosts
    differ in whether `path` still begins with `root_path`."""
    raw = cast(bytes | None, scope.get("raw_path"))
    path = quote(str(scope["path"])).encode() if raw is None else raw.partition(b"?")[0]
    path = normalize_path(path)
    root = normalize_path(quote(str(scope.get("root_path", ""))).encode()).rstrip(b"/")
    if root and (path == root or path.startswith(root + b"/")):
        path = path[len(root) :]
    return path or b"/"


@lru_cache(maxsize=256)
def split_headers(block: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a block of lines, as handlers write them."""
    lines = (line.partition(b": ") for line in block.split(b"\r\n") if line)
    return tuple((name.lower(), value) for name, _, value in lines)
