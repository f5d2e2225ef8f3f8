"""One line per administrative call: who asked for what, and the result. Always on.

A call is one to a route or RPC of the scope `admin`, also if it is refused. Lines go to the logger
`penstock.audit`, from the process that decided; `--log-level` does not silence them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock.protocols import access_log

log = logging.getLogger("penstock.audit")
log.setLevel(logging.INFO)

MAX_TEXT = 500


@dataclass(frozen=True, slots=True)
class AdminCall:
    """Who (`Gate.caller`) asks for what."""

    protocol: str
    caller: str
    action: str
    model: str = ""


def record(call: AdminCall, result: object, reason: str = "") -> None:
    """`result` is the status of the answer in its protocol; `reason` is why it was refused."""
    fields: dict[str, object] = {
        "caller": call.caller,
        "action": call.action,
        "model": call.model,
        "result": result,
        "reason": reason[:MAX_TEXT],
    }
    access_log.write(log, call.protocol, fields)
