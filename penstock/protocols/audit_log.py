"""One line per administrative call: the caller, the action and the result. Always on.

An administrative call is one to a route or RPC with scope `admin`, or one that registers or
unregisters shared memory, even if it is refused. Lines go to the logger `penstock.audit`, from the
process that decided; `--log-level` does not silence them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from penstock.errors import BackendFailed, Cancelled, PenstockError
from penstock.protocols import access_log
from penstock.protocols.http_errors import Refusal, logged_status
from penstock.protocols.route import Match
from penstock.protocols.route_table import RPC_ROUTES
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.types import Buffer
from penstock.wire import json_errors
from penstock.wire.version_rows import PromoteBody

log = logging.getLogger("penstock.audit")
log.setLevel(logging.INFO)

MAX_TEXT = 500
# What gRPC methods for administrators do.
ADMIN_ACTIONS = frozenset(row.handler for row in RPC_ROUTES.values() if row.is_audited)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdminCall:
    """An administrative request; `caller` is the name from `Gate.caller_name`, `model` may be a
    region instead, `version` is the one to promote."""

    protocol: str
    caller: str
    action: str
    model: str = ""
    version: str = ""


def record(call: AdminCall, error: Refusal | None = None) -> None:
    """Log a call and why it was refused, if it was."""
    fields: dict[str, object] = {
        "caller": call.caller,
        "action": call.action,
        "model": call.model,
        "version": call.version[:MAX_TEXT],
        "result": logged_status(call.protocol, error),
        "reason": str(error or "")[:MAX_TEXT],
    }
    access_log.write(log, call.protocol, fields)


def record_refusal(match: Match, caller: str, error: Refusal) -> None:
    """Log an HTTP message that never reached its handler, if it is an administrative call."""
    if match.route.is_audited:
        record(http_call(match, caller), error)


def http_call(match: Match, caller: str, body: Buffer = b"") -> AdminCall:
    version = ""
    if match.route.body is PromoteBody:
        with contextlib.suppress(*json_errors.UNREADABLE):  # The handler refuses it.
            version = str(msgspec.json.decode(body, type=PromoteBody).version)
    name = match.model_name or match.region
    return AdminCall("http", caller, match.route.handler, name, version)


async def record_answer(call: AdminCall, answer: Awaitable[Result]) -> Result:
    # Default, for clients that disconnect before the answer.
    error: PenstockError | None = Cancelled("")
    try:
        result = await answer
        error = None
        return result
    except PenstockError as refusal:
        error = refusal
        raise
    except Exception:
        error = BackendFailed("internal error")
        raise
    finally:
        record(call, error)


async def answer_rpc(management: ManagementApi, call: ManagementCall, caller: str) -> bytes:
    """Answer the call of a gRPC client."""
    answering = management.answer(call)
    if call.action in ADMIN_ACTIONS:
        name = call.model_name or str(call.parameters.get("region", ""))
        admin = AdminCall("grpc", caller, call.action, name)
        return await record_answer(admin, answering)
    return await answering
