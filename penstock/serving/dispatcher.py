"""Batches of one model on their way: from the queue to a worker, and back as answers.

Sends batches to idle workers, hands answers to the replies, and runs requests again whose batch
failed or whose worker died. Runs on an event loop without locks. Knows no process: workers are
links that the core opens, and the core says who is to blame for a death.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
from collections.abc import Sequence
from functools import partial

from penstock.errors import BackendFailed, PenstockError, TooLarge
from penstock.serving.batches import HangLimits, RunningBatch
from penstock.serving.called_models import ModelCalls
from penstock.serving.context import ModelContext
from penstock.serving.core_link import CoreLink
from penstock.serving.open_responses import OpenResponses, open_batch
from penstock.serving.quarantine import PoisonGuard
from penstock.serving.rate_limiter import UNLIMITED, BatchLimits
from penstock.serving.recalls import Recalls
from penstock.serving.replies import Replies, has_ended
from penstock.serving.request_memory import RequestMemory
from penstock.serving.request_queue import RequestQueue
from penstock.serving.sequences import sequence_id
from penstock.serving.wants import Wants
from penstock.serving.worker_link import WorkerLink
from penstock.serving.worker_place import WorkerPlace
from penstock.types import Request
from penstock.wire import frames

log = logging.getLogger("penstock.model")

# Limit on one dispatch frame, which has to fit the socket buffer.
MAX_DISPATCH_BYTES = 128 * 1024
# Suspects wait this long for a spare worker, since they may kill theirs.
SUSPECT_PATIENCE_S = 30.0
# What could not be given to a claim, for lack of memory for example, is wanted again after this.
LOOK_AGAIN_S = 0.005


class Dispatcher:
    """Invariant: an admitted request is in the queue, in exactly one RunningBatch, or done.
    `workers` are the places for them; `_lost` are the batches of dead workers, by life,
    until the core has judged the death."""

    def __init__(
        self,
        context: ModelContext,
        core: CoreLink,
        queue: RequestQueue,
        memory: RequestMemory,
        replies: Replies,
        guard: PoisonGuard,
    ) -> None:
        self._name = context.config.name
        self._core = core
        places = enumerate(context.config.places)
        self.workers = [WorkerPlace(index, num_slots) for index, (_, num_slots) in places]
        self._lost: dict[int, tuple[frames.Died, list[RunningBatch]]] = {}
        # Whether the core waits for an answer after a death.
        self._reports_answer = False
        # Whether the core lets this model, of those in all shards, run suspects.
        self._holds_try = False
        self._queue = queue
        self._memory = memory
        self._replies = replies
        self.calls = ModelCalls(context.config, context.callees, context.clock)
        self.recalls = Recalls(self.workers, queue, replies)
        self.responses = OpenResponses(context, self.workers, memory, replies)
        self._is_decoupled = context.config.is_decoupled
        self._guard = guard
        # None: no other shard has these workers, so it is known here which slots are free.
        sees_idle = context.sees_idle
        self._wants = None if sees_idle is None else Wants(queue, sees_idle, context.busy_s)
        # Set before the first worker, if executions need resources.
        self.limits: BatchLimits = UNLIMITED
        self._saturation = context.saturation
        self._clock = context.clock
        self._loop = asyncio.get_running_loop()
        self.hang_limits = HangLimits(context.config.hang_s)
        self._most_slots = max(each.num_slots for each in self.workers)
        self._batch_ids = itertools.count(1)
        # How long batches have run so far; of a merged one, in proportion to the rows.
        self.busy_s = 0.0
        self._num_slabs = 0
        self._is_pump_due = False
        self._is_answering = False
        self._last_num_requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []

    @property
    def num_running(self) -> int:
        running = [batch for each in self.workers for batch in (*each.batches, *each.returned)]
        lost = [batch for _, batches in self._lost.values() for batch in batches]
        return sum(len(batch.requests) for batch in (*running, *lost))

    def tick(self) -> None:
        """Do periodic work."""
        self._guard.table.expire(self._clock())
        if self._queue.sequences is not None:
            self.pump()
        # Queued requests may have expired although no instance became free.
        self.pump_if_waiting()
        self.publish()
        self.calls.tick()
        self._replies.log_overload_end()

    def close(self) -> None:
        self.limits.close()
        if self._timer is not None:
            self._timer.cancel()

    async def drain(self) -> None:
        """Wait until everything admitted has been answered."""
        self._queue.begin_drain()
        if self._queue.num_waiting or self.num_running:
            waiter = self._loop.create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def check_idle(self) -> None:
        """Wake those who `drain`, if nothing is queued or running."""
        if not self._queue.num_waiting and not self.num_running:
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    def wake(self) -> None:
        """Dispatch, now or at the end of this loop iteration."""
        is_alone = self._last_num_requests == 1 and self._queue.batcher.num_waiting == 1
        if is_alone and not self._is_answering:
            # The last batch had one request: waiting for others would only add latency.
            self.pump()
        elif not self._is_pump_due:
            # All requests that this loop iteration reads can join the same batch.
            self._is_pump_due = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Refuse expired requests, then dispatch batches to idle instances."""
        self._is_pump_due = False
        now = self._clock()
        self.recalls.expire(now)
        if self._queue.suspects:
            self._try_suspects(now)
        elif self._holds_try:
            self._end_try()
        has_idle = self._fill_workers(now)
        if self._wants is not None:
            # Workers that hear of it look at the page.
            self._queue.batcher.publish(now)
            has_idle = self._wants.send(self.workers, now) or has_idle
        self._arm_timer(now, only_expiry=not has_idle)
        if self._idle_waiters:
            self.check_idle()

    def publish(self) -> None:
        """Show other shards what is queued here, after requests were taken from the queue."""
        if self._wants is not None:
            self._queue.batcher.publish(self._clock())

    def pump_if_waiting(self) -> None:
        if self._queue.num_waiting:
            self.pump()

    def _fill_workers(self, now: float) -> bool:
        """Send batches until no worker takes another, or until the queue has none that may run
        now. Return whether it was the queue."""
        has_idle = False
        for num_others in range(self._most_slots):
            # Workers with no batch come first, then those with one, and so on.
            workers = self.workers if self._wants is None else self._wants.in_order(self.workers)
            for worker in workers:
                while len(worker.batches) <= num_others and self._takes_batch(worker):
                    if not self.limits.take(worker):
                        break
                    requests = self._queue.next(now, instance=worker.index)
                    is_sent = requests is not None and self._dispatch(worker, requests, now)
                    self.limits.settle(worker)
                    if requests is None and self._queue.sequences is None:
                        return True
                    if requests is None:
                        # Another instance may have sequences whose requests can run.
                        has_idle = True
                    if not is_sent:
                        break
        return has_idle

    def _takes_batch(self, worker: WorkerPlace) -> bool:
        """Whether the worker may take another batch. A rerun is alone, to attribute a crash."""
        if not worker.is_idle:
            return False
        if self._wants is not None and not self._wants.may_offer(worker):
            return False
        others = worker.batches
        if not others:
            return True
        if self._queue.batcher.num_reruns or others[0].closed_by == "rerun":
            return False
        return not (self._queue.suspects and self._may_try_suspect())

    def _try_suspects(self, now: float) -> None:
        """Run suspects on workers without batches."""
        while self._queue.suspects and self._may_try_suspect():
            idle = [each for each in self.workers if each.is_idle and not each.batches]
            if not idle or not self.limits.take(idle[0]):
                return
            request = self._queue.next_suspect(now)
            is_sent = request is not None and self._dispatch(idle[0], [request], now)
            self.limits.settle(idle[0])
            if not is_sent:
                return

    def _may_try_suspect(self) -> bool:
        """Whether a suspect may run now: one at a time, and only while a worker can be spared."""
        if self._runs_alone():
            return False
        waited_s = self._clock() - self._queue.tried_suspect_at
        self._holds_try = self._core.may_try(waited_s < SUSPECT_PATIENCE_S)
        return self._holds_try

    def _runs_alone(self) -> bool:
        """Whether a rerun or a suspect is with a worker."""
        return any(batch.closed_by == "rerun" for each in self.workers for batch in each.batches)

    def _end_try(self) -> None:
        """Let other shards run suspects, once this one has none."""
        if not self._runs_alone():
            self._holds_try = False
            self._core.tried()

    def _arm_timer(self, now: float, only_expiry: bool, latest: float = math.inf) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batcher = self._queue.batcher
        wake_at = batcher.next_expiry if only_expiry else batcher.wake_at
        if latest < math.inf:
            wake_at = latest if wake_at is None else min(wake_at, latest)
        if wake_at is not None:
            self._timer = self._loop.call_later(max(0.0, wake_at - now), self.pump)

    def _dispatch(
        self, worker: WorkerPlace, requests: list[Request], now: float, round: int = 0
    ) -> bool:
        """Send a batch to a worker, which may have claimed it in this round. False if shared memory
        is full: the batch is queued again until one in flight is answered."""
        batch = RunningBatch(next(self._batch_ids), requests, now)
        batch.is_started = self._wants is None
        try:
            num_placed = self._memory.place_batch(batch)
            if num_placed == 0:
                self._queue.batcher.ended(now)
                self._queue.put_back(requests)
                return False
            if num_placed < len(requests):
                self._queue.put_back(requests[num_placed:])
                batch.requests = requests[:num_placed]
            frame = self._memory.frame(batch)
            if self._wants is not None:
                geometry = batch.requests[0].ticket.fit.plan.geometry
                frame = self._wants.complete(frame, geometry.key, round, now)
                batch.is_started = batch.is_merged = not frame.tells_start
            data = frames.encode(frame)
        except Exception:  # A batch that cannot be encoded must not stop the others.
            log.exception("%s: a batch could not be dispatched", self._name)
            self._queue.batcher.ended(now)
            self._abandon(batch, BackendFailed("internal error; this is a bug"))
            return True
        if len(data) > MAX_DISPATCH_BYTES and len(batch.requests) > 1:
            return self._dispatch(worker, self._halve(batch), now, round)
        if len(data) > frames.MAX_FRAME_BYTES // 4:
            self._queue.batcher.ended(now)
            self._abandon(batch, TooLarge("the request's id and parameters are too large"))
            return True
        saturated_s = self._saturation.at(now)
        for request in batch.requests:
            timings = request.timings
            timings.dispatched = now
            timings.instance_wait_s = saturated_s - timings.saturated_s
        if self._is_decoupled:
            open_batch(batch)
        batch.instance, batch.closed_by = worker.index, self._queue.batcher.closed_by
        batch.waited_s = worker.waited_s
        worker.batches.append(batch)
        self._saturation.note(not any(each.is_idle for each in self.workers), now)
        self._last_num_requests = len(batch.requests)
        assert worker.link is not None, "it is idle"
        self._map_memory(worker.link, batch.requests if frame.has_regions else ())
        worker.is_wanting = frame.more is not None
        worker.link.send(data)
        return True

    def _map_memory(self, link: WorkerLink, requests: Sequence[Request]) -> None:
        """Map new slabs in all workers, before one of them needs it; and the clients' memory of
        these requests in theirs."""
        if self._num_slabs < len(self._memory.slabs):
            for each in self.workers:
                if each.link is not None:
                    each.link.map_slabs(self._memory.slabs)
            self._num_slabs = len(self._memory.slabs)
        for request in requests:
            if request.ticket.loan is not None:
                link.map_regions(request.ticket.loan.regions)

    def _halve(self, batch: RunningBatch) -> list[Request]:
        """Queue the second half of a batch whose frame is too long again; return the first."""
        requests, half = batch.requests, len(batch.requests) // 2
        self._memory.release_extents(batch)
        for request in requests:
            self._memory.requeued(request)
        self._queue.put_back(requests[half:])
        return requests[:half]

    def _abandon(self, batch: RunningBatch, error: PenstockError, reason: str = "OTHER") -> None:
        """End the requests of a batch with an error."""
        self._queue.finished(batch.requests, self._clock())
        self._memory.release_batch(batch)
        for request in batch.requests:
            self._replies.fail(request, error, reason)

    def _receive(self, worker: WorkerPlace, data: memoryview) -> bool:
        """Handle a frame of a worker; return whether it was an answer. Usually nothing else is
        pending then; the next loop iteration reads what is."""
        frame = frames.decode_worker_to_shard(data)
        if isinstance(frame, frames.Leaving):
            worker.is_leaving = True
            self._queue.lose_instance(worker.index, "its worker is being replaced")
            self._let_go(worker)
            return False
        if isinstance(frame, frames.Claim):
            self._claimed(worker, frame)
            return False
        if isinstance(frame, frames.Started):
            for batch in worker.batches:
                if batch.id == frame.batch:
                    batch.is_started, batch.is_merged = True, frame.is_merged
                    batch.began = frame.at
            return False
        if isinstance(frame, frames.Responded):
            if self.responses.respond(worker, frame):
                self.pump_if_waiting()
                self._settle(worker)
            return False
        self._answered(worker, frame)
        return True

    def _claimed(self, worker: WorkerPlace, claim: frames.Claim) -> None:
        """Answer a worker that has a free slot, with a batch or Decline."""
        assert self._wants is not None, "only a worker of several shards claims"
        now = worker.told_at = self._clock()
        self.recalls.expire(now)
        num_before = len(worker.batches)
        requests = self._wants.take(claim, worker, now)
        if requests is not None:
            self._dispatch(worker, requests, now, claim.round)
        latest = math.inf
        if len(worker.batches) == num_before and self._wants.pass_on(claim, worker, now):
            latest = now + LOOK_AGAIN_S
        self._arm_timer(now, only_expiry=worker.is_leaving, latest=latest)
        self._queue.batcher.publish(now)
        # Requests that would be late were dropped instead of given.
        self.recalls.expire(now)
        if self._idle_waiters:
            self.check_idle()

    def _answered(
        self, worker: WorkerPlace, frame: frames.Done | frames.BatchFailed | frames.Recalled
    ) -> None:
        # A sink may submit the next request during its callback. That one must not be dispatched
        # before the worker has its output spill back.
        self._is_answering = True
        try:
            batch = next((each for each in worker.batches if each.id == frame.batch), None)
            if self._reports_answer and not isinstance(frame, frames.Recalled):
                self._reports_answer = False
                self._core.answered()
            if batch is not None:
                worker.batches.remove(batch)
                self.limits.settle(worker)
                now = worker.answered_at = self._clock()
                self._saturation.note(False, now)
                self._queue.finished(batch.requests, now)
                if isinstance(frame, frames.Done):
                    self._deliver(worker, batch, frame, now)
                elif isinstance(frame, frames.Recalled):
                    self._return(batch)
                else:
                    self._fail(batch, frame, now)
        finally:
            self._is_answering = False
        self.pump_if_waiting()
        self._settle(worker)

    def _settle(self, worker: WorkerPlace) -> None:
        """Tell those who wait for it that nothing runs any more."""
        if self._idle_waiters:
            self.check_idle()
        if worker.is_leaving:
            self._let_go(worker)

    def _let_go(self, worker: WorkerPlace) -> None:
        """Tell the core that a leaving worker has answered everything."""
        if worker.is_leaving and not worker.batches and not worker.returned:
            self._core.left(worker.index, worker.life)

    def _deliver(
        self, worker: WorkerPlace, batch: RunningBatch, frame: frames.Done, now: float
    ) -> None:
        # The time is that of the whole batch, which may have rows of other shards.
        num_rows = frame.total_rows or batch.num_rows
        took_s = frame.input_s + frame.infer_s + frame.output_s
        has_waited = self._wants is not None and not batch.began
        began = max(batch.started, now - took_s if has_waited else min(batch.began, now))
        if began != batch.started:
            self._queue.batcher.ended(batch.started)
        self.hang_limits.note(num_rows, now - began)
        self.busy_s += (now - began) * batch.num_rows / max(1, num_rows)
        if self._wants is not None:
            self._wants.observe(took_s)
        geometry = batch.requests[0].ticket.fit.plan.geometry
        size = frame.total_tokens or batch.num_tokens or num_rows
        self._queue.batcher.observe(geometry, size, began, now)
        if self._is_decoupled:
            self.responses.returned(worker, batch, frame)
            return
        extents = frame.outputs
        if not extents:
            # Dispatch the next batch first: the worker computes while this loop encodes. Not while
            # the worker's spill still holds this answer.
            self.pump_if_waiting()
        assert worker.link is not None, "its answer came on it"
        answered = self._replies.deliver(batch, frame, worker.link.output_spill, now)
        self._memory.release_batch(batch)
        if extents:
            in_spill = (each for part in extents for each in part if not each.region)
            offsets = tuple(extent.offset for extent in in_spill)
            worker.link.send(frames.encode(frames.Release(offsets)))
        self._replies.count(batch, answered, now, num_rows if frame.is_first else 0)

    def _fail(self, batch: RunningBatch, frame: frames.BatchFailed, now: float) -> None:
        """Handle an exception of the model. To find the culprit, each request runs again alone;
        not in sequences, whose states may have changed."""
        self._queue.batcher.ended(batch.started)
        self._replies.note_batch(batch, now, batch.waits(), 0.0, "the model failed")
        has_company = len(batch.requests) > 1 or frame.is_merged
        if has_company and self._queue.sequences is None:
            self._rerun(batch)
        else:
            self._abandon(batch, BackendFailed(frame.error), "BACKEND")

    def _rerun(self, batch: RunningBatch) -> None:
        """Queue each request of the batch to run again alone."""
        for request in self._take_back(batch):
            self._queue.rerun(request)

    def _take_back(self, batch: RunningBatch) -> list[Request]:
        """Return the requests of a batch that are to be queued again; they keep their rows."""
        self._memory.release_extents(batch)
        kept = []
        for request in batch.requests:
            if has_ended(request):
                self._memory.release(request)
            else:
                self._memory.requeued(request)
                kept.append(request)
        return kept

    def add_places(self, number: int) -> None:
        """Have places for so many workers, or more."""
        for index in range(len(self.workers), number):
            self.workers.append(WorkerPlace(index))

    def set_worker(self, worker: frames.SetWorker, sock: socket.socket) -> None:
        """Use the ready worker of a place from now on, and give it the memory of this shard."""
        place = self.workers[worker.index]
        received = partial(self._receive, place)
        spill, is_shared = self._memory.input_spill, self._wants is not None
        calls = self.calls.connect(self._loop, place)
        link = WorkerLink(self._loop, sock, received, spill, is_shared, calls)
        place.open(worker.life, link)
        link.map_slabs(self._memory.slabs)
        self._queue.open_instance(worker.index)

    def died(self, died: frames.Died) -> None:
        """Keep the batches of a dead worker, and tell the core about them. If it is one request, it
        may be to blame."""
        place = self.workers[died.index]
        self._queue.lose_instance(died.index, f"its worker {died.reason}")
        batches, place.batches, place.returned = [*place.batches, *place.returned], [], []
        self.limits.settle(place)
        self._saturation.note(not any(each.is_idle for each in self.workers), self._clock())
        self._lost[died.life] = died, batches
        started = [batch for batch in batches if batch.is_started]
        requests = [request for batch in started for request in batch.requests]
        lost = frames.Lost(died.life, len(requests))
        if len(requests) == 1:
            (request,) = requests
            lost.body, lost.key = self._guard.fingerprint(request), request.caller
            lost.lost_with = request.lost_with
        self._core.lost(lost)

    def verdict(self, verdict: frames.Verdict) -> None:
        """Rerun each request of a dead worker's batches alone; one whose worker died before and
        that ran alone now fails."""
        self._reports_answer |= verdict.awaits_answer
        if verdict.life not in self._lost:
            return
        died, batches = self._lost.pop(verdict.life)
        now = self._clock()
        for batch in batches:
            if not batch.is_started:
                self._return(batch)
                continue
            if self._is_decoupled:
                self.responses.fail_begun(batch, died.reason)
            for request in batch.requests:
                if verdict.is_excused and verdict.is_pinned:
                    request.lost_with = None
                elif not verdict.is_excused and len(batch.requests) > 1:
                    request.lost_with = died.index
            self._lose(batch, died.reason, now)
        if batches:
            self.pump()

    def _return(self, batch: RunningBatch) -> None:
        """Queue a batch again that its worker had not started."""
        self._queue.batcher.ended(batch.started)
        self._queue.put_back(self._take_back(batch), batch.closed_by)

    def _lose(self, batch: RunningBatch, reason: str, now: float) -> None:
        self._queue.batcher.ended(batch.started)
        self._replies.note_batch(batch, now, batch.waits(), 0.0, "the worker died")
        if self._queue.sequences is not None:
            self._lose_steps(batch, reason)
            return
        ran_alone = len(batch.requests) == 1 and not batch.is_merged
        if ran_alone and batch.requests[0].num_deaths > 0:
            worker = f"the worker of model '{self._name}'"
            error = BackendFailed(f"{worker} {reason} while running it, twice")
            self._abandon(batch, error, "BACKEND")
            return
        for request in batch.requests:
            request.num_deaths += 1
        self._rerun(batch)

    def _lose_steps(self, batch: RunningBatch, reason: str) -> None:
        """End requests of sequences whose state died with their worker."""
        self._memory.release_batch(batch)
        for request in batch.requests:
            text = f"sequence {sequence_id(request)} lost: its worker {reason}"
            self._replies.fail(request, BackendFailed(text), "BACKEND")
