"""Model control: operators load, unload and list models through it, whatever the protocol.

Reads the repository off the event loop. Changes are allowed in explicit mode only. A load may bring
a configuration and files of its own, which last until the next load. `Reloader` is for development
(`penstock serve --reload`): it reloads Python models whose files change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from penstock.config import LoadPermissions, ModelConfig
from penstock.errors import (
    ConfigError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    PenstockError,
    StorageFull,
)
from penstock.repository import layout, load_request, pbtxt, staging
from penstock.repository.ensemble_files import add_members, unneeded_members
from penstock.repository.file_stamps import Stamps, stamp
from penstock.repository.load_request import LoadRequest
from penstock.repository.loaded_folders import LoadedFolders
from penstock.repository.pbtxt_fields import Proto
from penstock.repository.python_file import local_imports
from penstock.repository.repositories import Repositories
from penstock.serving.catalog import Catalog, Commit
from penstock.serving.file_watch import FileWatch
from penstock.types import Buffer, Parameter
from penstock.wire.documented import IndexRow

log = logging.getLogger("penstock.reload")
INTERVAL_S = 0.5


@dataclass(eq=False)
class Control:
    """Model control for one repository, at `path`. `is_explicit` allows loading and unloading;
    `allows_hard_links` allows model files with several hard links."""

    _catalog: Catalog
    path: str
    is_explicit: bool
    allows_hard_links: bool = False
    # What administrators may send with a load.
    allowed: LoadPermissions = LoadPermissions()
    # Further repositories, and the name of the configurations that are used there.
    others: tuple[str, ...] = ()
    config_name: str = ""
    is_polling: bool = False
    folders: LoadedFolders = field(default_factory=LoadedFolders)
    # By model. A change reads the repository and loads what it read before the next one reads.
    _changing: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    @property
    def sources(self) -> Repositories:
        """Where the models are."""
        return Repositories((self.path, *self.others), self.config_name)

    async def index(self, only_ready: object = False) -> list[IndexRow]:
        if not isinstance(only_ready, bool):
            raise InvalidRequest("'ready' must be true or false")
        names = await asyncio.to_thread(self.sources.names)
        rows = self._catalog.index(names)
        return [each for each in rows if each.state == "READY" or not only_ready]

    async def load(
        self,
        name: str,
        parameters: Mapping[str, Parameter] | None = None,
        files: Mapping[str, Buffer] | None = None,
    ) -> None:
        """Load or replace a model. If this call is cancelled, nothing changes. Parameters replace
        the configuration in the repository, or also all files, until the next load."""
        self.check_explicit()
        try:
            request = load_request.parse(parameters or {}, files or {}, self.allowed)
        except InvalidRequest as error:
            raise _refuse(name, [str(error)]) from None
        if request.config is None:
            try:
                await self.reload(name, at_once=True)
            except NotFound as error:
                raise NotFound(f"failed to load '{name}': {error}") from None
            return
        what = request.describe()
        log.info("%s is loaded with %s from a client", name, what, extra={"model": name})
        async with self._lock(name):
            if request.files:
                await self._load_sent(name, request)
            else:
                found = await asyncio.to_thread(self._read_with, name, request.config)
                await self._load_found(name, found, at_once=True)

    async def _load_sent(self, name: str, request: LoadRequest) -> None:
        """Load a model from the files of the request alone."""
        load_request.check_name(name)
        self._catalog.listen_to_ends(self.folders.release)
        text = pbtxt.to_text(request.config)
        writing = asyncio.ensure_future(
            asyncio.to_thread(self.folders.write, name, text, request.files)
        )
        try:
            repository = await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread goes on; what it writes is not used.
            writing.add_done_callback(self._discard_written)
            raise
        try:
            found = await asyncio.to_thread(layout.read_one, repository, name)
            await self._load_found(name, found, at_once=True)
        finally:
            there = (Path(model.config.artifact) for model in self._catalog)
            if not any(path.is_relative_to(repository) for path in there):
                await asyncio.to_thread(self.folders.discard, repository)

    def _discard_written(self, writing: asyncio.Future[Path]) -> None:
        if not writing.cancelled() and writing.exception() is None:
            self.folders.discard(writing.result())

    def _read_with(self, name: str, config: Proto) -> layout.RepositoryScan:
        """Read a model with another configuration."""
        if not self.allowed.code:
            try:
                path = self.sources.find(name)
                own = layout.read_own_message(path, name, self.config_name)
            except ConfigError:
                own = None
            load_request.check_settings(config, own)
        return self._check(self.sources.read_one(name, override=config))

    async def _load_found(
        self, name: str, found: layout.RepositoryScan, *, at_once: bool = False
    ) -> None:
        if any(config.is_ensemble for config in found.configs):
            loaded = {(each.config.name, each.config.version) for each in self._catalog}
            await asyncio.to_thread(self._add_members, found, loaded)
        await self._catalog.load(found, [name] if at_once else ())
        failure = self._catalog.failure(name)
        if failure is not None:
            raise _refuse(name, failure.problems)

    async def reload(self, name: str, *, at_once: bool = False) -> None:
        """Load or replace a model in any mode; if it cannot be loaded, the old one stays.
        `at_once`: also if it is loaded on demand."""
        async with self._lock(name):
            found = await asyncio.to_thread(self._read, name)
            await self._load_found(name, found, at_once=at_once)

    async def switch(self, name: str, version: str, commit: Commit) -> None:
        """Serve this version of a model instead of those that are served. It is loaded beside them;
        then `commit` makes the change permanent, and the switch is atomic. If the version cannot be
        loaded, or if `commit` raises, nothing changes."""
        self.check_explicit()
        async with self._lock(name):
            found = await asyncio.to_thread(self._read, name, version)
            try:
                await self._catalog.switch(found, commit)
            except ConfigError as error:
                raise _refuse(f"{name}/{version}", error.problems) from None

    async def promote_candidate(self, name: str, commit: Commit) -> None:
        """Serve the candidate of a model, as `Catalog.promote_candidate` does. A reload that has
        already read the repository ends first, and the rollout with it."""
        async with self._lock(name):
            await self._catalog.promote_candidate(name, commit)

    async def read(self, name: str, version: str) -> ModelConfig:
        """Read one version of a model. InvalidRequest if it cannot be loaded."""
        found = await asyncio.to_thread(self._read, name, version)
        if problems := found.problems.get(name):
            raise _refuse(f"{name}/{version}", problems)
        return found.only(self.path, version, "")

    def _read(self, name: str, version: str = "") -> layout.RepositoryScan:
        return self._check(self.sources.read_one(name, version))

    def _check(self, found: layout.RepositoryScan) -> layout.RepositoryScan:
        return found if self.allows_hard_links else layout.refuse_hard_links(found)

    def _add_members(
        self, found: layout.RepositoryScan, loaded: Collection[tuple[str, str]]
    ) -> None:
        """Add the models that an ensemble runs and that are not loaded by name and version."""
        names = {name for name, _ in loaded}

        def is_loaded(member: str, version: str) -> bool:
            return (member, version) in loaded if version else member in names

        add_members(found, self._read, is_loaded)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._changing.setdefault(name, asyncio.Lock())

    async def unload(self, name: str, with_dependents: object = False) -> None:
        """Unload a model; `with_dependents`, also the models that were loaded only because this
        ensemble runs them, unless others run them too."""
        self.check_explicit()
        if not isinstance(with_dependents, bool):
            raise InvalidRequest("'unload_dependents' must be true or false")
        loaded = {each.config.name: each.config for each in self._catalog}
        await self.remove(name)
        if with_dependents:
            for member in unneeded_members(name, loaded.values(), self._catalog.loaded_along):
                await self.remove(member)

    async def remove(self, name: str) -> None:
        """Unload a model in any mode."""
        await self._catalog.unload(name)

    def close(self) -> None:
        """Remove the files that came with loads, once no model is loaded."""
        self.folders.close()

    def check_explicit(self) -> None:
        """Raise NotAllowed unless changes are allowed."""
        if self.is_polling:
            raise NotAllowed(
                "explicit model load / unload is not allowed if polling is enabled: change the "
                "repository, or start the server with --model-control-mode explicit"
            )
        if not self.is_explicit:
            raise NotAllowed(
                "explicit model load / unload is not allowed if polling is enabled, or without a "
                "control mode: start the server with --model-control-mode explicit"
            )


def _refuse(name: str, problems: Sequence[str]) -> StorageFull | InvalidRequest:
    text = f"failed to load '{name}': {'; '.join(problems)}"
    return StorageFull(text) if staging.says_full(text) else InvalidRequest(text)


class Reloader:
    """Watches the files of the loaded Python models: the model's own and the modules beside it that
    it imports. Runs on the core's event loop, reads files off it."""

    def __init__(self, catalog: Catalog, control: Control, interval_s: float = INTERVAL_S) -> None:
        self._catalog = catalog
        self._control = control
        self._interval_s = interval_s
        self._watch = FileWatch()

    async def run(self) -> None:
        while True:
            models = self._files()
            began_ns = {name: self._catalog.load_began_ns[name] for name in models}
            for name in await asyncio.to_thread(self._find_changed, models, began_ns):
                await self._reload(name)
            await asyncio.sleep(self._interval_s)

    def _files(self) -> dict[str, list[Path]]:
        """Return the files of each loaded Python model, one for each version. Candidates do not
        count: a reload would end their rollout."""
        found: dict[str, list[Path]] = {}
        for model in self._catalog:
            name, version = model.config.name, model.config.version
            if model.config.backend == "python" and version in self._catalog.versions(name):
                found.setdefault(model.config.name, []).append(Path(model.config.artifact))
        return found

    def _find_changed(
        self, models: Mapping[str, list[Path]], began_ns: Mapping[str, int]
    ) -> list[str]:
        """Return the models that differ from what was loaded. A change is reported once, whether it
        can be loaded or not, and when it has lasted for one interval: editors write in parts. At
        the first check, a file counts as changed if it was written after the load began."""
        found: dict[str, Stamps] = {}
        for name, paths in models.items():
            files = {file for path in paths for file in (path, *local_imports(path))}
            found[name] = stamps = {file: stamp(file) for file in sorted(files)}
            as_loaded = {
                file: seen
                for file, seen in stamps.items()
                if seen is None or seen[0] <= began_ns[name]
            }
            self._watch.know(name, as_loaded)
        return self._watch.changed(found, time.monotonic())

    async def _reload(self, name: str) -> None:
        log.info("%s has changed and is reloaded", name, extra={"model": name})
        try:
            await self._control.reload(name)
        except PenstockError as error:
            # The catalog has logged why a model cannot be loaded.
            is_logged = self._catalog.failure(name) is not None
            reason = "" if is_logged else f": {error}"
            log.warning("%s keeps the code it had%s", name, reason, extra={"model": name})
