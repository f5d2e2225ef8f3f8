"""Which queued requests run together, and which are refused, so that the others keep the SLO.

*slo* mode: predicts from T(b) (`batch_times`) when a request would be answered and refuses at
arrival requests that would be late; dispatches eagerly; under backlog drops late requests at the
head instead of shrinking the batch for them. Sizes are rows, or tokens if batches have a token
budget: T(b) is a function of those, and rows are limited as well. Has the interface of
`batcher.Batcher` and learns from `observe`, `ended` and `seed`. Pure: time is an argument.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from penstock.config import BatchPolicy
from penstock.errors import Overloaded
from penstock.serving.elsewhere import NOTHING_ELSEWHERE, Elsewhere, OtherShards
from penstock.serving.lanes import Closed, Lane, Lanes
from penstock.serving.paces import GeometryPace, Paces
from penstock.serving.shares import BatchShare, Queued
from penstock.types import Request

# One batch in EXPLORE_EVERY may explore a size to learn its time, only below this load.
EXPLORE_EVERY = 64
EXPLORE_BELOW = 0.5


class Deadlines:
    """When queued requests must be answered: by the SLO, or sooner if they say so. The SLO's time
    begins with the arrival, or at the end of a cold start, `began`."""

    def __init__(self, slo_s: float) -> None:
        self._slo_s = slo_s
        self._began = -math.inf
        self._in_order: deque[tuple[float, Request]] = deque()
        self._others: list[tuple[float, int, Request]] = []
        self._num_added = 0

    @property
    def first(self) -> float:
        """Return the earliest deadline, or infinity."""
        first = self._in_order[0][0] if self._in_order else math.inf
        return min(first, self._others[0][0]) if self._others else first

    def allowed_s(self, request: Request) -> float:
        asked = request.timeout_s
        return self._slo_s if asked is None else min(asked, self._slo_s)

    def at(self, request: Request) -> float:
        asked = request.timeout_s  # As `allowed_s`, without the call.
        queued = request.timings.queued
        if queued < self._began:
            latest = self._began + self._slo_s
            return latest if asked is None else min(queued + asked, latest)
        return queued + (self._slo_s if asked is None else min(asked, self._slo_s))

    def begin_at(self, began: float) -> None:
        """Set when a cold start ends, or ended."""
        self._began = began
        waiting = [each for _, each in self._in_order] + [each for _, _, each in self._others]
        self._in_order.clear()
        self._others.clear()
        for request in waiting:
            self.add_late(request)

    def add(self, request: Request) -> None:
        """Add a request that has just arrived."""
        if request.timeout_s is None:
            self._in_order.append((self.at(request), request))
        else:
            self.add_late(request)

    def add_late(self, request: Request) -> None:
        """Add a request whose deadline may be before others."""
        self._num_added += 1
        heapq.heappush(self._others, (self.at(request), self._num_added, request))

    def take_passed(self, now: float) -> list[Request]:
        """Remove the deadlines that have passed; return their requests that are still queued in a
        lane. One that was put back has two deadlines."""
        passed: list[Request] = []
        in_order, others = self._in_order, self._others
        while in_order and (in_order[0][0] <= now or in_order[0][1].ticket.queue is None):
            passed.append(in_order.popleft()[1])
        while others and (others[0][0] <= now or others[0][2].ticket.queue is None):
            passed.append(heapq.heappop(others)[2])
        return [request for request in passed if isinstance(request.ticket.queue, Lane)]


class SloBatcher(Lanes):
    """Owned by the core's event loop."""

    def __init__(
        self,
        policy: BatchPolicy,
        num_executors: int = 1,
        elsewhere: Elsewhere = NOTHING_ELSEWHERE,
    ) -> None:
        assert policy.slo_latency_s is not None
        super().__init__(policy, elsewhere)
        self._max_size = policy.max_tokens or self._max_rows
        # Size of a request in the unit of T(b).
        size = "num_tokens" if self._has_budget else "num_rows"
        self._size: Callable[[Request], int] = attrgetter(size)
        self._paces = paces = Paces(policy, num_executors)
        # Statistics of each geometry seen recently.
        self.paces: Mapping[object, GeometryPace] = paces.by_geometry
        # Seeds batch times from warm-up; hears how long the event loop waited for a CPU; returns
        # T(b).
        self.seed, self.note_wait, self.mean_times = paces.seed, paces.note_wait, paces.mean_times
        # Predicted end and start of the running batches; sorted. Of a shard, only those that no
        # worker has claimed: the workers show all of them.
        self._running: list[tuple[float, float]] = []
        self._deadlines = Deadlines(policy.slo_latency_s)
        self._dropped: list[Request] = []
        # Time that everything queued takes one executor; includes requests that have left since.
        self._work_s = 0.0
        self._num_batches = 0
        # Arrival of the first request since the caller last asked `expire`.
        self._turn_began: float | None = None
        # When the first instance is expected, during a cold start.
        self._ready_at = -math.inf

    @property
    def num_waiting(self) -> int:
        return self.num_queued + len(self._dropped)

    @property
    def inflation(self) -> float:
        """How many times as long as T(b) the slowest batches take."""
        return self._paces.inflation

    @property
    def next_expiry(self) -> float | None:
        if self._dropped:
            return -math.inf
        first = self._deadlines.first
        return None if first == math.inf else first

    def observe(self, geometry: object, size: int, started: float, now: float) -> None:
        """Record that a batch of this geometry is done."""
        self.ended(started)
        self._paces.observe(geometry, size, started, now)

    def ended(self, started: float) -> None:
        """Record that a batch ended, successfully or not."""
        for index, (_, its_start) in enumerate(self._running):
            if its_start == started:
                del self._running[index]
                return

    def count_executors(self, num_ready: int, now: float) -> None:
        """Set how many batches can run at once from now on."""
        self._paces.num_executors = max(1, num_ready)

    def begin_cold_start(self, expected_s: float, now: float) -> None:
        """Expect the first instance after `expected_s`. Until it is there, only limits of their own
        make requests late."""
        self._ready_at = now + expected_s
        self._deadlines.begin_at(math.inf)

    def end_cold_start(self, now: float) -> None:
        """Expect that what is queued is answered within the SLO from now on."""
        self._ready_at = -math.inf
        self._deadlines.begin_at(now)

    def add(self, request: Request, geometry: object, now: float) -> None:
        """Queue the request, or raise Overloaded if it would be late."""
        paces = self._paces
        if now >= paces.refresh_at:
            paces.refresh(now)
        self._admit(request, now)
        pace = paces.get(geometry)
        pace.arrived(self._size(request), now)
        # An idle model takes anything: a wrong prediction must not refuse all requests for ever.
        there = None if self._elsewhere is None else self._elsewhere.look(now)
        num_running = len(self._running if there is None else there.ends)
        if self.num_queued or num_running >= paces.num_executors or there and there.sizes[-1]:
            self._check(request, geometry, pace, now, there)
        self._append(request, geometry)
        if there is not None:
            self._show_arrival(request, self._deadlines.at(request))
        self._work_s += pace.work_s(self._size(request))
        if self._turn_began is None:
            self._turn_began = now
        self._deadlines.add(request)

    def put_back(self, requests: list[Request], geometry: object) -> None:
        super().put_back(requests, geometry)
        for request in requests:
            self._deadlines.add_late(request)

    def remove(self, request: Request) -> bool:
        if request in self._dropped:
            self._dropped.remove(request)
            return True
        return super().remove(request)

    def take_dropped(self) -> list[Request]:
        """Return the requests that `next` dropped because they would be late, to be refused."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def expire(self, now: float) -> list[Request]:
        """Return the requests to refuse: dropped by `next`, or past their deadline."""
        if self._turn_began is not None:
            self.note_wait(now - self._turn_began)
            self._turn_began = None
        refused, self._dropped = self._dropped, []
        for request in self._deadlines.take_passed(now):
            if super().remove(request):  # Not if it has a second deadline there.
                refused.append(request)
        return refused

    def drain(self) -> list[Request]:
        """Remove and return all queued requests, including dropped ones not refused yet."""
        return self.take_dropped() + super().drain()

    def next(self, now: float, share: BatchShare | None = None) -> list[Request] | None:
        """Return the batch to run now on a free instance, or this shard's share of one that a
        worker has claimed; None: not yet (see `wake_at`)."""
        if now >= self._paces.refresh_at:
            self._paces.refresh(now)
        batch = self._next_batch(now, share)
        self._work_s = sum(map(self._paces.waiting_s, self._lanes.values()))
        self.wake_at = self.next_expiry
        return batch

    def wanted(self, now: float) -> Queued | None:
        """Return what this shard would give if a worker claimed it now; None: nothing (see
        `wake_at`)."""
        self.wake_at = self.next_expiry
        lanes = self.waiting()
        if not lanes:
            return None
        lane = lanes[0]
        due = self._deadlines.at(next(lane.walk()))
        pace = self._paces.get(lane.geometry)
        return self._queued(lane, due, pace.arrivals_per_s, pace.target_size)

    def publish(self, now: float) -> None:
        """Show the other shards and the workers what is queued here."""
        queued = self.wanted(now)
        if queued is None:
            rates = [pace.arrivals_at(now) for pace in self._paces.by_geometry.values()]
            empty = (0,) * self._num_levels
            queued = Queued(empty, empty, now, arrivals_per_s=sum(rates))
        total = sum(self._sizes)
        # Levels share the work in proportion to their size.
        unit_s = self._work_s / total if total else 0.0
        self._publish(queued, [size * unit_s for size in self._sizes], now)

    def _check(
        self,
        request: Request,
        geometry: object,
        pace: GeometryPace,
        now: float,
        there: OtherShards | None,
    ) -> None:
        """Refuse a request that is predicted to be late."""
        paces = self._paces
        lane, size = self._lanes.get(geometry), self._size(request)
        ahead = sum(paces.sizes(lane)[: request.priority + 1]) if lane is not None else 0
        target, target_s = paces.full_batch(lane, pace)
        arrivals_per_s = pace.arrivals_per_s
        if there is not None:
            arrivals_per_s += there.arrivals_per_s
            # Other shards do not say of which geometry their requests are.
            if len(paces.by_geometry) == 1:
                ahead += int(there.sizes[min(request.priority, len(there.sizes) - 1)])
        num_batches, in_mine = divmod(ahead, target)
        if in_mine and in_mine + size > target:
            num_batches, in_mine = num_batches + 1, 0
        rounds, turn = divmod(num_batches, paces.num_executors)
        start = max(self._free_at(turn, now, there), self._ready_at) + rounds * target_s
        if len(self._lanes) > (lane is not None):
            others_s = self._work_s - (paces.waiting_s(lane) if lane is not None else 0.0)
            start += max(0.0, others_s) / paces.num_executors
        if there is not None and len(paces.by_geometry) > 1:
            work_s = there.work_s[min(request.priority, len(there.work_s) - 1)]
            start += work_s / paces.num_executors
        # Others will join its batch before it starts.
        joining = in_mine + size + arrivals_per_s * (start - now)
        own_s = pace.times.mean_s(max(size, min(joining, target)))
        finish = start + own_s
        kept_s = paces.margin_s(own_s) + paces.lag_s
        latest = self._deadlines.at(request)
        if self._ready_at > now:
            latest = min(latest, self._ready_at + self._deadlines.allowed_s(request))
        if finish > latest - kept_s:
            raise Overloaded(
                f"would be answered in {(finish - now) * 1e3:.1f} ms; "
                f"{self._deadlines.allowed_s(request) * 1e3:g} ms are allowed and "
                f"{kept_s * 1e3:.1f} ms of them are kept free",
                retry_after_s=max(start - now, target_s),
                reason="predicted_late",
            )

    def _free_at(self, turn: int, now: float, there: OtherShards | None) -> float:
        """Return when the executor after `turn` others becomes free. An overdue one is expected to
        take as long again as it is overdue."""
        if there is None:
            busy = turn - (self._paces.num_executors - len(self._running))
            if busy < 0:
                return now
            end = self._running[min(busy, len(self._running) - 1)][0]
        else:
            busy = turn - (self._paces.num_executors - len(there.ends))
            if busy < 0 or not there.ends:
                return now
            end = there.ends[min(busy, len(there.ends) - 1)]
        return end if end > now else now + (now - end)

    def _next_batch(self, now: float, share: BatchShare | None) -> list[Request] | None:
        again = self._take_alone()
        if again is not None:
            self._note_running(now, self._paces.mean_s(self._size(again)))
            return [again]
        for lane in self._lanes_for(share):
            pace = self._paces.get(lane.geometry)
            if share is not None:
                batch = self._form_part(lane, share, now)
            elif self._is_backlogged(lane, pace):
                batch = self._form_from_backlog(lane, pace, now)
            else:
                batch = self._form_from_all(lane, pace, now)
            if batch:
                size = sum(map(self._size, batch))
                self._limit = self._reached(batch, size)
                self._take(lane, batch)
                self._note_running(now, pace.times.mean_s(size))
                return batch
        return None

    def _reached(self, batch: Sequence[Request], size: int) -> Closed | None:
        """Return why the batch took no more: a hard limit, or what forming it found."""
        if sum(request.num_rows for request in batch) >= self._max_rows:
            return self._full
        return "token budget" if size >= self._max_size else self._limit

    def _is_backlogged(self, lane: Lane, pace: GeometryPace) -> bool:
        """Whether more than a target batch is queued and will not clear by itself: executors that
        are fast enough together serve it without drops, in batches as large as the head allows."""
        size, batch_s = self._paces.full_batch(lane, pace)
        if sum(self._paces.sizes(lane)) <= size and sum(lane.rows) <= self._max_rows:
            return False
        load = pace.arrivals_per_s * batch_s / size
        return self._paces.num_executors == 1 or load > self._paces.num_executors

    def _form_from_backlog(self, lane: Lane, pace: GeometryPace, now: float) -> list[Request]:
        """Form a batch of the target size and drop requests that would be late in it."""
        batch: list[Request] = []
        late: list[Request] = []
        num_rows = size = 0
        batch_s = self._paces.full_batch(lane, pace)[1]
        finish = now + batch_s + self._paces.spread_s(batch_s)
        self._limit = None
        for request in lane.walk():
            next_size = size + self._size(request)
            if batch and num_rows + request.num_rows > self._max_rows:
                self._limit = self._full
                break
            if batch and next_size > pace.target_size:
                is_most = pace.target_size >= self._max_size
                self._limit = "token budget" if is_most else "SLO target"
                break
            if self._deadlines.at(request) < finish:
                late.append(request)
                continue
            batch.append(request)
            num_rows, size = num_rows + request.num_rows, next_size
        self._drop(late)
        return batch

    def _form_from_all(self, lane: Lane, pace: GeometryPace, now: float) -> list[Request]:
        """Take as many requests as can run without making the most urgent one late."""
        batch: list[Request] = []
        late: list[Request] = []
        num_rows, size, deadline = 0, 0, math.inf
        paces, deadlines = self._paces, self._deadlines
        max_size = self._explored(lane, pace, now)
        self._limit = None
        for request in lane.walk():
            next_size = size + self._size(request)
            if batch and num_rows + request.num_rows > self._max_rows:
                self._limit = self._full
                break
            if batch and next_size > max_size:
                self._limit = "token budget" if max_size == self._max_size else "trial"
                break
            batch_s = pace.times.mean_s(next_size)
            finish = now + batch_s + paces.spread_s(batch_s)
            its_deadline = deadlines.at(request)
            if finish > min(deadline, its_deadline):
                if batch:
                    self._limit = "SLO deadline"
                    break
                if finish - now <= deadlines.allowed_s(request):
                    late.append(request)
                    continue
                # Even an idle model would be late: it was admitted to test that prediction.
            batch.append(request)
            num_rows, size = num_rows + request.num_rows, next_size
            deadline = min(deadline, its_deadline)
        self._drop(late)
        return batch

    def _form_part(self, lane: Lane, share: BatchShare, now: float) -> list[Request]:
        """Form this shard's share of a batch that ends at a given time."""
        batch: list[Request] = []
        late: list[Request] = []
        num_rows = num_tokens = 0
        deadlines = self._deadlines
        can_hope = share.ends_at - now
        self._limit = None
        for request in lane.walk():
            if deadlines.at(request) < share.ends_at:
                if share.drops_late:
                    late.append(request)
                    continue
                if batch:
                    self._limit = "SLO deadline"
                    break
                if can_hope <= deadlines.allowed_s(request):
                    late.append(request)
                    continue
                # Even an idle model would be late: it was admitted to test that prediction.
            num_rows, num_tokens = num_rows + request.num_rows, num_tokens + request.num_tokens
            if num_rows > share.max_rows or num_tokens > share.max_tokens:
                self._limit = "SLO target" if share.drops_late else "SLO deadline"
                break
            batch.append(request)
        self._drop(late)
        return batch

    def _explored(self, lane: Lane, pace: GeometryPace, now: float) -> int:
        """Return the largest size or, rarely and at low load, one whose time is poorly known."""
        if (self._num_batches + 1) % EXPLORE_EVERY or pace.target_s <= 0:
            return self._max_size
        head = next(lane.walk())
        waiting = sum(self._paces.sizes(lane))
        rung = pace.times.stale_rung(waiting - 1, now, self._size(head))
        capacity = self._paces.num_executors / pace.unit_s
        if rung is None or pace.arrivals_per_s > EXPLORE_BELOW * capacity:
            return self._max_size
        both_s = pace.times.mean_s(rung) + pace.times.mean_s(waiting - rung)
        is_harmless = now + both_s + self._paces.margin_s(both_s) < self._deadlines.at(head)
        return rung if is_harmless else self._max_size

    def _drop(self, late: list[Request]) -> None:
        for request in late:
            super().remove(request)
        self._dropped += late

    def _note_running(self, now: float, duration_s: float) -> None:
        self._num_batches += 1
        if len(self._running) >= self._paces.num_executors:
            del self._running[0]  # An executor is free, so this batch must have ended.
        insort(self._running, (now + duration_s, now))
