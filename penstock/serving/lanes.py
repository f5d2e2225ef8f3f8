"""The queued requests of one model: a lane for each geometry, and reruns that run alone.

The base of both batchers. Keeps order, counts and limits; does not decide what runs, or when. Pure.
A request is in at most one place: `request.ticket.queue` is its lane, the rerun queue, or None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from penstock.config import BatchPolicy, QueuePolicy
from penstock.errors import Overloaded
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere, ShardLoad
from penstock.serving.shares import BatchShare, Queued
from penstock.types import Request

# Why a batch closed: no other request was queued, only ones of another shape were, it has the most
# rows, the most tokens, a preferred size or the SLO's target size, waiting longer was not allowed
# or would have made a request late, the size was explored for its time, it must run alone (a rerun,
# or a model that does not batch), or there was no memory for more.
Closed = Literal[
    "queue empty", "other shape", "full", "token budget", "preferred size", "delay expired",
    "SLO target", "SLO deadline", "trial", "rerun", "unbatched", "no room",
]  # fmt: skip


class Lane:
    """The queued requests of one geometry, by priority level; FIFO within each level.

    Requests that left early (cancelled, expired) stay in their deque until a walk removes them;
    `num_live`, `rows` and `tokens` (by level) count only those that are still queued.
    """

    __slots__ = ("delayed", "geometry", "levels", "num_live", "rows", "tokens")

    def __init__(self, geometry: object, num_levels: int) -> None:
        self.geometry = geometry
        self.levels: tuple[deque[Request], ...] = tuple(deque() for _ in range(num_levels))
        self.delayed: tuple[deque[Request], ...] = tuple(deque() for _ in range(num_levels))
        self.num_live = 0
        self.rows = [0] * num_levels
        # 0 without a token budget.
        self.tokens = [0] * num_levels

    def walk(self) -> Iterator[Request]:
        """Yield live requests in serving order."""
        for level, late in zip(self.levels, self.delayed, strict=True):
            for queue in (level, late):
                for request in queue:
                    if request.ticket.queue is self:
                        yield request

    def postpone(self, request: Request) -> None:
        """Move a request behind the others of its level."""
        self.levels[request.priority].remove(request)
        self.delayed[request.priority].append(request)

    def heads(self) -> Iterator[Request]:
        """Yield requests from the front of each queue, as long as the caller removes them."""
        for queue in (*self.levels, *self.delayed):
            while queue:
                request = queue[0]
                if request.ticket.queue is not self:
                    queue.popleft()
                    continue
                yield request
                if request.ticket.queue is self:
                    break

    def drop_dead(self) -> None:
        """Remove dead entries from the front of each deque."""
        for queue in (*self.levels, *self.delayed):
            while queue and queue[0].ticket.queue is not self:
                queue.popleft()

    def compact_if_sparse(self) -> None:
        """Remove all dead entries once they are the majority."""
        if sum(map(len, self.levels)) + sum(map(len, self.delayed)) <= 2 * self.num_live + 64:
            return
        for queue in (*self.levels, *self.delayed):
            if queue:
                alive = [request for request in queue if request.ticket.queue is self]
                queue.clear()
                queue.extend(alive)


class Lanes:
    """Invariant: every lane that is kept has a live request. `elsewhere` are the other shards of
    the model; limits apply to all of them together."""

    def __init__(self, policy: BatchPolicy, elsewhere: Elsewhere = NOTHING_ELSEWHERE) -> None:
        self.policy = policy
        # None: this batcher has the whole queue.
        self._elsewhere = None if elsewhere is NOTHING_ELSEWHERE else elsewhere
        self._max_rows = policy.max_batch_size if policy.is_dynamic else 1
        # When to ask again even if no request arrives and no instance becomes free.
        self.wake_at: float | None = None
        # Why the batch that is being formed took no more; None: it took everything of its shape.
        self._limit: Closed | None = None
        self._full: Closed = "full" if policy.is_dynamic else "unbatched"
        # Why the last batch took no more.
        self.closed_by: Closed = "queue empty"
        self._num_levels = max(1, policy.num_priorities)
        self._level = policy.level
        self._max_pending = policy.max_pending
        first = 1 if policy.num_priorities else 0
        self._policies = [policy.policy(first + level) for level in range(self._num_levels)]
        self._counts = [0] * self._num_levels
        self._has_budget = policy.max_tokens is not None
        # Queued rows (or tokens, with a token budget) of all lanes, by level.
        self._sizes = [0] * self._num_levels
        self._lanes: dict[object, Lane] = {}
        self._alone: deque[Request] = deque()
        self.num_queued = 0
        # Requests whose queue time-out passed after they were sent to a worker of several shards.
        self.overdue: list[Request] = []
        # Requests so far, also refused ones, and their rows (or tokens).
        self.num_offered = self.size_offered = 0

    @property
    def num_waiting(self) -> int:
        """All requests that have no answer and do not run."""
        return self.num_queued

    @property
    def num_reruns(self) -> int:
        return len(self._alone)

    @property
    def size_queued(self) -> int:
        """Rows (or tokens) that are queued."""
        return sum(self._sizes) + len(self._alone)

    def waiting(self) -> list[Lane]:
        """Return the lanes in serving order: by highest priority, then by longest wait."""
        lanes = list(self._lanes.values())
        if len(lanes) > 1:
            lanes.sort(key=_head_rank)
        return lanes

    def _admit(self, request: Request, now: float) -> QueuePolicy:
        """Set the request's level and return its policy; raise Overloaded at a limit."""
        level = self._level(request.priority) if self._num_levels > 1 else 0
        policy = self._policies[level]
        request.priority = level
        self.num_offered += 1
        self.size_offered += request.num_tokens if self._has_budget else request.num_rows
        num_queued, num_in_level = self.num_queued, self._counts[level]
        if self._elsewhere is not None:
            nums = self._elsewhere.look(now).num_requests
            index = min(level, len(nums) - 1)
            num_queued += int(nums[-1])
            num_in_level += int(nums[index] - (nums[index - 1] if index else 0))
        if num_queued >= self._max_pending:
            raise Overloaded(f"Exceeds maximum queue size: {self._max_pending} waiting")
        if 0 < policy.max_queue_size <= num_in_level:
            raise Overloaded(f"Exceeds maximum queue size: {policy.max_queue_size} waiting")
        return policy

    def _ahead(self, level: int, now: float) -> tuple[int, int]:
        """Return the number of requests at this level and above, and their rows or tokens."""
        num_ahead, size_ahead = sum(self._counts[: level + 1]), sum(self._sizes[: level + 1])
        if self._elsewhere is not None:
            there = self._elsewhere.look(now)
            index = min(level, len(there.sizes) - 1)
            num_ahead += int(there.num_requests[index])
            size_ahead += int(there.sizes[index])
        return num_ahead, size_ahead

    def _queued(
        self, lane: Lane, due: float, arrivals_per_s: float = 0.0, target_size: int = 0
    ) -> Queued:
        """Return everything that is queued, with this lane's head first."""
        head = next(lane.walk())
        tokens = tuple(self._sizes) if self._has_budget else ()
        rows = tuple(self._sizes)
        if self._has_budget:
            lanes = self._lanes.values()
            rows = tuple(sum(each.rows[i] for each in lanes) for i in range(self._num_levels))
        geometry, sizes = lane.geometry, (head.num_rows, head.num_tokens)
        return Queued(rows, tokens, due, *sizes, geometry, arrivals_per_s, target_size)

    def _publish(self, queued: Queued | None, work_s: list[float], now: float) -> None:
        """Show the other shards and the workers what is queued here."""
        if self._elsewhere is None:
            return
        if queued is None:
            queued = Queued((0,) * self._num_levels, (0,) * self._num_levels, now)
        counts: Sequence[int] = self._counts
        if self._alone:
            queued, counts = self._with_reruns(queued, now)
        self._elsewhere.publish(ShardLoad(queued, counts, work_s), now)

    def _with_reruns(self, queued: Queued, now: float) -> tuple[Queued, Sequence[int]]:
        """Add the requests that run again alone, before all others."""
        again = self._alone
        rows, counts = list(queued.rows), list(self._counts)
        rows[0] += sum(request.num_rows for request in again)
        counts[0] += len(again)
        tokens = list(queued.tokens)
        if self._has_budget:
            tokens[0] += sum(request.num_tokens for request in again)
        sizes = again[0].num_rows, again[0].num_tokens
        rate, target = queued.arrivals_per_s, queued.target_size
        return Queued(tuple(rows), tuple(tokens), now, *sizes, None, rate, target), counts

    def _show_arrival(self, request: Request, due: float) -> None:
        """Show the other shards a request that was just queued."""
        assert self._elsewhere is not None
        level = request.priority
        counted = self._counts[level], self._sizes[level]
        self._elsewhere.arrived(level, *counted, due if self.num_queued == 1 else None)

    def _lanes_for(self, share: BatchShare | None) -> list[Lane]:
        """Return the lanes that may form a batch, or a part of one, in serving order."""
        if share is None or share.geometry is None:
            return self.waiting()
        lane = self._lanes.get(share.geometry)
        return [] if lane is None else [lane]

    def _append(self, request: Request, geometry: object) -> None:
        """Append the request to its level."""
        lane = self._lanes.get(geometry) or self._lane(geometry)
        request.ticket.queue = lane
        level = request.priority
        lane.levels[level].append(request)
        lane.rows[level] += request.num_rows
        lane.tokens[level] += request.num_tokens
        lane.num_live += 1
        self._counts[level] += 1
        self._sizes[level] += request.num_tokens if self._has_budget else request.num_rows
        self.num_queued += 1

    def put_back(self, requests: list[Request], geometry: object) -> None:
        """Undo a `next` whose batch could not be dispatched whole, keeping the order."""
        self.closed_by = "no room"
        for request in reversed(requests):
            lane = self._lane(geometry)
            request.ticket.queue = lane
            lane.levels[request.priority].appendleft(request)
            self._count(request, lane, +1)

    def rerun_alone(self, request: Request) -> None:
        """Rerun this request before all others, in a batch of its own."""
        request.ticket.queue = self._alone
        self._alone.append(request)
        self.num_queued += 1

    def _take_alone(self) -> Request | None:
        """Return the next rerun, and set `closed_by`."""
        if not self._alone:
            return None
        request = self._alone.popleft()
        self.closed_by = "rerun"
        request.ticket.queue = None
        self.num_queued -= 1
        return request

    def _take(self, lane: Lane, batch: list[Request]) -> None:
        """Remove these requests, which are at the front of the lane, and set `closed_by`."""
        counts, rows, tokens, sizes = self._counts, lane.rows, lane.tokens, self._sizes
        for request in batch:
            request.ticket.queue = None
            level = request.priority
            counts[level] -= 1
            rows[level] -= request.num_rows
            tokens[level] -= request.num_tokens
            sizes[level] -= request.num_tokens if self._has_budget else request.num_rows
        lane.num_live -= len(batch)
        self.num_queued -= len(batch)
        if lane.num_live == 0:
            del self._lanes[lane.geometry]
        else:
            lane.drop_dead()
        self.closed_by = self._limit or ("other shape" if self._lanes else "queue empty")

    def remove(self, request: Request) -> bool:
        """Remove a request that need not run. False if it is not queued here."""
        ticket = request.ticket
        home = ticket.queue
        if home is None:
            return False
        ticket.queue = None
        if home is self._alone:
            self._alone.remove(request)
            self.num_queued -= 1
            return True
        assert isinstance(home, Lane)
        self._count(request, home, -1)
        if home.num_live == 0:
            del self._lanes[home.geometry]
        else:
            home.compact_if_sparse()
        return True

    def drain(self) -> list[Request]:
        """Remove and return all queued requests."""
        everything = list(self._alone)
        for lane in self._lanes.values():
            everything.extend(lane.walk())
        for request in everything:
            self.remove(request)
        return everything

    def _lane(self, geometry: object) -> Lane:
        lane = self._lanes.get(geometry)
        if lane is None:
            lane = self._lanes[geometry] = Lane(geometry, self._num_levels)
        return lane

    def _count(self, request: Request, lane: Lane, step: int) -> None:
        level = request.priority
        lane.num_live += step
        lane.rows[level] += step * request.num_rows
        lane.tokens[level] += step * request.num_tokens
        self._counts[level] += step
        self._sizes[level] += step * (request.num_tokens if self._has_budget else request.num_rows)
        self.num_queued += step


def _head_rank(lane: Lane) -> tuple[int, float]:
    head = next(lane.walk())
    return head.priority, head.timings.queued
