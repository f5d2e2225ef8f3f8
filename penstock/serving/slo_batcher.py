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
from penstock.serving.batch_times import BatchTimes, Spread
from penstock.serving.lanes import Closed, Lane, Lanes
from penstock.types import Request

# Share of the SLO kept free at admission for delays between client and event loop: at 10x load on
# two cores, with 8 %, 99.9 % took less than the promised 50 ms in here and the client still saw a
# p99 of 51 ms.
MIN_MARGIN = 0.10
# Multiple of a batch's spread (how much longer the slowest 1 % take), kept free at admission if
# that is more: the batch ahead varies too.
SPREADS = 1.5
# Smaller batches leave room for the spread but cost throughput: at most this share of it. Where
# that is not enough, the slowest batches miss the SLO.
MAX_COST = 0.3
# A request waits unseen while the event loop is busy with others or not scheduled by the OS: the
# longest such time of the last seconds, up to this share of the SLO, is kept free as well. On two
# cores with ten other busy processes the loop ran for 1.2 s of 8 s and waited for a CPU for 1 s to
# 3 s (2026-11-16); the longest waits were 20 ms to 200 ms. Keeping all of that free would refuse
# everything.
MAX_LAG = 0.2
# Share of the SLO kept free when choosing the size of a batch.
AIM_MARGIN = 0.05
REFRESH_S = 1.0
# Time constant of the average arrival rate.
ARRIVALS_S = 0.1
# One batch in EXPLORE_EVERY may explore a size to learn its time, only below this load.
EXPLORE_EVERY = 64
EXPLORE_BELOW = 0.5
MAX_PACES = 512


