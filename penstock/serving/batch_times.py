"""T(b): the time of a batch of b rows (or b tokens, with a token budget), learned while serving.
Pure: time is an argument.

A mean for each rung (size) of the batch ladder, with linear interpolation between them. Estimates
for rungs that never ran are on the slow side. Detects when the whole table has drifted. `Spread`
says how much longer than predicted the slowest batches take, `WaitLimit` how long requests may
queue.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.config import BatchPolicy, QueuePolicy, ladder

# Weight of a new observation; the first few weigh more.
SMOOTHING = 0.1
# Clip outliers (a stall, a page fault): an observation counts as at most this factor off.
MAX_SURPRISE = 2.0
NUM_TRUSTED = 3
# The share of batches that should take at most `inflation` times the mean, and the number of recent
# batches that this is taken from: seconds of load, so that it adapts to noisy neighbours.
QUANTILE = 0.99
SPREAD_WINDOW = 256
MAX_INFLATION = 2.5
# If the median of this many batches is off by more than DRIFT, the table is scaled and relearned.
DRIFT_WINDOW = 20
DRIFT = 0.10
STALE_AFTER_S = 30.0
# The default limit: the larger of this time and this number of the largest batches.
MIN_WAIT_S = 1.0
MAX_BATCHES = 10
# A request is admitted if the predicted wait is at most this share of the time allowed. The rest
# covers the running batch and batches that take longer than usual: a request that is refused after
# queueing has cost its client the whole time.
ADMITTED = 0.9
ROUNDING = 1e-9
# Batches are timed at most this often: in fixed mode nothing else needs T(b).
LEARN_EVERY_S = 0.001
# Time without an instance is added to the limit and taken back at this rate afterwards: at up to
# 80 % load the backlog of a restart is worked off in time, and no request of it is refused.
RECOVERY = 0.25


class BatchTimes:
    """T(b) of one geometry. Before the first observation, predictions are 0."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._sizes = ladder(max_size)
        self._means = [0.0] * len(self._sizes)
        self._num_seen = [0] * len(self._sizes)
        self._seen_at = [-math.inf] * len(self._sizes)
        # Ratios of the last batches to the table as it was before them.
        self._ratios: list[float] = []
        self._before: list[float] = []
        self._window_began = -math.inf

    @property
    def is_known(self) -> bool:
        return any(self._num_seen)

    @property
    def means_s(self) -> dict[int, float]:
        """The table: mean time by rung."""
        return dict(zip(self._sizes, self._means, strict=True))

    def copy(self) -> BatchTimes:
        twin = BatchTimes(self._max_size)
        twin._means = list(self._means)
        twin._num_seen = [min(1, count) for count in self._num_seen]
        return twin

    def mean_s(self, size: float) -> float:
        """Return the predicted time of a batch; linear extrapolation above the largest rung."""
        return _on_lines(self._sizes, self._means, size)

    def largest_within(self, limit_s: float) -> int:
        """Return the largest batch predicted to take at most `limit_s`; at least 1."""
        sizes, means = self._sizes, self._means
        if means[-1] <= limit_s:
            return sizes[-1]
        for low in range(len(sizes) - 2, -1, -1):
            if means[low] <= limit_s:
                per_unit = (means[low + 1] - means[low]) / (sizes[low + 1] - sizes[low])
                return sizes[low] + int((limit_s - means[low]) / per_unit)
        return 1

    def stale_rung(self, max_size: int, now: float, min_size: int = 1) -> int | None:
        """Return the least recent rung of these sizes; None if it ran within STALE_AFTER_S."""
        rungs = [i for i, size in enumerate(self._sizes) if min_size <= size <= max_size]
        if not rungs:
            return None
        oldest = min(rungs, key=self._seen_at.__getitem__)
        return self._sizes[oldest] if now - self._seen_at[oldest] > STALE_AFTER_S else None

    def seed(self, size: int, duration_s: float) -> None:
        """Set a rung's time from warm-up, which later observations refine."""
        if size in self._sizes:
            index = self._sizes.index(size)
            is_new = self._num_seen[index] == 0
            mean = self._means[index]
            self._means[index] = duration_s if is_new else (mean + duration_s) / 2
            self._num_seen[index] = max(1, self._num_seen[index])
            self._guess()

    def seed_between(self, points: Mapping[int, float]) -> None:
        """Like `seed`, from times of any sizes: rungs between them are interpolated. If no rung is,
        the next larger rung gets the time of the largest size, in proportion."""
        sizes = sorted(points)
        means = [points[size] for size in sizes]
        within = [rung for rung in self._sizes if sizes and sizes[0] <= rung <= sizes[-1]]
        for rung in within:
            self.seed(rung, means[0] if len(sizes) == 1 else _on_lines(sizes, means, rung))
        larger = [rung for rung in self._sizes if sizes and rung > sizes[-1]]
        if larger and not within:
            self.seed(larger[0], means[-1] * larger[0] / sizes[-1])

    def observe(self, size: int, duration_s: float, now: float) -> bool:
        """Learn from a batch. True if the table had drifted and was scaled."""
        size = min(size, self._max_size)
        if self.is_known:
            self._note_ratio(size, duration_s, now)
        high = bisect_left(self._sizes, size)
        if self._sizes[high] == size:
            self._learn_rung(high, duration_s, now)
        else:
            self._learn_between(high, size, duration_s, now)
        return self._has_drifted()

    def _learn_rung(self, index: int, duration_s: float, now: float) -> None:
        count = self._num_seen[index]
        self._num_seen[index] = count + 1
        self._seen_at[index] = now
        if count == 0:
            self._means[index] = duration_s
            self._guess()
            return
        mean = self._means[index]
        believed_s = _believed(duration_s, mean, count)
        self._means[index] += max(SMOOTHING, 1 / (count + 1)) * (believed_s - mean)

    def _learn_between(self, high: int, size: int, duration_s: float, now: float) -> None:
        """Move both neighbouring rungs by their share; the nearer one, if new, all the way."""
        low = high - 1
        sizes, means = self._sizes, self._means
        share = (size - sizes[low]) / (sizes[high] - sizes[low])
        nearest = high if share >= 0.5 else low
        is_low_known, is_high_known = self._num_seen[low] > 0, self._num_seen[high] > 0
        count = self._num_seen[nearest]
        self._num_seen[nearest] = count + 1
        self._seen_at[nearest] = now
        if nearest == high and not is_high_known:
            rise_s = (duration_s - means[low]) / share
            means[high] = (
                max(duration_s, means[low] + rise_s)
                if is_low_known
                else duration_s * sizes[high] / size
            )
            self._guess()
            return
        if nearest == low and not is_low_known:
            means[low] = duration_s
            self._guess()
            return
        predicted_s = means[low] + share * (means[high] - means[low])
        if predicted_s <= 0:
            means[low] = means[high] = duration_s
            return
        # Multiplicative: an additive correction could push the other neighbour below zero.
        weight = max(SMOOTHING, 1 / (count + 1))
        off = weight * (_believed(duration_s, predicted_s, count) / predicted_s - 1)
        means[high] *= 1 + share * off
        means[low] *= 1 + (1 - share) * off

    def _guess(self) -> None:
        """Estimate rungs that never ran: as slow as the next larger known one; above the largest
        known one, extrapolate linearly."""
        seen = [index for index, count in enumerate(self._num_seen) if count]
        first, last = seen[0], seen[-1]
        sizes, means = self._sizes, self._means
        for index in range(len(sizes)):
            if self._num_seen[index]:
                continue
            if index < last:
                means[index] = means[next(known for known in seen if known > index)]
            elif first == last:
                means[index] = means[last] * sizes[index] / sizes[last]
            else:
                per_unit = max(0.0, (means[last] - means[first]) / (sizes[last] - sizes[first]))
                means[index] = means[last] + per_unit * (sizes[index] - sizes[last])

    def _note_ratio(self, size: int, duration_s: float, now: float) -> None:
        if not self._ratios:
            self._before = list(self._means)
            self._window_began = now
        expected_s = _on_lines(self._sizes, self._before, size)
        self._ratios.append(duration_s / expected_s if expected_s > 0 else 1.0)

    def _has_drifted(self) -> bool:
        """Check for drift, and then scale the rungs that did not run in the window."""
        if len(self._ratios) < DRIFT_WINDOW:
            return False
        factor = median(self._ratios)
        self._ratios.clear()
        if abs(factor - 1) <= DRIFT:
            return False
        for index, seen_at in enumerate(self._seen_at):
            if seen_at < self._window_began:
                self._means[index] *= factor
        self._num_seen = [min(1, count) for count in self._num_seen]
        return True


