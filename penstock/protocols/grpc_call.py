"""One gRPC call on an HTTP/2 stream: messages in and out, compression, deadline, status.

Knows no service: `v2_grpc` derives a class for each kind of RPC. All of it runs on the event loop
of the connection; only large compressed messages are inflated in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, TooLarge
from penstock.protocols.gate import Keys
from penstock.protocols.h2_stream import H2Stream
from penstock.protocols.http_errors import WrongHead
from penstock.protocols.http_reader import MessageHead
from penstock.types import Buffer
from penstock.wire import compression, grpc_status
from penstock.wire.grpc_status import PREFIX_BYTES
from penstock.wire.statuses import status_of

if TYPE_CHECKING:
    from penstock.protocols.grpc_server import GrpcServer

log = logging.getLogger("penstock.grpc")

# Shorter compressed messages are inflated on the event loop.
MIN_THREAD_BYTES = 4096
# Of shorter messages a copy is cheaper than a view.
VIEW_BYTES = 1 << 14
# Smaller answers are not worth compressing.
MIN_COMPRESSED_BYTES = 1024
TOO_LARGE = "the message has {} bytes, more than {} (--grpc-max-message-bytes)"


@dataclass(slots=True, eq=False)
class RpcHead:
    """What the head of a call says. Cached on the head (`MessageHead.note`), which is the same
    object for identical heads; `keys` are those that it was checked against."""

    open: Callable[[GrpcServer, H2Stream, RpcHead], GrpcCall]
    keys: Keys | None
    # As in `Request.caller`.
    caller: bytes = b""
    timeout_s: float | None = None
    # Encoding of compressed messages, and the one for answers.
    encoding: bytes = b"identity"
    answers: bytes = b"identity"


class GrpcCall:
    """A call is over when its status was sent, or when its client is gone; `is_over` is set once,
    and nothing happens afterwards. Derived classes take messages."""

    __slots__ = (
        "_buffered", "_has_head", "_inflating", "_needed", "_parts", "_timer", "_waiting",
        "has_ended", "head", "is_over", "server", "stream",
    )  # fmt: skip

    def __init__(self, server: GrpcServer, stream: H2Stream, head: RpcHead) -> None:
        self.server = server
        self.stream = stream
        self.head = head
        self.is_over = False
        # The client has sent its last message.
        self.has_ended = False
        self._has_head = False
        # The bytes of an incomplete message, and how many are needed to go on.
        self._parts: list[Buffer] = []
        self._buffered, self._needed = 0, PREFIX_BYTES
        # Messages behind one that is being inflated, with their flags.
        self._waiting: deque[tuple[int, Buffer]] = deque()
        self._inflating: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if head.timeout_s is not None:
            self._timer = server.loop.call_later(head.timeout_s, self._expire)

    # What derived classes implement.

    @property
    def is_busy(self) -> bool:
        return True

    def message(self, data: Buffer) -> None:
        """Take the next message."""
        raise NotImplementedError

    def ended(self) -> None:
        """The client has sent its last message, and all were taken."""

    def left(self) -> None:
        """The call is over without an answer: cancel what runs."""

    def drained(self) -> None:
        """All that was sent has left the stream."""

    # From the stream.

    def data(self, chunk: Buffer, is_end: bool) -> None:
        if self.is_over:
            return
        if not self._parts and len(chunk) >= PREFIX_BYTES:
            length = int.from_bytes(chunk[1:PREFIX_BYTES])
            if len(chunk) == length + PREFIX_BYTES and length <= self.server.max_message_bytes:
                self.has_ended = is_end
                self._take(chunk[0], chunk[PREFIX_BYTES:])
                if is_end:
                    self._check_end()
                return
        if chunk:
            self._collect(chunk)
        if is_end and not self.is_over:
            self.has_ended = True
            if self._buffered:
                self.abort("INTERNAL", "the last message is incomplete")
            else:
                self._check_end()

    def gone(self) -> None:
        self._close()

    # Messages in.

    def _collect(self, chunk: Buffer) -> None:
        self._parts.append(chunk)
        self._buffered += len(chunk)
        self.stream.hold(len(chunk), self.server.now())
        if self._buffered < self._needed:
            return
        data: Buffer = b"".join(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts.clear()
        self.stream.unhold()
        view, position, end = memoryview(data), 0, len(data)
        self._needed = PREFIX_BYTES
        while end - position >= PREFIX_BYTES and not self.is_over:
            start = position + PREFIX_BYTES
            length = int.from_bytes(view[position + 1 : start])
            if length > self.server.max_message_bytes:
                text = TOO_LARGE.format(length, self.server.max_message_bytes)
                self.abort("RESOURCE_EXHAUSTED", text)
                return
            if end - start < length:
                self._needed = PREFIX_BYTES + length
                break
            flag, position = view[position], start + length
            message = view[start:position]
            self._take(flag, message if length >= VIEW_BYTES else bytes(message))
        rest = view[position:]
        self._buffered = len(rest)
        if rest and not self.is_over:
            self._parts.append(rest)
            self.stream.hold(len(rest), self.server.now())

    def _take(self, flag: int, data: Buffer) -> None:
        if self._inflating is not None:
            self._waiting.append((flag, data))
        elif flag == 0:
            self._hand_over(data)
        elif flag != 1 or self.head.encoding == b"identity":
            self.abort("INTERNAL", "a message is marked as compressed, but has no grpc-encoding")
        elif len(data) < MIN_THREAD_BYTES:
            try:
                self._hand_over(self._inflate(data))
            except PenstockError as error:
                self._refuse_encoding(error)
        else:
            self._inflating = self.server.loop.create_task(self._inflate_later(data))

    def _hand_over(self, data: Buffer) -> None:
        try:
            self.message(data)
        except PenstockError as error:
            self.fail(error)
        except Exception:  # The protocol edge.
            self.fail_bug()

    def _inflate(self, data: Buffer) -> bytes:
        return compression.inflate(data, self.head.encoding, self.server.max_message_bytes)

    async def _inflate_later(self, data: Buffer) -> None:
        try:
            inflated = await asyncio.to_thread(self._inflate, data)
        except PenstockError as error:
            self._refuse_encoding(error)
            return
        self._inflating = None
        if self.is_over:
            return
        self._hand_over(inflated)
        while self._waiting and self._inflating is None and not self.is_over:
            self._take(*self._waiting.popleft())
        self._check_end()

    def _refuse_encoding(self, error: PenstockError) -> None:
        if isinstance(error, TooLarge):
            limit = self.server.max_message_bytes
            text = f"the message inflates to more than {limit} bytes (--grpc-max-message-bytes)"
            self.abort("RESOURCE_EXHAUSTED", text)
        else:
            self.abort("INTERNAL", str(error).replace("body", "message"))

    def _check_end(self) -> None:
        if self.has_ended and self._inflating is None and not self.is_over:
            try:
                self.ended()
            except Exception:  # The protocol edge.
                self.fail_bug()

    # Messages and statuses out.

    def _encode(self, parts: Sequence[Buffer]) -> bytes:
        """Return one message with its prefix; copies the parts."""
        length = sum(map(len, parts))
        if self.head.answers != b"identity" and length >= MIN_COMPRESSED_BYTES:
            data = compression.deflate(b"".join(parts), self.head.answers)
            if len(data) < length:
                return grpc_status.prefix(len(data), is_compressed=True) + data
        return b"".join((grpc_status.prefix(length), *parts))

    def _start(self) -> tuple[tuple[bytes, bytes], ...] | None:
        """Return the head of the answer, if it was not sent yet."""
        if self._has_head:
            return None
        self._has_head = True
        return grpc_status.HEADS[self.head.answers]

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send a message of several."""
        if not self.is_over:
            self.stream.send(self._start(), self._encode(parts))

    def reply(self, parts: Sequence[Buffer]) -> None:
        """Send the only message and end the call."""
        if not self.is_over:
            data = self._encode(parts)
            self._close(is_answered=True)
            self.stream.send(self._start(), data, grpc_status.OK)

    def end(self) -> None:
        """End the call without an error."""
        if not self.is_over:
            self._close(is_answered=True)
            self.stream.send(self._start(), b"", grpc_status.OK)

    def fail(self, error: PenstockError) -> None:
        self.abort(status_of(error).grpc, str(error))

    def fail_bug(self) -> None:
        """Log the exception that is being handled."""
        log.exception("while answering a call")
        self.abort("INTERNAL", "internal error")

    def abort(self, status: str, text: str) -> None:
        """End the call with a status; what runs is cancelled."""
        if self.is_over:
            return
        self._close()
        if self._has_head:
            self.stream.send(None, b"", grpc_status.trailers(status, text))
        else:
            self.stream.send_only(grpc_status.only_trailers(status, text))

    def _expire(self) -> None:
        self.abort("DEADLINE_EXCEEDED", "Deadline Exceeded")

    def _close(self, is_answered: bool = False) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._parts.clear()
        self._waiting.clear()
        self.stream.unhold()
        if not is_answered:
            self.left()


