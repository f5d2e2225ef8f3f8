"""Trace and log settings as protobuf has them, and as JSON. Pure."""

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


# Fields of a log setting's value.
_BOOL, _NUMBER, _TEXT = "bool_param", "uint32_param", "string_param"


def log_changes(message: Proto) -> dict[str, Parameter]:
    """Return what a LogSettingsRequest changes; a setting without a value is null."""
    given = {}
    for name, setting in message.settings.items():
        kind = setting.WhichOneof("parameter_choice")
        given[name] = None if kind is None else getattr(setting, kind)
    return {"settings": msgspec.json.encode(given).decode()} if given else {}


def log_answer(body: bytes) -> bytes:
    """Return the JSON of a LogSettingsResponse."""
    settings = {
        name: {_kind_of(value): value}
        for name, value in msgspec.json.decode(body, type=JsonObject).items()
    }
    return msgspec.json.encode({"settings": settings})


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return _BOOL
    return _NUMBER if isinstance(value, int) else _TEXT
