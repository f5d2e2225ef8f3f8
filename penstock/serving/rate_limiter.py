"""Executions of all models of a server that need resources: asks the pool, and wakes models.

Belongs to the core's event loop, which queues the requests of these models. A model asks before it
forms a batch, so a batch grows while it has to wait. Knows no process and no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.config import ModelConfig, RateLimit
from penstock.errors import ConfigError
from penstock.serving.rate_pool import Needs, RatePool, ResourceKey, needs_of
from penstock.serving.worker_place import WorkerPlace


class BatchLimits(Protocol):
    """What decides whether a worker may get another batch."""

    def take(self, worker: WorkerPlace) -> bool:
        """Return whether the worker may get a batch now. If not, the model is woken when it may.
        Call `settle` when it has one, or when there is none for it."""

    def settle(self, worker: WorkerPlace) -> None:
        """Give back what is not needed by the batches of the worker."""

    def close(self) -> None: ...


class Unlimited:
    def take(self, worker: WorkerPlace) -> bool:
        return True

    def settle(self, worker: WorkerPlace) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


UNLIMITED = Unlimited()


class RateLimiter:
    def __init__(self, given: Mapping[ResourceKey, int]) -> None:
        self.pool = RatePool(given)
        self._is_due = False
        self.num_decisions = 0

    def open(self, config: ModelConfig, wake: Callable[[], None]) -> LimitedPlaces:
        """Add the instances of a model that is being loaded; `wake` is called when one of them may
        execute."""
        limits = LimitedPlaces(self, wake)
        for index in range(len(config.places)):
            self.pool.add((limits, index), *limit_at(config, index))
            limits.indices.append(index)
        return limits

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if an instance of the model could never execute."""
        found: dict[str, None] = {}
        for index in range(len(config.places)):
            found |= dict.fromkeys(self.pool.problems(limit_at(config, index)[0]))
        if found:
            raise ConfigError([f"instance_group.rate_limiter: {each}" for each in found])

    def decide(self, asking: tuple[LimitedPlaces, int] | None = None) -> None:
        """Grant what can be granted, and wake those models. The one that is `asking` sees its
        answer itself: woken for a batch that waits to be filled, it would ask for ever."""
        self._is_due = False
        self.num_decisions += 1
        woken: dict[LimitedPlaces, None] = {}
        for instance in self.pool.grant():
            assert isinstance(instance, tuple)
            limits, index = instance
            limits.granted.add(index)
            if instance != asking:
                woken[limits] = None
        for limits in woken:
            asyncio.get_running_loop().call_soon(limits.wake)

    def decide_soon(self) -> None:
        """Decide once all models that have just got an answer have said what they want next."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.decide)


class LimitedPlaces:
    """The instances of one model. `granted` are those that may execute and have no batch for it
    yet; `_num_held` counts what each holds, these included."""

    def __init__(self, limiter: RateLimiter, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self._wake = wake
        self._is_closed = False
        self.indices: list[int] = []
        self.granted: set[int] = set()
        self._num_held: dict[int, int] = {}

    def wake(self) -> None:
        if not self._is_closed:
            self._wake()
            # Those that found nothing to execute.
            for index in list(self.granted):
                self._give_back(index)

    def take(self, worker: WorkerPlace) -> bool:
        index = worker.index
        if index not in self.granted:
            self._limiter.pool.want((self, index))
            self._limiter.decide((self, index))
        return index in self.granted

    def settle(self, worker: WorkerPlace) -> None:
        index, num_batches = worker.index, len(worker.batches)
        held = self._num_held.get(index, 0)
        if index in self.granted and num_batches > held:
            self.granted.discard(index)
            held += 1
        elif index in self.granted:
            self._give_back(index)
        while held > num_batches:
            held -= 1
            self._limiter.pool.release((self, index))
            self._limiter.decide_soon()
        self._num_held[index] = held

    def close(self) -> None:
        """Give everything back; nothing is wanted any more."""
        self._is_closed = True
        for index in self.indices:
            self._limiter.pool.remove((self, index))
        self.indices.clear()
        self.granted.clear()
        self._limiter.decide_soon()

    def _give_back(self, index: int) -> None:
        self.granted.discard(index)
        self._limiter.pool.release((self, index), was_used=False)
        self._limiter.decide_soon()


def limit_at(config: ModelConfig, index: int) -> tuple[Needs, int]:
    """Return the needs and the priority of the instance at a place: that of the same number on its
    device. Instances that are added by load are as the last one."""
    devices = [device for device, _ in config.places]
    device = devices[index]
    number = devices[:index].count(device)
    kind = device.partition(":")[0]
    limits: Sequence[RateLimit] = [
        each for each in config.rate_limits if each.device in (device, kind)
    ]
    limits = limits or config.rate_limits
    limit = limits[min(number, len(limits) - 1)]
    return needs_of(limit.resources, device), limit.priority
