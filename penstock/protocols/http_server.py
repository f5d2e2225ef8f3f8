"""The HTTP server: the listener of its port, and what its connections (`http`) share."""

from __future__ import annotations

from collections.abc import Callable

from penstock.config import HttpLimits
from penstock.protocols.http import Connection, Handler
from penstock.protocols.http_reader import MessageHead, Prepare, Rejection, Screen
from penstock.protocols.listener import Listener
from penstock.serving.lifecycle import Lifecycle

HEAD_BYTES = 8 * 1024
# Called with the time at which the message began.
Rejected = Callable[[Rejection, float], None]


class HttpServer(Listener):
    """Listens, owns the connections, and drains them."""

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        screen: Screen = lambda head: True,
        lifecycle: Lifecycle | None = None,
        prepare: Prepare = lambda head: None,
        rejected: Rejected = lambda rejection, received: None,
    ) -> None:
        """`screen` decides whether a long body is read; if not, the handler gets the head alone.
        `prepare` gives memory to long bodies. `rejected` hears of messages that no handler gets.
        While draining, each connection, also an idle one, closes after its next answer."""
        super().__init__(limits)
        self.handler = handler
        self.screen = screen
        self.prepare = prepare
        self.rejected = rejected
        # For the starts of messages on connections that receive long bodies: what is read here is
        # used before the next read.
        self.head_buffer = memoryview(bytearray(HEAD_BYTES))
        self.lifecycle = lifecycle or Lifecycle()
        self.known_heads: dict[bytes, MessageHead] = {}

    def connect(self) -> Connection:
        return Connection(self)

    def forget_heads(self) -> None:
        """Clear the cached heads, because handlers' notes on them may be outdated."""
        for head in self.known_heads.values():
            head.note = None  # A body may be being received for it.
        self.known_heads.clear()