class Spread:
    """How much longer than predicted the slowest 1 % of the last batches took, over all geometries;
    with few batches, the slowest one."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=SPREAD_WINDOW)

    def note(self, duration_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._ratios.append(duration_s / predicted_s)

    def forget(self) -> None:
        """Drop all ratios: the predictions they compare with were wrong."""
        self._ratios.clear()

    @property
    def inflation(self) -> float:
        """From 1 to MAX_INFLATION; 1 without a batch."""
        if not self._ratios:
            return 1.0
        ordered = sorted(self._ratios)
        slow = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
        return min(MAX_INFLATION, max(1.0, slow))


class WaitLimit:
    """How long requests may wait for an instance (`penstock.max_wait_ms`), for all queues of a
    model: the limit, the predicted length of the queue in seconds, and the extra time that requests
    get because no instance was running."""

    def __init__(self, policy: BatchPolicy, batch_size: int) -> None:
        """`batch_size` is the size of a batch when many requests wait, in rows or tokens."""
        self._max_wait_s = policy.max_wait_s
        # The configured batching delay does not count as overload.
        self._delay_s = policy.max_queue_delay_s if policy.is_dynamic else 0.0
        self._batch_size = batch_size
        self._largest = policy.max_tokens or policy.max_batch_size
        self._times = BatchTimes(self._largest)
        self._num_executors = 1
        self._learn_at = -math.inf
        # The extra time when the number of executors last became zero or more than zero.
        self._extra_s = 0.0
        self._since = 0.0
        self._is_available = True
        # Rows or tokens that may be ahead of a request; None: to be computed again.
        self._room: float | None = None
        # When a batch last ended.
        self.ended_at = -math.inf

    def applies(self, queue: QueuePolicy) -> bool:
        """Whether requests of this queue have a limit. The default does not apply to queues with
        their own time-out or size limit."""
        if self._max_wait_s is not None:
            return self._max_wait_s > 0
        return queue.default_timeout_s == 0 and queue.max_queue_size == 0

    def mean_times(self) -> dict[int, float]:
        """Return T(b); empty if it is unknown."""
        return self._times.means_s if self._times.is_known else {}

    def seed(self, timings: Mapping[int, float]) -> None:
        """Seed T(b) with times from warm-up, in seconds by size."""
        self._times.seed_between(timings)
        self._room = None

    def observe(self, size: int, started: float, now: float) -> None:
        """Note that a batch of this size was answered."""
        self.ended_at = now
        if now >= self._learn_at:
            self._learn_at = now + LEARN_EVERY_S
            self._times.observe(size, now - started, now)
            self._room = None

    def count_executors(self, num_ready: int, now: float) -> None:
        """Set how many batches can run at once from now on."""
        is_available = num_ready > 0
        if is_available is not self._is_available:
            self._extra_s, self._since = self.extra_s(now), now
            self._is_available = is_available
        self._num_executors = max(1, num_ready)
        self._room = None

    def has_room(self, size_ahead: int, num_ahead: int) -> bool:
        """Return whether a new request surely waits no longer than it may, behind those ahead: as
        long as T(b) stays the same, a comparison says so. Otherwise `predicted_s` decides."""
        if self._room is None:
            self._room = self._count_room()
        return size_ahead <= self._room and size_ahead <= self._batch_size * num_ahead

    def _count_room(self) -> float:
        """Return how much may be ahead in batches of the usual size, without any extra time."""
        limit_s = self._limit_s
        each_s = self._times.mean_s(self._batch_size) / self._batch_size / self._num_executors
        if limit_s == math.inf or each_s <= 0:
            return math.inf
        # A little less, because the prediction rounds otherwise.
        return (1 - ROUNDING) * ADMITTED * (limit_s + self._delay_s) / each_s

    @property
    def _limit_s(self) -> float:
        """The limit by itself; infinite as for `allowed_s`."""
        if not self._is_available:
            return math.inf
        if self._max_wait_s is not None:
            return self._max_wait_s
        if not self._times.is_known:
            return math.inf
        return max(MIN_WAIT_S, MAX_BATCHES * self._times.mean_s(self._largest))

    def extra_s(self, now: float) -> float:
        """Return the extra time that requests get because no instance was running."""
        elapsed_s = now - self._since
        if not self._is_available:
            return self._extra_s + elapsed_s
        return max(0.0, self._extra_s - RECOVERY * elapsed_s)

    def allowed_s(self, now: float) -> float:
        """Return how long requests may wait. Infinite without an instance, and with the default
        limit before the first batch was timed."""
        return self._limit_s + self._delay_s + self.extra_s(now)

    def predicted_s(self, size_ahead: int, num_ahead: int) -> float:
        """Return how long a new request waits for those ahead, of `size_ahead` together."""
        if not num_ahead:
            return 0.0
        size = max(self._batch_size, size_ahead / num_ahead)
        return size_ahead / size * self._times.mean_s(size) / self._num_executors


def _on_lines(sizes: list[int], means: list[float], size: float) -> float:
    if size <= sizes[0]:
        return means[0]
    if len(sizes) == 1:
        return means[0] * size
    high = min(bisect_left(sizes, size), len(sizes) - 1)
    low = high - 1
    share = (size - sizes[low]) / (sizes[high] - sizes[low])
    return means[low] + share * (means[high] - means[low])


def _believed(duration_s: float, predicted_s: float, num_seen: int) -> float:
    if num_seen < NUM_TRUSTED or predicted_s <= 0:
        return duration_s
    return min(max(duration_s, predicted_s / MAX_SURPRISE), predicted_s * MAX_SURPRISE)
