"""Loads, replaces and unloads the models of a server, and lists them.

Runs on the core's event loop. A reload starts the new versions beside the old ones, switches
atomically and drains the old ones; if the new ones cannot be loaded, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from penstock.config import ModelConfig
from penstock.errors import ConfigError, NotFound
from penstock.processes.child import StartLife
from penstock.processes.life import ProcessLife
from penstock.repository.ensemble_files import needed_models, take_out_cycles
from penstock.repository.layout import RepositoryScan
from penstock.serving.context import log_about
from penstock.serving.fleet import Arrangement, Fleet, GpuReservations
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model_memory import ModelMemory
from penstock.serving.model_table import LoadFailure, ModelTable
from penstock.serving.owned_model import OwnedModel
from penstock.serving.pipeline import StagePipeline
from penstock.serving.placement import Share
from penstock.serving.scrape import Pending
from penstock.serving.served import PROCESS_STATES, ModelProcess, Served
from penstock.serving.shards import ShardedModel, ShardedVersion, Shards
from penstock.serving.traffic_split import renew_split
from penstock.serving.version_loader import Make, VersionLoader, finish, network_of
from penstock.wire import frames
from penstock.wire.documented import IndexRow

log = logging.getLogger("penstock.catalog")

# Makes a change permanent.
Commit = Callable[[], Awaitable[object]]


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
        fleet = fleet or Fleet()
        self._reservations = reservations = GpuReservations(fleet)
        self.memory = memory = ModelMemory(reservations.find_room, fleet.memory_of)
        find_room = reservations.find_room
        self._loader = VersionLoader(self, start_life, makers or {}, shards, find_room, memory)
        # When the latest load of each model began, in ns, by the clock that stamps files.
        self.load_began_ns: dict[str, int] = {}
        # Models that are loaded only because an ensemble runs them.
        self.loaded_along: set[str] = set()
        # Serialize changes of one model.
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._leaving: set[asyncio.Task[None]] = set()

    def listen_to_ends(self, on_end: Callable[[ModelConfig], object]) -> None:
        """Let `on_end` hear of each version whose files are not read any more."""
        self._loader.on_end = on_end

    def announce(self, found: RepositoryScan) -> None:
        """Say that these models will be loaded: until then they are not ready, not unknown."""
        self._awaited.update(config.name for config in found.configs)
        self._publish_soon()

    async def load(self, found: RepositoryScan, at_once: Collection[str] = ()) -> None:
        """Load or replace all models found; a failure of one does not affect the others. Those that
        are loaded on demand get no worker yet, unless they are replaced while they have one, or
        their names are in `at_once`."""
        self.announce(found)
        self.loaded_along.difference_update(found.folders)
        self.loaded_along |= found.members
        now_ns = time.time_ns()
        self.load_began_ns.update((config.name, now_ns) for config in found.configs)
        try:
            await self._load(found, at_once)
        finally:
            self._awaited.difference_update(config.name for config in found.configs)
            await self._publish()

    async def _load(self, found: RepositoryScan, at_once: Collection[str]) -> None:
        arranged = await self._arrange(found.configs)
        for name, problems in (found.problems | arranged.problems).items():
            self._fail(name, tuple(problems))
        by_name: dict[str, list[ModelConfig]] = {}
        for config in arranged.configs:
            by_name.setdefault(config.name, []).append(config)
        needed = needed_models(arranged.configs)
        for name, cycle in take_out_cycles(needed).items():
            self._fail(name, tuple(cycle))
        loaded = {name: asyncio.Event() for name in needed}

        async def replace_one(name: str) -> None:
            """Load a model after those that it runs, whether or not they could be loaded."""
            try:
                for other in needed[name]:
                    await loaded[other].wait()
                is_lazy = name not in at_once
                await self._replace(name, by_name[name], arranged.shares, is_lazy=is_lazy)
            finally:
                loaded[name].set()

        try:
            async with asyncio.TaskGroup() as group:
                for name in needed:
                    group.create_task(replace_one(name))
        finally:
            self._reservations.release(arranged.shares)

    async def _arrange(self, configs: Sequence[ModelConfig]) -> Arrangement:
        return await self._reservations.arrange([self.memory.choose(each) for each in configs])

    async def switch(self, found: RepositoryScan, commit: Commit) -> None:
        """Serve the one model found instead of its loaded versions. Once it is ready, `commit` and
        switch atomically. If it cannot be loaded (ConfigError), or if `commit` raises, nothing
        changes. A cancelled call that has begun to commit ends the switch first."""
        [name] = {*(config.name for config in found.configs), *found.problems}
        self.announce(found)
        try:
            await self._switch(name, found, commit)
        finally:
            self._awaited.discard(name)
            await self._publish()

    async def _switch(self, name: str, found: RepositoryScan, commit: Commit) -> None:
        arranged = await self._arrange(found.configs)
        try:
            if problems := [*found.problems.get(name, ()), *arranged.problems.get(name, ())]:
                raise ConfigError(problems)
            async with self._changing[name]:
                self.load_began_ns[name] = time.time_ns()
                started = await self._start_all(name, arranged.configs, arranged.shares)
                await finish(self._commit(name, started, commit))
        finally:
            self._reservations.release(arranged.shares)

    async def _commit(self, name: str, started: Sequence[Served], commit: Commit) -> None:
        try:
            await commit()
        except BaseException:
            for model in started:
                await self._loader.end(model)
            raise
        await self._take_over(name, started)

    async def unload(self, name: str) -> None:
        """Unload a model: new requests get NotFound, admitted ones are still answered."""
        async with self._changing[name]:
            self._failures.pop(name, None)
            self._awaited.discard(name)
            self.loaded_along.discard(name)
            self._latest.pop(name, None)
            self.load_began_ns.pop(name, None)
            models = self._models.pop(name, {})
            left = [*models.values(), *self._end_split(name, models)]
            await finish(self._let_go(left))

    # Rollouts.

    async def add_candidate(self, config: ModelConfig) -> Served:
        """Load a version beside those that are served; no request finds it before a split. If it is
        one of them, it is used as it is. ConfigError if it cannot be loaded."""
        name = config.name
        async with self._changing[name]:
            self.find(name)
            found = self._models[name].get(config.version)
            if found is None:
                arranged = await self._arrange([config])
                try:
                    if arranged.problems:
                        raise ConfigError(arranged.problems[name])
                    shares = arranged.shares
                    [found] = await self._start_all(name, arranged.configs, shares)
                finally:
                    self._reservations.release(arranged.shares)
            if name not in self._models:
                await self._loader.end(found)
                raise NotFound(f"model '{name}' was unloaded while version {config.version} loaded")
            self._candidates[name] = found
            return found

    async def split(self, name: str, rule: frames.SplitRule) -> bool:
        """Split the requests of a model with its candidate; return when all shards do. False if
        there is no such candidate any more: the model was loaded again or unloaded."""
        candidate = self._candidates.get(name)
        if candidate is None or candidate.config.version != rule.candidate:
            return False
        self.rules[name] = rule
        if isinstance(candidate, ShardedVersion):
            rule.number = candidate.number
        else:
            known, stable = self.splits.get(name), self._latest[name]
            self.splits[name] = renew_split(known, rule, stable, candidate)
        await self._publish()
        return True

    async def drop_candidate(self, name: str) -> None:
        """End the split: the stable version gets all requests, and the candidate is unloaded."""
        left = self._end_split(name, self._models.get(name, {}))
        await finish(self._let_go(left))

    async def promote_candidate(self, name: str, commit: Commit) -> None:
        """Serve the candidate and nothing else, once `commit` has made that permanent; if that
        raises, nothing changes. Other versions answer what they have admitted. NotFound if the
        candidate is gone: the model was loaded again or unloaded."""
        async with self._changing[name]:
            if (candidate := self._candidates.get(name)) is None:
                raise NotFound(f"model '{name}' has no candidate any more")

            async def promote() -> None:
                await commit()
                await self._take_over(name, [candidate])

            await finish(promote())

    def _end_split(self, name: str, served: Mapping[str, Served]) -> list[Served]:
        """Forget the split of a model; return its candidate, unless that is served anyway."""
        self.rules.pop(name, None)
        self.splits.pop(name, None)
        candidate = self._candidates.pop(name, None)
        return [] if candidate is None or candidate in served.values() else [candidate]

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
        return [each for model in self for each in pending_of(model)]

    async def refresh(self) -> None:
        """Bring the figures of all models up to date, if shards count for them."""
        if self.shards is not None:
            await self.shards.read()

    async def drain(self) -> None:
        """Wait until every admitted request has its answer."""
        await asyncio.gather(*(model.drain() for model in self))

    async def close(self) -> None:
        await asyncio.gather(*(self._loader.end(model) for model in self), *self._leaving)
        self.memory.stop()
        self._is_closed = True
        for held in (self.splits, self.rules, self._candidates):
            held.clear()
        self._models.clear()
        self._latest.clear()
        await self.caches.close()
        await asyncio.to_thread(self.recorders.close)

    async def _replace(
        self, name: str, configs: Sequence[ModelConfig], promised: list[Share], *, is_lazy: bool
    ) -> None:
        async with self._changing[name]:
            try:
                if await self._change_instances(name, configs):
                    self._failures.pop(name, None)
                    return
                started = await self._start_all(name, configs, promised, is_lazy=is_lazy)
            except ConfigError as error:
                self._fail(name, error.problems)
                return
            await self._take_over(name, started)

    async def _change_instances(self, name: str, configs: Sequence[ModelConfig]) -> bool:
        """Give the loaded version other instances, if that is all that has changed; False: it must
        be loaded anew. A rollout ends with any load, and several versions change together."""
        loaded = self._models.get(name, {})
        if len(loaded) != 1 or len(configs) != 1 or name in self._candidates:
            return False
        model = loaded.get(configs[0].version)
        return model is not None and await self._loader.change_instances(model, configs[0])

    async def _start_all(
        self,
        name: str,
        configs: Sequence[ModelConfig],
        promised: list[Share],
        *,
        is_lazy: bool = False,
    ) -> list[Served]:
        """Start versions beside those that are loaded; all of them or none."""
        started: list[Served] = []
        # Scaled versions begin with as many instances as those that they replace have now.
        count = max(map(_num_scaled, self._models.get(name, {}).values()), default=None)
        try:
            for config in configs:
                is_awaited = is_lazy and not count
                started.append(await self._loader.start(config, count, is_lazy=is_awaited))
                self._reservations.settle(promised, name, config.version)
        except BaseException:
            self._reservations.settle(promised, name)
            for model in started:
                await self._loader.end(model)
            raise
        return started

    async def _take_over(self, name: str, started: Sequence[Served]) -> None:
        """Send all new requests to these versions, and let the old ones finish theirs."""
        self._failures.pop(name, None)
        old = self._models.get(name, {})
        left = [*old.values(), *self._end_split(name, old)]
        left = [model for model in left if model not in started]
        self._models[name] = {model.config.version: model for model in started}
        self._latest[name] = max(started, key=lambda model: int(model.config.version))
        await finish(self._let_go(left))

    def _fail(self, name: str, problems: tuple[str, ...]) -> None:
        self._failures[name] = LoadFailure(name, problems)
        self._publish_soon()
        what = "; ".join(problems)
        log.error("%s cannot be loaded: %s", name, what, extra={"model": name, "reason": what})

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
        awaited, rules = tuple(self._awaited), dict(self.rules)
        tracing, logging = self.tracer.table, self.log_switches
        return frames.Publish(0, models, failures, awaited, rules, tracing, logging)

    async def _let_go(self, models: Sequence[Served]) -> None:
        """Retire versions that the table no longer has, once all shards know. Nothing else would
        end them: a cancelled call finishes this first."""
        await self._publish()
        for model in models:
            self._retire(model)

    def _retire(self, model: Served) -> None:
        """Drain a version in the background, then close it."""

        async def leave() -> None:
            await model.drain()
            await self._loader.end(model)
            log_about(log, logging.INFO, model.config, " is unloaded")

        task = asyncio.get_running_loop().create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def pending_of(model: Served) -> list[Pending]:
    """Return the metrics of a model, then those of its stages, if it has any."""
    stages: list[Pending] = []
    owned = model.model if isinstance(model, OwnedModel) else model
    if isinstance(owned, StagePipeline):
        stages += [_pending(stage) for stage in owned.models]
    elif isinstance(model, ShardedModel):
        figures = zip(model.stages, model.stage_figures, strict=False)
        for stage, (metrics, num_waiting) in figures:
            stages.append(_pending_stage(metrics, num_waiting, stage.host.processes))
    whole = replace(
        _pending(model),
        processes=model.processes,
        is_staged=model.config.is_staged or model.config.is_ensemble,
        drift=model.drift,
    )
    return [whole, *stages]


def _pending(model: Served) -> Pending:
    return _pending_stage(model.metrics, model.num_waiting, model.processes)


def _num_scaled(model: Served) -> int:
    """Return how many instances a version should have now."""
    host = network_of(model)
    wanted = [] if host is None else [each for each in host.instances if each.is_wanted]
    return len(wanted)


def _pending_stage(
    metrics: ModelMetrics, num_waiting: int, processes: Sequence[ModelProcess]
) -> Pending:
    """Return the state of a model, or of one of its stages, with the processes that it has."""
    states = Counter(each.state for each in processes)
    counts: dict[str, int] = {state: states[state] for state in PROCESS_STATES}
    num_ready = sum(each.is_ready for each in processes)
    return Pending(metrics, num_waiting, num_ready, instances=counts)
