"""The requests of one model that wait for an instance: in the batcher, or as suspects.

Suspects are requests whose worker died while poison requests are known. Each runs again alone, and
only when that cannot take the last worker from the other requests. Knows no process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from penstock.errors import Overloaded, PenstockError, Quarantined
from penstock.serving.batcher import Batcher
from penstock.serving.context import ModelContext
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere
from penstock.serving.quarantine import PoisonGuard
from penstock.serving.replies import Replies
from penstock.serving.sequence_batcher import SequenceBatcher
from penstock.serving.shares import BatchShare
from penstock.serving.slo_batcher import SloBatcher
from penstock.types import Request

QUEUE_TIMEOUT = Overloaded("Request timeout expired", reason="queue_timeout")
LATE = "Request timeout expired: the answer would have been late"
DROPPED = Overloaded(LATE, reason="dropped_late")


class RequestQueue:
    """Owns the batcher and the suspects. The batcher is also `slo`, if the model has an SLO, or
    `sequences`, if its requests belong to sequences: then no request ever runs again."""

    def __init__(
        self,
        context: ModelContext,
        replies: Replies,
        guard: PoisonGuard,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> None:
        self._config = config = context.config
        self._replies = replies
        self._guard = guard
        self._clock = context.clock
        # The other shards that serve the model.
        self._elsewhere = elsewhere
        self.slo: SloBatcher | None = None
        self.sequences: SequenceBatcher | None = None
        if config.sequences is not None:
            self.sequences = SequenceBatcher(config, context.metrics.num_sequences_ended)
        if self.sequences is None and config.batching.slo_latency_s is not None:
            self.slo = SloBatcher(config.batching, config.num_instances, elsewhere)
        chosen = self.slo or self.sequences
        self.batcher: Batcher | SloBatcher = chosen or Batcher(config.batching, elsewhere)
        self.suspects: deque[Request] = deque()
        # When a suspect was last tried, or when the first one was added.
        self.tried_suspect_at = 0.0

    @property
    def num_waiting(self) -> int:
        return self.batcher.num_waiting + len(self.suspects)

    def stop_batching(self) -> None:
        """Serve one request at a time. Requests wait only if they wait for the first instance."""
        policy = replace(self._config.batching, is_dynamic=False)
        waiting, now = self.batcher.drain(), self._clock()
        if self.slo is not None:
            self.slo = SloBatcher(policy, self._config.num_instances, self._elsewhere)
        self.batcher = self.slo or Batcher(policy, self._elsewhere)
        if waiting:
            self.batcher.begin_cold_start(0.0, now)
        for request in waiting:
            try:
                self.batcher.add(request, request.ticket.fit.plan.geometry, now)
            except PenstockError as error:
                self._replies.refuse(request, error, "gave_up")

    def expire(self, now: float) -> list[Request]:
        """Refuse the requests that waited too long, or that would be late. Return those that have
        been dispatched and may wait in a worker for longer than they may be queued."""
        if self.slo is not None:
            for request in self.slo.take_dropped():
                self._replies.refuse(request, DROPPED)
        for request in self.batcher.expire(now):
            self._replies.refuse(request, QUEUE_TIMEOUT)
        overdue, self.batcher.overdue = self.batcher.overdue, []
        return overdue

    def open_instance(self, instance: int) -> None:
        """Note that the worker of an instance is ready."""
        if self.sequences is not None:
            self.sequences.open(instance)

    def lose_instance(self, instance: int, reason: str) -> None:
        """End the sequences of an instance whose worker is gone, or gets no more batches."""
        if self.sequences is not None:
            self.sequences.lose(instance, reason)
            self._refuse_broken()

    def vacate(self, instance: int) -> bool:
        """Begin no sequence on an instance; return whether it has none."""
        return self.sequences is None or self.sequences.table.vacate(instance)

    def occupy(self, instance: int) -> None:
        """Begin sequences again on an instance that was to be vacated."""
        if self.sequences is not None:
            self.sequences.table.occupy(instance)

    def finished(self, requests: list[Request], now: float) -> None:
        """Note that requests have run, or never will: their sequences go on."""
        if self.sequences is not None:
            self.sequences.finished(requests, now)

    def begin_drain(self) -> None:
        """End idle sequences at once: no more requests come."""
        if self.sequences is not None:
            self.sequences.table.end_idle(self._clock())

    def next(
        self, now: float, share: BatchShare | None = None, instance: int = 0
    ) -> list[Request] | None:
        """Return the batch to run now on a free instance, or this shard's share of one that a
        worker has claimed; None: not yet."""
        if self.sequences is not None:
            return self.sequences.next_of(instance, now)
        while True:
            batch = self.batcher.next(now, share)
            if batch is None or self.batcher.closed_by != "rerun":
                return batch
            # Its body or key may have been quarantined while it waited.
            if not self._guard.table.is_active or not self.refuse_if_quarantined(batch[0]):
                return batch
            self.batcher.ended(now)

    def next_suspect(self, now: float) -> Request | None:
        while self.suspects:
            request = self.suspects.popleft()
            if not self.refuse_if_quarantined(request):
                self.tried_suspect_at = now
                self.batcher.closed_by = "rerun"
                return request
        return None

    def rerun(self, request: Request) -> None:
        """Run a request again, alone; as a suspect if it may have killed a worker."""
        if self._guard.table.has_bodies and request.num_deaths > 0:
            if not self.suspects:
                self.tried_suspect_at = self._clock()
            self.suspects.append(request)
        else:
            self.batcher.rerun_alone(request)

    def put_back(self, requests: list[Request], closed_by: str = "") -> None:
        """Undo a `next` or `next_suspect` for requests that were not run, keeping the order.
        `closed_by` is what the batcher said of their batch, unless it was the last one."""
        if (closed_by or self.batcher.closed_by) == "rerun":
            for request in requests:
                self.rerun(request)
        elif requests:
            self.batcher.put_back(requests, requests[0].ticket.fit.plan.geometry)

    def remove(self, request: Request) -> bool:
        """Remove a request; False if it is not queued."""
        if request in self.suspects:
            self.suspects.remove(request)
            return True
        is_removed = self.batcher.remove(request)
        self._refuse_broken()
        return is_removed

    def refuse_all(self, error: PenstockError) -> None:
        """End all queued requests with an error."""
        suspects = list(self.suspects)
        self.suspects.clear()
        for request in (*suspects, *self.batcher.drain()):
            self._replies.refuse(request, error, "gave_up")

    def refuse_older(self, than: float, error: PenstockError) -> None:
        """End the requests with an error that were queued before this time."""
        for request in self._waiting():
            if request.timings.queued < than:
                self.remove(request)
                self._replies.refuse(request, error, "gave_up")

    def refuse_quarantined(self) -> None:
        """Refuse quarantined requests that are already queued."""
        for request in self._waiting():
            self.refuse_if_quarantined(request)

    def refuse_if_quarantined(self, request: Request) -> bool:
        if request.is_done:
            return True
        try:
            self._guard.check(request)
        except Quarantined as error:
            self.remove(request)
            self._replies.refuse(request, error)
            return True
        return False

    def _waiting(self) -> list[Request]:
        if self.sequences is not None:
            return list(self.sequences.requests())
        queued = (request for lane in self.batcher.waiting() for request in lane.walk())
        return [*queued, *self.suspects]

    def _refuse_broken(self) -> None:
        """End the requests whose sequence cannot go on."""
        for request, error in self.sequences.take_broken() if self.sequences is not None else ():
            self._replies.refuse(request, error, "gave_up")
