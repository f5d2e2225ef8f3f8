"""Whether a model can run requests: what the core says of its workers, as a shard hears it.

The shard's end of `core_link`. Applies what is known only about all workers together; what an
answer or a death means for a batch is the dispatcher's part. Knows no process.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from penstock.errors import NotReady
from penstock.serving.cold_start import ColdRequests
from penstock.serving.context import ModelContext
from penstock.serving.core_link import CoreLink
from penstock.serving.dispatcher import Dispatcher
from penstock.serving.padding import Pads
from penstock.serving.quarantine import PoisonGuard
from penstock.serving.request_memory import RequestMemory
from penstock.serving.request_queue import RequestQueue
from penstock.serving.worker_place import WorkerPlace
from penstock.wire import frames

State = Literal["LOADING", "READY", "UNAVAILABLE", "UNLOADING"]

# With no worker ready, queued requests wait this long for one to come back, or LOAD_FACTOR times
# the model's load time if that is longer.
UNAVAILABLE_AFTER_S = 30.0
LOAD_FACTOR = 2
# Reasons of requests that were refused for lack of time.
TOO_LATE = ("predicted_late", "dropped_late", "queue_timeout")


class Readiness:
    """A shard's part of a model, as the core calls it (`core_link.ModelPart`)."""

    def __init__(
        self,
        context: ModelContext,
        core: CoreLink,
        dispatcher: Dispatcher,
        queue: RequestQueue,
        memory: RequestMemory,
        guard: PoisonGuard,
    ) -> None:
        self.config = context.config
        self._core = core
        self._dispatcher = dispatcher
        self._workers: Sequence[WorkerPlace] = dispatcher.workers
        self._queue = queue
        self._memory = memory
        self._guard = guard
        self._planner = context.planner
        self._metrics = context.metrics
        self._saturation = context.saturation
        self._clock = context.clock
        self._num_batches = context.num_batches
        self.cold = ColdRequests(context.config, core, queue, context.clock)
        self.state: State = "LOADING"
        self.reason = ""
        # Why the last worker ended.
        self._last_reason = ""
        # None while a worker is ready.
        self._without_worker_since: float | None = context.clock()

    @property
    def is_ready(self) -> bool:
        """Whether a worker can run a batch, or is started when a request comes."""
        can_start = self.cold.is_cold and not self.cold.refuses
        return self.state == "READY" and (self._has_worker or can_start)

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests and no sequences."""
        table = self._queue.sequences.table if self._queue.sequences is not None else None
        has_sequences = table is not None and bool(table.num_live or table.num_in_line)
        num_requests = self._queue.num_waiting + self._dispatcher.num_running
        return not num_requests and not has_sequences

    @property
    def _has_worker(self) -> bool:
        return any(each.is_ready for each in self._workers)

    @property
    def last_answered(self) -> float:
        """When a worker last answered."""
        return max(each.answered_at for each in self._workers)

    def not_ready(self) -> NotReady:
        reason = self.reason or self._last_reason
        detail = f": {reason}" if reason else ""
        return NotReady(f"Model '{self.config.name}' is not at ready state{detail}")

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def open_model(self, proved: frames.ModelProved) -> None:
        """Batch and pad as far as the workers proved harmless. If the first request loads the
        model, this is called again when that has happened."""
        self._metrics.load_s = proved.load_s
        if proved.needs_requests:
            self._memory.needs_parts = True
        proof = proved.proof
        if proof.unbatched:
            self._queue.stop_batching()
        if self.config.padding is not None and not proof.unpadded:
            self._pad(Pads(self.config), proved)
        self.state = "READY"

    def load_failed(self, problems: Sequence[str]) -> None:
        self.state = "UNAVAILABLE"
        self.reason = "; ".join(problems)

    def set_worker(self, worker: frames.SetWorker, sock: socket.socket) -> None:
        self._dispatcher.set_worker(worker, sock)
        self._dispatcher.hang_limits.seed(worker.timings)
        self._saturation.note(False, self._clock())
        self._queue.batcher.seed(worker.timings)
        self._without_worker_since = None
        self.cold.end()
        self._count_executors()
        self._dispatcher.pump()

    def died(self, died: frames.Died) -> None:
        worker = self._workers[died.index]
        if worker.link is not None:
            # Answers that it sent before.
            worker.link.read(reads_all=True)
        worker.close()
        if self._without_worker_since is None and not self._has_worker:
            self._without_worker_since = self._clock()
        self._count_executors()
        self._dispatcher.died(died)

    def verdict(self, verdict: frames.Verdict) -> None:
        self._dispatcher.verdict(verdict)

    def set_quarantine(self, quarantine: frames.SetQuarantine) -> None:
        self._guard.table.replace(quarantine.bodies, quarantine.keys)
        if self._guard.table.is_active:
            self._queue.refuse_quarantined()
            self._dispatcher.publish()

    def may_try(self) -> None:
        self._dispatcher.pump_if_waiting()

    def set_reason(self, reason: str) -> None:
        self._last_reason = self.cold.reason = reason

    def scaled(self, scaled: frames.Scaled) -> None:
        if scaled.target == 0:
            self.cold.begin(scaled.load_s)
        if scaled.problem:
            self.cold.refuse(scaled.problem, scaled.refuse_s)
            self._dispatcher.check_idle()

    def resized(self, resized: frames.Resized) -> None:
        self.config = replace(self.config, num_instances=resized.num_instances)
        self._dispatcher.add_places(resized.num_places)
        self._memory.resize(self.config)

    def vacate(self, index: int) -> bool:
        return self._queue.vacate(index)

    def occupy(self, index: int) -> None:
        self._queue.occupy(index)
        self._dispatcher.pump()

    def tick(self) -> None:
        self._dispatcher.tick()
        self.cold.tick()
        self._fail_if_unavailable()
        self._report_hangs()
        if self.config.is_scaled:
            self._count_executors()
            self._report_load()

    def _report_load(self) -> None:
        """Tell the core how much there is to do, and how much was late."""
        batcher, refused = self._queue.batcher, self._metrics.num_refused
        self._core.report(
            frames.PartLoad(
                batcher.size_offered,
                batcher.size_queued,
                self._dispatcher.busy_s,
                batcher.mean_times(),
                batcher.inflation,
                batcher.num_offered,
                self._metrics.num_late + sum(refused[reason] for reason in TOO_LATE),
            )
        )

    def _report_hangs(self) -> None:
        """Tell the core which workers take too long over their oldest batch."""
        now = self._clock()
        for worker in self._workers:
            if not worker.batches:
                if worker.is_wanting and self._is_silent(worker, now):
                    self._core.hung(worker.index, worker.life)
                continue
            batch = worker.batches[0]
            limit_s = self._dispatcher.hang_limits.limit_s(batch.num_rows)
            # What the model waits for others is no hang: those are watched themselves.
            limit_s += worker.waited_s - batch.waited_s
            # Batches that were sent before this one ran first.
            if now > max(batch.started, worker.answered_at) + limit_s:
                self._core.hung(worker.index, worker.life)

    def _is_silent(self, worker: WorkerPlace, now: float) -> bool:
        """Whether a worker that shows a busy slot does not claim what this shard wants to run, and
        has not run a batch of any shard for twice as long as a batch may take: if it runs one, the
        shards that have it know better when it is overdue."""
        num_shown = self._num_batches(worker.index)
        if num_shown != worker.num_shown:
            worker.num_shown, worker.shown_at = num_shown, now
        since = max(worker.told_at, worker.answered_at, worker.shown_at, worker.waited_at)
        return now > since + 2 * self._dispatcher.hang_limits.longest_s

    def _fail_if_unavailable(self) -> None:
        """Fail queued requests when no worker came back in time."""
        if self.state != "READY" or self._has_worker or self.cold.is_cold:
            return
        patience_s = max(UNAVAILABLE_AFTER_S, LOAD_FACTOR * self._metrics.load_s)
        since = self._without_worker_since
        if self._queue.num_waiting and since is not None and self._clock() - since > patience_s:
            self._queue.refuse_all(self.not_ready())
            self._dispatcher.check_idle()

    def _count_executors(self) -> None:
        ready = [each for each in self._workers if each.is_ready and not each.is_leaving]
        if ready or not self.cold.is_cold:
            num_ready = sum(each.num_slots for each in ready)
            self._queue.batcher.count_executors(num_ready, self._clock())

    def _pad(self, pads: Pads, proved: frames.ModelProved) -> None:
        self._planner.pads = pads
        for each in proved.bucket_timings:
            for bucket, timings in each.items():
                geometry = self._planner.bucket_geometry(bucket)
                self._queue.batcher.seed(pads.warm_times(timings, bucket), geometry)
