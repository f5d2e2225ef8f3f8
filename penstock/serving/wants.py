"""What a shard tells workers that also serve other shards, and how it answers their claims.

Such a worker decides when a batch runs (`claims`). The shard offers a batch unasked while the
worker seems to have nothing to do, or if its batches are so quick that claiming takes longer;
otherwise it says once what it has queued, and waits for the worker's claim. Knows frames and the
queue, but neither sockets nor memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.serving.plan import Geometry
from penstock.serving.request_queue import RequestQueue
from penstock.serving.shares import BatchShare, Queued
from penstock.serving.worker_place import WorkerPlace
from penstock.types import Request
from penstock.wire import frames

# Batches shorter than this are offered unasked to busy workers too: a claim costs more than it
# gains. What a shard offers has then grown while its last batch ran, and the worker merges what
# all shards have offered. 8 shards on 16 cores, a model that computes nothing: claims gave parts of
# two rows and 61 CPU-us of shards per request (2026-11-18).
QUICK_S = 0.0005
# Not while one of the last batches took longer than this, or the worker's batch has: a request
# that is slower than others would hold up what was offered behind it.
SLOW_S = 0.002
# Weight of the last batch in the mean time, and what is left of the longest time with each batch.
LAST, LEFT = 0.125, 0.99


class Wants:
    """Invariant: `WorkerPlace.is_wanting` if the last that the worker heard is that there is
    something to claim."""

    def __init__(
        self,
        queue: RequestQueue,
        sees_idle: Callable[[int], bool],
        busy_s: Callable[[int], float] = lambda index: 0.0,
    ) -> None:
        self._queue = queue
        self._sees_idle = sees_idle
        self._busy_s = busy_s
        policy = queue.batcher.policy
        # Batches that wait for others are formed from the rows of all shards.
        self._is_eager = not policy.preferred_batch_sizes and policy.max_queue_delay_s == 0
        self._mean_s = math.inf
        self._longest_s = 0.0

    @property
    def is_quick(self) -> bool:
        return self._is_eager and self._mean_s < QUICK_S and self._longest_s < SLOW_S

    def observe(self, batch_s: float) -> None:
        """Note how long the worker took for a batch, with the rows of other shards."""
        known = self._mean_s < math.inf
        self._mean_s = self._mean_s + LAST * (batch_s - self._mean_s) if known else batch_s
        self._longest_s = max(batch_s, LEFT * self._longest_s)

    def in_order(self, workers: Sequence[WorkerPlace]) -> list[WorkerPlace]:
        """Idle workers first, then those that answered last: their caches are warm."""
        by_time = sorted(workers, key=_answered_at, reverse=True)
        return sorted(by_time, key=lambda worker: not self._sees_idle(worker.index))

    def may_offer(self, worker: WorkerPlace) -> bool:
        """Whether to send a batch unasked; there is at most one that was not answered."""
        if worker.batches:
            return False
        if self._sees_idle(worker.index):
            return True
        return self.is_quick and self._busy_s(worker.index) < SLOW_S

    def wanted(self, now: float) -> frames.Want | None:
        """Return what a worker could claim; None: nothing now."""
        batcher = self._queue.batcher
        if batcher.num_reruns:
            # Comes before all others, and alone.
            return frames.Want((1,), due=now)
        queued = batcher.wanted(now)
        return None if queued is None else _want(queued)

    def send(self, workers: Sequence[WorkerPlace], now: float) -> bool:
        """Tell the workers that do not know it that there is something to claim. Return whether
        that was looked at; the batcher then says when to look again."""
        deaf = [each for each in workers if _listens(each) and not each.is_wanting]
        if self.is_quick:
            # Their answers lead to the next offer.
            deaf = [each for each in deaf if not each.batches]
        want = self.wanted(now) if deaf else None
        if want is not None:
            for worker in deaf:
                worker.is_wanting, worker.told_at = True, now
                worker.send(want)
        return bool(deaf)

    def take(self, claim: frames.Claim, worker: WorkerPlace, now: float) -> list[Request] | None:
        """Return the requests for a claim; None: nothing to give."""
        if not _listens(worker):
            return None
        return self._queue.next(now, self._share(claim))

    def complete(self, frame: frames.Dispatch, key: str, round: int, now: float) -> frames.Dispatch:
        """Add what a worker of several shards needs to know of a batch of this geometry."""
        batcher = self._queue.batcher
        frame.is_alone = batcher.closed_by == "rerun"
        frame.geometry = key if batcher.policy.is_dynamic else ""
        frame.round = round
        frame.more = None if self.is_quick else self.wanted(now)
        # The answer comes at once. If the worker dies, its requests run again alone, and then it
        # has to be known whether they had started.
        frame.tells_start = not self.is_quick or frame.is_alone
        return frame

    def pass_on(self, claim: frames.Claim, worker: WorkerPlace, now: float) -> bool:
        """Answer a claim with nothing. Return whether to look again soon: claimed again at once,
        what could not be given now could not be given either, except to a larger claim."""
        more = self.wanted(now) if _listens(worker) else None
        is_kept = more is not None and more.geometry == claim.geometry
        if more is not None and is_kept and more.head_rows > claim.max_rows:
            is_kept = False
        worker.is_wanting = more is not None and not is_kept
        worker.send(frames.Decline(claim.round, None if is_kept else more))
        return is_kept

    def _share(self, claim: frames.Claim) -> BatchShare:
        geometry: Geometry | str | None = claim.geometry
        for lane in self._queue.batcher.waiting():
            if isinstance(lane.geometry, Geometry) and lane.geometry.key == claim.geometry:
                geometry = lane.geometry
        return BatchShare(
            claim.max_rows,
            claim.others_rows,
            claim.ends_at,
            claim.drops_late,
            geometry,
            claim.max_tokens,
            claim.is_due,
        )


def _answered_at(worker: WorkerPlace) -> float:
    return worker.answered_at


def _listens(worker: WorkerPlace) -> bool:
    return worker.is_ready and not worker.is_leaving


def _want(queued: Queued) -> frames.Want:
    geometry = queued.geometry.key if isinstance(queued.geometry, Geometry) else None
    return frames.Want(
        queued.rows,
        queued.tokens,
        queued.due,
        queued.head_rows,
        queued.head_tokens,
        geometry,
        queued.arrivals_per_s,
        queued.target_size,
    )
