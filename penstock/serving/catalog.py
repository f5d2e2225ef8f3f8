"""Which models there are: name and version to Model; loading, swapping and unloading them.

Owned by the core's event loop. Without a version in the request the highest loaded one answers. A
reload starts the new versions beside the old ones, switches in one step, and lets the old ones
finish; if the new ones cannot be loaded nothing changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import ConfigError, NotFound, NotReady, QuotaExceeded
from penstock.metrics import GpuMemory, Pending
from penstock.repository import Found, listed
from penstock.serving.fleet import Arrangement, Fleet
from penstock.serving.memory_plan import Share
from penstock.serving.model import Model
from penstock.serving.quotas import Quotas
from penstock.serving.served import Served
from penstock.serving.supervisor import ProcessLife, StartLife, load_timeout_text

log = logging.getLogger("penstock.catalog")

# Loading is mostly imports and disk; more at once only makes each slower.
MAX_LOADING = 4


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that was asked for and could not be loaded, and why."""

    name: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index."""

    name: str
    version: str
    state: str
    reason: str


Make = Callable[[ModelConfig, Quotas], Served]


class Catalog:
    """`makers` by backend, where a version is not a Model with workers."""

    def __init__(
        self,
        start_life: StartLife = ProcessLife,
        fleet: Fleet | None = None,
        makers: Mapping[str, Make] | None = None,
    ) -> None:
        self._start_life = start_life
        # What each API key may send, of all models together.
        self.quotas = Quotas()
        self._makers = makers or {}
        self._is_closed = False
        self._fleet = fleet or Fleet()
        # What each load was promised of the GPUs and may not have taken yet.
        self._promised: list[list[Share]] = []
        self._arranging = asyncio.Lock()
        # Something promised was taken, or is not wanted any more.
        self._settled = asyncio.Event()
        self._models: dict[str, dict[str, Served]] = {}
        self._latest: dict[str, Served] = {}
        self._failures: dict[str, LoadFailure] = {}
        self._changing: dict[str, asyncio.Lock] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(MAX_LOADING)

    def __iter__(self) -> Iterator[Served]:
        for versions in self._models.values():
            yield from versions.values()

    @property
    def failures(self) -> list[LoadFailure]:
        """Models that were asked for and are not there."""
        return [f for name, f in self._failures.items() if name not in self._models]

    @property
    def is_ready(self) -> bool:
        """Every model that was asked for can answer."""
        return not self.failures and all(model.is_ready for model in self)

    def count_request(self, caller: bytes, received: float, name: str, version: str = "") -> None:
        """Count a request of this key when it arrives, whatever becomes of it. QuotaExceeded when
        the key sends too many; the model is told if there is one."""
        if not self.quotas.is_active:
            return
        try:
            self.quotas.check_rate(caller, received)
        except QuotaExceeded as error:
            with contextlib.suppress(NotFound, NotReady):
                self.find(name, version).refused(error, received)
            raise

    async def load(self, found: Found) -> None:
        """Load or replace all models found; one that fails does not disturb the others."""
        arranged = await self._arrange(found.configs)
        for name, problems in (found.problems | arranged.problems).items():
            self._fail(name, tuple(problems))
        by_name: dict[str, list[ModelConfig]] = {}
        for config in arranged.configs:
            by_name.setdefault(config.name, []).append(config)
        try:
            async with asyncio.TaskGroup() as group:
                for name, configs in by_name.items():
                    group.create_task(self._replace(name, configs, arranged.shares))
        finally:
            self._promised = [each for each in self._promised if each is not arranged.shares]
            self._settled.set()

    async def _arrange(self, configs: Sequence[ModelConfig]) -> Arrangement:
        """Their devices, and room on them. Those that need no GPU wait for nobody. What others are
        loading counts as promised, and what they have of it already is not free either: who finds
        no room for that is asked again when they are done."""
        if not any(config.uses_gpu for config in configs):
            return Arrangement(list(configs))
        async with self._arranging:
            while True:
                self._settled.clear()
                promised = [share for each in self._promised for share in each]
                arranged = await asyncio.to_thread(self._fleet.arrange, configs, promised)
                if not (arranged.is_short and promised):
                    self._promised.append(arranged.shares)
                    return arranged
                await self._settled.wait()

    def _settle(self, shares: list[Share], name: str, version: str = "") -> None:
        """A model, or one version of it, has taken its memory or will not: the driver tells."""
        shares[:] = [
            share
            for share in shares
            if share.model != name or (version and share.version != version)
        ]
        self._settled.set()

    async def unload(self, name: str) -> None:
        """New requests find no such model; those admitted are answered first."""
        async with self._lock(name):
            self._failures.pop(name, None)
            self._latest.pop(name, None)
            for model in self._models.pop(name, {}).values():
                self._retire(model)

    def find(self, name: str, version: str = "") -> Served:
        """NotReady, with the reasons, if it could not be loaded; NotFound if nobody tried."""
        model = self._latest.get(name) if not version else self._models.get(name, {}).get(version)
        if model is not None:
            return model
        if name not in self._models:
            raise self._absence(name)
        raise NotFound(
            f"Request for unknown model: '{name}' version {version} is not found; "
            f"loaded: {', '.join(self.versions(name))}"
        )

    def _absence(self, name: str) -> NotReady | NotFound:
        """Why a model is not there."""
        if self._is_closed:
            return NotReady("the server is shutting down")
        if (failure := self._failures.get(name)) is not None:
            return NotReady(f"model '{name}' could not be loaded: {'; '.join(failure.problems)}")
        loaded = listed(sorted(self._models))
        return NotFound(f"Request for unknown model: '{name}' is not found; loaded: {loaded}")

    def find_all(self, name: str, version: str = "") -> list[Served]:
        """The version named, or all loaded versions of the model, or of every model."""
        if not name:
            return list(self)
        if version:
            return [self.find(name, version)]
        self.find(name)
        return list(self._models[name].values())

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, {}), key=int)

    def index(self, names: Sequence[str]) -> list[IndexEntry]:
        """What is loaded, what failed, and of `names` (those in the repository) the rest."""
        entries = [
            IndexEntry(model.config.name, model.config.version, model.shown_state, model.reason)
            for model in self
        ]
        for failure in self.failures:
            reason = "; ".join(failure.problems)
            entries.append(IndexEntry(failure.name, "", "UNAVAILABLE", reason))
        known = {entry.name for entry in entries}
        for name in names:
            if name not in known:
                loading = name in self._changing and self._changing[name].locked()
                entries.append(IndexEntry(name, "", "LOADING" if loading else "", ""))
        return sorted(entries, key=lambda entry: (entry.name, entry.version))

    def pending(self) -> list[Pending]:
        return [
            Pending(
                model.metrics,
                model.num_waiting,
                sum(each.is_ready for each in model.instances),
                [
                    GpuMemory(each.index, each.device, each.gpu_memory_bytes)
                    for each in model.instances
                    if each.gpu_memory_bytes
                ],
            )
            for model in self
        ]

    async def drain(self) -> None:
        """Wait until every admitted request has its answer."""
        await asyncio.gather(*(model.drain() for model in self))

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self), *self._leaving)
        self._is_closed = True
        self._models.clear()
        self._latest.clear()

    def _lock(self, name: str) -> asyncio.Lock:
        """Changes of one model happen one after the other."""
        return self._changing.setdefault(name, asyncio.Lock())

    async def _replace(
        self, name: str, configs: Sequence[ModelConfig], promised: list[Share]
    ) -> None:
        async with self._lock(name):
            started: list[Served] = []
            try:
                for config in configs:
                    async with self._limit:
                        started.append(await self._start(config))
                    self._settle(promised, name, config.version)
            except BaseException as error:
                self._settle(promised, name)
                for model in started:
                    await model.close()
                if not isinstance(error, ConfigError):
                    raise
                self._fail(name, error.problems)
                return
            self._failures.pop(name, None)
            old = self._models.get(name, {})
            self._models[name] = {model.config.version: model for model in started}
            self._latest[name] = max(started, key=lambda model: int(model.config.version))
            for model in old.values():
                self._retire(model)

    def _fail(self, name: str, problems: tuple[str, ...]) -> None:
        self._failures[name] = LoadFailure(name, problems)
        what = "; ".join(problems)
        log.error("%s cannot be loaded: %s", name, what, extra={"model": name, "reason": what})

    async def _start(self, config: ModelConfig) -> Served:
        """A model whose instances are all warm."""
        began = time.monotonic()
        count = config.num_instances
        plural = "instance" if count == 1 else "instances"
        where = {"model": config.name, "version": config.version}
        log.info("%s/%s loads %d %s", config.name, config.version, count, plural, extra=where)
        for warning in config.warnings:
            log.warning("%s/%s: config.pbtxt: %s", *where.values(), warning, extra=where)
        model = self._made(config)
        limit = asyncio.timeout(config.load_timeout_s)
        try:
            async with limit:
                await model.start()
        except BaseException:
            await model.close()
            if limit.expired():
                raise ConfigError([load_timeout_text(config.load_timeout_s)]) from None
            raise
        took_s = time.monotonic() - began
        where_and_when = {**where, "load_s": round(took_s, 3)}
        log.info("%s/%s is ready after %.2f s", *where.values(), took_s, extra=where_and_when)
        if built := model.instances[0].built:
            log.info("%s/%s was built with %s", *where.values(), built, extra=where)
        return model

    def _made(self, config: ModelConfig) -> Served:
        if (make := self._makers.get(config.backend)) is not None:
            return make(config, self.quotas)
        try:
            return Model(config, start_life=self._start_life, quotas=self.quotas)
        except OSError as error:
            raise ConfigError([f"shared memory: {error}"]) from None

    def _retire(self, model: Served) -> None:
        """Let it finish what it has admitted, then end it."""

        async def leave() -> None:
            await model.drain()
            await model.close()
            log.info("%s/%s is unloaded", *model.labels.values(), extra=model.labels)

        task = asyncio.get_running_loop().create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def failure(self, name: str) -> LoadFailure | None:
        """Why the last load of this model failed, if it did."""
        return self._failures.get(name)
