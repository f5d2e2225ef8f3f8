"""The spare workers of one model: loaded in advance while requests kill workers, if memory allows.

Decides how many there are and which takes over; the supervisor starts and stops them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.config import CPU, ModelConfig
from penstock.processes.restarts import SparePlan
from penstock.serving.context import log_about
from penstock.serving.instance import Instance

log = logging.getLogger("penstock.supervisor")

# No more are started after this many died unused.
MAX_LOST = 3


class Spares:
    """`workers` are loaded or loading; `instances` are those that serve."""

    def __init__(self, config: ModelConfig, instances: Sequence[Instance]) -> None:
        self._config = config
        self._instances = instances
        self._loop = asyncio.get_running_loop()
        self._plan = SparePlan()
        self.workers: list[Instance] = []
        # Spares that died unused since one last took over.
        self._num_lost = 0

    @property
    def num_wanted(self) -> int:
        started = [each.start_s for each in (*self._instances, *self.workers) if each.is_ready]
        return self._plan.num_wanted(self._loop.time(), max(started, default=0.0))

    @property
    def has_all(self) -> bool:
        """Whether all wanted spares are ready, and at least one is."""
        num_ready = sum(spare.is_ready and not spare.is_leaving for spare in self.workers)
        return num_ready > 0 and num_ready >= self.num_wanted

    def can_replace_worker(self, is_patient: bool) -> bool:
        """Whether losing a worker would leave a spare, or another that serves. Without spares, or
        when some are missing and the caller is no longer patient, a single ready worker is risked
        only after it has served for as long as it took to start."""
        if self.workers and (self.has_all or is_patient):
            return self.has_all
        ready = [each for each in self._instances if each.is_ready]
        if len(ready) > 1:
            return True
        return any(self._loop.time() - each.ready_at >= each.start_s for each in ready)

    def note_kill(self) -> None:
        """Note that a request killed a worker; more may follow."""
        self._plan.killed(self._loop.time())

    def add(self) -> Instance | None:
        """Return a new spare to start, if one is wanted, memory allows and no worker is loading,
        which it would slow down. Only on CPUs: the GPU memory plan has no room for spares."""
        serving = [each for each in self._instances if each.is_wanted]
        everyone = (*serving, *self.workers)
        if self._config.uses_gpu or not all(each.is_ready for each in everyone):
            return None
        child = serving[0].child if serving else None
        if child is None or len(self.workers) >= self.num_wanted:
            return None
        if self._num_lost >= MAX_LOST or not child.life.has_room_for_another():
            return None
        spare = Instance(len(self._instances) + len(self.workers), CPU)
        spare.is_spare = True
        self.workers.append(spare)
        return spare

    def pick(self) -> Instance | None:
        """Return a ready spare, else the one that has been loading longest; it is ready first."""
        able = [each for each in self.workers if each.child is not None and not each.is_leaving]
        return min(able, key=lambda each: (not each.is_ready, each.started_at), default=None)

    def promote(self, spare: Instance) -> None:
        """Let a spare serve from now on."""
        self.workers.remove(spare)
        spare.is_spare = False
        self._num_lost = 0

    def lose(self, spare: Instance, reason: str) -> None:
        self.workers.remove(spare)
        if spare.is_leaving:
            return
        self._num_lost += 1
        why = spare.load_error or f"it {reason}"
        log_about(log, logging.WARNING, self._config, " lost its spare worker: %s", why)
