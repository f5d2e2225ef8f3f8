"""Which waiting requests run together, and when. Pure: time is an argument.

*Fixed* mode: Triton's dynamic batcher rule for rule (preferred sizes, queue delay, priorities,
queue policies; its core's GetDynamicBatch), except that requests of another shape wait in a lane of
their own instead of closing the batch. The caller asks `next` whenever an instance is free and
again at `wake_at`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from penstock.config import BatchPolicy, QueuePolicy
from penstock.errors import Overloaded
from penstock.types import LEVEL_UNSET, Request

Answer = TypeVar("Answer")


class _Lane:
    """The waiting requests of one geometry, by priority level; first come, first served in each.

    Requests that left early (cancelled, expired) stay in their deque until the walk meets them;
    `num_live` counts only those that still wait.
    """

    __slots__ = ("delayed", "geometry", "levels", "num_live")

    def __init__(self, geometry: object, num_levels: int) -> None:
        self.geometry = geometry
        self.levels: tuple[deque[Request], ...] = tuple(deque() for _ in range(num_levels))
        self.delayed: tuple[deque[Request], ...] = tuple(deque() for _ in range(num_levels))
        self.num_live = 0

    def walk(self) -> Iterator[Request]:
        """Live requests in the order in which they are served."""
        for level, late in zip(self.levels, self.delayed, strict=True):
            for queue in (level, late):
                for request in queue:
                    if request.queue is self:
                        yield request

    def drop_dead(self) -> None:
        """Forget those at the front of each deque that do not wait here any more."""
        for queue in (*self.levels, *self.delayed):
            while queue and queue[0].queue is not self:
                queue.popleft()

    def compact(self) -> None:
        for queue in (*self.levels, *self.delayed):
            if queue:
                alive = [request for request in queue if request.queue is self]
                queue.clear()
                queue.extend(alive)


class Batcher:
    """Owned by the core's event loop. A request is in at most one lane: `request.queue`."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._num_levels = max(1, policy.num_priorities)
        self._max_rows = policy.max_batch_size if policy.is_dynamic else 1
        preferred = policy.preferred_batch_sizes
        self._preferred = frozenset(preferred)
        self._max_preferred = max(preferred) if preferred else self._max_rows
        self._is_eager = not preferred and policy.max_queue_delay_s == 0
        self._lanes: dict[object, _Lane] = {}
        self._alone: deque[Request] = deque()
        self._counts = [0] * self._num_levels
        first = 1 if policy.num_priorities else 0
        self._policies = [policy.policy(first + level) for level in range(self._num_levels)]
        self._expiries: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self.num_waiting = 0
        # When to ask again although nothing arrives and no instance gets free.
        self.wake_at: float | None = None

    def __repr__(self) -> str:
        return f"<Batcher waiting={self.num_waiting} shapes={len(self._lanes)}>"

    @property
    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None

    def add(self, request: Request, geometry: object, now: float) -> None:
        """Queue the request, or raise Overloaded."""
        level = self._level(request) if self._num_levels > 1 else 0
        policy = self._policies[level]
        if self.num_waiting >= self._policy.max_pending:
            raise Overloaded(f"Exceeds maximum queue size: {self._policy.max_pending} waiting")
        if 0 < policy.max_queue_size <= self._counts[level]:
            raise Overloaded(f"Exceeds maximum queue size: {policy.max_queue_size} waiting")
        lane = self._lanes.get(geometry)
        if lane is None:
            lane = self._lanes[geometry] = _Lane(geometry, self._num_levels)
        request.queue = lane
        request.priority = level
        lane.levels[level].append(request)
        lane.num_live += 1
        self._counts[level] += 1
        self.num_waiting += 1
        if policy.default_timeout_s or policy.allow_timeout_override:
            self._expect(request, policy, now)

    def rerun_alone(self, request: Request) -> None:
        """Run this request again, before all others and in a batch of its own."""
        request.queue = self._alone
        self._alone.append(request)
        self.num_waiting += 1

    def put_back(self, requests: list[Request], geometry: object) -> None:
        """Undo a `next` whose batch could not be dispatched whole; order is kept."""
        lane = self._lanes.get(geometry)
        if lane is None:
            lane = self._lanes[geometry] = _Lane(geometry, self._num_levels)
        for request in reversed(requests):
            request.queue = lane
            lane.levels[request.priority].appendleft(request)
            self._count(request, lane, +1)

    def remove(self, request: Request) -> bool:
        """Take out a request that need not run. False if it does not wait here."""
        home = request.queue
        if home is None:
            return False
        request.queue = None
        if home is self._alone:
            self._alone.remove(request)
            self.num_waiting -= 1
            return True
        assert isinstance(home, _Lane)
        self._count(request, home, -1)
        if home.num_live == 0:
            del self._lanes[home.geometry]
        elif sum(map(len, home.levels)) + sum(map(len, home.delayed)) > 2 * home.num_live + 64:
            home.compact()
        return True

    def expire(self, now: float) -> list[Request]:
        """Apply queue time-outs: returns those to refuse; DELAY moves them behind their level."""
        refused: list[Request] = []
        while self._expiries and self._expiries[0][0] <= now:
            request = heapq.heappop(self._expiries)[2]
            lane = request.queue
            if not isinstance(lane, _Lane):
                continue
            if self._policies[request.priority].timeout_action == "DELAY":
                self._postpone(request, lane)
            else:
                self.remove(request)
                refused.append(request)
        return refused

    def drain(self) -> list[Request]:
        """Everything that waits, taken out."""
        everything = list(self._alone)
        for lane in self._lanes.values():
            everything.extend(lane.walk())
        for request in everything:
            self.remove(request)
        return everything

    def next(self, now: float) -> list[Request] | None:
        """The batch to run now on a free instance; None when there is none (see `wake_at`)."""
        self.wake_at = self.next_expiry
        if self._alone:
            request = self._alone.popleft()
            request.queue = None
            self.num_waiting -= 1
            return [request]
        for lane in self._lanes_in_order():
            batch = self._form(lane, now)
            if batch:
                self._take(lane, batch)
                return batch
        return None

    def _lanes_in_order(self) -> list[_Lane]:
        """Highest priority first, then the longest wait."""
        lanes = list(self._lanes.values())
        if len(lanes) > 1:
            lanes.sort(key=_head_rank)
        return lanes

    def _form(self, lane: _Lane, now: float) -> list[Request] | None:
        """Triton's GetDynamicBatch for one lane."""
        batch: list[Request] = []
        num_rows = num_preferred = 0
        oldest = now
        cannot_grow = False
        for request in lane.walk():
            if batch and num_rows + request.num_rows > self._max_rows:
                cannot_grow = True
                break
            if batch and num_rows + request.num_rows > self._max_preferred and not num_preferred:
                # Larger than every preferred size: what fits below is as good as preferred.
                num_preferred = len(batch)
            batch.append(request)
            num_rows += request.num_rows
            oldest = min(oldest, request.timings.queued)
            if num_rows in self._preferred:
                num_preferred = len(batch)
            if num_rows >= self._max_rows:
                cannot_grow = True
                break
        if self._is_eager:
            return batch
        delay_s = self._policy.max_queue_delay_s
        is_late = delay_s > 0 and now - oldest >= delay_s
        if num_preferred and not is_late:
            return batch[:num_preferred]
        if cannot_grow or is_late or delay_s == 0 or num_rows >= self._max_preferred:
            return batch
        wake_at = oldest + delay_s
        self.wake_at = wake_at if self.wake_at is None else min(self.wake_at, wake_at)
        return None

    def _take(self, lane: _Lane, batch: list[Request]) -> None:
        for request in batch:
            request.queue = None
            self._counts[request.priority] -= 1
        lane.num_live -= len(batch)
        self.num_waiting -= len(batch)
        if lane.num_live == 0:
            del self._lanes[lane.geometry]
        else:
            lane.drop_dead()

    def _postpone(self, request: Request, lane: _Lane) -> None:
        level = request.priority
        lane.levels[level].remove(request)
        lane.delayed[level].append(request)

    def _count(self, request: Request, lane: _Lane, step: int) -> None:
        lane.num_live += step
        self._counts[request.priority] += step
        self.num_waiting += step

    def _level(self, request: Request) -> int:
        """Index of the request's level; 0 is the highest. Unknown levels mean the default."""
        wanted = request.priority
        if wanted == LEVEL_UNSET or wanted > self._num_levels:
            wanted = self._policy.default_priority
        return max(1, wanted) - 1

    def _expect(self, request: Request, policy: QueuePolicy, now: float) -> None:
        """Note when the request's time in the queue is up, if ever."""
        timeout_s = policy.default_timeout_s
        asked = request.timeout_s
        if policy.allow_timeout_override and asked and (timeout_s == 0 or asked < timeout_s):
            timeout_s = asked
        if timeout_s > 0:
            self._num_added += 1
            heapq.heappush(self._expiries, (now + timeout_s, self._num_added, request))


def _head_rank(lane: _Lane) -> tuple[int, float]:
    head = next(lane.walk())
    return head.priority, head.timings.queued


class Sequencer(Generic[Answer]):
    """Lets answers leave in the order of arrival (`preserve_ordering`). Pure."""

    def __init__(self) -> None:
        self._next_turn = 0
        self._first_open = 0
        self._finished: dict[int, Answer] = {}

    def enter(self) -> int:
        turn = self._next_turn
        self._next_turn += 1
        return turn

    def finish(self, turn: int, answer: Answer) -> list[Answer]:
        """Note that `turn` has its answer; returns the answers that may leave now, in order."""
        if turn < self._first_open or turn in self._finished:
            return []  # It ended before, by a cancel for instance; the first answer counts.
        self._finished[turn] = answer
        ready: list[Answer] = []
        while self._first_open in self._finished:
            ready.append(self._finished.pop(self._first_open))
            self._first_open += 1
        return ready
