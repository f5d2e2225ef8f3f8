"""How one model is loaded by its requests, and gives its memory to others: part of its host.

Tells the shards' parts what that means for requests. Whether there is memory is the question of
`model_memory`; knows nothing of other models. Belongs to the core's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from penstock.serving.core_link import ModelPart
from penstock.serving.instance import Instance
from penstock.serving.scaler import FindRoom, InstanceScaler

# Room is not sought any more when no shard has asked for an instance for this long.
GIVE_UP_S = 3.0


class DemandLoading:
    """Does nothing until `begin`. `is_lazy`: the first request loads the model; otherwise it is
    loaded at once, by the same rules."""

    def __init__(
        self,
        scaler: InstanceScaler,
        parts: Mapping[int, ModelPart],
        clock: Callable[[], float],
    ) -> None:
        self._scaler = scaler
        self._parts = parts
        self._clock = clock
        self.is_used = self.is_lazy = False
        # What shards and workers show on the shared page, if there is one: whether there are no
        # requests, and when the last batch started.
        self.is_unused: Callable[[], bool] = lambda: True
        self.last_started: Callable[[], float] = lambda: 0.0
        # Why a worker that is wanted is not started yet.
        self._waits_for = ""
        self._memory: Callable[[], str] = lambda: ""

    def begin(
        self, find_room: FindRoom, *, is_lazy: bool, memory: Callable[[], str] = lambda: ""
    ) -> None:
        """Find memory for each worker from now on; `memory` says what the model has. Only before
        the model is loaded."""
        self.is_used, self.is_lazy = True, is_lazy
        self._memory = memory
        self._scaler.find_room = find_room
        self._scaler.begin_without()

    @property
    def is_idle(self) -> bool:
        """Whether the model has no requests and no sequences, as far as the core can see."""
        return self.is_unused() and all(part.is_idle for part in self._parts.values())

    @property
    def last_used(self) -> float:
        """When the last batch ran."""
        answered = (part.last_answered for part in self._parts.values())
        return max((self.last_started(), *answered))

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for the first worker."""
        return self._clock() - self._scaler.last_used < GIVE_UP_S

    @property
    def reason(self) -> str:
        """Why the model is not in memory; empty if it is, or is never loaded on demand."""
        if not self.is_used or not self._scaler.is_cold:
            return ""
        if self._scaler.problem:
            return f"it could not be loaded: {self._scaler.problem}"
        if self._scaler.num_wanted:
            return f"it is being loaded{f'; {self._waits_for}' if self._waits_for else ''}"
        return f"not in memory ({self._scaler.decision.reason}); the next request loads it"

    def describe(self) -> str:
        """Say since when the model is in memory and what it holds, and why it has as many instances
        as it has; the last is all there is to say of a model that is not loaded on demand, or not
        loaded."""
        instances = self._scaler.describe()
        if not self.is_used or self._scaler.is_cold:
            return instances
        moment = datetime.fromtimestamp(self._scaler.warm_since, UTC)
        text = f"loaded on demand since {moment.isoformat(timespec='seconds')}"
        if memory := self._memory():
            text += f"; it holds {memory}"
        return text if self._scaler.limits[1] == 1 else f"{text}; {instances}"

    def evict(self, reason: str) -> None:
        """Stop all workers when they have answered; the next request starts one."""
        self._waits_for = ""
        self._scaler.stop_all(reason)
        self.tell_scaled()

    def refuse(self, problem: str) -> None:
        """Refuse requests for a while: no worker can be started."""
        self._waits_for = ""
        self._scaler.fail(problem)
        self.tell_scaled()

    def wait_for(self, reason: str) -> None:
        """Note why a worker is not started yet."""
        if reason != self._waits_for:
            self._waits_for = reason
            for part in self._parts.values():
                part.set_reason(reason)

    def died(self, instance: Instance, reason: str) -> None:
        """Hear that a worker has died. The first one, for which requests wait, is not started again
        before another request comes."""
        is_first = self.is_used and self._scaler.is_cold
        if is_first and instance.is_wanted and not instance.is_dismissed:
            self.refuse(instance.load_error or f"its worker {reason} while loading; see the log")

    def tell_scaled(self) -> None:
        """Tell the shards how many workers there should be."""
        for part in list(self._parts.values()):
            part.scaled(self._scaler.scaled)
