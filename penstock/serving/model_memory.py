"""Memory of the models that are loaded on demand: the actor beside `evictions`.

Measures workers once they are ready, and remembers that for the next load; before the first one, a
model's files tell. Lets a model start a worker when the plan of its device has room, and evicts
others for it. Counts host memory for workers on the CPU, and GPU memory for those on a GPU. Belongs
to the core's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.config import CPU, ModelConfig, ModelMemoryLimit
from penstock.repository.file_stamps import Stamps
from penstock.repository.parameters import on_demand_problem
from penstock.serving.context import log_about
from penstock.serving.evictions import MemoryDemand, MemoryPlan, Resident, plan_memory
from penstock.serving.fleet import CONTEXT_BYTES, need_of, weight_bytes
from penstock.serving.instance import Instance
from penstock.serving.model_host import ModelHost
from penstock.serving.placement import gib
from penstock.serving.scaler import FindRoom
from penstock.serving.scrape import ScrapeLines
from penstock.system.memory import proportional_bytes

log = logging.getLogger("penstock.memory")

# The plan is made again after this time while a model waits, or else after that one; and sizes are
# measured again.
LOOK_S, KEEP_S, MEASURE_S = 0.02, 1.0, 10.0
# A model that has just been loaded stays for this long: shards have not sent its requests yet.
SETTLE_S = 0.5
# A worker without its model: the interpreter with an engine's library. Deliberately low.
WORKER_BYTES = 64 << 20
# Memory of a device whose driver does not tell.
UNKNOWN_BYTES = 1 << 60
EVICTED = "evicted: others needed its memory"


@dataclass(eq=False)
class DemandedModel:
    """A version that requests load. `sizes` are what its workers take by device, remembered."""

    key: int
    config: ModelConfig
    host: ModelHost
    sizes: dict[str, int]
    # Sizes of its present workers, by their lives.
    measured: dict[int, int] = field(default_factory=dict)
    # Workers that may be started and are not yet.
    granted: Counter[str] = field(default_factory=Counter)
    # Its first worker waits for memory.
    is_seeking: bool = False
    num_loads: int = 0
    load_s: float = 0.0
    num_evictions: int = 0

    @property
    def name(self) -> str:
        return f"{self.config.name}/{self.config.version}"

    @property
    def is_loading(self) -> bool:
        """Whether it was never open for requests; somebody waits for that."""
        return self.host.state == "LOADING"

    @property
    def is_awaited(self) -> bool:
        return self.is_loading or self.host.demand.is_awaited

    def refuse(self, problem: str) -> None:
        """Give up starting its first worker."""
        if self.is_loading:
            self.host.load_failed((problem,))
        else:
            self.host.demand.refuse(problem)

    @property
    def has_worker(self) -> bool:
        """Whether a worker has memory that it will keep, or waits for it as the first one."""
        kept = (each.child is not None and not each.is_dismissed for each in self.host.instances)
        return self.is_seeking or any(kept)

    def workers(self, device: str) -> list[Instance]:
        """Return the places whose workers have memory of a device, or are about to."""
        return [
            each
            for each in self.host.instances
            if each.device == device and (each.child is not None or each.needs_worker)
        ]

    def bytes_on(self, device: str) -> int:
        size = self.sizes.get(device, 0)
        known = sum(self.measured.get(each.life, size) for each in self.workers(device))
        return known + self.granted[device] * size

    def describe_memory(self) -> str:
        """Say how much memory it has, by device."""
        sizes = {device: self.bytes_on(device) for device in dict.fromkeys(self.config.devices)}
        return ", ".join(f"{gib(size)} on {device}" for device, size in sizes.items() if size)

    def resident(self, device: str, now: float) -> Resident:
        """Describe it for the plan of a device."""
        workers = self.workers(device)
        is_leaving = all(each.is_dismissed or not each.is_wanted for each in workers)
        used = max((self.host.demand.last_used, *(each.ready_at for each in workers)))
        size, stays = self.bytes_on(device), self._why_stays(workers, now)
        is_leaving = is_leaving and not self.granted[device]
        return Resident(self.key, self.name, size, used, stays, is_leaving)

    def _why_stays(self, workers: Sequence[Instance], now: float) -> str:
        if not all(each.is_ready for each in workers) or self.granted.total():
            return "loads"
        if self.config.scaling.on_demand == "keep":
            return "is kept"
        if any(now - each.ready_at < SETTLE_S for each in workers):
            return "has just been loaded"
        return "" if self.host.demand.is_idle else "has requests"


class ModelMemory:
    """`find_gpu_room` reserves GPU memory, which other models take as well; `memory_of` reads how
    much a device has, 0 if that is unknown. `limit` and `loads_all` are set before models are
    loaded; with the latter, models whose configuration does not say otherwise are loaded on demand,
    if they can be."""

    def __init__(self, find_gpu_room: FindRoom, memory_of: Callable[[str], int]) -> None:
        self._find_gpu_room = find_gpu_room
        self._memory_of = memory_of
        self.limit = ModelMemoryLimit()
        self.loads_all = False
        self._keys = itertools.count()
        self._models: dict[int, DemandedModel] = {}
        # Of each version, its files and the sizes of its workers by device.
        self._known: dict[tuple[str, str], tuple[Stamps, dict[str, int]]] = {}
        # Demands by device, the one that has waited longest first.
        self._demands: dict[str, list[MemoryDemand]] = {}
        self._totals: dict[str, int] = {}
        self._measured_at = -MEASURE_S
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
        version = config.name, config.version
        files, sizes = self._known.get(version, (None, {}))
        if files != stamps:
            sizes = {}
        self._known[version] = stamps, sizes
        model = DemandedModel(next(self._keys), config, host, sizes)
        self._models[id(host)] = model
        find_room = partial(self._find_room, model)
        host.demand.begin(find_room, is_lazy=is_lazy, memory=model.describe_memory)

    def close(self, host: ModelHost | None) -> None:
        """Forget a version that has ended, but not how much memory it took."""
        self._models.pop(id(host), None)

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
        if device not in model.sizes:
            model.sizes[device] = await asyncio.to_thread(_estimate, config)
        await self._read_total(device)
        await self._measure()
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
            others = self._residents(config.device, but=model)
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
            self._limit(device), self._residents(device), self._demands.get(device, ())
        )

    def _limit(self, device: str) -> int:
        return self.limit.of(self._totals[device] or UNKNOWN_BYTES)

    def _residents(self, device: str, but: DemandedModel | None = None) -> list[Resident]:
        now = time.monotonic()
        models = (each for each in self._models.values() if each is not but)
        return [each.resident(device, now) for each in models if each.bytes_on(device)]

    def _evict(self, keys: Sequence[int], cause: DemandedModel | None = None) -> None:
        for model in list(self._models.values()):
            if model.key in keys:
                size = gib(sum(model.bytes_on(device) for device in self._totals))
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
        self._measured_at = -MEASURE_S
        self._start(self._measure())

    async def keep_limit(self) -> None:
        """Measure now and then, and evict idle models when others have grown. Runs until it is
        cancelled."""
        while True:
            await asyncio.sleep(KEEP_S)
            if time.monotonic() - self._measured_at >= MEASURE_S:
                await self._measure()
            for device in self._totals:
                self._evict(self._plan(device).evict)

    async def _measure(self) -> None:
        """Read what the workers take now."""
        now = time.monotonic()
        if now - self._measured_at < KEEP_S:
            return
        self._measured_at = now
        wanted = [
            (model, each.life, each.device, each.pid, each.process.gpu_memory_bytes)
            for model in self._models.values()
            for each in model.host.instances
            if each.is_ready
        ]
        pids = [pid for _, _, device, pid, _ in wanted if device == CPU]
        taken = await asyncio.to_thread(lambda: {pid: proportional_bytes(pid) for pid in pids})
        for model, life, device, pid, gpu_bytes in wanted:
            size = taken[pid] if device == CPU else gpu_bytes + CONTEXT_BYTES * bool(gpu_bytes)
            if size:
                model.measured[life] = model.sizes[device] = size
        for model in self._models.values():
            alive = {each.life for each in model.host.instances}
            model.measured = {n: size for n, size in model.measured.items() if n in alive}

    async def _read_total(self, device: str) -> None:
        if device not in self._totals:
            self._totals[device] = await asyncio.to_thread(self._memory_of, device)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def families(self) -> Iterator[ScrapeLines]:
        """Yield what a scrape shows of these models."""
        if not self._models:
            return
        models = [
            (each.config.labels, each)
            for each in sorted(self._models.values(), key=lambda each: each.name)
        ]
        yield ScrapeLines.of(
            "penstock_model_loads",
            "Loads on demand",
            "counter",
            [(labels, each.num_loads) for labels, each in models],
        )
        yield ScrapeLines.of(
            "penstock_cold_start_seconds",
            "Seconds that loads on demand took, with waiting for memory",
            "counter",
            [(labels, each.load_s) for labels, each in models],
        )
        yield ScrapeLines.of(
            "penstock_model_evictions",
            "Times that a model gave its memory to others",
            "counter",
            [(labels, each.num_evictions) for labels, each in models],
        )
        sizes = [
            ({**labels, "device": device}, each.bytes_on(device))
            for labels, each in models
            for device in dict.fromkeys(each.config.devices)
        ]
        text = "Memory of models that are loaded on demand"
        yield ScrapeLines.of("penstock_model_memory_bytes", text, "gauge", sizes)
        limits = [({"device": device}, self._limit(device)) for device in self._totals]
        text = "Limit of the memory of models that are loaded on demand"
        yield ScrapeLines.of("penstock_model_memory_limit_bytes", text, "gauge", limits)


def _estimate(config: ModelConfig) -> int:
    """Return what a worker takes, before one was measured."""
    if config.device != CPU:
        return need_of(config).num_bytes
    return weight_bytes(config) + WORKER_BYTES
