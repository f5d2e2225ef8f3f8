"""The metrics port: scrapes and health on a listener of their own, behind the same gate.

So that scrapers need no way to the port that answers inference. `/metrics` is also there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.errors import PenstockError
from penstock.protocols.asgi import AsgiBridge
from penstock.protocols.gate import Gate
from penstock.protocols.http import Exchange
from penstock.protocols.v2_http import reply_error

if TYPE_CHECKING:
    from penstock.protocols.v2_routes import V2Routes


class MetricsHttp:
    """The handler of the metrics listener."""

    def __init__(self, gate: Gate, routes: V2Routes) -> None:
        self._gate = gate
        self._bridge = AsgiBridge(routes.metrics_application())

    def handle(self, exchange: Exchange) -> None:
        head = exchange.head
        try:
            self._gate.check(unquote(head.path.decode("latin-1")), head.headers)
        except PenstockError as error:
            reply_error(exchange, error)
            return
        self._bridge.handle(exchange)

    async def close(self) -> None:
        await self._bridge.close()
