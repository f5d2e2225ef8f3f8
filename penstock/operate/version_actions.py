"""Actions of the management API on the versions of models: list, compare, promote, roll back,
verify and prune. Knows no protocol.

Runs on the core's event loop, touches the disk off it. A promotion loads the version beside those
that are served, changes the repository when it is ready, and switches atomically: a version that
cannot be loaded changes nothing, and the repository never names a version that did not load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import (
    SHUTTING_DOWN,
    ConfigError,
    InvalidRequest,
    NotFound,
    NotReady,
    PenstockError,
)
from penstock.operate import (
    model_folders,
    promotion,
    pruning,
    rollout_state,
    verification,
    version_diff,
    version_list,
)
from penstock.operate.ensemble_checks import check_ensembles, find_users
from penstock.operate.off_loop import off_loop
from penstock.operate.promotion import Change, Grounds
from penstock.operate.rollouts import Rollouts
from penstock.repository import history, versions
from penstock.repository.history import Cause, HistoryEvent
from penstock.serving.management import Answer, ManagementApi, ManagementCall

log = logging.getLogger("penstock.versions")
ACTIONS = ("versions", "history", "diff", "promote", "rollback", "verify", "prune", "rollout")
# Fields of a promotion by which a version gets a part of the requests first.
ROLLOUT_FIELDS = (
    *("canary", "shadow", "steps", "header", "hash_header"),
    *("agreement", "step_s", "mirrored_per_s"),
)
Result = TypeVar("Result")


class VersionActions:
    """Answers calls for the repository of one server. `name_of` returns the name of a caller, which
    the history records. Someone must run the `rollouts`."""

    def __init__(
        self,
        management: ManagementApi,
        name_of: Callable[[bytes], str],
        rollouts: Rollouts | None = None,
    ) -> None:
        self._rollouts = rollouts or Rollouts(management.catalog, management.control)
        self._catalog = management.catalog
        self._control = management.control
        self._lifecycle = management.lifecycle
        self._name_of = name_of

    @property
    def answers(self) -> Mapping[str, Answer]:
        return {name: getattr(self, name) for name in ACTIONS}

    async def versions(self, call: ManagementCall) -> bytes:
        loaded = self._loaded(call.model_name)
        return _json(await self._read(version_list.list_versions, call.model_name, loaded))

    async def history(self, call: ManagementCall) -> bytes:
        return _json(await self._read(_history, call.model_name))

    async def diff(self, call: ManagementCall) -> bytes:
        a, b = (str(call.parameters[key]) for key in ("a", "b"))
        return _json(await self._read(version_diff.compare, call.model_name, a, b))

    async def promote(self, call: ManagementCall) -> bytes:
        given, name = call.parameters, call.model_name
        self._check_changes()
        version, force = str(given["version"]), str(given.get("force", ""))
        if _asks_for_rollout(given):
            return _json(await self._start_rollout(call, version, force))
        if self._rollouts.is_running(name):
            advice = "wait for its end, or stop it first with a rollback"
            raise InvalidRequest(f"{name}: a rollout is running; {advice}")
        root = await self._root(call.model_name)
        grounds = self._grounds(call, force)

        def prepare() -> Change:
            model_folders.find_version(root, name, version)
            return promotion.prepare(root, name, version, grounds)

        change = await off_loop(prepare)
        if find_users(self._catalog, name):
            check_ensembles(self._catalog, await self._control.read(name, version))
        return _json(await self.serve(change))

    async def _start_rollout(self, call: ManagementCall, version: str, force: str) -> HistoryEvent:
        given = {field: call.parameters.get(field) for field in ROLLOUT_FIELDS}
        reason = str(call.parameters.get("reason", ""))
        plan = rollout_state.make_plan(given, reason=reason, force=force)
        actor = self._name_of(call.caller)
        return await self._rollouts.start(call.model_name, version, plan, actor)

    async def rollout(self, call: ManagementCall) -> bytes:
        """Show how the rollout of a model stands, or how its last one ended."""
        if (state := self._rollouts.state(call.model_name)) is None:
            self._catalog.find(call.model_name)
            raise NotFound(f"{call.model_name}: no rollout since the server started")
        return _json(state)

    async def rollback(self, call: ManagementCall) -> bytes:
        """Stop a running rollout; without one, serve the version from before the last promotion,
        unless only a rollout is to be stopped."""
        self._check_changes()
        is_running = self._rollouts.is_running(call.model_name)
        if is_running or call.parameters.get("rollout_only"):
            grounds = self._grounds(call)
            stopping = self._rollouts.stop(call.model_name, grounds.actor, grounds.reason)
            return _json(await stopping)
        name, grounds = call.model_name, self._grounds(call)
        root = await self._root(name)

        def prepare() -> Change:
            model_folders.find_model(root, name)
            return promotion.prepare_rollback(root, name, grounds)

        return _json(await self.serve(await off_loop(prepare)))

    async def verify(self, call: ManagementCall) -> bytes:
        return _json(await self._read(verification.verify, call.model_name))

    async def prune(self, call: ManagementCall) -> bytes:
        keep, dry_run = int(call.parameters["keep"]), bool(call.parameters.get("dry_run"))
        if not dry_run:
            self._check_changes()
        name, loaded = call.model_name, self._loaded(call.model_name)
        grounds = self._grounds(call)
        return _json(await self._read(pruning.prune, name, keep, grounds, loaded, dry_run))

    async def serve(self, change: Change) -> HistoryEvent:
        """Load the version of a checked change, change the repository, and switch."""
        events: list[HistoryEvent] = []
        has_begun = False

        async def commit() -> None:
            nonlocal has_begun
            has_begun = True
            events.append(await off_loop(change.apply))

        try:
            await self._control.switch(change.name, change.version, commit)
        except PenstockError as error:
            if not has_begun:
                await asyncio.to_thread(_record_failure, change, str(error))
            raise
        [event] = events
        log.info(
            *("%s: version %s is %s", change.name, change.version, event.kind),
            extra={"model": change.name, "version": change.version, "actor": event.actor},
        )
        return event

    async def _read(self, read: Callable[..., Result], name: str, *arguments: object) -> Result:
        return await off_loop(partial(read, await self._root(name), name, *arguments))

    async def _root(self, name: str) -> Path:
        """Return the repository that has a model."""
        sources = self._control.sources
        return await off_loop(lambda: model_folders.find_repository(sources.find(name)))

    def _loaded(self, name: str) -> list[str]:
        """Return the loaded versions of a model, with the candidate of its rollout."""
        configs = (each.config for each in self._catalog)
        return [config.version for config in configs if config.name == name]

    def _grounds(self, call: ManagementCall, force: str = "") -> Grounds:
        reason = str(call.parameters.get("reason", ""))
        return Grounds(self._name_of(call.caller), reason, force)

    def _check_changes(self) -> None:
        """Raise NotAllowed or NotReady unless the repository may be changed now."""
        self._control.check_explicit()
        if self._lifecycle.is_draining:
            raise NotReady(SHUTTING_DOWN)
        if self._lifecycle.is_loading:
            raise NotReady("models are loading", retry_after_s=1.0)


def _asks_for_rollout(given: Mapping[str, object]) -> bool:
    values = [given.get(field) for field in ROLLOUT_FIELDS]
    # 0 is a value that was given, and refused.
    return any(value not in (None, "") and value is not False for value in values)


def _history(root: Path, name: str) -> list[HistoryEvent]:
    return history.read(model_folders.find_model(root, name))


def _record_failure(change: Change, reason: str) -> None:
    """Write to the history that a version could not be loaded."""
    cause = Cause(history.FAILED, change.cause.actor, reason)
    with contextlib.suppress(OSError, ConfigError):  # The caller hears of it anyway.
        folder = versions.existing_folder(change.root, change.name)
        history.append(folder, cause.event(change.version, versions.served_versions(folder)))


def _json(body: object) -> bytes:
    return msgspec.json.encode(body)