class UnaryCall(GrpcCall):
    """A call with one request message, which `run` gets when the client has sent all."""

    __slots__ = ("_message",)

    def __init__(self, server: GrpcServer, stream: H2Stream, head: RpcHead) -> None:
        super().__init__(server, stream, head)
        self._message: Buffer | None = None

    def run(self, data: Buffer) -> None:
        raise NotImplementedError

    def message(self, data: Buffer) -> None:
        if self._message is not None:
            self.abort("INTERNAL", "the call has several messages; expected one")
            return
        self._message = data
        if not self.has_ended:
            # Incomplete until the client says that nothing follows.
            self.stream.hold(len(data), self.server.now())

    def ended(self) -> None:
        message, self._message = self._message, b""
        self.stream.unhold()
        if message is None:
            self.abort("INTERNAL", "the call has no message; expected one")
            return
        try:
            self.run(message)
        except PenstockError as error:
            self.fail(error)


class RefusedCall(GrpcCall):
    """A call that is answered by its head."""

    __slots__ = ()

    @property
    def is_busy(self) -> bool:
        return False

    def message(self, data: Buffer) -> None:
        """Ignore it."""

    def refuse(self, error: WrongHead) -> None:
        """Answer what is no gRPC call with a status of HTTP."""
        self.is_over = True
        status, text = b"%d" % error.status, str(error)
        fields = ((b":status", status), (b"content-type", b"text/plain"))
        self.stream.send(fields, text.encode(), grpc_status.trailers("UNKNOWN", text))


def accepted_encoding(head: MessageHead, wanted: bytes) -> bytes:
    """Return the encoding for answers: the server's, if the client accepts it."""
    given = head.headers.get(b"grpc-accept-encoding", b"")
    return wanted if wanted in [item.strip() for item in given.split(b",")] else b"identity"
