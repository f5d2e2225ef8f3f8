"""Versions of models as the HTTP API and `penstock repo` show them: plain JSON values. Pure.

`repository.history` and `operate` make them; clients decode answers with the same types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from penstock.wire.json_errors import JsonObject


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One line of a model's history.jsonl."""

    # ISO 8601, UTC.
    time: str
    # What happened; `repository.history` lists the kinds.
    kind: str
    version: str
    # Versions that were served until then.
    previous: tuple[str, ...] = ()
    # The API key's name, or the user of the machine.
    actor: str = ""
    reason: str = ""
    # Facts behind the event, such as problems that were overridden.
    figures: JsonObject = field(default_factory=dict)


class PromoteBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a promotion. `force` says why problems of the evidence do not matter. `canary` is
    the share of requests to begin with, `steps` the shares that follow; requests are chosen by
    `header`, or by the hash of `hash_header`, or at random. `shadow` sends copies of requests."""

    version: str | int
    force: str = ""
    reason: str = ""
    canary: str = ""
    shadow: bool = False
    steps: str = ""
    header: str = ""
    hash_header: str = ""
    # Least share of rows on which both versions agree, such as 95%; empty: from the evidence.
    agreement: str = ""
    # Shortest time of a step in seconds, and most requests that run in both versions.
    step_s: float | None = None
    mirrored_per_s: float | None = None


class RollbackBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a rollback. With `rollout_only`, nothing but a running rollout is stopped."""

    reason: str = ""
    rollout_only: bool = False


class PruneBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a request to remove old versions: all but the `keep` newest, and those in use."""

    keep: Annotated[int, msgspec.Meta(ge=1)]
    dry_run: bool = False


class VersionRow(msgspec.Struct, frozen=True):
    """A version in a repository, with the main figures of its evidence; null: not measured."""

    model: str
    version: str
    # Selected by the model's config.pbtxt, so the next load serves it.
    is_served: bool
    # Loaded by the server that answers.
    is_loaded: bool = False
    is_rollback_target: bool = False
    slo: str = ""
    outcome: str = ""
    p99_s: float | None = None
    throughput: float | None = None
    # Highest rate that keeps the latency terms of the SLO.
    max_rate: float | None = None
    accuracy: float | None = None
    metric: str = ""
    memory_bytes: float | None = None
    cost_per_million: float | None = None
    num_bytes: int = 0
    # When it was committed; empty: it was made by hand.
    created: str = ""
    # The machine of the evidence.
    hardware: str = ""
    # Why it cannot be read.
    problems: list[str] = []


class FileChange(msgspec.Struct, frozen=True):
    """A file that differs between two versions."""

    name: str
    change: Literal["added", "removed", "changed"]
    a_bytes: int | None = None
    b_bytes: int | None = None


class FigureRow(msgspec.Struct, frozen=True):
    """A figure of the evidence of two versions, in the unit s, /s, bytes or none."""

    name: str
    unit: str
    a: float | None
    b: float | None
    # b / a; null if one of them is unknown.
    ratio: float | None


class VersionDiff(msgspec.Struct, frozen=True):
    """What version `b` has that version `a` has not, and the reverse."""

    model: str
    a: str
    b: str
    # Lines of a unified diff of config.pbtxt.
    config: list[str]
    files: list[FileChange]
    figures: list[FigureRow]
    # Steps of the optimisation that made each version.
    a_steps: list[str]
    b_steps: list[str]
    # Why figures may not be comparable, one sentence each.
    notes: list[str] = []


class VerifyRow(msgspec.Struct, frozen=True):
    """A version whose files were compared with its manifest. Without a version: the model itself,
    its configuration and history."""

    model: str
    version: str
    state: Literal["whole", "damaged", "not committed"]
    problems: list[str] = []


class PruneAnswer(msgspec.Struct, frozen=True):
    """Versions that were removed, or would be, and why each of the others is kept."""

    model: str
    removed: list[str]
    kept: dict[str, str]
    freed_bytes: int
    dry_run: bool
