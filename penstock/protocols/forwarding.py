"""Messages that a shard leaves to the core, so that answers do not depend on the process."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.protocols.core_client import CoreClient
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import reply_error
from penstock.wire import frames


class Forwarding:
    """A message that the core answers."""

    __slots__ = ("_exchange", "_message", "_core")

    def __init__(self, core: CoreClient, exchange: Exchange) -> None:
        self._core = core
        self._exchange = exchange
        head = exchange.head
        self._message = frames.Forward(
            0,
            exchange.received,
            head.method,
            head.path + b"?" + head.query if head.query else head.path,
            head.headers,
            head.keep_alive,
            head.is_http_1_0,
            frames.Parcel(),
        )

    def start(self) -> None:
        exchange = self._exchange
        exchange.abandon = self.abandon
        try:
            self._core.forward(self._message, exchange.body, self._deliver)
        except PenstockError as error:
            reply_error(exchange, error)

    def abandon(self) -> None:
        self._core.cancel_forward(self._message.call)

    def _deliver(self, data: bytes, answer: frames.Forwarded) -> None:
        if answer.is_part:
            self._exchange.pass_part(data)
        elif not answer.is_cut:
            self._exchange.pass_on(data, answer.keeps)
        elif not self._exchange.is_finished:
            self._exchange.abort()
