"""How long batches take, by geometry, and which size of batch fits the SLO. Pure.

Sizes are rows, or tokens if batches have a token budget: T(b) (`batch_times`) is a function of
those, and rows are limited as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.config import BatchPolicy
from penstock.serving.batch_times import BatchTimes, Spread
from penstock.serving.lanes import Lane

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
# What is left of the weight of earlier arrivals each time that the mean of all geometries is read.
FADE = 0.97
MAX_PACES = 512


@dataclass(slots=True, eq=False)
class GeometryPace:
    """Statistics of one geometry: T(b), target size, arrival rate in rows (or tokens)."""

    times: BatchTimes
    target_size: int = 1
    target_s: float = 0.0
    arrivals_per_s: float = 0.0
    _arrived_at: float = -math.inf
    # Of this geometry in the mean of all.
    weight: float = 0.0

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
        self.weight += size

    def arrivals_at(self, now: float) -> float:
        """Return the arrival rate at a time at which nothing arrived."""
        return self.arrivals_per_s * math.exp(min(0.0, self._arrived_at - now) / ARRIVALS_S)


class Paces:
    """The paces of all geometries, aimed so that batches fit the SLO. `num_executors` batches run
    at once; `lag_s` of the SLO are kept free for a busy event loop."""

    def __init__(self, policy: BatchPolicy, num_executors: int) -> None:
        assert policy.slo_latency_s is not None
        self._slo_s = policy.slo_latency_s
        self._max_rows = policy.max_batch_size if policy.is_dynamic else 1
        self._has_budget = policy.max_tokens is not None
        self._max_size = policy.max_tokens or self._max_rows
        self._prior = BatchTimes(policy.max_tokens or policy.max_batch_size)
        self.by_geometry: dict[object, GeometryPace] = {}
        self._spread = Spread()
        # The slowest 1 % of batches take at least this many times the mean.
        self.inflation = 1.0
        self.lag_s = 0.0
        self.refresh_at = -math.inf
        self.num_executors = num_executors

    def get(self, geometry: object) -> GeometryPace:
        pace = self.by_geometry.get(geometry)
        if pace is None:
            if len(self.by_geometry) >= MAX_PACES:
                del self.by_geometry[next(iter(self.by_geometry))]
            pace = self.by_geometry[geometry] = GeometryPace(self._prior.copy())
            self._aim(pace)
        return pace

    def refresh(self, now: float) -> None:
        """Aim anew; call it from `refresh_at` on."""
        self.refresh_at = now + REFRESH_S
        self.lag_s /= 2
        self.inflation = self._spread.inflation
        for pace in self.by_geometry.values():
            self._aim(pace)

    def _aim(self, pace: GeometryPace) -> None:
        """Fit T(b)(1 + 1/N) and the spread into the SLO: a request waits for the first of N
        executors to be free, then runs, and may be among the slowest."""
        num_batches = 1 + 1 / self.num_executors
        limit_s = self.usable_s
        pace.aim(limit_s / num_batches, self._max_size)
        pace.aim_lower(limit_s / (num_batches + SPREADS * (self.inflation - 1)))

    def seed(self, timings: Mapping[int, float], geometry: object = None) -> None:
        """Seed batch times from warm-up, in seconds by size; for one geometry, or for all. Rows are
        those of the batch ladder, tokens are arbitrary."""
        pace = self.get(geometry) if geometry is not None else None
        times = self._prior if pace is None else pace.times
        if self._has_budget:
            times.seed_between(timings)
        else:
            for num_rows, duration_s in timings.items():
                times.seed(num_rows, duration_s)
        if pace is not None:
            self._aim(pace)

    def observe(self, geometry: object, size: int, started: float, now: float) -> None:
        """Learn from a batch of this geometry that is done."""
        if self._has_budget and size > self._max_size:
            return  # A single request beyond the token budget: not a size of T(b).
        self._prior.observe(size, now - started, now)
        pace = self.get(geometry)
        was_known = pace.times.is_known
        if was_known:
            self._spread.note(now - started, pace.times.mean_s(size))
        has_drifted = pace.times.observe(size, now - started, now)
        if has_drifted:
            self._spread.forget()
        if has_drifted or not was_known:
            self._aim(pace)

    def mean_times(self) -> dict[int, float]:
        """Return T(b) over all geometries, weighted by what arrived of each lately; empty if it is
        unknown. Reading it fades earlier arrivals."""
        known = [pace for pace in self.by_geometry.values() if pace.times.is_known]
        total = sum(pace.weight for pace in known)
        if total <= 0:
            return self._prior.means_s if self._prior.is_known else {}
        mean = dict.fromkeys(self._prior.means_s, 0.0)
        for pace in known:
            for size, each_s in pace.times.means_s.items():
                mean[size] += each_s * pace.weight / total
            pace.weight *= FADE
        return mean

    def note_wait(self, waited_s: float) -> None:
        self.lag_s = max(self.lag_s, min(waited_s, MAX_LAG * self._slo_s))

    def mean_s(self, size: int) -> float:
        """Return the time of a batch of any geometry."""
        return self._prior.mean_s(size)

    @property
    def usable_s(self) -> float:
        """The part of the SLO that is left for queueing and computing."""
        return (1 - AIM_MARGIN) * self._slo_s - self.lag_s

    def margin_s(self, batch_s: float) -> float:
        """Return the part of the SLO kept free for a batch that takes this long on average."""
        return max(MIN_MARGIN * self._slo_s, self.spread_s(batch_s, SPREADS))

    def spread_s(self, batch_s: float, times: float = 1.0) -> float:
        """Return how much longer it may take, within the SLO: more would refuse everything."""
        room_s = self.usable_s - batch_s * (1 + 1 / self.num_executors)
        return max(0.0, min(times * (self.inflation - 1) * batch_s, room_s))

    def largest_by(self, pace: GeometryPace, limit_s: float, max_size: int) -> int:
        """Return the largest batch that takes no longer than this, even if it is slow; at least
        1."""
        times = pace.times
        size = min(max_size, times.largest_within(limit_s / self.inflation))
        # The spread is limited, so more may fit.
        while size < max_size:
            larger = min(max_size, size + max(1, size // 8))
            batch_s = times.mean_s(larger)
            if batch_s + self.spread_s(batch_s) > limit_s:
                break
            size = larger
        return size

    def is_too_slow_for(self, arrivals_per_s: float, pace: GeometryPace) -> bool:
        """Whether what is queued beyond a target batch will not clear by itself, because more
        arrives than all executors run. A single one never is fast enough."""
        load = arrivals_per_s * pace.unit_s
        return self.num_executors == 1 or load > self.num_executors

    def sizes(self, lane: Lane) -> Sequence[int]:
        """Return the queued sizes by level."""
        return lane.tokens if self._has_budget else lane.rows

    def full_batch(self, lane: Lane | None, pace: GeometryPace) -> tuple[int, float]:
        """Return size and time of the batches that the lane forms: the target size, or less if the
        row limit is reached first, but never less than a request."""
        if lane is None:
            return pace.target_size, pace.target_s
        size, waiting = pace.target_size, sum(self.sizes(lane))
        num_rows = sum(lane.rows) if self._has_budget else 0
        if num_rows >= self._max_rows:
            size = min(size, max(1, self._max_rows * waiting // num_rows))
        size = max(size, -(-waiting // lane.num_live))
        if size == pace.target_size:
            return size, pace.target_s
        return size, pace.times.mean_s(size)

    def waiting_s(self, lane: Lane) -> float:
        size, batch_s = self.full_batch(lane, self.get(lane.geometry))
        return sum(self.sizes(lane)) * batch_s / size
