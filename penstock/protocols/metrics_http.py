"""The metrics port: scrapes and health on a separate listener, behind the same gate.

Scrapers then need no access to the inference port, which serves these paths too.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.protocols.gate import Gate
from penstock.protocols.handler_tasks import HandlerTasks
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import WrongHead, reply_error
from penstock.protocols.v2_http import admit
from penstock.protocols.v2_routes import make_handlers
from penstock.serving.management import ManagementApi


class MetricsHttp:
    """The handler of the metrics listener."""

    def __init__(self, gate: Gate, management: ManagementApi) -> None:
        self._gate = gate
        self._handlers = make_handlers(management)
        self._tasks = HandlerTasks(reply_error)
        self.close = self._tasks.close

    def handle(self, exchange: Exchange) -> None:
        try:
            match = admit(exchange, self._gate, is_metrics_port=True)
        except (PenstockError, WrongHead) as error:
            reply_error(exchange, error)
        else:
            self._tasks.start(exchange, self._handlers[match.route.handler], match)
