"""Memory of the models loaded on demand: it is measured, remembered and shown here.

Measures workers once they are ready, and remembers that for the next load; before the first one, a
model's files tell. Host memory for workers on the CPU, GPU memory for those on a GPU. Decides
nothing: that is for `model_memory`. Belongs to the core's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.config import CPU, ModelConfig
from penstock.repository.file_stamps import Stamps
from penstock.serving.evictions import Resident
from penstock.serving.fleet import CONTEXT_BYTES, need_of, weight_bytes
from penstock.serving.instance import Instance
from penstock.serving.model_host import ModelHost
from penstock.serving.placement import gib
from penstock.serving.scrape import ScrapeLines
from penstock.system.memory import proportional_bytes

# Sizes are measured again after this time, and not again within that one.
MEASURE_S, AGAIN_S = 10.0, 1.0
# A model that has just been loaded stays for this long: shards have not sent its requests yet.
SETTLE_S = 0.5
# A worker without its model: the interpreter with an engine's library. Deliberately low.
WORKER_BYTES = 64 << 20


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
        """Whether its first load is under way."""
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


class MeasuredModels:
    """The open versions. `memory_of` reads how much a device has, 0 if that is unknown; `totals`
    have that of each device that was asked for."""

    def __init__(self, memory_of: Callable[[str], int]) -> None:
        self._memory_of = memory_of
        self._keys = itertools.count()
        self._models: dict[int, DemandedModel] = {}
        # The files of each version, and the sizes of its workers by device.
        self._known: dict[tuple[str, str], tuple[Stamps, dict[str, int]]] = {}
        self.totals: dict[str, int] = {}
        self._measured_at = -MEASURE_S
        self._measuring = asyncio.Lock()

    def __bool__(self) -> bool:
        return bool(self._models)

    def __iter__(self) -> Iterator[DemandedModel]:
        return iter(list(self._models.values()))

    def open(self, config: ModelConfig, host: ModelHost, stamps: Stamps) -> DemandedModel:
        """Add a version, with the sizes that it had before if its files are the same."""
        version = config.name, config.version
        files, sizes = self._known.get(version, (None, {}))
        if files != stamps:
            sizes = {}
        self._known[version] = stamps, sizes
        model = self._models[id(host)] = DemandedModel(next(self._keys), config, host, sizes)
        return model

    def close(self, host: ModelHost | None) -> None:
        """Forget a version that has ended, but not how much memory it took."""
        self._models.pop(id(host), None)

    def residents(self, device: str, but: DemandedModel | None = None) -> list[Resident]:
        """Describe the models that have memory of a device."""
        now = time.monotonic()
        models = (each for each in self if each is not but)
        return [each.resident(device, now) for each in models if each.bytes_on(device)]

    async def read(self, model: DemandedModel, config: ModelConfig) -> None:
        """Find out what the device of a worker of this configuration has, what such a worker takes,
        and what others take now."""
        device = config.device
        if device not in model.sizes:
            model.sizes[device] = await asyncio.to_thread(_estimate, config)
        if device not in self.totals:
            self.totals[device] = await asyncio.to_thread(self._memory_of, device)
        await self.measure(AGAIN_S)

    async def measure(self, again_s: float = 0.0) -> None:
        """Read what the workers take now, unless that was done in the last `again_s`. One that is
        under way is waited for: what it finds decides about the next model."""
        async with self._measuring:
            now = time.monotonic()
            if now - self._measured_at < again_s:
                return
            self._measured_at = now
            await self._measure()

    async def _measure(self) -> None:
        wanted = [
            (model, each.life, each.device, each.pid, each.process.gpu_memory_bytes)
            for model in self
            for each in model.host.instances
            if each.is_ready
        ]
        pids = [pid for _, _, device, pid, _ in wanted if device == CPU]
        taken = await asyncio.to_thread(lambda: {pid: proportional_bytes(pid) for pid in pids})
        for model, life, device, pid, gpu_bytes in wanted:
            size = taken[pid] if device == CPU else gpu_bytes + CONTEXT_BYTES * bool(gpu_bytes)
            if size:
                model.measured[life] = model.sizes[device] = size
        for model in self:
            alive = {each.life for each in model.host.instances}
            model.measured = {n: size for n, size in model.measured.items() if n in alive}

    def families(self) -> Iterator[ScrapeLines]:
        """Yield what a scrape shows of these models."""
        models = [(each.config.labels, each) for each in sorted(self, key=lambda each: each.name)]
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


def _estimate(config: ModelConfig) -> int:
    """Return what a worker takes, before one was measured."""
    if config.device != CPU:
        return need_of(config).num_bytes
    return weight_bytes(config) + WORKER_BYTES
