"""Trace settings as clients and operators give them: parsed, checked and layered. Pure.

A model's own settings come before the global ones, and those before what the server was started
with. Names, values and errors are Triton's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import InvalidRequest, Unsupported
from penstock.wire.trace_records import OFF, TENSORS, TIMESTAMPS, TraceSetting, TraceTable

MAX_UINT32, MAX_INT32 = (1 << 32) - 1, (1 << 31) - 1
# The range of each number.
RANGES = {
    "trace_rate": (0, MAX_UINT32),
    "trace_count": (-1, MAX_INT32),
    "log_frequency": (0, MAX_UINT32),
}
NAMES = ("trace_level", *RANGES)
FIXED = "trace_file"
# The fields of TraceSetting.
FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count"}
# A setting's new value; None clears it.
Change = tuple[str, ...] | int | None
GLOBAL = ""


def parse_changes(given: Mapping[str, object]) -> dict[str, Change]:
    """Return what a client wants to change. Lists of one value count as the value, as they come
    over gRPC."""
    if FIXED in given:
        raise Unsupported("trace file location can not be updated through network protocol")
    changes: dict[str, Change] = {}
    for name, value in given.items():
        if name not in NAMES:
            raise InvalidRequest(f"unknown trace setting '{name}'; expected {', '.join(NAMES)}")
        if value is None or value == []:
            changes[name] = None
        elif name == "trace_level":
            changes[name] = parse_levels(value)
        else:
            changes[name] = parse_number(name, value)
    return changes


def parse_levels(value: object) -> tuple[str, ...]:
    """Return the levels that are switched on."""
    levels = [value] if isinstance(value, str) else value
    known = (OFF, TIMESTAMPS, TENSORS)
    if not isinstance(levels, list) or not all(each in known for each in levels):
        text = f"'trace_level' is a list of OFF, TIMESTAMPS or TENSORS, got {str(value)[:200]}"
        raise InvalidRequest(text)
    if OFF in levels and len(levels) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    return tuple(each for each in (TIMESTAMPS, TENSORS) if each in levels)


def parse_number(name: str, value: object) -> int:
    if isinstance(value, list):
        if len(value) != 1:
            raise InvalidRequest(f"expect only 1 value for '{name}'")
        value = value[0]
    least, most = RANGES[name]
    text = str(value)[:50]
    digits = text.removeprefix("-")
    if isinstance(value, bool) or not (digits.isascii() and digits.isdigit()):
        raise InvalidRequest(f"Unable to parse '{name}', got: {text}")
    number = int(text)
    if not least <= number <= most:
        raise InvalidRequest(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}"
        )
    return number


@dataclass(eq=False)
class TraceLayers:
    """The settings of all models. Invariant: `counts` has the traces that are left for the global
    settings, under GLOBAL, and for each model that has settings of its own."""

    start: TraceSetting = TraceSetting()
    _changes: dict[str, dict[str, Change]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._changes[GLOBAL] = {}
        self._counts[GLOBAL] = self.start.count

    def setting(self, model: str) -> TraceSetting:
        scope = self.scope(model)
        return msgspec.structs.replace(self._resolved(scope), count=self._counts[scope])

    def scope(self, model: str) -> str:
        """Return whose settings a model uses: its name, or GLOBAL."""
        return model if model in self._changes else GLOBAL

    def table(self, *, follows_clients: bool = False) -> TraceTable:
        models = {name: self.setting(name) for name in self._changes if name != GLOBAL}
        return TraceTable(self.setting(GLOBAL), models, follows_clients)

    def change(self, model: str, changes: Mapping[str, Change]) -> None:
        """Change the settings of a model, or of all that have none. A count starts anew if it was
        given or cleared, for models that take it from the global settings too."""
        own = {**self._changes.get(model, {}), **changes}
        own = {name: value for name, value in own.items() if value is not None}
        is_new = model not in self._changes
        if not own and model != GLOBAL:
            self._changes.pop(model, None)
            self._counts.pop(model, None)
            return
        self._changes[model] = own
        restarts = {model} if is_new or "trace_count" in changes else set()
        if model == GLOBAL and restarts:
            restarts |= {name for name, each in self._changes.items() if "trace_count" not in each}
        for scope in restarts:
            self._counts[scope] = self._resolved(scope).count

    def take(self, scope: str) -> bool:
        """Count one trace; False if no more are wanted."""
        left = self._counts.get(scope, 0)
        if left > 0:
            self._counts[scope] = left - 1
        return left != 0

    def is_exhausted(self, scope: str) -> bool:
        return self._counts.get(scope) == 0

    def _resolved(self, scope: str) -> TraceSetting:
        below = [] if scope == GLOBAL else [self._changes[GLOBAL]]
        return self._layered([*below, self._changes[scope]])

    def _layered(self, layers: Sequence[Mapping[str, Change]]) -> TraceSetting:
        setting = self.start
        for layer in layers:
            known = {FIELDS.get(n, n): value for n, value in layer.items() if value is not None}
            setting = msgspec.structs.replace(setting, **known)
        return setting
