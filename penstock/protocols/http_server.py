"""The HTTP server: the listener of its port, and what its connections (`http`) share."""

from __future__ import annotations

from penstock.config import HttpLimits
from penstock.protocols.http import Connection, Handler
from penstock.protocols.http_reader import MessageHead, Screen
from penstock.protocols.listener import Listener
from penstock.serving.lifecycle import Lifecycle


class HttpServer(Listener):
    """Listens, owns the connections, and drains them."""

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        screen: Screen = lambda head: True,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        """`screen` decides whether a long body is read; if not, the handler gets the head alone.
        While draining, each connection, also an idle one, closes after its next answer."""
        super().__init__(limits)
        self.handler = handler
        self.screen = screen
        self.lifecycle = lifecycle or Lifecycle()
        self.known_heads: dict[bytes, MessageHead] = {}

    def connect(self) -> Connection:
        return Connection(self)

    def forget_heads(self) -> None:
        """Clear the cached heads, because handlers' notes on them may be outdated."""
        self.known_heads.clear()
