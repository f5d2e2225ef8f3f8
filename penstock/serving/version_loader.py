"""Starts single versions and ends them. The catalog decides which, and which of them get requests.

Runs on the core's event loop. While a version is loaded, a lock marks its files as in use, so that
other processes do not remove them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace

from penstock import units
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.processes.child import StartLife
from penstock.repository import fingerprint, holds
from penstock.repository.file_stamps import Stamps, stamps_of
from penstock.serving.context import log_about
from penstock.serving.ensemble import Ensemble
from penstock.serving.instance_change import changes_instances_only
from penstock.serving.model import Model
from penstock.serving.model_host import ModelHost
from penstock.serving.model_memory import ModelMemory
from penstock.serving.model_table import ModelTable
from penstock.serving.owned_model import OwnedModel
from penstock.serving.pipeline import StagePipeline, make_model, stages_of
from penstock.serving.quotas import Quotas
from penstock.serving.scaler import FindRoom
from penstock.serving.served import Served
from penstock.serving.sharded_ensemble import ShardedEnsemble
from penstock.serving.shards import ShardedModel, Shards
from penstock.serving.supervisor import load_timeout_text

log = logging.getLogger("penstock.catalog")

# Limit on concurrent loads: they are mostly imports and disk reads, and slow each other down.
MAX_LOADING = 4
Make = Callable[[ModelConfig, Quotas], Served]


class VersionLoader:
    """`table` has what all versions share; `makers` create versions of the backends that do not use
    `Model`; `shards` take the requests, if they have processes of their own. `find_room` reserves
    GPU memory for further instances, `memory` that of models loaded on demand."""

    def __init__(
        self,
        table: ModelTable,
        start_life: StartLife,
        makers: Mapping[str, Make],
        shards: Shards | None,
        find_room: FindRoom,
        memory: ModelMemory,
    ) -> None:
        self._table = table
        self._start_life = start_life
        self._makers = makers
        self._shards = shards
        self._find_room = find_room
        self._memory = memory
        # Hears of each version whose files nobody reads any more.
        self.on_end: Callable[[ModelConfig], object] = lambda config: None
        # Descriptors that mark the files of loaded versions as in use, by the model's id.
        self._holds: dict[int, int] = {}
        # Their files when they were loaded, likewise.
        self._stamps: dict[int, Stamps] = {}
        self._limit = asyncio.Semaphore(MAX_LOADING)

    async def start(
        self, config: ModelConfig, num_running: int | None = None, *, is_lazy: bool = False
    ) -> Served:
        """Start a version; return it when all its instances are warm. If it is scaled, it begins
        with as many as the version that it replaces has now. If it is loaded on demand, it begins
        with one, or with none if `is_lazy`. ConfigError if it cannot be loaded."""
        async with self._limit:
            return await self._start(config, num_running, is_lazy=is_lazy)

    async def _start(
        self, config: ModelConfig, num_running: int | None, *, is_lazy: bool
    ) -> Served:
        began = time.monotonic()
        config = self._limited(config)
        taken = await self._table.caches.read(config)
        if taken is not None:
            config = replace(config, fingerprint=taken.text)
        model = self._create(config)
        is_lazy = is_lazy and config.scaling.is_on_demand
        _announce(config, "with its first request" if is_lazy else self._begin(model, num_running))
        limit = asyncio.timeout(config.load_timeout_s)
        try:
            async with limit:
                await finish(self._hold(model))
                await self._note_files(model, is_lazy=is_lazy)
                await model.start()
                if taken is not None:
                    await asyncio.to_thread(fingerprint.check, config, taken)
        except BaseException:
            await self.end(model)
            if limit.expired():
                raise ConfigError([load_timeout_text(config.load_timeout_s)]) from None
            raise
        took_s = time.monotonic() - began
        text, load_s = " is ready after %.2f s", round(took_s, 3)
        log_about(log, logging.INFO, config, text, took_s, load_s=load_s)
        if model.processes and (built := model.processes[0].built):
            text = ", ".join(f"{key}={value}" for key, value in built.items())
            log_about(log, logging.INFO, config, " was built with %s", text)
        return model

    def _begin(self, model: Served, num_running: int | None) -> str:
        """Let a version begin with as many instances as it should, and say how many."""
        config, host = model.config, network_of(model)
        count = config.num_instances
        if config.scaling.is_on_demand:
            count = 1
        elif host is not None and config.is_scaled:
            host.scaler.find_room = self._find_room
            if num_running is not None:
                host.scaler.begin_with(num_running)
                count = len(host.processes)
        return units.count(count, "instance") if count else "no workers"

    async def _note_files(self, model: Served, *, is_lazy: bool) -> None:
        """Note the files that a version is loaded from, and by whom, if it is loaded on demand."""
        config, host = model.config, network_of(model)
        self._stamps[id(model)] = stamps = await asyncio.to_thread(stamps_of, config)
        if host is not None and config.scaling.is_on_demand:
            self._memory.open(config, host, stamps, is_lazy=is_lazy)

    async def change_instances(self, model: Served, config: ModelConfig) -> bool:
        """Give a loaded version the number of instances of this configuration, if it differs in
        nothing else and its files are those that were loaded; False: it must be loaded anew.
        ConfigError, and nothing changes, if an instance cannot be started."""
        config = replace(self._limited(config), fingerprint=model.config.fingerprint)
        host = network_of(model)
        if host is None or not model.is_ready or not changes_instances_only(model.config, config):
            return False
        if await asyncio.to_thread(stamps_of, config) != self._stamps.get(id(model)):
            return False
        await host.change_instances(stages_of(config)[-1].config if config.is_staged else config)
        use_config(model, config)
        text = " has %d instances now, without loading it anew"
        log_about(log, logging.INFO, config, text, config.num_instances)
        return True

    def _limited(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration without rate limits if the server has none; ConfigError if an
        instance could never execute."""
        limiter = self._table.rate_limiter
        if limiter is None:
            return replace(config, rate_limits=())
        if config.rate_limits:
            limiter.check(config)
        return config

    async def _hold(self, model: Served) -> None:
        """Keep other processes from removing the files of a version."""
        folder = holds.version_folder(model.config)
        if folder is None:
            return
        held = await asyncio.to_thread(holds.hold, folder)
        if held is not None:
            self._holds[id(model)] = held

    async def end(self, model: Served) -> None:
        """Close a version, and let its files be removed."""
        await model.close()
        self._memory.close(network_of(model))
        if (held := self._holds.pop(id(model), None)) is not None:
            os.close(held)
        self._stamps.pop(id(model), None)
        self.on_end(model.config)

    def _create(self, config: ModelConfig) -> Served:
        self._table.recorders.check(config)
        model = self._make(config)
        if self._shards is None:
            model.recorder = self._table.recorders.open(config, model.metrics)
            self._table.count_latencies(model)
        return model

    def _make(self, config: ModelConfig) -> Served:
        if (make := self._makers.get(config.backend)) is not None:
            return make(config, self._table.quotas)
        if config.is_ensemble:
            if self._shards is not None:
                return ShardedEnsemble(config, self._shards, self._table)
            return Ensemble(config, self._table)
        if self._shards is not None and not config.has_one_owner:
            return ShardedModel(config, self._shards, self._start_life)
        try:
            model = make_model(
                config,
                self._start_life,
                self._table.quotas,
                regions=self._table.regions,
                callees=self._table,
            )
        except OSError as error:
            raise ConfigError([f"shared memory: {error}"]) from None
        if self._table.rate_limiter is not None and config.rate_limits:
            # The step before a network needs nothing.
            network = model.models[-1] if isinstance(model, StagePipeline) else model
            network.limit_rate(self._table.rate_limiter)
        if self._shards is not None:
            # They keep the answers to what they hand over.
            return OwnedModel(config, self._shards, model)
        model.cache = self._table.caches.open(config, model.metrics)
        return model


def _announce(config: ModelConfig, what: str) -> None:
    log_about(log, logging.INFO, config, " loads %s", what)
    for warning in config.warnings:
        log_about(log, logging.WARNING, config, ": config.pbtxt: %s", warning)
    for note in config.notes:
        log_about(log, logging.INFO, config, ": %s", note)


async def finish(work: Coroutine[object, object, None]) -> None:
    """Run `work` to its end, even if this call is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a change failed after its client had left: %s", error)
        raise


def network_of(model: Served) -> ModelHost | None:
    """Return the workers of a model, without those of earlier stages; None if it has none here."""
    if isinstance(model, OwnedModel):
        model = model.model
    if isinstance(model, Model):
        return model.host
    if isinstance(model, StagePipeline):
        return model.models[-1].host
    return model.stages[-1].host if isinstance(model, ShardedModel) else None


def use_config(model: Served, config: ModelConfig) -> None:
    """Let a version have another configuration, of which its workers know already."""
    if isinstance(model, OwnedModel):
        use_config(model.model, config)
    if isinstance(model, OwnedModel | StagePipeline | ShardedModel):
        model.config = config
