"""history.jsonl of a model: what was done to its versions, by whom and why. Lines are only added.

`versions` and `operate` write events. A line is on disk before the change that it announces, so the
last event may announce a change that never happened: `rollback_target` knows how to tell. Knows
nothing of evidence or of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.repository import staging
from penstock.wire.version_rows import HistoryEvent as HistoryEvent

NAME = "history.jsonl"
PROMOTED, ROLLED_BACK = "promoted", "rolled back"
# A promotion against the evidence; `figures` has the problems that were overridden.
FORCED = "forced"
# A promotion that changed nothing, because the server could not load the version.
FAILED = "failed"
PRUNED = "pruned"
# Kinds that change which version is served.
CHANGES = (PROMOTED, FORCED, ROLLED_BACK)
KINDS = (
    *(*CHANGES, FAILED, PRUNED),
    *("canary started", "canary step", "shadow started", "rollout stopped"),
)

Versions = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cause:
    """Kind, actor, reason and figures of a change: an event without its versions."""

    kind: str = PROMOTED
    actor: str = ""
    reason: str = ""
    figures: dict[str, object] = field(default_factory=dict)

    def event(self, version: str, previous: Sequence[str] = ()) -> HistoryEvent:
        """Return the event of now."""
        now, before = datetime.now(UTC).isoformat(timespec="seconds"), tuple(previous)
        return HistoryEvent(
            now, self.kind, version, before, self.actor, self.reason, dict(self.figures)
        )


class _Line(msgspec.Struct):
    """An event as it is written; older lines have only the first three."""

    time: str
    version: str
    previous: Versions = ()
    kind: str = PROMOTED
    actor: str = ""
    reason: str = ""
    figures: dict[str, object] = {}


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_lines = msgspec.json.Decoder(_Line)


def append(folder: Path, event: HistoryEvent) -> None:
    """Add an event to the history in a model's folder; it is on disk when this returns."""
    staging.append(folder / NAME, msgspec.json.encode(event))


def read(folder: Path) -> list[HistoryEvent]:
    """Return the events of a model, oldest first. Lines that a crash cut off are left out;
    `unreadable_lines` names them."""
    return [event for _, event in _read(folder) if event is not None]


def unreadable_lines(folder: Path) -> list[int]:
    """Return the numbers of lines that are not events."""
    return [number for number, event in _read(folder) if event is None]


def _read(folder: Path) -> list[tuple[int, HistoryEvent | None]]:
    path = folder / NAME
    try:
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return [(number, _decode(line)) for number, line in enumerate(lines, 1) if line.strip()]


def _decode(line: bytes) -> HistoryEvent | None:
    try:
        found = _lines.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return HistoryEvent(
        found.time,
        found.kind,
        found.version,
        found.previous,
        found.actor,
        found.reason,
        found.figures,
    )


def rollback_target(events: Sequence[HistoryEvent], served: Sequence[str]) -> Versions:
    """Return the versions that were served before those of now; empty if the history knows none. A
    rollback undoes the last promotion that is not undone yet, so a second one goes further back."""
    changes = [event for event in events if _changes_repository(event)]
    # What was served, the latest last, without what was rolled back.
    stack: list[Versions] = []
    for index, event in enumerate(changes):
        is_last = index + 1 == len(changes)
        after = tuple(served) if is_last else changes[index + 1].previous
        if event.previous and stack[-1:] != [event.previous]:
            stack.append(event.previous)
        version = (event.version,)
        if after == event.previous != version:
            continue  # Announced, but never done: its writer was killed.
        if event.kind == ROLLED_BACK:
            while stack and stack[-1] != version:
                stack.pop()
        if stack[-1:] != [version]:
            stack.append(version)
    if stack[-1:] == [tuple(served)]:
        stack.pop()
    return stack[-1] if stack else ()


def _changes_repository(event: HistoryEvent) -> bool:
    """Whether another version is served from then on. A rollout that is rolled back changes
    nothing on disk; its events have its mode."""
    is_of_rollout = event.kind == ROLLED_BACK and "mode" in event.figures
    return event.kind in CHANGES and not is_of_rollout
