"""The loaded models by name and version; loads, replaces and unloads them.

Runs on the core's event loop. Requests without a version go to the highest loaded one. A reload
starts the new versions beside the old ones, switches atomically and drains the old ones; if the
new ones cannot be loaded, nothing changes.
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
from penstock.processes.child import StartLife
from penstock.processes.life import ProcessLife
from penstock.repository.layout import RepositoryScan, listed
from penstock.serving.context import log_about
from penstock.serving.fleet import Arrangement, Fleet
from penstock.serving.memory_plan import Share
from penstock.serving.pipeline import StagePipeline, make_model
from penstock.serving.quotas import Quotas
from penstock.serving.scrape import Pending
from penstock.serving.served import ModelProcess, Served
from penstock.serving.supervisor import load_timeout_text

log = logging.getLogger("penstock.catalog")

# Limit on concurrent loads: they are mostly imports and disk reads, and slow each other down.
MAX_LOADING = 4


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A requested model that could not be loaded, and why."""

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


class GpuReservations:
    """GPU memory reserved for each load in progress, which it may not have allocated yet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._promised: list[list[Share]] = []
        self._arranging = asyncio.Lock()
        # Set when reserved memory was allocated or given up.
        self._settled = asyncio.Event()

    async def arrange(self, configs: Sequence[ModelConfig]) -> Arrangement:
        """Assign devices and reserve GPU memory; CPU-only models never wait. Memory of loads in
        progress may count twice, as reserved and as already allocated. So if memory is short, try
        again whenever one of them is done."""
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

    def settle(self, shares: list[Share], name: str, version: str = "") -> None:
        """Drop the reservation of a model or version that has allocated its memory or failed: from
        now on the driver's figures are right."""
        shares[:] = [
            share
            for share in shares
            if share.model != name or (version and share.version != version)
        ]
        self._settled.set()

    def release(self, shares: list[Share]) -> None:
        """Drop what is left of the reservations of a load that has ended."""
        self._promised = [each for each in self._promised if each is not shares]
        self._settled.set()