class Pace:
    """Statistics of one geometry: T(b), target size, arrival rate in rows (or tokens)."""

    __slots__ = ("_arrived_at", "arrivals_per_s", "target_size", "target_s", "times")

    def __init__(self, times: BatchTimes) -> None:
        self.times = times
        self.target_size = 1
        self.target_s = 0.0
        self.arrivals_per_s = 0.0
        self._arrived_at = -math.inf

    @property
    def unit_s(self) -> float:
        return self.target_s / self.target_size

    def work_s(self, size: int) -> float:
        """Return the time of a request within a target batch; a larger one has its own batch."""
        return self.unit_s * size if size <= self.target_size else self.times.mean_s(size)

    def aim(self, limit_s: float, max_size: int) -> None:
        """Target the largest batch that takes no longer than this."""
        self._set_target(min(max_size, self.times.largest_within(limit_s)))

    def aim_lower(self, limit_s: float) -> None:
        """Target the largest batch that takes no longer than this, or the smallest that does not
        cost more throughput than MAX_COST."""
        least_per_s = (1 - MAX_COST) / self.unit_s if self.unit_s > 0 else 0.0
        size = self.times.largest_within(limit_s)
        while size < self.target_size and size < least_per_s * self.times.mean_s(size):
            size += max(1, size // 8)
        self._set_target(min(size, self.target_size))

    def _set_target(self, size: int) -> None:
        self.target_size = size
        self.target_s = self.times.mean_s(size)

    def arrived(self, size: int, now: float) -> None:
        fade = math.exp((self._arrived_at - now) / ARRIVALS_S)
        self.arrivals_per_s = self.arrivals_per_s * fade + size / ARRIVALS_S
        self._arrived_at = now


class SloBatcher:
    """Owned by the core's event loop. `num_executors` follows the number of ready instances."""

    def __init__(self, policy: BatchPolicy, num_executors: int = 1) -> None:
        assert policy.slo_latency_s is not None
        self.policy = policy
        self._slo_s = policy.slo_latency_s
        self._max_rows = policy.max_batch_size if policy.is_dynamic else 1
        self._has_budget = policy.max_tokens is not None
        self._max_size = policy.max_tokens or self._max_rows
        # Size of a request in the unit of T(b).
        self._size: Callable[[Request], int] = attrgetter(
            "num_tokens" if self._has_budget else "num_rows"
        )
        self._lanes = Lanes(policy)
        self._prior = BatchTimes(policy.max_tokens or policy.max_batch_size)
        self._paces: dict[object, Pace] = {}
        # Predicted end and start of the running batches; sorted.
        self._running: list[tuple[float, float]] = []
        # Deadlines: those of the SLO arrive in order, shorter ones of single requests do not.
        self._deadlines: deque[tuple[float, Request]] = deque()
        self._short_deadlines: list[tuple[float, int, Request]] = []
        self._dropped: list[Request] = []
        # Time that everything queued takes one executor; includes requests that have left since.
        self._work_s = 0.0
        self._num_added = 0
        self._num_batches = 0
        self._spread = Spread()
        # The slowest 1 % of batches take at least this many times the mean.
        self._inflation = 1.0
        # Arrival of the first request since the caller last asked `expire`.
        self._turn_began: float | None = None
        self._lag_s = 0.0
        self._refresh_at = -math.inf
        self.num_executors = num_executors
        self.wake_at: float | None = None
        # Why the last batch took no more; None: it took everything of its shape.
        self._limit: Closed | None = None
        self._full: Closed = "full" if policy.is_dynamic else "unbatched"
        self.closed_by: Closed = "queue empty"

    def __repr__(self) -> str:
        return f"<SloBatcher waiting={self.num_waiting} running={len(self._running)}>"

    @property
    def num_waiting(self) -> int:
        return self._lanes.num_waiting + len(self._dropped)

    @property
    def next_expiry(self) -> float | None:
        if self._dropped:
            return -math.inf
        first = self._deadlines[0][0] if self._deadlines else math.inf
        if self._short_deadlines:
            first = min(first, self._short_deadlines[0][0])
        return None if first == math.inf else first

    def seed(self, timings: Mapping[int, float], geometry: object = None) -> None:
        """Seed batch times from warm-up, in seconds by size; for one geometry, or for all. Rows are
        those of the batch ladder, tokens are arbitrary."""
        pace = self._pace(geometry) if geometry is not None else None
        times = self._prior if pace is None else pace.times
        if self._has_budget:
            times.seed_between(timings)
        else:
            for num_rows, duration_s in timings.items():
                times.seed(num_rows, duration_s)
        if pace is not None:
            self._aim(pace)

    def observe(self, geometry: object, size: int, started: float, now: float) -> None:
        """Record that a batch of this geometry is done."""
        self.ended(started)
        if self._has_budget and size > self._max_size:
            return  # A single request beyond the token budget: not a size of T(b).
        self._prior.observe(size, now - started, now)
        pace = self._pace(geometry)
        was_known = pace.times.is_known
        if was_known:
            self._spread.note(now - started, pace.times.mean_s(size))
        has_drifted = pace.times.observe(size, now - started, now)
        if has_drifted:
            self._spread.forget()
        if has_drifted or not was_known:
            self._aim(pace)

    def ended(self, started: float) -> None:
        """Record that a batch ended, successfully or not."""
        for index, (_, its_start) in enumerate(self._running):
            if its_start == started:
                del self._running[index]
                return

    def count_executors(self, num_ready: int, now: float) -> None:
        """Set how many batches can run at once from now on."""
        self.num_executors = max(1, num_ready)

    def add(self, request: Request, geometry: object, now: float) -> None:
        """Queue the request, or raise Overloaded if it would be late."""
        if now >= self._refresh_at:
            self._refresh(now)
        self._lanes.admit(request)
        pace = self._pace(geometry)
        pace.arrived(self._size(request), now)
        # An idle model takes anything: a wrong prediction must not refuse all requests for ever.
        if self._lanes.num_waiting or len(self._running) >= self.num_executors:
            self._check(request, geometry, pace, now)
        self._lanes.append(request, geometry)
        self._work_s += pace.work_s(self._size(request))
        if self._turn_began is None:
            self._turn_began = now
        self._expect(request)

    def rerun_alone(self, request: Request) -> None:
        """Rerun this request before all others, in a batch of its own."""
        self._lanes.append_alone(request)

    def put_back(self, requests: list[Request], geometry: object) -> None:
        """Undo a `next` whose batch could not be dispatched whole, keeping the order."""
        self._lanes.put_back(requests, geometry)
        self.closed_by = "no room"
        for request in requests:
            self._expect_early(request)

    def remove(self, request: Request) -> bool:
        """Remove a request that need not run. False if it is not queued here."""
        if request in self._dropped:
            self._dropped.remove(request)
            return True
        return self._lanes.remove(request)

    def note_wait(self, waited_s: float) -> None:
        """Record that the event loop, and so its requests, waited this long for a CPU."""
        self._lag_s = max(self._lag_s, min(waited_s, MAX_LAG * self._slo_s))

    def take_dropped(self) -> list[Request]:
        """Return the requests that `next` dropped because they would be late, to be refused."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def expire(self, now: float) -> list[Request]:
        """Return the requests to refuse: dropped by `next`, or past their deadline."""
        self._note_turn(now)
        refused, self._dropped = self._dropped, []
        deadlines, short = self._deadlines, self._short_deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1].ticket.queue is None):
            self._expire_one(deadlines.popleft()[1], refused)
        while short and (short[0][0] <= now or short[0][2].ticket.queue is None):
            self._expire_one(heapq.heappop(short)[2], refused)
        return refused

    def drain(self) -> list[Request]:
        """Remove and return all queued requests, including dropped ones not refused yet."""
        dropped, self._dropped = self._dropped, []
        return dropped + self._lanes.drain()

    def next(self, now: float) -> list[Request] | None:
        """Return the batch to run now on a free instance; None: not yet (see `wake_at`)."""
        if now >= self._refresh_at:
            self._refresh(now)
        batch = self._next_batch(now)
        self._work_s = sum(map(self._waiting_s, self._lanes.values()))
        self.wake_at = self.next_expiry
        return batch

    def waiting(self) -> list[Lane]:
        """Return the lanes in serving order."""
        return self._lanes.in_order()

    @property
    def num_reruns(self) -> int:
        return self._lanes.num_alone

    @property
    def paces(self) -> Mapping[object, Pace]:
        """Statistics of each geometry seen recently."""
        return self._paces

    # Admission.

    def _check(self, request: Request, geometry: object, pace: Pace, now: float) -> None:
        """Refuse a request that is predicted to be late."""
        lane, size = self._lanes.get(geometry), self._size(request)
        ahead = sum(self._sizes(lane)[: request.priority + 1]) if lane is not None else 0
        target, target_s = self._full_batch(lane, pace)
        num_batches, in_mine = divmod(ahead, target)
        if in_mine and in_mine + size > target:
            num_batches, in_mine = num_batches + 1, 0
        rounds, turn = divmod(num_batches, self.num_executors)
        start = self._free_at(turn, now) + rounds * target_s
        if len(self._lanes) > (lane is not None):
            others_s = self._work_s - (self._waiting_s(lane) if lane is not None else 0.0)
            start += max(0.0, others_s) / self.num_executors
        # Others will join its batch before it starts.
        joining = in_mine + size + pace.arrivals_per_s * (start - now)
        own_s = pace.times.mean_s(max(size, min(joining, target)))
        finish = start + own_s
        kept_s = self._margin_s(own_s) + self._lag_s
        if finish > self._deadline(request) - kept_s:
            raise Overloaded(
                f"would be answered in {(finish - now) * 1e3:.1f} ms; "
                f"{self._allowed_s(request) * 1e3:g} ms are allowed and "
                f"{kept_s * 1e3:.1f} ms of them are kept free",
                retry_after_s=max(start - now, target_s),
                reason="predicted_late",
            )

    @property
    def _usable_s(self) -> float:
        """The part of the SLO that is left for queueing and computing."""
        return (1 - AIM_MARGIN) * self._slo_s - self._lag_s

    def _margin_s(self, batch_s: float) -> float:
        """Return the part of the SLO kept free for a batch that takes this long on average."""
        return max(MIN_MARGIN * self._slo_s, self._spread_s(batch_s, SPREADS))

    def _spread_s(self, batch_s: float, times: float = 1.0) -> float:
        """Return how much longer such a batch may take, capped by the room in the SLO: more would
        refuse everything."""
        room_s = self._usable_s - batch_s * (1 + 1 / self.num_executors)
        return max(0.0, min(times * (self._inflation - 1) * batch_s, room_s))

    def _free_at(self, turn: int, now: float) -> float:
        """Return when the executor after `turn` others becomes free. An overdue one is expected to
        take as long again as it is overdue."""
        busy = turn - (self.num_executors - len(self._running))
        if busy < 0:
            return now
        end = self._running[min(busy, len(self._running) - 1)][0]
        return end if end > now else now + (now - end)

    def _note_turn(self, now: float) -> None:
        if self._turn_began is not None:
            self.note_wait(now - self._turn_began)
            self._turn_began = None

    def _sizes(self, lane: Lane) -> Sequence[int]:
        """Return the queued sizes by level."""
        return lane.tokens if self._has_budget else lane.rows

    def _full_batch(self, lane: Lane | None, pace: Pace) -> tuple[int, float]:
        """Return size and time of the batches that the lane forms: the target size, or less if the
        row limit is reached first, but never less than a request."""
        if lane is None:
            return pace.target_size, pace.target_s
        size, waiting = pace.target_size, sum(self._sizes(lane))
        num_rows = sum(lane.rows) if self._has_budget else 0
        if num_rows >= self._max_rows:
            size = min(size, max(1, self._max_rows * waiting // num_rows))
        size = max(size, -(-waiting // lane.num_live))
        if size == pace.target_size:
            return size, pace.target_s
        return size, pace.times.mean_s(size)

    def _waiting_s(self, lane: Lane) -> float:
        size, batch_s = self._full_batch(lane, self._pace(lane.geometry))
        return sum(self._sizes(lane)) * batch_s / size

    def _allowed_s(self, request: Request) -> float:
        asked = request.timeout_s
        return self._slo_s if asked is None else min(asked, self._slo_s)

    def _deadline(self, request: Request) -> float:
        return request.timings.queued + self._allowed_s(request)

    def _expect(self, request: Request) -> None:
        if request.timeout_s is None:
            self._deadlines.append((self._deadline(request), request))
        else:
            self._expect_early(request)

    def _expect_early(self, request: Request) -> None:
        self._num_added += 1
        entry = (self._deadline(request), self._num_added, request)
        heapq.heappush(self._short_deadlines, entry)

    def _expire_one(self, request: Request, refused: list[Request]) -> None:
        if isinstance(request.ticket.queue, Lane):
            self._lanes.remove(request)
            refused.append(request)

    # Batches.

    def _next_batch(self, now: float) -> list[Request] | None:
        again = self._lanes.take_alone()
        if again is not None:
            self._note_running(now, self._prior.mean_s(self._size(again)))
            self.closed_by = "rerun"
            return [again]
        for lane in self._lanes.in_order():
            pace = self._pace(lane.geometry)
            if self._is_backlogged(lane, pace):
                batch = self._form_from_backlog(lane, pace, now)
            else:
                batch = self._form_from_all(lane, pace, now)
            if batch:
                self._lanes.take(lane, batch)
                size = sum(map(self._size, batch))
                self.closed_by = self._reached(batch, size) or self._lanes.closed_empty()
                self._note_running(now, pace.times.mean_s(size))
                return batch
        return None

    def _reached(self, batch: Sequence[Request], size: int) -> Closed | None:
        """Return why the batch took no more: a hard limit, or what forming it found."""
        if sum(request.num_rows for request in batch) >= self._max_rows:
            return self._full
        return "token budget" if size >= self._max_size else self._limit

    def _is_backlogged(self, lane: Lane, pace: Pace) -> bool:
        """Whether more than a target batch is queued and the backlog will not clear by itself.
        Several executors that are fast enough together serve it without drops, in batches as large
        as the head allows."""
        size, batch_s = self._full_batch(lane, pace)
        if sum(self._sizes(lane)) <= size and sum(lane.rows) <= self._max_rows:
            return False
        load = pace.arrivals_per_s * batch_s / size
        return self.num_executors == 1 or load > self.num_executors

    def _form_from_backlog(self, lane: Lane, pace: Pace, now: float) -> list[Request]:
        """Form a batch of the target size and drop requests that would be late in it."""
        batch: list[Request] = []
        late: list[Request] = []
        num_rows = size = 0
        batch_s = self._full_batch(lane, pace)[1]
        finish = now + batch_s + self._spread_s(batch_s)
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
            if self._deadline(request) < finish:
                late.append(request)
                continue
            batch.append(request)
            num_rows, size = num_rows + request.num_rows, next_size
        self._drop(late)
        return batch

    def _form_from_all(self, lane: Lane, pace: Pace, now: float) -> list[Request]:
        """Take as many requests as can run without making the most urgent one late."""
        batch: list[Request] = []
        late: list[Request] = []
        num_rows, size, deadline = 0, 0, math.inf
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
            finish = now + batch_s + self._spread_s(batch_s)
            its_deadline = self._deadline(request)
            if finish > min(deadline, its_deadline):
                if batch:
                    self._limit = "SLO deadline"
                    break
                if finish - now <= self._allowed_s(request):
                    late.append(request)
                    continue
                # Even an idle model would be late: it was admitted to test that prediction.
            batch.append(request)
            num_rows, size = num_rows + request.num_rows, next_size
            deadline = min(deadline, its_deadline)
        self._drop(late)
        return batch

    def _explored(self, lane: Lane, pace: Pace, now: float) -> int:
        """Return the largest size or, rarely and at low load, one whose time is poorly known."""
        if (self._num_batches + 1) % EXPLORE_EVERY or pace.target_s <= 0:
            return self._max_size
        head = next(lane.walk())
        waiting = sum(self._sizes(lane))
        rung = pace.times.stale_rung(waiting - 1, now, self._size(head))
        capacity = self.num_executors / pace.unit_s
        if rung is None or pace.arrivals_per_s > EXPLORE_BELOW * capacity:
            return self._max_size
        both_s = pace.times.mean_s(rung) + pace.times.mean_s(waiting - rung)
        is_harmless = now + both_s + self._margin_s(both_s) < self._deadline(head)
        return rung if is_harmless else self._max_size

    def _drop(self, late: list[Request]) -> None:
        for request in late:
            self._lanes.remove(request)
        self._dropped += late

    def _note_running(self, now: float, duration_s: float) -> None:
        self._num_batches += 1
        if len(self._running) >= self.num_executors:
            del self._running[0]  # An executor is free, so this batch must have ended.
        insort(self._running, (now + duration_s, now))

    # Target sizes.

    def _pace(self, geometry: object) -> Pace:
        pace = self._paces.get(geometry)
        if pace is None:
            if len(self._paces) >= MAX_PACES:
                del self._paces[next(iter(self._paces))]
            pace = self._paces[geometry] = Pace(self._prior.copy())
            self._aim(pace)
        return pace

    def _refresh(self, now: float) -> None:
        self._refresh_at = now + REFRESH_S
        self._lag_s /= 2
        self._inflation = self._spread.inflation
        for pace in self._paces.values():
            self._aim(pace)

    def _aim(self, pace: Pace) -> None:
        """Fit T(b)(1 + 1/N) and the spread into the SLO: a request waits for the first of N
        executors to be free, then runs, and may be among the slowest."""
        num_batches = 1 + 1 / self.num_executors
        limit_s = self._usable_s
        pace.aim(limit_s / num_batches, self._max_size)
        pace.aim_lower(limit_s / (num_batches + SPREADS * (self._inflation - 1)))
