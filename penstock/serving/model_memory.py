"""Memory of the models that are loaded on demand: the actor beside `evictions`.

Lets a model start a worker when the plan of its device has room, and evicts others for it. What
they take is measured by `measured_models`. Belongs to the core's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial

from penstock.config import CPU, ModelConfig, ModelMemoryLimit
from penstock.repository.file_stamps import Stamps
from penstock.repository.parameters import on_demand_problem
from penstock.serving.context import log_about
from penstock.serving.evictions import MemoryDemand, MemoryPlan, plan_memory
from penstock.serving.measured_models import MEASURE_S, DemandedModel, MeasuredModels
from penstock.serving.model_host import ModelHost
from penstock.serving.placement import gib
from penstock.serving.scaler import FindRoom
from penstock.serving.scrape import ScrapeLines

log = logging.getLogger("penstock.memory")

# The plan is made again after this time while a model waits, or else after that one.
LOOK_S, KEEP_S = 0.02, 1.0
# Memory of a device whose driver does not tell.
UNKNOWN_BYTES = 1 << 60
EVICTED = "evicted: others needed its memory"


class ModelMemory:
    """`find_gpu_room` reserves GPU memory, which other models take as well; `memory_of` reads how
    much a device has, 0 if that is unknown. `limit` and `loads_all` are set before models are
    loaded; with the latter, models whose configuration does not say otherwise are loaded on demand,
    if they can be."""

    def __init__(self, find_gpu_room: FindRoom, memory_of: Callable[[str], int]) -> None:
        self._find_gpu_room = find_gpu_room
        self._models = MeasuredModels(memory_of)
        self.limit = ModelMemoryLimit()
        self.loads_all = False
        self._keys = itertools.count()
        # Demands by device, the one that has waited longest first.
        self._demands: dict[str, list[MemoryDemand]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def choose(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration as this server loads it."""
        is_said = bool(config.scaling.on_demand)
        if is_said or not self.loads_all or on_demand_problem(config):
            return config
        return replace(config, scaling=replace(config.scaling, on_demand="true"))

    def open(self, config: ModelConfig, host: ModelHost, stamps: Stamps, *, is_lazy: bool) -> None:
        """Load a version on demand from now on; `is_lazy`: its first request does. Before it is
        started."""
        model = self._models.open(config, host, stamps)
        find_room = partial(self._find_room, model)
        host.demand.begin(find_room, is_lazy=is_lazy, memory=model.describe_memory)

    def close(self, host: ModelHost | None) -> None:
        """Forget a version that has ended, but not how much memory it took."""
        self._models.close(host)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _find_room(
        self, model: DemandedModel, config: ModelConfig
    ) -> Callable[[], None] | None:
        """Wait until a worker of this configuration may be started, which has one device. Return
        what must be called once it has its memory; None: it must not be started."""
        device, began = config.device, time.monotonic()
        # Not the time tells which workers are new: that of the event loop is coarse.
        old = {each.life for each in model.host.instances}
        await self._models.read(model, config)
        # Only the first worker of a model may take the memory of others.
        evicts = not model.has_worker
        demand = MemoryDemand(next(self._keys), model.name, model.sizes[device], evicts)
        waiting = self._demands.setdefault(device, [])
        waiting.append(demand)
        model.is_seeking |= evicts
        try:
            if not await self._wait(model, demand, device):
                return None
            model.granted[device] += 1
        finally:
            waiting.remove(demand)
            model.is_seeking &= not evicts
        try:
            release = None
            if device != CPU:
                release = await self._gpu_room(model, config, evicts=evicts)
                if release is None:
                    return None
        finally:
            model.granted[device] -= 1
        return partial(self._settled, model, old, began, release)

    async def _wait(self, model: DemandedModel, demand: MemoryDemand, device: str) -> bool:
        """Return whether the demand can be met now; wait for that if others may be evicted."""
        until = time.monotonic() + model.config.scaling.cold_start_s
        while model.is_awaited or not demand.evicts:
            plan = self._plan(device)
            self._evict(plan.evict, model)
            if demand.key in plan.start:
                return True
            problem = plan.refused.get(demand.key, "")
            if not problem and not demand.evicts:
                return False
            reason = plan.waits.get(demand.key, "")
            if model.is_loading and time.monotonic() > until:
                problem = reason
            if problem:
                model.refuse(f"{problem} (--model-memory)")
                return False
            model.host.demand.wait_for(reason)
            await asyncio.sleep(LOOK_S)
        return False

    async def _gpu_room(
        self, model: DemandedModel, config: ModelConfig, *, evicts: bool
    ) -> Callable[[], None] | None:
        """Reserve GPU memory; evict others while the GPU itself has too little."""
        while (release := await self._find_gpu_room(config)) is None:
            if not evicts:
                return None
            others = self._models.residents(config.device, but=model)
            is_leaving = any(each.is_leaving for each in others)
            idle = [each for each in others if not each.stays and not each.is_leaving]
            if not is_leaving and not idle:
                model.host.demand.wait_for(f"{config.device} has no memory left")
                if not model.is_awaited:
                    return None
            elif not is_leaving:
                oldest = min(idle, key=lambda each: each.last_used)
                self._evict((oldest.key,), model)
            await asyncio.sleep(LOOK_S)
        return release

    def _plan(self, device: str) -> MemoryPlan:
        return plan_memory(
            self._limit(device), self._models.residents(device), self._demands.get(device, ())
        )

    def _limit(self, device: str) -> int:
        return self.limit.of(self._models.totals[device] or UNKNOWN_BYTES)

    def _evict(self, keys: Sequence[int], cause: DemandedModel | None = None) -> None:
        for model in self._models:
            if model.key in keys:
                size = gib(sum(model.bytes_on(device) for device in self._models.totals))
                whom = "the limit" if cause is None else cause.name
                log_about(log, logging.INFO, model.config, " is evicted: %s for %s", size, whom)
                model.num_evictions += 1
                model.host.demand.evict(EVICTED)

    def _settled(
        self,
        model: DemandedModel,
        old: set[int],
        began: float,
        release: Callable[[], None] | None,
    ) -> None:
        """Hear that a worker has its memory, or is dead."""
        if release is not None:
            release()
        if any(each.is_ready and each.life not in old for each in model.host.instances):
            model.num_loads += 1
            model.load_s += time.monotonic() - began
        self._start(self._models.measure())

    async def keep_limit(self) -> None:
        """Measure now and then, and evict idle models when others have grown. Runs until it is
        cancelled."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self._models.measure(MEASURE_S)
            for device in self._models.totals:
                self._evict(self._plan(device).evict)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def families(self) -> Iterator[ScrapeLines]:
        """Yield what a scrape shows of these models."""
        if not self._models:
            return
        yield from self._models.families()
        limits = [({"device": device}, self._limit(device)) for device in self._models.totals]
        text = "Limit of the memory of models that are loaded on demand"
        yield ScrapeLines.of("penstock_model_memory_limit_bytes", text, "gauge", limits)
