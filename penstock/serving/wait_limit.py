"""How long requests may wait for an instance in *fixed* mode (`penstock.max_wait_ms`).

Owns the limit, the predicted length of the queue in seconds, and the extra time that requests get
because no instance was running. Does not hold requests: `batcher` asks. Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.config import BatchPolicy, QueuePolicy
from penstock.serving.batch_times import BatchTimes

# The default limit: the larger of this time and this number of the largest batches.
MIN_WAIT_S = 1.0
MAX_BATCHES = 10
# Batches are timed at most this often: in fixed mode nothing else needs T(b).
LEARN_EVERY_S = 0.001
# Time without an instance is added to the limit and taken back at this rate afterwards: at up to
# 80 % load the backlog of a restart is worked off in time, and no request of it is refused.
RECOVERY = 0.25


class WaitLimit:
    """One for all queues of a model. Owned by the core's event loop."""

    def __init__(self, policy: BatchPolicy, batch_size: int) -> None:
        """`batch_size` is the size of a batch when many requests wait, in rows or tokens."""
        self._max_wait_s = policy.max_wait_s
        # The configured batching delay does not count as overload.
        self._delay_s = policy.max_queue_delay_s if policy.is_dynamic else 0.0
        self._batch_size = batch_size
        self._times = BatchTimes(policy.max_tokens or policy.max_batch_size)
        self._largest = policy.max_tokens or policy.max_batch_size
        self._num_executors = 1
        self._learn_at = -math.inf
        # The extra time when the number of executors last became zero or more than zero.
        self._extra_s = 0.0
        self._since = 0.0
        self._is_available = True
        # When a batch last ended.
        self.ended_at = -math.inf

    def applies(self, queue: QueuePolicy) -> bool:
        """Whether requests of this queue have a limit. The default does not apply to queues with
        their own time-out or size limit."""
        if self._max_wait_s is not None:
            return self._max_wait_s > 0
        return queue.default_timeout_s == 0 and queue.max_queue_size == 0

    def seed(self, timings: Mapping[int, float]) -> None:
        """Seed T(b) with times from warm-up, in seconds by size."""
        self._times.seed_between(timings)

    def observe(self, size: int, started: float, now: float) -> None:
        """Note that a batch of this size was answered."""
        self.ended_at = now
        if now >= self._learn_at:
            self._learn_at = now + LEARN_EVERY_S
            self._times.observe(size, now - started, now)

    def count_executors(self, num_ready: int, now: float) -> None:
        is_available = num_ready > 0
        if is_available is not self._is_available:
            self._extra_s, self._since = self.extra_s(now), now
            self._is_available = is_available
        self._num_executors = max(1, num_ready)

    def extra_s(self, now: float) -> float:
        """Return the extra time that requests get because no instance was running."""
        elapsed_s = now - self._since
        if not self._is_available:
            return self._extra_s + elapsed_s
        return max(0.0, self._extra_s - RECOVERY * elapsed_s)

    def allowed_s(self, now: float) -> float:
        """Return how long requests may wait. Infinite without an instance, and with the default
        limit before the first batch was timed."""
        if not self._is_available:
            return math.inf
        limit_s = self._max_wait_s
        if limit_s is None:
            if not self._times.is_known:
                return math.inf
            limit_s = max(MIN_WAIT_S, MAX_BATCHES * self._times.mean_s(self._largest))
        return limit_s + self._delay_s + self.extra_s(now)

    def predicted_s(self, size_ahead: int, num_ahead: int) -> float:
        """Return how long a new request waits for `num_ahead` requests of `size_ahead` rows or
        tokens."""
        if not num_ahead:
            return 0.0
        size = max(self._batch_size, size_ahead / num_ahead)
        return size_ahead / size * self._times.mean_s(size) / self._num_executors
