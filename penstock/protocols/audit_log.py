"""One line per administrative call: the caller, the action and the result. Always on.

An administrative call is one to a route or RPC with scope `admin`, even if it is refused. Lines go
to the logger `penstock.audit`, from the process that decided; `--log-level` does not silence them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import BackendFailed, Cancelled, PenstockError
from penstock.protocols import access_log

log = logging.getLogger("penstock.audit")
log.setLevel(logging.INFO)

MAX_TEXT = 500
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdminCall:
    """An administrative request; `caller` is the name from `Gate.caller_name`."""

    protocol: str
    caller: str
    action: str
    model: str = ""


def record(call: AdminCall, result: object, reason: str = "") -> None:
    """Log a call; `result` is its status in its protocol, `reason` why it was refused."""
    fields: dict[str, object] = {
        "caller": call.caller,
        "action": call.action,
        "model": call.model,
        "result": result,
        "reason": reason[:MAX_TEXT],
    }
    access_log.write(log, call.protocol, fields)


async def record_answer(
    call: AdminCall,
    answer: Awaitable[Result],
    status_ok: object,
    status: Callable[[PenstockError], object],
) -> Result:
    """Await the answer and log the call; `status` maps errors to statuses of the protocol."""
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
        record(call, status_ok if error is None else status(error), str(error or ""))