class Catalog:
    """The loaded models. `makers` create versions of the backends that do not use `Model`."""

    def __init__(
        self,
        start_life: StartLife = ProcessLife,
        fleet: Fleet | None = None,
        makers: Mapping[str, Make] | None = None,
    ) -> None:
        self._start_life = start_life
        # Quotas of API keys, shared by all models.
        self.quotas = Quotas()
        self._makers = makers or {}
        self._is_closed = False
        self._reservations = GpuReservations(fleet or Fleet())
        self._models: dict[str, dict[str, Served]] = {}
        self._latest: dict[str, Served] = {}
        self._failures: dict[str, LoadFailure] = {}
        # Models that are loading: requests for them get NotReady, which clients retry.
        self._awaited: set[str] = set()
        # When the latest load of each model began, in ns, by the clock that stamps files.
        self.load_began_ns: dict[str, int] = {}
        self._changing: dict[str, asyncio.Lock] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(MAX_LOADING)

    def __iter__(self) -> Iterator[Served]:
        for versions in self._models.values():
            yield from versions.values()

    @property
    def failures(self) -> list[LoadFailure]:
        """Requested models that are not loaded."""
        return [f for name, f in self._failures.items() if name not in self._models]

    @property
    def is_ready(self) -> bool:
        """Whether every requested model can answer."""
        return not self.failures and all(model.is_ready for model in self)

    def count_request(self, caller: bytes, received: float, name: str, version: str = "") -> None:
        """Count a request of this key on arrival, whatever its outcome. QuotaExceeded if the key
        sends too many; the model, if it exists, counts the refusal."""
        if not self.quotas.is_active:
            return
        try:
            self.quotas.check_rate(caller, received)
        except QuotaExceeded as error:
            with contextlib.suppress(NotFound, NotReady):
                self.find(name, version).refused(error, received)
            raise

    def announce(self, found: RepositoryScan) -> None:
        """Say that these models will be loaded: until then they are not ready, not unknown."""
        self._awaited.update(config.name for config in found.configs)

    async def load(self, found: RepositoryScan) -> None:
        """Load or replace all models found; a failure of one does not affect the others."""
        self.announce(found)
        now_ns = time.time_ns()
        self.load_began_ns.update((config.name, now_ns) for config in found.configs)
        try:
            await self._load(found)
        finally:
            self._awaited.difference_update(config.name for config in found.configs)

    async def _load(self, found: RepositoryScan) -> None:
        arranged = await self._reservations.arrange(found.configs)
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
            self._reservations.release(arranged.shares)

    async def unload(self, name: str) -> None:
        """Unload a model: new requests get NotFound, admitted ones are still answered."""
        async with self._lock(name):
            self._failures.pop(name, None)
            self._awaited.discard(name)
            self._latest.pop(name, None)
            self.load_began_ns.pop(name, None)
            for model in self._models.pop(name, {}).values():
                self._retire(model)

    def find(self, name: str, version: str = "") -> Served:
        """Return a loaded version. NotReady if the model is loading or, with the reasons, if that
        failed; NotFound if it was never requested."""
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
        """Return why a model is not loaded."""
        if self._is_closed:
            return NotReady("the server is shutting down")
        if (failure := self._failures.get(name)) is not None:
            return NotReady(f"model '{name}' could not be loaded: {'; '.join(failure.problems)}")
        if name in self._awaited:
            return NotReady(f"model '{name}' is loading")
        loaded = listed(sorted(self._models))
        return NotFound(f"Request for unknown model: '{name}' is not found; loaded: {loaded}")

    def find_all(self, name: str, version: str = "") -> list[Served]:
        """Return the named version, all loaded versions of the model, or those of all models."""
        if not name:
            return list(self)
        if version:
            return [self.find(name, version)]
        self.find(name)
        return list(self._models[name].values())

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, {}), key=int)

    def index(self, names: Sequence[str]) -> list[IndexEntry]:
        """Return loaded models, failed ones, and the rest of `names`, those in the repository."""
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
        """Return the metrics of all models and, under names of their own, of their stages. GPU
        memory of stages counts for the whole model."""
        found: list[Pending] = []
        for model in self:
            found.append(_pending(model, model.processes))
            found += map(_pending, model.models if isinstance(model, StagePipeline) else ())
        return found

    async def drain(self) -> None:
        """Wait until every admitted request has its answer."""
        await asyncio.gather(*(model.drain() for model in self))

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self), *self._leaving)
        self._is_closed = True
        self._models.clear()
        self._latest.clear()

    def _lock(self, name: str) -> asyncio.Lock:
        """Return the lock that serializes changes of one model."""
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
                    self._reservations.settle(promised, name, config.version)
            except BaseException as error:
                self._reservations.settle(promised, name)
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
        """Start a version; return it when all its instances are warm."""
        began = time.monotonic()
        count = config.num_instances
        plural = "instance" if count == 1 else "instances"
        log_about(log, logging.INFO, config, " loads %d %s", count, plural)
        for warning in config.warnings:
            log_about(log, logging.WARNING, config, ": config.pbtxt: %s", warning)
        for note in config.notes:
            log_about(log, logging.INFO, config, ": %s", note)
        model = self._create(config)
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
        text, load_s = " is ready after %.2f s", round(took_s, 3)
        log_about(log, logging.INFO, config, text, took_s, load_s=load_s)
        if built := model.processes[0].built:
            text = ", ".join(f"{key}={value}" for key, value in built.items())
            log_about(log, logging.INFO, config, " was built with %s", text)
        return model

    def _create(self, config: ModelConfig) -> Served:
        if (make := self._makers.get(config.backend)) is not None:
            return make(config, self.quotas)
        try:
            return make_model(config, self._start_life, self.quotas)
        except OSError as error:
            raise ConfigError([f"shared memory: {error}"]) from None

    def _retire(self, model: Served) -> None:
        """Drain a version in the background, then close it."""

        async def leave() -> None:
            await model.drain()
            await model.close()
            log_about(log, logging.INFO, model.config, " is unloaded")

        task = asyncio.get_running_loop().create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def failure(self, name: str) -> LoadFailure | None:
        """Return why the last load of this model failed; None if it did not."""
        return self._failures.get(name)


def _pending(model: Served, processes: Sequence[ModelProcess] = ()) -> Pending:
    num_ready = sum(each.is_ready for each in model.processes)
    return Pending(model.metrics, model.num_waiting, num_ready, processes)
