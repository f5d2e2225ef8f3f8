"""Starts and stops the instances of one model as its load requires: the actor beside `scaling`.

Adds up what the shards report, asks the controller twice a second, and lets the supervisor start or
stop workers. The memory of a GPU is reserved before a worker is started on it. Belongs to the
core's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from penstock.config import CPU, ModelConfig
from penstock.serving.arrival_rates import ArrivalRates, Increments
from penstock.serving.context import log_about
from penstock.serving.core_link import ModelPart
from penstock.serving.instance import Instance
from penstock.serving.scaling import InstanceCounts, Observation, ScalingDecision, ScalingPolicy
from penstock.serving.supervisor import Supervisor
from penstock.wire import frames

log = logging.getLogger("penstock.scaling")

# After memory had no room for an instance, the next attempt is made after this time.
ROOM_AGAIN_S = 10.0
# Requests are refused for this long after the first instance could not be loaded on demand.
LOAD_AGAIN_S = 10.0
# The slowest of this many starts is expected of the next one.
NUM_STARTS = 3
MANY = 1 << 16
SCALED_DOWN = "fewer instances are needed"
NOT_LOADED = "no request has come yet"
FIRST_REQUEST = "a request came when there was no instance"

# Reserves memory for a worker of a configuration; returns what gives the reservation back, or None
# if there is no room.
FindRoom = Callable[[ModelConfig], Awaitable[Callable[[], None] | None]]


class InstanceScaler:
    """`is_cold` from when the last instance is stopped until another is ready. `find_room` is None
    if the model's memory is not planned. Does nothing if the number of instances is fixed."""

    def __init__(
        self,
        config: ModelConfig,
        supervisor: Supervisor,
        clock: Callable[[], float],
        parts: Mapping[int, ModelPart],
    ) -> None:
        """`parts` are the shards' parts of the model."""
        self._parts = parts
        self._supervisor = supervisor
        self._clock = clock
        self._use(config)
        self._rates = ArrivalRates(clock())
        self._loads: dict[int, frames.PartLoad] = {}
        self._new = Increments()
        self._busy_s = self._num_requests = self._num_late = 0.0
        self._looked_at = clock()
        # How long the last instances took to be ready.
        self.starts: deque[float] = deque(maxlen=NUM_STARTS)
        self._no_room_until = 0.0
        # What gives back the memory that is reserved for an instance until it is loaded, and the
        # last life of that instance before.
        self._reserved: dict[int, tuple[int, Callable[[], None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.find_room: FindRoom | None = None
        self.is_cold = False
        # When the first instance was last ready, in seconds since 1970.
        self.warm_since = time.time()
        # Why the first instance could not be loaded on demand, and until when requests are refused.
        self.problem = ""
        self._load_again_at = 0.0
        # Instances that end when their sequences have ended.
        self._vacated: set[Instance] = set()
        # Whether there may be another number of instances than workers were told of.
        self._varies = config.is_scaled
        self.decision = ScalingDecision(len(self._wanted), "the number at the start")

    def _use(self, config: ModelConfig) -> None:
        self._config = config
        # Instances that share a worker are started and stopped together.
        slots = max(count for _, count in config.places)
        least = min(len(config.places), -(-config.min_instances // slots))
        self.limits = least, len(config.places)
        self.policy = ScalingPolicy(*self.limits, config.scaling, config.batching, slots)

    @property
    def _wanted(self) -> list[Instance]:
        return [each for each in self._supervisor.instances if each.is_wanted]

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    @property
    def load_s(self) -> float:
        """How long an instance is expected to take until it is ready."""
        return max(self.starts, default=0.0)

    @property
    def scaled(self) -> frames.Scaled:
        """What shards must know."""
        refuse_s = max(0.0, self._load_again_at - self._clock()) if self.problem else 0.0
        target = 0 if self.is_cold else self.decision.target
        return frames.Scaled(target, self.load_s, self.problem if refuse_s else "", refuse_s)

    @property
    def refuses(self) -> bool:
        """Whether requests are refused because the last load failed."""
        return bool(self.problem) and self._clock() < self._load_again_at

    @property
    def last_used(self) -> float:
        """When the last request came, as far as shards have said."""
        return self._rates.arrived_at

    def describe(self) -> str:
        """Describe the last decision on the number of instances; empty if the number is fixed."""
        if not self._config.is_scaled:
            return ""
        least, most = self.limits
        if self._config.scaling.is_on_demand:
            least = 0
        return f"{self.decision.target} of {least} to {most} instances: {self.decision.reason}"

    def begin_without(self) -> None:
        """Load nothing until `wake`."""
        self._supervisor.want_first(0)
        self.decision = ScalingDecision(0, NOT_LOADED)
        self.is_cold = True

    def begin_with(self, num_instances: int) -> None:
        """Load as many instances at first as another version has now, within the limits; on GPUs,
        memory is planned for the configured number."""
        least, most = self.limits
        if not self._config.uses_gpu:
            self._supervisor.want_first(max(least, 1, min(most, num_instances)))
            self.decision = ScalingDecision(len(self._wanted), "as many as the last version had")

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for index in list(self._reserved):
            self._give_back(index)

    def report(self, shard: int, load: frames.PartLoad) -> None:
        """Hear the load of a shard."""
        self._rates.count(shard, load.num_offered, self._clock())
        self._busy_s += self._new.count((shard, "busy"), load.busy_s)
        self._num_requests += self._new.count((shard, "requests"), load.num_requests)
        self._num_late += self._new.count((shard, "late"), load.num_late)
        self._loads[shard] = load

    def forget(self, shard: int) -> None:
        """Drop a shard that has ended."""
        self._rates.forget(shard)
        for name in ("busy", "requests", "late"):
            self._new.forget((shard, name))
        self._loads.pop(shard, None)

    def ready(self, instance: Instance) -> None:
        """Hear that a worker is ready."""
        self.starts.append(instance.start_s)
        if self.is_cold:
            # Clients that were refused meanwhile come back.
            self._rates.touch(self._clock())
            self.warm_since = time.time()
        self.is_cold = False
        self.problem = ""
        self.settled(instance)

    def tell_executors(self) -> None:
        """Tell the workers how many batches can run at once now."""
        if not self._varies:
            return
        instances = self._supervisor.instances
        ready = [each for each in instances if each.is_ready and not each.is_leaving]
        frame = frames.encode(frames.SetExecutors(max(1, sum(each.num_slots for each in ready))))
        for instance in ready:
            instance.send(frame)

    def settled(self, instance: Instance) -> None:
        """Give back the reservation of a worker that has its memory, or has died. The one before
        it may still be leaving when the memory is reserved; its end changes nothing."""
        life, _ = self._reserved.get(instance.index, (0, None))
        if instance.life != life or not instance.is_wanted:
            self._give_back(instance.index)

    def _give_back(self, index: int) -> None:
        _, release = self._reserved.pop(index, (0, None))
        if release is not None:
            release()

    def wake(self, reason: str = FIRST_REQUEST) -> None:
        """Start the first instance, if there is none."""
        self._rates.touch(self._clock())
        if not self._wanted and not self.refuses:
            self._follow(ScalingDecision(1, reason))

    def fail(self, problem: str) -> None:
        """Give up loading the first instance; refuse requests for a while, then try again."""
        self.problem, self._load_again_at = problem, self._clock() + LOAD_AGAIN_S
        for instance in self._wanted:
            instance.is_wanted = False
        self.is_cold = True
        self.decision = ScalingDecision(0, problem)
        log_about(log, logging.ERROR, self._config, " cannot be loaded: %s", problem)

    def stop_all(self, reason: str) -> None:
        """Stop all instances when they have answered."""
        self._follow(ScalingDecision(0, reason))

    def resize(self, config: ModelConfig, count: int, reason: str) -> list[Instance]:
        """Use another configuration, with `count` instances or as near as its limits allow; return
        those that are started."""
        before = self._wanted
        self._varies = True
        self._use(config)
        self._supervisor.use(config)
        least, most = self.limits
        self._follow(ScalingDecision(min(most, max(least, count)), reason))
        return [each for each in self._wanted if each not in before]

    def leave_vacated(self) -> None:
        """Stop the instances whose sequences have ended."""
        for instance in list(self._vacated):
            index, parts = instance.index, self._parts.values()
            if instance.is_wanted:
                self._vacated.discard(instance)
                for part in parts:
                    part.occupy(index)
            elif all([part.vacate(index) for part in parts]):
                self._vacated.discard(instance)
                self._supervisor.dismiss(instance, SCALED_DOWN)

    def tick(self) -> bool:
        """Decide how many instances there should be; return whether the last is being stopped."""
        now = self._clock()
        if self._config.scaling.is_on_demand and not self._wanted:
            return False
        decision = self.policy.decide(self._observe(now), now)
        if decision.target == len(self._wanted):
            self.decision = decision
            return False
        was_cold = self.is_cold
        self._follow(decision)
        return self.is_cold and not was_cold

    def _observe(self, now: float) -> Observation:
        wanted = self._wanted
        ready = [each for each in wanted if each.is_ready and not each.is_leaving]
        num_slots = sum(each.num_slots for each in ready)
        available_s = max(1e-9, (now - self._looked_at) * num_slots)
        busy, self._busy_s, self._looked_at = min(1.0, self._busy_s / available_s), 0.0, now
        loads = self._loads.values()
        known = [each for each in loads if each.times_s]
        busiest = max(known, key=lambda each: each.busy_s, default=None)
        return Observation(
            self._rates.look(now),
            InstanceCounts(len(ready), len(wanted) - len(ready), self._room(now)),
            sum(each.num_queued for each in loads),
            busy,
            busiest.times_s if busiest is not None else {},
            self.load_s,
            max((each.inflation for each in loads), default=1.0),
            self._num_requests,
            self._num_late,
        )

    def _room(self, now: float) -> int:
        """Return how many instances may be started now, as far as it is known."""
        if now < self._no_room_until:
            return 0
        if self._config.uses_gpu:
            return MANY
        running = next((each.child for each in self._wanted if each.child is not None), None)
        return MANY if running is None or running.life.has_room_for_another() else 0

    def _follow(self, decision: ScalingDecision) -> None:
        """Start or stop instances until there are as many as decided."""
        before = len(self._wanted)
        for _ in range(decision.target - before):
            if (instance := self._supervisor.want_another()) is not None:
                self._start(instance)
        for _ in range(before - decision.target):
            self._stop_one()
        after = len(self._wanted)
        self.decision = ScalingDecision(after, decision.reason)
        self.leave_vacated()
        if after == 0:
            self.is_cold = True
        if after != before:
            text = " scales from %d to %d instances: %s"
            log_about(log, logging.INFO, self._config, text, before, after, decision.reason)

    def _stop_one(self) -> None:
        """Stop an instance: one that still loads, or else the one that was added last."""
        instance = max(self._wanted, key=lambda each: (not each.is_ready, each.index))
        instance.is_wanted = False
        if instance.is_ready:
            self._vacated.add(instance)
        else:
            self._supervisor.dismiss(instance, SCALED_DOWN)

    def _start(self, instance: Instance) -> None:
        is_planned = instance.device != CPU or self._config.scaling.is_on_demand
        if self.find_room is None or not is_planned:
            self._supervisor.start_wanted(instance)
            return
        if instance.waits_for_room:
            # It was dismissed and is wanted again.
            return
        instance.waits_for_room = True
        task = asyncio.get_running_loop().create_task(self._start_with_room(instance))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_with_room(self, instance: Instance) -> None:
        """Start a worker, if the memory plan has room for it."""
        assert self.find_room is not None
        config = self._config.of_worker(instance.device, instance.num_slots)
        try:
            release = await self.find_room(config)
        finally:
            instance.waits_for_room = False
        if release is None:
            if instance.is_wanted:
                self._no_room_until = self._clock() + ROOM_AGAIN_S
                self._supervisor.dismiss(instance, "no memory")
                text = " cannot start an instance: %s has no memory left"
                log_about(log, logging.WARNING, self._config, text, instance.device)
            if not self._wanted:
                self.is_cold = True
            return
        if not instance.is_wanted:
            release()
            return
        self._give_back(instance.index)
        self._reserved[instance.index] = instance.life, release
        self._supervisor.start_wanted(instance)
