"""`penstock.repo`: the versions of models in a repository or on a running server.

Each function is a command of `penstock repo`. REPOSITORY is a folder, or http://host:port of a
server, with the prefix that it is mounted below. A server serves a promoted version at once.
Results print as tables; `value` is the answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.api import shown
from penstock.api.options import from_keywords
from penstock.api.repo_options import PromoteOptions
from penstock.api.version_sources import VersionSource, open_source
from penstock.errors import CommandLineError
from penstock.operate.rollout_state import RolloutState
from penstock.report import rollout_tables
from penstock.report import version_tables as tables
from penstock.repository.model_source import URL
from penstock.wire.version_rows import (
    HistoryEvent,
    PruneAnswer,
    PruneBody,
    RollbackBody,
    VerifyRow,
    VersionDiff,
    VersionRow,
)

if TYPE_CHECKING:
    from typing import Unpack

    from rich.console import RenderableType

    from penstock.api import keywords

Repository = str | os.PathLike[str]
Version = str | int
Value = TypeVar("Value")
Rows = TypeVar("Rows")
GIVE_URL = "give the server's URL as REPOSITORY, such as http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class RepoResult(Generic[Value]):
    """An answer that prints as a table, and renders in notebooks."""

    value: Value
    _show: Callable[[Value], RenderableType]

    def __rich__(self) -> RenderableType:
        return self._show(self.value)

    def __str__(self) -> str:
        return shown.to_text(self.__rich__())

    def _repr_html_(self) -> str:
        return shown.to_html(self.__rich__())


def list(repository: Repository = ".", *, api_key: str = "") -> RepoResult[Sequence[VersionRow]]:
    """List the versions of all models, with the main figures of their evidence."""
    source = open_source(os.fspath(repository), api_key)
    return RepoResult(_of_all(source, source.versions), tables.show_versions)


def history(
    repository: Repository, model: str, *, api_key: str = ""
) -> RepoResult[Sequence[HistoryEvent]]:
    """Return what was done to the versions of a model, oldest first."""
    source = open_source(os.fspath(repository), api_key)
    return RepoResult(source.history(model), tables.show_history)


def diff(
    repository: Repository, model: str, a: Version, b: Version, *, api_key: str = ""
) -> RepoResult[VersionDiff]:
    """Compare two versions: configuration, files and evidence."""
    source = open_source(os.fspath(repository), api_key)
    return RepoResult(source.diff(model, str(a), str(b)), tables.show_diff)


def promote(
    repository: Repository,
    model: str,
    version: Version,
    /,
    **options: Unpack[keywords.PromoteKeywords],
) -> RepoResult[HistoryEvent]:
    """Serve a version whose evidence is good for this hardware. ConfigError says what it lacks,
    unless `force` says why that does not matter. Options are those of `penstock repo promote`."""
    return promote_version(
        os.fspath(repository), model, str(version), from_keywords(PromoteOptions, options)
    )


def promote_version(
    repository: str, model: str, version: str, options: PromoteOptions
) -> RepoResult[HistoryEvent]:
    """Promote with the options of the command line."""
    body = options.body(version)
    if options.rollout_flags and not URL.match(repository):
        flags = ", ".join(options.rollout_flags)
        raise CommandLineError([f"{flags}: a rollout needs a running server; {GIVE_URL}"])
    source = open_source(repository, options.api_key)
    return _change(source, model, source.promote(model, body))


def rollback(
    repository: Repository,
    model: str,
    *,
    reason: str = "",
    rollout_only: bool = False,
    api_key: str = "",
) -> RepoResult[HistoryEvent]:
    """Stop a running rollout; otherwise serve the version from before the last promotion that was
    not rolled back yet, unless `rollout_only`: then NotFound."""
    if rollout_only and not URL.match(os.fspath(repository)):
        raise CommandLineError([f"--rollout-only: a rollout needs a running server; {GIVE_URL}"])
    source = open_source(os.fspath(repository), api_key)
    return _change(source, model, source.rollback(model, RollbackBody(reason, rollout_only)))


def rollout(repository: str, model: str, *, api_key: str = "") -> RepoResult[RolloutState]:
    """Return how the canary or shadow of a model on a running server stands, or how the last one
    since its start has ended."""
    source = open_source(repository, api_key)
    return RepoResult(source.rollout(model), rollout_tables.show_rollout)


def verify(
    repository: Repository, model: str = "", *, api_key: str = ""
) -> RepoResult[Sequence[VerifyRow]]:
    """Compare every file of every committed version with its digest, of one model or of all."""
    source = open_source(os.fspath(repository), api_key)
    rows = source.verify(model) if model else _of_all(source, source.verify)
    return RepoResult(rows, tables.show_verification)


def prune(
    repository: Repository, model: str, keep: int, *, dry_run: bool = False, api_key: str = ""
) -> RepoResult[PruneAnswer]:
    """Remove old versions. The `keep` newest stay, and those that are served, loaded by a server,
    or needed for a rollback."""
    if keep < 1:
        raise CommandLineError([f"keep: {keep} is too small; at least 1, the newest, is kept"])
    source = open_source(os.fspath(repository), api_key)
    return RepoResult(source.prune(model, PruneBody(keep, dry_run)), tables.show_pruning)


def _change(source: VersionSource, model: str, event: HistoryEvent) -> RepoResult[HistoryEvent]:
    return RepoResult(event, partial(tables.show_change, model=model, is_live=source.is_live))


def _of_all(source: VersionSource, ask: Callable[[str], Sequence[Rows]]) -> Sequence[Rows]:
    return tuple(row for name in source.names() for row in ask(name))
