"""Log settings as Triton's clients change them: parsed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace

import msgspec

from penstock.errors import InvalidRequest, Unsupported
from penstock.system import logs
from penstock.system.logs import LogSwitches
from penstock.wire.json_errors import JsonObject

FIXED = "log_file"
NAMES = tuple(each.name for each in fields(LogSwitches))
MAX_VERBOSE = (1 << 32) - 1


def parse_log_changes(text: str, current: LogSwitches | None) -> LogSwitches | None:
    """Return the settings after a change that a client sends as JSON; None if there is none."""
    given: JsonObject = msgspec.json.decode(text, type=JsonObject)
    checked = {name: check_log_setting(name, value) for name, value in given.items()}
    # As in Triton, null changes nothing.
    changed: JsonObject = {n: value for n, value in checked.items() if value is not None}
    return replace(current or logs.present(), **changed) if changed else None


def check_log_setting(name: str, value: object) -> bool | int | str | None:
    """Return the value if the setting takes it."""
    if name == FIXED:
        if value is None:
            return None
        raise Unsupported("log file location can not be updated through network protocol")
    if name not in NAMES:
        raise InvalidRequest(f"unknown log setting '{name[:50]}'; expected {', '.join(NAMES)}")
    shown = str(value)[:50]
    match value:
        case None:
            return None
        case bool() if name.startswith(("log_info", "log_warning", "log_error")):
            return value
        case int() if name == "log_verbose_level" and not isinstance(value, bool):
            if not 0 <= value <= MAX_VERBOSE:
                raise InvalidRequest(f"log_verbose_level must be 0 or more, got: {shown}")
            return value
        case str() if name == "log_format":
            if value not in logs.TIME_FORMATS:
                raise InvalidRequest(f"invalid argument for log_format, got: {shown}")
            return value
    expected = {"log_verbose_level": "int32", "log_format": "string"}.get(name, "boolean")
    raise InvalidRequest(f"expect {expected} for '{name}', got: {shown}")


def show_logging(current: LogSwitches | None) -> bytes:
    """Return all settings as JSON. Lines go to stderr, so there is no file."""
    settings: Mapping[str, object] = {FIXED: "", **asdict(current or logs.present())}
    return msgspec.json.encode(settings)
