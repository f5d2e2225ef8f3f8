"""One HTTP/1.1 connection: limits, time-outs, keep-alive, cancellation.

It hands each message that `http_reader` has read to a handler as an `Exchange`; the handler answers
it, at once or later, on the same event loop. It knows nothing of models. Each connection runs one
exchange at a time; pipelined messages are queued.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol, cast

from penstock.errors import SHUTTING_DOWN
from penstock.protocols.answer_sender import AnswerSender, Keep
from penstock.protocols.body_receiver import BodyReceiver
from penstock.protocols.http_reader import (
    LONG_BYTES,
    LongBody,
    Message,
    MessageHead,
    MessageReader,
    Rejection,
)
from penstock.types import Buffer
from penstock.wire.statuses import encode_error

if TYPE_CHECKING:
    from penstock.protocols.http_server import HttpServer

log = logging.getLogger("penstock.http")

MAX_PIPELINED = 16
# Longer answers are not joined.
LONG_ANSWER_BYTES = 16 * 1024
# Unsent bytes of a stream; a client that reads too slowly is disconnected.
MAX_UNSENT_BYTES = 8 << 20
# A body that takes longer does not hold shared memory.
SLOW_BODY_S = 0.5
# Clients send the same head again and again; its parse is cached.
MAX_KNOWN_HEADS = 1024
# A refused client may go on sending for this long: resetting the connection would lose the answer.
LINGER_S = 10.0
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
JSON = b"Content-Type: application/json\r\n"


class Peer(Protocol):
    """The sender of a message: a connection, or the shard that holds it."""

    @property
    def num_unsent(self) -> int:
        """Bytes that the client has not read yet."""

    def will_keep_alive(self, head: MessageHead) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def finish(self, data: bytes, keep_alive: bool) -> None: ...
    def finish_long(self, parts: Sequence[Buffer], keep_alive: bool, keep: Keep | None) -> None: ...
    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Exchange:
    """One message and its answer. `abandon` is called if the client disconnects before it."""

    _connection: Peer
    head: MessageHead
    body: Buffer
    received: float
    # Set instead of `body` if the body does not lie in one piece. It is only valid until the
    # handler returns.
    long: LongBody | None = None
    # As `Request.caller`, where the handler sets it.
    caller: bytes = b""
    is_finished: bool = False
    is_streaming: bool = False
    abandon: Callable[[], object] | None = None

    def reply(
        self, status: int, headers: bytes, parts: Sequence[Buffer], keep: Keep | None = None
    ) -> None:
        """Send the whole answer. Buffers are copied before this returns, unless `keep` is called:
        then they are used until the function that it returned is called."""
        if self.is_finished:
            return
        length = 0
        for part in parts:
            length += len(part)
        head, keeps = self.head, self._connection.will_keep_alive(self.head)
        if not keeps:
            headers += b"Connection: close\r\n"
        if head.method == b"HEAD":
            parts = ()
        line = _STATUS_LINES.get(status) or _unusual_line(status)
        if status == 204:
            start = b"%b%b\r\n" % (line, headers)
        else:
            start = b"%b%bContent-Length: %d\r\n\r\n" % (line, headers, length)
        self.is_finished = True
        # Also breaks the reference cycle exchange, request, sink, which only the GC would free.
        self.abandon = None
        if length < LONG_ANSWER_BYTES or not parts:
            self._connection.finish(b"".join((start, *parts)), keeps)
        else:
            self._connection.finish_long((start, *parts), keeps, keep)

    def reply_json(self, body: bytes) -> None:
        self.reply(200, JSON, (body,))

    def pass_on(self, data: bytes, keep_alive: bool) -> None:
        """Send an answer with its head, or the end of one; once it is finished, do nothing."""
        if not self.is_finished:
            self.is_finished = True
            self.abandon = None
            self._connection.finish(data, keep_alive)

    def pass_part(self, data: bytes) -> None:
        """Send the next part of such an answer. A client that does not read is disconnected."""
        if self.is_finished:
            return
        if self._connection.num_unsent > MAX_UNSENT_BYTES:
            # The handler is notified when the connection closes.
            self.abort()
        else:
            self._connection.write(data)

    @property
    def num_unsent(self) -> int:
        """Bytes of a stream that the client has not read yet; 0 if a shard has the connection."""
        return self._connection.num_unsent

    def leave(self) -> None:
        self.is_finished = True
        if self.abandon is not None:
            self.abandon()

    def reply_error(self, status: int, text: str, headers: bytes = b"") -> None:
        self.reply(status, JSON + headers, (encode_error(text),))

    def reply_bug(self) -> None:
        """Log the exception that is being handled; answer 500, or cut a stream."""
        log.exception("while handling %r", self.head.path)
        if self.is_streaming:
            self.abort()
        else:
            self.reply_error(500, "internal error")

    def start_stream(self, status: int, headers: bytes) -> None:
        """Start an answer of unknown length; `stream` its parts, then `end_stream`."""
        self.is_streaming = True
        # The body has been read; its memory may be reused.
        self.body = b""
        close = b"" if self._keeps_after_stream() else b"Connection: close\r\n"
        coding = b"" if self.head.is_http_1_0 else b"Transfer-Encoding: chunked\r\n"
        line = _STATUS_LINES.get(status) or _unusual_line(status)
        self._connection.write(line + headers + close + coding + b"\r\n")

    def stream(self, part: Buffer) -> None:
        if not part or self.is_finished or self.head.method == b"HEAD":
            return
        if self.head.is_http_1_0:
            self.pass_part(bytes(part))
        else:
            self.pass_part(b"%x\r\n%b\r\n" % (len(part), bytes(part)))

    def end_stream(self) -> None:
        has_end = self.head.method != b"HEAD" and not self.head.is_http_1_0
        self.pass_on(b"0\r\n\r\n" if has_end else b"", self._keeps_after_stream())

    def _keeps_after_stream(self) -> bool:
        """Whether the connection survives a stream: HTTP/1.0 ends one by closing it."""
        return self._connection.will_keep_alive(self.head) and not self.head.is_http_1_0

    def abort(self) -> None:
        """Cut the connection, so that the client notices that the answer is incomplete."""
        self.is_finished = True
        self._connection.abort()


Handler = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """One client: receiving a head or a body, or idle; at most one exchange runs."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._lifecycle = server.lifecycle
        self._known_heads = server.known_heads
        limits, screen = server.limits, server.screen
        receive, expect_continue = self._enqueue, self._expect_continue
        self._reader = MessageReader(limits, screen, receive, expect_continue, self._prepare)
        # Receives instead of this object, from the first long body on; never with TLS.
        self._receiver: BodyReceiver | None = None
        # Set before any other call.
        self._transport: asyncio.Transport
        self._running: Exchange | None = None
        self._waiting: deque[Message | Rejection] = deque()
        self._is_closing = False
        # The client was refused: further bytes are dropped.
        self._is_deaf = False
        self._is_paused = False
        self._owes_continue = False
        self._is_advancing = False
        self._num_written = self._num_sent = 0
        # Made for the first long answer, unless the connection uses TLS.
        self._sender: AnswerSender | None = None
        # Start of the current state, for the sweep.
        self.since = server.now()
        self.received = 0.0
        self.is_leaving = False
        # A streamed answer that had begun before.
        self._kept: Exchange | None = None
        self.write_blocked_since: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        if not self._server.add(self):
            transport.write(refusal(503, "too many connections"))
            self._is_closing = True
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._server.remove(self)
        self._waiting.clear()
        self._reader.close()
        # It refers back to this object.
        self._receiver = self._kept = None
        if self._sender is not None:
            self._sender.drop()
        exchange, self._running = self._running, None
        if exchange is not None:
            exchange.leave()

    def pause_writing(self) -> None:
        self.write_blocked_since = self._server.now()

    def resume_writing(self) -> None:
        self.write_blocked_since = None
        if self._sender is not None:
            self._sender.flush()

    def eof_received(self) -> bool:
        """Close, after all that is queued has been sent."""
        if self._sender is not None and self._sender.is_busy:
            self._close()
            return True
        return False

    def data_received(self, data: bytes) -> None:
        if self._is_closing or self._is_deaf:
            return
        self.received = self._server.now()
        if self._reader.at_boundary and self._running is None:
            end = data.find(b"\r\n\r\n") + 4
            known = self._known_heads.get(data[:end])
            if known is not None:
                num_body = len(data) - end
                if num_body == known.content_length and num_body <= LONG_BYTES:
                    self._start(known, data[end:])
                    return
                if self._begin_long(known, num_body):
                    self._parse(memoryview(data)[end:])
                    return
                if num_body == known.content_length:
                    self._start(known, memoryview(data)[end:])
                    return
            self._parse(data)
            if (head := self._reader.only_head(data, end)) is not None:
                if len(self._known_heads) >= MAX_KNOWN_HEADS:
                    self._known_heads.clear()
                self._known_heads[data[:end]] = head
        else:
            self._parse(data)

    def body_received(self, num_bytes: int) -> None:
        """Note that the long body received bytes."""
        self.received = self._server.now()
        self._reader.fill_long(num_bytes)

    def _prepare(self, head: MessageHead) -> LongBody | None:
        """Return memory for a long body; not for a pipelined one, which may wait for long."""
        if self._running is not None or self._waiting:
            return None
        return self._server.prepare(head)

    def _begin_long(self, head: MessageHead, num_given: int) -> bool:
        """Begin a message with a known head, if its body is long and not yet complete."""
        length = head.content_length
        if length is None or length <= LONG_BYTES or num_given > length:
            return False
        if not self._reader.begin_long(head):
            return False
        self.since = self.received
        self._receive_directly()
        return True

    def _parse(self, data: Buffer) -> None:
        if self._reader.at_boundary:
            self.since = self.received
        refusal = self._reader.feed(data)
        if self._reader.long is not None:
            self._receive_directly()
        if refusal is not None:
            self._reject(refusal)
        elif len(self._waiting) > MAX_PIPELINED:
            self._is_paused = True
            self._transport.pause_reading()

    def _receive_directly(self) -> None:
        """Receive bodies into their memory from now on, unless they have to be decrypted."""
        if self._receiver is None and self._transport.get_extra_info("sslcontext") is None:
            head_buffer = self._server.head_buffer
            self._receiver = BodyReceiver(self._transport, self, self._reader, head_buffer)
        if self._receiver is not None:
            self._receiver.start()

    def leave(self) -> None:
        """Close after the next answer, unless another request has already been received."""
        self.is_leaving = True
        if self._running is not None and self._running.is_streaming:
            self._kept = self._running

    def will_keep_alive(self, head: MessageHead) -> bool:
        if self.is_leaving and self._can_leave():
            return False
        return head.keep_alive and not self._lifecycle.is_draining

    def _can_leave(self) -> bool:
        """Whether the running answer may be the last one: the client reads so in its head."""
        is_last = not self._waiting and self._reader.at_boundary
        return is_last and self._running is not self._kept

    @property
    def num_unsent(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        return size if self._sender is None else size + self._sender.num_unsent

    def write(self, data: bytes) -> None:
        if not self._is_closing:
            self._num_written += len(data)
            if self._sender is not None and self._sender.is_busy:
                self._sender.append(data)
            else:
                self._transport.write(data)

    def finish(self, data: bytes, keep_alive: bool) -> None:
        """Write the last bytes of the running exchange."""
        self.write(data)
        self._running = None
        self.since = self._server.now()
        if not keep_alive:
            self._close()
        elif self._waiting:
            if not self._is_advancing:
                self._next()
        elif self._owes_continue:
            self._continue()

    def finish_long(self, parts: Sequence[Buffer], keep_alive: bool, keep: Keep | None) -> None:
        """Write the whole answer of the running exchange from where it lies. TLS joins it."""
        if self._sender is None and self._transport.get_extra_info("sslcontext") is None:
            self._sender = AnswerSender(self._transport)
        if self._sender is None:
            self.finish(b"".join(parts), keep_alive)
            return
        if not self._is_closing:
            self._num_written += sum(map(len, parts))
            self._sender.send(parts, keep)
        self.finish(b"", keep_alive)

    def _expect_continue(self) -> None:
        """Send 100 Continue once the messages before this one are answered."""
        self._owes_continue = True
        self._continue()

    def _continue(self) -> None:
        if self._owes_continue and self._running is None and not self._waiting:
            self._owes_continue = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def close(self) -> None:
        """Close for the server: an incomplete message is refused."""
        if self.received and self.is_receiving and not self._is_deaf and self._running is None:
            self._reject(Rejection(503, SHUTTING_DOWN))
        else:
            self._close()

    def _close(self) -> None:
        """Close after all written data is sent; after a refusal, once the client has stopped."""
        is_first, self._is_closing = not self._is_closing, True
        self._waiting.clear()
        if self._sender is not None and self._sender.is_busy:
            self._sender.when_sent = partial(self._close_now, is_first)
        else:
            self._close_now(is_first)

    def _close_now(self, is_first: bool) -> None:
        if is_first and self._is_deaf:
            if self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def sweep(self, now: float) -> None:
        """Enforce time-outs; called about once a second."""
        if self._is_write_blocked(now):
            self.abort()
        elif self._is_closing:
            if self._is_deaf and now - self.since > LINGER_S:
                self.abort()
        elif self._running is not None:
            return
        elif self._reader.at_boundary:
            if now - self.since > self._limits.keep_alive_s:
                self._close()
        elif (late := self._reader.find_late(now - self.since, now - self.received)) is not None:
            self._reject(late)
        elif self._reader.long is not None and now - self.since > SLOW_BODY_S:
            self._reader.long.move_out()

    def _is_write_blocked(self, now: float) -> bool:
        """Whether the client has read nothing for too long."""
        blocked = self.write_blocked_since
        if blocked is None:
            return False
        # Compare bytes sent, not bytes unsent: new data must not hide that the client reads.
        num_sent = self._num_written - self.num_unsent
        if num_sent > self._num_sent:
            self.write_blocked_since = blocked = now
        self._num_sent = num_sent
        return now - blocked > self._limits.write_timeout_s

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def is_receiving(self) -> bool:
        return not self._is_closing and (not self.received or not self._reader.at_boundary)

    def _enqueue(self, item: Message | Rejection) -> None:
        """Handle what was read, after the messages before it."""
        self._owes_continue = False
        long = item[2] if isinstance(item, tuple) and len(item) == 3 else None
        if self._is_closing:
            if long is not None:
                long.drop()
            return
        if self._running is not None or self._waiting:
            if long is not None:
                long.move_out()
            self._waiting.append(item)
        elif isinstance(item, Rejection):
            self._refuse_now(item)
        else:
            self._start(*item)

    def _next(self) -> None:
        """Run queued messages until one is not answered at once."""
        self._is_advancing = True
        while self._waiting and self._running is None and not self._is_closing:
            item = self._waiting.popleft()
            if isinstance(item, Rejection):
                self._refuse_now(item)
            else:
                self._start(*item)
        self._is_advancing = False
        self._continue()
        if self._is_paused and not self._waiting:
            self._is_paused = False
            self._transport.resume_reading()

    def _start(self, head: MessageHead, body: Buffer, long: LongBody | None = None) -> None:
        self._running = exchange = Exchange(self, head, body, self.received, long)
        try:
            self._server.handler(exchange)
        except Exception:  # Keep serving.
            exchange.reply_bug()
        if long is not None:
            long.drop()
            exchange.long = None

    def _reject(self, refusal: Message | Rejection) -> None:
        """Refuse the message and drop all bytes that follow."""
        if isinstance(refusal, Rejection):
            refusal.head = refusal.head or self._reader.head
            self._server.rejected(refusal, self.since)
        self._is_deaf = True
        self._reader.stop()
        self._enqueue(refusal)

    def _refuse_now(self, rejection: Rejection) -> None:
        self.write(refusal(rejection.status, str(rejection)))
        self.since = self._server.now()
        self._close()


def _unusual_line(status: int) -> bytes:
    return b"HTTP/1.1 %d \r\n" % status


def refusal(status: int, text: str) -> bytes:
    body, head = encode_error(text), _STATUS_LINES[status] + JSON + b"Connection: close\r\n"
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
