"""One stream of an HTTP/2 connection: its windows, what it still has to send, and its receiver.

The connection (`h2`) reads frames and writes them; a `StreamReceiver` gets the body of a request
and answers through the stream. Lives on the connection's event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.protocols.http_reader import MessageHead
from penstock.types import Buffer
from penstock.wire.hpack import Field

if TYPE_CHECKING:
    from penstock.protocols.h2_data import DataReader
    from penstock.protocols.h2_sender import H2Sender

Fields = tuple[Field, ...]


class StreamReceiver(Protocol):
    """Receives one request. `is_busy`: shutdown waits for its answer."""

    @property
    def is_busy(self) -> bool: ...

    def data(self, chunk: Buffer, is_end: bool) -> None:
        """Take the next bytes of the body; a chunk may be empty at the end."""

    def gone(self) -> None:
        """The client reset the stream or disconnected: nothing can be sent any more."""

    def drained(self) -> None:
        """All that was sent has left the stream, after some of it had to wait."""


@dataclass(slots=True)
class Unsent:
    """Frames that wait for a window: headers, then data, then trailers, which end the stream."""

    headers: Fields | None
    data: memoryview
    trailers: Fields | None


class H2Stream:
    """Invariant: it is among the connection's streams until this side has ended it or it was
    reset; then `is_over` is set."""

    __slots__ = (
        "_reader", "_sender", "has_ended", "head", "held_since", "is_over", "is_paused", "num_held",
        "num_unacked", "number", "receive_window", "receiver", "send_window", "unsent",
    )  # fmt: skip
    # Set when it is opened.
    receiver: StreamReceiver

    def __init__(
        self,
        number: int,
        head: MessageHead,
        sender: H2Sender,
        reader: DataReader,
        receive_window: int,
    ) -> None:
        self.number = number
        self.head = head
        self._sender = sender
        self._reader = reader
        self.send_window = sender.initial_window
        self.receive_window = receive_window
        # Received since the window was last extended.
        self.num_unacked = 0
        # Bytes of an incomplete message, which the receiver stores, and since when.
        self.num_held = 0
        self.held_since = 0.0
        # The client has sent everything.
        self.has_ended = False
        self.is_over = False
        # The receiver wants no more data for now.
        self.is_paused = False
        self.unsent: deque[Unsent] = deque()

    def send(
        self, headers: Fields | None, data: Buffer = b"", trailers: Fields | None = None
    ) -> None:
        """Send headers, data and trailers, each if given, now or when the windows allow it. Data
        must not change afterwards. Trailers end the stream."""
        if not self.is_over:
            self._sender.send(self, headers, data, trailers)

    def send_only(self, headers: Fields) -> None:
        """Send an answer that consists of headers only."""
        if not self.is_over:
            self._sender.send_last(self, headers)

    def hold(self, num_bytes: int, now: float) -> None:
        """Count stored bytes of an incomplete message."""
        if not self.num_held:
            self.held_since = now
        self.num_held += num_bytes
        self._reader.num_held += num_bytes

    def unhold(self) -> None:
        """The message is complete, or given up."""
        if self.num_held:
            num_bytes, self.num_held = self.num_held, 0
            self._reader.release(num_bytes)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._reader.grant(self)
