"""Where `penstock repo` finds versions: a repository on this machine, or a running server, which
also swaps at once. Both answer the same questions with the same values."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from penstock.api.endpoint import parse_endpoint
from penstock.api.server_http import RemoteServer
from penstock.errors import CommandLineError, ConfigError
from penstock.operate import (
    model_folders,
    promotion,
    pruning,
    verification,
    version_diff,
    version_list,
)
from penstock.operate.promotion import Grounds
from penstock.operate.rollout_state import RolloutState
from penstock.repository import history, layout
from penstock.repository.model_source import URL
from penstock.wire.documented import IndexBody, IndexRow
from penstock.wire.version_rows import (
    HistoryEvent,
    PromoteBody,
    PruneAnswer,
    PruneBody,
    RollbackBody,
    VerifyRow,
    VersionDiff,
    VersionRow,
)

# A promotion takes as long as the model loads; reading all bytes takes as long as there are bytes.
LONG_S = 3600.0


class VersionSource(Protocol):
    """Answers about the versions of models, and changes them."""

    @property
    def is_live(self) -> bool:
        """Whether changes are served at once."""

    def names(self) -> Sequence[str]:
        """Return the models, those without versions too."""

    def versions(self, model: str) -> Sequence[VersionRow]: ...

    def history(self, model: str) -> Sequence[HistoryEvent]: ...

    def diff(self, model: str, a: str, b: str) -> VersionDiff: ...

    def promote(self, model: str, body: PromoteBody) -> HistoryEvent: ...

    def rollback(self, model: str, body: RollbackBody) -> HistoryEvent: ...

    def rollout(self, model: str) -> RolloutState: ...

    def verify(self, model: str) -> Sequence[VerifyRow]: ...

    def prune(self, model: str, body: PruneBody) -> PruneAnswer: ...


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A repository on this machine; servers see a change at their next load."""

    root: Path

    @property
    def is_live(self) -> bool:
        return False

    def names(self) -> Sequence[str]:
        return layout.names(self.root)

    def versions(self, model: str) -> Sequence[VersionRow]:
        return version_list.list_versions(self.root, model)

    def history(self, model: str) -> Sequence[HistoryEvent]:
        return history.read(model_folders.find_model(self.root, model))

    def diff(self, model: str, a: str, b: str) -> VersionDiff:
        return version_diff.compare(self.root, model, a, b)

    def promote(self, model: str, body: PromoteBody) -> HistoryEvent:
        version, grounds = str(body.version), Grounds(_user(), body.reason, body.force)
        model_folders.find_version(self.root, model, version)
        return promotion.prepare(self.root, model, version, grounds).apply()

    def rollback(self, model: str, body: RollbackBody) -> HistoryEvent:
        model_folders.find_model(self.root, model)
        return promotion.prepare_rollback(self.root, model, Grounds(_user(), body.reason)).apply()

    def rollout(self, model: str) -> RolloutState:
        """Refuse: only servers have rollouts."""
        server = "give the server's URL as REPOSITORY, such as http://127.0.0.1:8000"
        raise CommandLineError([f"{self.root}: a rollout needs a running server; {server}"])

    def verify(self, model: str) -> Sequence[VerifyRow]:
        return verification.verify(self.root, model)

    def prune(self, model: str, body: PruneBody) -> PruneAnswer:
        grounds = Grounds(_user())
        return pruning.prune(self.root, model, body.keep, grounds, dry_run=body.dry_run)


@dataclass(frozen=True, slots=True)
class ServerSource:
    """The repository of a running server."""

    server: RemoteServer

    @property
    def is_live(self) -> bool:
        return True

    def names(self) -> Sequence[str]:
        rows = self.server.ask("/v2/repository/index", list[IndexRow], IndexBody())
        return list(dict.fromkeys(row.name for row in rows))

    def versions(self, model: str) -> Sequence[VersionRow]:
        return self.server.ask(_path(model, "versions"), list[VersionRow])

    def history(self, model: str) -> Sequence[HistoryEvent]:
        return self.server.ask(_path(model, "history"), list[HistoryEvent])

    def diff(self, model: str, a: str, b: str) -> VersionDiff:
        path = _path(model, "diff", a, b)
        return self.server.ask(path, VersionDiff, timeout_s=LONG_S)

    def promote(self, model: str, body: PromoteBody) -> HistoryEvent:
        return self.server.ask(_path(model, "promote"), HistoryEvent, body, LONG_S)

    def rollback(self, model: str, body: RollbackBody) -> HistoryEvent:
        return self.server.ask(_path(model, "rollback"), HistoryEvent, body, LONG_S)

    def rollout(self, model: str) -> RolloutState:
        return self.server.ask(_path(model, "rollout"), RolloutState)

    def verify(self, model: str) -> Sequence[VerifyRow]:
        return self.server.ask(_path(model, "verify"), list[VerifyRow], {}, LONG_S)

    def prune(self, model: str, body: PruneBody) -> PruneAnswer:
        return self.server.ask(_path(model, "prune"), PruneAnswer, body, LONG_S)


def open_source(repository: str, api_key: str = "") -> VersionSource:
    """Return the source that REPOSITORY names: a folder, or the URL of a server. ConfigError says
    what else it is."""
    if not URL.match(repository):
        return FolderSource(model_folders.find_repository(repository))
    try:
        endpoint = parse_endpoint(repository)
    except ConfigError as error:
        raise CommandLineError(error.problems) from None
    if endpoint.scheme not in ("http", "https"):
        raise CommandLineError([f"{repository}: versions are managed over HTTP; give that port"])
    if endpoint.model:
        raise CommandLineError(
            [f"{repository}: names a model; give the server, {endpoint.url}, then the model"]
        )
    return ServerSource(RemoteServer(endpoint.url, api_key, "admin", ""))


def _path(model: str, *parts: str) -> str:
    return "/v2/repository/models/" + "/".join(quote(part, safe="") for part in (model, *parts))


def _user() -> str:
    """Return the name of the user who runs this process."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"
