"""Which queued requests run together, and when. Pure: time is an argument.

*Fixed* mode: Triton's dynamic batcher rule for rule (preferred sizes, queue delay, priorities,
queue policies; its core's GetDynamicBatch), except that requests of another shape queue in their
own lane instead of closing the batch, that batches may also have a token budget, and that queueing
time is limited (`WaitLimit`). The caller asks `next` whenever an instance is free and again at
`wake_at`, and `expire` every half second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from penstock.config import BatchPolicy, QueuePolicy
from penstock.errors import Overloaded
from penstock.serving.batch_times import ADMITTED, WaitLimit
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere
from penstock.serving.lanes import Lane, Lanes
from penstock.serving.shares import BatchShare, Queued
from penstock.types import Request

# Checks for overdue requests within the time allowed.
LOOKS = 16


class Batcher(Lanes):
    """Owned by the core's event loop."""

    def __init__(self, policy: BatchPolicy, elsewhere: Elsewhere = NOTHING_ELSEWHERE) -> None:
        super().__init__(policy, elsewhere)
        self._max_tokens = math.inf if policy.max_tokens is None else policy.max_tokens
        preferred = policy.preferred_batch_sizes
        self._preferred = frozenset(preferred)
        self._max_preferred = max(preferred) if preferred else self._max_rows
        self._is_eager = not preferred and policy.max_queue_delay_s == 0
        self._wait = WaitLimit(policy, policy.max_tokens or self._max_preferred)
        self.count_executors, self.mean_times = self._wait.count_executors, self._wait.mean_times
        self._is_limited = any(map(self._wait.applies, policy.policies))
        self._look_at = -math.inf
        self._expiries: list[tuple[float, int, Request]] = []
        self._num_added = 0

    # Unknown: only the SLO batcher measures it.
    inflation = 1.0

    @property
    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def begin_cold_start(self, expected_s: float, now: float) -> None:
        """Expect the first instance after `expected_s`; until then no wait is too long, except for
        a queue's own time-out."""
        self.count_executors(0, now)

    def end_cold_start(self, now: float) -> None:
        """Do nothing: `count_executors` follows."""

    def add(self, request: Request, geometry: object, now: float) -> None:
        """Queue the request, or raise Overloaded."""
        policy = self._admit(request, now)
        if self._is_limited and (self.num_queued or self._elsewhere is not None):
            self._check_wait(request, policy, now)
        self._append(request, geometry)
        if self._elsewhere is not None:
            self._show_arrival(request, request.timings.queued)
        if policy.default_timeout_s or policy.allow_timeout_override:
            self._expect(request, policy, now)

    def seed(self, timings: Mapping[int, float], geometry: object = None) -> None:
        """Seed batch times from warm-up, in seconds by size: tokens if a geometry is given and
        batches have a token budget, otherwise rows. Fixed mode has one table for all geometries."""
        if (geometry is None) is (self.policy.max_tokens is None):
            self._wait.seed(timings)

    def observe(self, geometry: object, size: int, started: float, now: float) -> None:
        """Record that a batch is done."""
        # T(b) is needed only while requests are queued.
        if self.num_queued:
            self._wait.observe(size, started, now)

    def ended(self, started: float) -> None:
        """Record that a batch ended, successfully or not."""

    def expire(self, now: float) -> list[Request]:
        """Apply queue time-outs; return requests to refuse. DELAY moves them behind their level."""
        refused: list[Request] = []
        while self._expiries and self._expiries[0][0] <= now:
            request = heapq.heappop(self._expiries)[2]
            lane = request.ticket.queue
            is_delayed = self._policies[request.priority].timeout_action == "DELAY"
            if not isinstance(lane, Lane):
                if self._elsewhere is not None and lane is None and not is_delayed:
                    self.overdue.append(request)
            elif is_delayed:
                lane.postpone(request)
            else:
                self.remove(request)
                refused.append(request)
        if self._is_limited and self.num_queued and now >= self._look_at:
            refused += self._expire_waits(now)
        return refused

    def next(self, now: float, share: BatchShare | None = None) -> list[Request] | None:
        """Return the batch to run now on a free instance, or this shard's share of one that a
        worker has claimed; None: not yet (see `wake_at`)."""
        self.wake_at = self.next_expiry
        again = self._take_alone()
        if again is not None:
            return [again]
        for lane in self._lanes_for(share):
            batch = self._form(lane, now) if share is None else self._part(lane, share, now)
            if batch:
                self._take(lane, batch)
                return batch
        return None

    def wanted(self, now: float) -> Queued | None:
        """Return what this shard would give if a worker claimed it now; None: nothing is due (see
        `wake_at`). Requests of other shards count towards preferred sizes."""
        self.wake_at = self.next_expiry
        there = 0
        if self._elsewhere is not None and not self._is_eager:
            there = int(self._elsewhere.look(now, is_fresh=True).sizes[-1])
        for lane in self.waiting():
            head = next(lane.walk())
            if self._is_due(lane, head, there, now):
                return self._queued(lane, head.timings.queued)
        return None

    def publish(self, now: float) -> None:
        """Show the other shards and the workers what is queued here."""
        lanes = self.waiting()
        queued = self._queued(lanes[0], next(lanes[0].walk()).timings.queued) if lanes else None
        self._publish(queued, [0.0] * self._num_levels, now)

    def _is_due(self, lane: Lane, head: Request, there: int, now: float) -> bool:
        delay_s = self.policy.max_queue_delay_s
        if self._is_eager or delay_s == 0 or now >= head.timings.queued + delay_s:
            return True
        enough: float = min(self._preferred, default=self._max_preferred)
        if self._has_budget:
            enough = self._max_tokens
        if there + sum(lane.tokens if self._has_budget else lane.rows) >= enough:
            return True
        wake_at = head.timings.queued + delay_s
        self.wake_at = wake_at if self.wake_at is None else min(self.wake_at, wake_at)
        return False

    def _part(self, lane: Lane, share: BatchShare, now: float) -> list[Request]:
        """Form this shard's share of a batch."""
        there = 0 if self._has_budget else share.others_rows
        if not share.is_due and not self._is_due(lane, next(lane.walk()), there, now):
            return []
        max_rows = min(share.max_rows, self._max_rows) if self.policy.is_dynamic else 1
        batch = self._fitting(lane, max_rows, min(share.max_tokens, self._max_tokens))
        is_unbatched = not self.policy.is_dynamic
        # The first request is never divided; it may not fit a share.
        is_within = sum(request.num_rows for request in batch) <= share.max_rows
        return batch if is_unbatched or is_within else []

    def _fitting(self, lane: Lane, max_rows: int, max_tokens: float) -> list[Request]:
        """Return as many requests from the front of the lane as fit a batch; sets `_limit`."""
        batch: list[Request] = []
        num_rows = num_tokens = 0
        self._limit = None
        for request in lane.walk():
            num_rows += request.num_rows
            num_tokens += request.num_tokens
            if batch and (num_rows > max_rows or num_tokens > max_tokens):
                self._limit = self._full if num_rows > max_rows else "token budget"
                break
            batch.append(request)
            if num_rows >= max_rows or num_tokens >= max_tokens:
                self._limit = self._full if num_rows >= max_rows else "token budget"
                break
        return batch

    def _form(self, lane: Lane, now: float) -> list[Request] | None:
        """Apply Triton's GetDynamicBatch to one lane."""
        batch = self._fitting(lane, self._max_rows, self._max_tokens)
        if self._is_eager:
            return batch
        limit = self._limit
        num_rows = num_preferred = 0
        oldest = now
        for index, request in enumerate(batch):
            num_rows += request.num_rows
            oldest = min(oldest, request.timings.queued)
            if index and num_rows > self._max_preferred and not num_preferred:
                # Beyond every preferred size: what fits below counts as preferred.
                num_preferred = index
            if num_rows in self._preferred:
                num_preferred = index + 1
        delay_s = self.policy.max_queue_delay_s
        is_late = delay_s > 0 and now >= oldest + delay_s
        if num_preferred and not is_late:
            self._limit = "preferred size"
            return batch[:num_preferred]
        if limit or is_late or delay_s == 0 or num_rows >= self._max_preferred:
            self._limit = limit or ("delay expired" if is_late else None)
            return batch
        wake_at = oldest + delay_s
        self.wake_at = wake_at if self.wake_at is None else min(self.wake_at, wake_at)
        return None

    def _check_wait(self, request: Request, policy: QueuePolicy, now: float) -> None:
        """Refuse a request whose predicted wait is too long."""
        num_ahead, size_ahead = self._ahead(request.priority, now)
        if self._wait.has_room(size_ahead, num_ahead):
            return
        predicted_s = self._wait.predicted_s(size_ahead, num_ahead)
        allowed_s = self._wait.allowed_s(now)
        if predicted_s > ADMITTED * allowed_s and self._wait.applies(policy):
            raise Overloaded(
                f"the queue is {predicted_s:.2f} s long; requests may wait {allowed_s:.2f} s "
                "(penstock.max_wait_ms)",
                retry_after_s=predicted_s - ADMITTED * allowed_s,
                reason="predicted_late",
            )

    def _expire_waits(self, now: float) -> list[Request]:
        """Remove the requests that have waited too long although batches were answered: while an
        instance is stuck, nothing is refused because of it."""
        allowed_s = self._wait.allowed_s(now)
        refused: list[Request] = []
        if allowed_s == math.inf:
            return refused
        self._look_at = now + allowed_s / LOOKS
        latest = min(now - allowed_s, self._wait.ended_at)
        for lane in list(self._lanes.values()):
            for request in lane.heads():
                is_late = request.timings.queued < latest
                if is_late and self._wait.applies(self._policies[request.priority]):
                    self.remove(request)
                    refused.append(request)
        return refused

    def _expect(self, request: Request, policy: QueuePolicy, now: float) -> None:
        """Schedule the request's queue time-out, if it has one."""
        timeout_s = queue_timeout_s(policy, request.timeout_s)
        if timeout_s > 0:
            self._num_added += 1
            heapq.heappush(self._expiries, (now + timeout_s, self._num_added, request))


def queue_timeout_s(policy: QueuePolicy, asked: float | None) -> float:
    """Return how long a request that asks for this limit may be queued; 0: without limit."""
    limit_s = policy.default_timeout_s
    if policy.allow_timeout_override and asked and (limit_s == 0 or asked < limit_s):
        return asked
    return limit_s
