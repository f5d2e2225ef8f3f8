"""The HTTP side of the management API: all v2 routes except inference, and metrics.

Only translates paths and bodies; `route_table` names these handlers.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.errors import InvalidRequest
from penstock.protocols.handler_tasks import Reply, RouteCall, RouteHandler
from penstock.protocols.route_table import MISSING, unsupported
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.types import Parameter
from penstock.wire import json_errors
from penstock.wire.v2 import IndexBody, LoadBody

METRICS = "text/plain; version=0.0.4; charset=utf-8"


def make_handlers(management: ManagementApi) -> dict[str, RouteHandler]:
    """Return the handlers by their names in the route table."""

    async def answer(call: RouteCall) -> Reply:
        match = call.match
        asked = ManagementCall(
            match.route.handler, match.model_name, match.model_version, _parameters(call)
        )
        return Reply(await management.answer(asked))

    async def metrics(call: RouteCall) -> Reply:
        return Reply(await management.metrics(), content_type=METRICS)

    async def refuse(call: RouteCall) -> Reply:
        raise unsupported(call.match.route.handler)

    return {
        **dict.fromkeys(management.actions, answer),
        **dict.fromkeys(MISSING, refuse),
        "metrics": metrics,
    }


def _parameters(call: RouteCall) -> Mapping[str, Parameter]:
    """Decode the JSON object of a request; an empty body counts as an empty object."""
    schema = call.match.route.body
    if schema is None:
        return {}
    try:
        body = msgspec.json.decode(call.body or b"{}", type=schema)
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(call.body, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None
    match body:
        case IndexBody():
            return {"ready": body.ready}
        case LoadBody():
            return dict.fromkeys(body.parameters or (), True)
    return {}
