"""Trace settings as protobuf has them, and as JSON. Pure."""

from __future__ import annotations

import msgspec

from penstock.types import Parameter
from penstock.wire.json_errors import JsonObject
from penstock.wire.v2_pb import Proto


def trace_changes(message: Proto) -> dict[str, Parameter]:
    """Return what a TraceSettingRequest changes. A setting without values is cleared."""
    given = {name: list(setting.value) for name, setting in message.settings.items()}
    return {"settings": msgspec.json.encode(given).decode()} if given else {}


def trace_answer(body: bytes) -> bytes:
    """Return the JSON of a TraceSettingResponse."""
    settings = {
        name: {"value": value if isinstance(value, list) else [value]}
        for name, value in msgspec.json.decode(body, type=JsonObject).items()
    }
    return msgspec.json.encode({"settings": settings})
