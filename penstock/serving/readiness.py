"""Whether a model can run requests: its first load, what its workers proved, and lost instances.

Receives the supervisor's events. Decides what is known only about all instances together; what an
answer or a death means for a batch is the dispatcher's part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from penstock.errors import ConfigError, NotReady
from penstock.serving.context import ModelContext, log_about
from penstock.serving.dispatcher import Dispatcher
from penstock.serving.instance import Instance
from penstock.serving.padding import Pads
from penstock.serving.proof import agreed
from penstock.serving.request_memory import RequestMemory
from penstock.serving.request_queue import RequestQueue
from penstock.serving.supervisor import Supervisor
from penstock.wire import frames

log = logging.getLogger("penstock.model")

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]

# With no instance ready, queued requests wait this long for one to come back, or LOAD_FACTOR times
# the model's load time if that is longer.
UNAVAILABLE_AFTER_S = 30.0
LOAD_FACTOR = 2


class Readiness:
    """The supervisor's listener."""

    def __init__(
        self,
        context: ModelContext,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        queue: RequestQueue,
        memory: RequestMemory,
    ) -> None:
        self._config = context.config
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        # Events that only the dispatcher handles.
        self.attach, self.tick = dispatcher.attach, dispatcher.tick
        self._queue = queue
        self._memory = memory
        self._planner = context.planner
        self._metrics = context.metrics
        self._saturation = context.saturation
        self._clock = context.clock
        self.state: State = "LOADING"
        self.reason = ""
        # How the model is served and why, if its configuration does not say.
        self.notes: tuple[str, ...] = ()
        # Done when all instances are warm, or when loading failed and `_load_problems` is set. Not
        # an exception of the future: model and traceback would keep each other alive.
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load_problems: Sequence[str] = ()
        # None while an instance is ready.
        self._without_instance_since: float | None = context.clock()

    @property
    def is_ready(self) -> bool:
        """Whether an instance can run a batch."""
        return self.state == "READY" and self._has_instance

    @property
    def _has_instance(self) -> bool:
        return any(each.is_ready for each in self._supervisor.instances)

    def not_ready(self) -> NotReady:
        reason = self.reason or self._supervisor.last_reason
        detail = f": {reason}" if reason else ""
        return NotReady(f"Model '{self._config.name}' is not at ready state{detail}")

    async def load(self) -> None:
        """Start the workers and wait until all are warm. ConfigError if the model cannot load."""
        self._supervisor.start(self)
        await self._first_ready
        if self._load_problems:
            raise ConfigError(self._load_problems)

    def instance_ready(self, instance: Instance) -> None:
        assert instance.ready is not None
        self._metrics.load_s = instance.ready.load_s
        if instance.ready.needs_requests:
            self._memory.needs_parts = True
        self._dispatcher.hang_limits.seed(instance.ready.timings)
        self._saturation.note(False, self._clock())
        self._queue.batcher.seed(instance.ready.timings)
        self._without_instance_since = None
        self._count_executors()
        instances = self._supervisor.instances
        if all(each.is_ready for each in instances) and not self._first_ready.done():
            self._apply_proofs([each.ready for each in instances if each.ready is not None])
            self.state = "READY"
            self._first_ready.set_result(None)
        self._dispatcher.pump()

    def instance_died(self, instance: Instance, reason: str) -> bool:
        """Return whether a request is to blame; the death then counts towards no crash loop."""
        if self.state == "READY":
            self._metrics.num_restarts += 1
            if not instance.is_leaving:
                self._metrics.num_deaths["hang" if instance.is_hung else "crash"] += 1
        # A death while loading does not restart the clock, so that queued requests still time out.
        if self._without_instance_since is None and not self._has_instance:
            self._without_instance_since = self._clock()
        self._count_executors()
        return self._dispatcher.died(instance, reason)

    def load_failed(self, problems: Sequence[str]) -> None:
        self.state = "UNAVAILABLE"
        self.reason = "; ".join(problems)
        if not self._first_ready.done():
            self._load_problems = problems
            self._first_ready.set_result(None)

    def hang_limit_s(self, instance: Instance) -> float | None:
        """Return how long the instance's oldest batch may still take; None if it has no batch."""
        self._fail_if_unavailable()
        if not instance.batches:
            return None
        batch = instance.batches[0]
        limit_s = self._dispatcher.hang_limits.limit_s(batch.num_rows)
        # Batches that were sent before this one ran first.
        return max(batch.started, instance.answered_at) + limit_s - self._clock()

    def _fail_if_unavailable(self) -> None:
        """Fail queued requests when no instance came back in time."""
        if self.state != "READY" or self._has_instance:
            return
        patience_s = max(UNAVAILABLE_AFTER_S, LOAD_FACTOR * self._metrics.load_s)
        since = self._without_instance_since
        if self._queue.num_waiting and since is not None and self._clock() - since > patience_s:
            self._queue.refuse_all(self.not_ready())
            self._dispatcher.check_idle()

    def _count_executors(self) -> None:
        instances = self._supervisor.instances
        num_ready = sum(each.num_slots for each in instances if each.is_ready)
        self._queue.batcher.count_executors(num_ready, self._clock())

    def _apply_proofs(self, ready: Sequence[frames.WorkerReady]) -> None:
        """Batch and pad as far as every instance proved harmless. No request is queued yet."""
        config = self._config
        proof = self._supervisor.proof = agreed([each.proof for each in ready])
        notes = list(proof.notes)
        if proof.unbatched:
            notes.append(f"served one request at a time: {proof.unbatched}")
            self._queue.stop_batching()
            for each in ready:
                self._queue.batcher.seed(each.timings)
            self._count_executors()
        if proof.unpadded:
            notes.append(f"not padded: {proof.unpadded}")
        elif config.padding is not None:
            self._pad(Pads(config), ready)
        if config.unkept_note:
            notes.append(config.unkept_note)
        self.notes = (*notes, *config.warnings)
        for note in notes:
            # Notes of the proof are about what was not checked; that is served as configured.
            level = logging.INFO if note in proof.notes else logging.WARNING
            log_about(log, level, config, ": %s", note)

    def _pad(self, pads: Pads, ready: Sequence[frames.WorkerReady]) -> None:
        self._planner.pads = pads
        for each in ready:
            for bucket, timings in each.bucket_timings.items():
                geometry = self._planner.bucket_geometry(bucket)
                self._queue.batcher.seed(pads.warm_times(timings, bucket), geometry)
