"""Loads, replaces and unloads the models of a server, and lists them.

Runs on the core's event loop. A reload starts the new versions beside the old ones, switches
atomically and drains the old ones; if the new ones cannot be loaded, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.processes.child import StartLife
from penstock.processes.life import ProcessLife
from penstock.repository.layout import RepositoryScan
from penstock.serving.context import log_about
from penstock.serving.fleet import Fleet, GpuReservations
from penstock.serving.model_table import LoadFailure, ModelTable
from penstock.serving.pipeline import StagePipeline, make_model
from penstock.serving.placement import Share
from penstock.serving.quotas import Quotas
from penstock.serving.scrape import Pending
from penstock.serving.served import ModelProcess, Served
from penstock.serving.shards import ShardedModel, ShardedVersion, Shards
from penstock.serving.supervisor import load_timeout_text
from penstock.wire import frames
from penstock.wire.documented import IndexRow

log = logging.getLogger("penstock.catalog")

# Limit on concurrent loads: they are mostly imports and disk reads, and slow each other down.
MAX_LOADING = 4


Make = Callable[[ModelConfig, Quotas], Served]


class Catalog(ModelTable):
    """`makers` create versions of the backends that do not use `Model`."""

    def __init__(
        self,
        start_life: StartLife = ProcessLife,
        fleet: Fleet | None = None,
        makers: Mapping[str, Make] | None = None,
        shards: Shards | None = None,
    ) -> None:
        """`shards` take the requests, if they have processes of their own."""
        super().__init__()
        self.shards = shards
        if shards is not None:
            shards.table = self._published
        self._start_life = start_life
        self._makers = makers or {}
        self._reservations = GpuReservations(fleet or Fleet())
        # When the latest load of each model began, in ns, by the clock that stamps files.
        self.load_began_ns: dict[str, int] = {}
        self._changing: dict[str, asyncio.Lock] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(MAX_LOADING)

    def announce(self, found: RepositoryScan) -> None:
        """Say that these models will be loaded: until then they are not ready, not unknown."""
        self._awaited.update(config.name for config in found.configs)
        self._publish_soon()

    async def load(self, found: RepositoryScan) -> None:
        """Load or replace all models found; a failure of one does not affect the others."""
        self.announce(found)
        now_ns = time.time_ns()
        self.load_began_ns.update((config.name, now_ns) for config in found.configs)
        try:
            await self._load(found)
        finally:
            self._awaited.difference_update(config.name for config in found.configs)
            await self._publish()

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
            models = self._models.pop(name, {})
            await self._publish()
            for model in models.values():
                self._retire(model)

    def index(self, names: Sequence[str]) -> list[IndexRow]:
        """Return loaded models, failed ones, and the rest of `names`, those in the repository."""
        entries = [
            IndexRow(model.config.name, model.config.version, model.shown_state, model.reason)
            for model in self
        ]
        for failure in self.failures:
            reason = "; ".join(failure.problems)
            entries.append(IndexRow(failure.name, "", "UNAVAILABLE", reason))
        known = {entry.name for entry in entries}
        for name in names:
            if name not in known:
                loading = name in self._changing and self._changing[name].locked()
                entries.append(IndexRow(name, "", "LOADING" if loading else "", ""))
        return sorted(entries, key=lambda entry: (entry.name, entry.version))

    def pending(self) -> list[Pending]:
        """Return the metrics of all models and, under names of their own, of their stages. GPU
        memory of stages counts for the whole model."""
        found: list[Pending] = []
        for model in self:
            found.append(_pending(model, model.processes))
            if isinstance(model, StagePipeline):
                found += map(_pending, model.models)
            elif isinstance(model, ShardedModel):
                figures = zip(model.stages, model.stage_figures, strict=False)
                for stage, (metrics, num_waiting) in figures:
                    num_ready = sum(each.is_ready for each in stage.host.processes)
                    found.append(Pending(metrics, num_waiting, num_ready))
        return found

    async def refresh(self) -> None:
        """Bring the figures of all models up to date, if shards count for them."""
        if self.shards is not None:
            await self.shards.read()

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
            await self._publish()
            for model in old.values():
                self._retire(model)

    def _fail(self, name: str, problems: tuple[str, ...]) -> None:
        self._failures[name] = LoadFailure(name, problems)
        self._publish_soon()
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
        if self.shards is not None:
            return ShardedModel(config, self.shards, self._start_life)
        try:
            return make_model(config, self._start_life, self.quotas, regions=self.regions)
        except OSError as error:
            raise ConfigError([f"shared memory: {error}"]) from None

    async def _publish(self) -> None:
        """Return when all shards have the models as they are now."""
        if self.shards is not None:
            await self.shards.publish()

    def _publish_soon(self) -> None:
        if self.shards is not None:
            self.shards.publish_soon()

    def _published(self) -> frames.Publish:
        models = {
            name: tuple(
                each.number for each in versions.values() if isinstance(each, ShardedVersion)
            )
            for name, versions in self._models.items()
        }
        failures = {name: failure.problems for name, failure in self._failures.items()}
        return frames.Publish(0, models, failures, tuple(self._awaited))

    def _retire(self, model: Served) -> None:
        """Drain a version in the background, then close it."""

        async def leave() -> None:
            await model.drain()
            await model.close()
            log_about(log, logging.INFO, model.config, " is unloaded")

        task = asyncio.get_running_loop().create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _pending(model: Served, processes: Sequence[ModelProcess] = ()) -> Pending:
    num_ready = sum(each.is_ready for each in model.processes)
    return Pending(model.metrics, model.num_waiting, num_ready, processes)
