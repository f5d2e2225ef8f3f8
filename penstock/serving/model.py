"""One version of a model as a Servable: its parts, put together.

A request passes admission, gets a place in shared memory, waits in the queue, runs in a batch of
the dispatcher and is answered by the replies. Everything runs on one event loop without locks.
Knows no protocol: requests carry their sink. Its workers belong to the core (`model_host`), which
talks to the parts here only through `core_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, NotReady, PenstockError
from penstock.processes.child import StartLife
from penstock.processes.life import ProcessLife
from penstock.serving.admission import Admission
from penstock.serving.batcher import Batcher
from penstock.serving.context import ModelContext, Saturation
from penstock.serving.core_link import ONLY_SHARD, ShardSetup
from penstock.serving.dispatcher import Dispatcher
from penstock.serving.drift import InputDrift
from penstock.serving.explain import Explanation, explain, mode_of
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model_host import DirectLink, ModelHost
from penstock.serving.plan import Planner, slab_bytes
from penstock.serving.quarantine import PoisonGuard
from penstock.serving.quotas import QueueShares, Quotas
from penstock.serving.rate_limiter import RateLimiter
from penstock.serving.readiness import Readiness, State
from penstock.serving.replies import Replies, has_ended
from penstock.serving.request_memory import RequestMemory
from penstock.serving.request_queue import RequestQueue
from penstock.serving.request_recorder import RequestRecorder
from penstock.serving.reservation import Reservation
from penstock.serving.response_cache import AnswerCache
from penstock.serving.sequences import read_gauges
from penstock.serving.served import ModelProcess
from penstock.serving.slo_batcher import SloBatcher
from penstock.serving.worker_place import WorkerPlace
from penstock.types import CANCELLED, Request

log = logging.getLogger("penstock.model")
# Time for the current batches of workers that are the core's.
CLOSE_S = 5.0


class Model:
    """References between the parts go one way, and the host drops its own when it stops: an
    unloaded model is freed without the garbage collector."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        start_life: StartLife = ProcessLife,
        clock: Callable[[], float] = time.monotonic,
        quotas: Quotas | None = None,
        metrics: ModelMetrics | None = None,
        shard: ShardSetup = ONLY_SHARD,
    ) -> None:
        quotas, policy = quotas or Quotas(), config.batching
        num_levels = max(1, policy.num_priorities)
        metrics = metrics or ModelMetrics.from_config(config)
        context = ModelContext(
            config=config,
            clock=clock,
            metrics=metrics,
            planner=Planner(config, slab_bytes(config)),
            quotas=quotas,
            shares=QueueShares(quotas, policy.max_pending, num_levels, shard.elsewhere),
            saturation=Saturation(clock()),
            sees_idle=shard.sees_idle,
            busy_s=shard.busy_s,
            num_batches=shard.num_batches,
            regions=shard.regions,
            callees=shard.callees,
        )
        self.metrics = metrics
        self._shares = context.shares
        self._clock = clock
        self.memory = memory = RequestMemory(context)
        if config.uses_gpu:
            metrics.read_gauges = memory.gauges
        self._replies = replies = Replies(context, memory, shard.elsewhere)
        self.history = replies.history
        guard = PoisonGuard(context)
        self._queue = queue = RequestQueue(context, replies, guard, shard.elsewhere)
        if queue.sequences is not None:
            metrics.read_gauges = partial(read_gauges, metrics.read_gauges, queue.sequences.table)
        self._admission = Admission(context, memory, queue, guard, replies)
        # The workers, unless the core is in another process.
        self.host: ModelHost | None = None
        core = shard.core
        if core is None:
            self.host = ModelHost(config, start_life, clock, metrics)
            core = DirectLink(self.host)
        self._dispatcher = dispatcher = Dispatcher(context, core, queue, memory, replies, guard)
        self.readiness = Readiness(context, core, dispatcher, queue, memory, guard)
        self._cold = self.readiness.cold
        if self.host is not None:
            self.host.join(0, self.readiness)
        self.workers: Sequence[WorkerPlace] = dispatcher.workers
        # Set by the owner if requests are recorded.
        self.recorder: RequestRecorder | None = None
        # Set by the owner if answers are kept.
        self.cache: AnswerCache | None = None
        # What only one part does, as `Served` promises it.
        self.refused = replies.refused

    def limit_rate(self, limiter: RateLimiter) -> None:
        """Execute only with the resources that the instances need; before any worker is started."""
        self._dispatcher.limits = limiter.open(self.config, self._dispatcher.pump)

    @property
    def config(self) -> ModelConfig:
        return self.readiness.config

    @property
    def state(self) -> State:
        return self.readiness.state

    @property
    def shown_state(self) -> State:
        """State in the repository index: unavailable while no worker can run."""
        return "UNAVAILABLE" if self.state == "READY" and not self.is_ready else self.state

    @property
    def is_ready(self) -> bool:
        """Whether a worker can run a batch."""
        return self.readiness.is_ready

    @property
    def is_cold(self) -> bool:
        """Whether requests wait for the first instance of a model that is scaled to zero."""
        return self._cold.is_cold

    @property
    def reason(self) -> str:
        unloaded = "" if self.host is None else self.host.demand.reason
        return self.readiness.reason or unloaded

    @property
    def processes(self) -> Sequence[ModelProcess]:
        """Empty if they are the core's, in another process."""
        return [] if self.host is None else self.host.processes

    @property
    def notes(self) -> Sequence[str]:
        """How it is served and why, if its configuration does not say. The core's, likewise."""
        return () if self.host is None else (*self.host.notes, *self.host.drift.notes)

    @property
    def drift(self) -> Sequence[InputDrift]:
        """How live inputs compare with the evidence. The core's, likewise."""
        return [] if self.host is None else self.host.drift.states

    @property
    def batcher(self) -> Batcher | SloBatcher:
        return self._queue.batcher

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        return self._dispatcher.num_running

    @property
    def mode(self) -> str:
        return mode_of(self.config, self.batcher.policy)[0]

    def explain(self) -> Explanation:
        return explain(self, self._clock())

    async def start(self) -> None:
        """Start the workers and wait until all are warm. ConfigError if the model cannot load."""
        assert self.host is not None, "the core starts its workers"
        await self.host.load()

    async def refresh(self) -> None:
        """Do nothing: all figures are here."""

    async def drain(self) -> None:
        """Wait until everything that came has been answered."""
        if self.cache is not None:
            await self.cache.drain()
        await self._dispatcher.drain()

    async def close(self) -> None:
        """Stop the workers; requests still queued get an error. If the workers are the core's, wait
        for their current batches only."""
        self.readiness.state = "UNLOADING"
        error = NotReady(f"model '{self.config.name}' is being unloaded")
        self._dispatcher.close()
        self._queue.refuse_all(error)
        self._dispatcher.check_idle()
        if self.host is not None:
            await self.host.stop()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.drain()
        self._queue.refuse_all(error)
        self._dispatcher.check_idle()
        if self._replies.order is not None:
            self._replies.order.close()
        self.readiness.close()
        self.memory.close()
        self._admission.close()
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def tick(self) -> None:
        """Show other shards again what is here, whatever happened to the page."""
        self._shares.show()
        if self._replies.order is not None:
            self._replies.order.tick()

    def reserve(self, form: object) -> Reservation | None:
        """Reserve memory for a request of this form that is being received; None: receive it into
        private memory. It is not queued or admitted before `submit`."""
        if self.readiness.state != "READY":
            return None
        try:
            return self.memory.reserve(form)
        except OSError:
            return None  # No shared memory is left; `submit` reports it.

    def submit(self, request: Request, reserved: Reservation | None = None) -> None:
        """`reserved` is the memory of the inputs; an admitted request adopts it."""
        if self.recorder is not None:
            self.recorder.see(request)
        if not self._is_known(request):
            self._admit(request, reserved)

    def _is_known(self, request: Request) -> bool:
        """Let the cache answer the request, or look for the answer."""
        if self.cache is None or self.readiness.state != "READY":
            return False
        return self.cache.answers(request, self._admit, self._replies.order)

    def _admit(self, request: Request, reserved: Reservation | None = None) -> None:
        try:
            if self.readiness.state != "READY":
                raise self.readiness.not_ready()
            if self._cold.is_cold:
                self._cold.check()
            self._admission.admit(request)
        except PenstockError as error:
            if not request.is_mirror:
                self._admission.refused(request, error, self.num_waiting + self.num_running)
                self.refused(error, request.timings.received)
            request.respond(error)
            return
        if self._place(request, reserved):
            self._dispatcher.wake()
            if self._cold.is_cold:
                self._cold.wake()

    def _place(self, request: Request, reserved: Reservation | None) -> bool:
        try:
            if reserved is None or not self.memory.adopt(request, reserved):
                self.memory.place(request)
        except Exception:  # A request that cannot be copied must not stay in the queue.
            log.exception("%s: a request could not be placed in shared memory", self.config.name)
            failure = BackendFailed("the request could not be placed in shared memory")
            self._withdraw(request, failure, "OTHER")
            return False
        return True

    def cancel(self, request: Request) -> None:
        """Cancel a request. Queued, it never runs; once it runs, its answer is dropped."""
        if self.cache is not None and self.cache.cancel(request):
            return
        if hasattr(request, "ticket") and not has_ended(request):
            self._withdraw(request, CANCELLED, "CANCELED")
            self._dispatcher.calls.cancelled()
            self._dispatcher.check_idle()

    def _withdraw(self, request: Request, error: PenstockError, reason: str) -> None:
        if self._queue.remove(request):
            self.memory.release(request, was_dispatched=False)
            self._dispatcher.publish()
        elif self.config.is_decoupled:
            self._dispatcher.responses.cancel(request)
        else:
            self._dispatcher.recalls.recall(request)
        self._replies.fail(request, error, reason)
