"""Which request rate a number of executors sustains within a latency limit, from T(b). Pure.

Batches of b rows on N executors run N b / T(b) rows per second, and take T(b) (1 + 1/N) of the
limit: a request waits for the first executor to be free, then runs (`paces`). The rest of the limit
is time in which a burst can be worked off: the probability that a request waits longer falls
exponentially with it (Kingman's bound; the probability of waiting at all is Sakasegawa's). Sizes
are rows, or tokens with a token budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import BatchPolicy
from penstock.serving.batch_times import MAX_BATCHES, MIN_WAIT_S
from penstock.serving.paces import AIM_MARGIN, MIN_MARGIN

# Share of the requests that may be late.
LATE = 0.01
PRECISION = 0.01


@dataclass(frozen=True, slots=True)
class ExecutorModel:
    """T(b) in seconds by size, and the time that a request may take. `dispersion` is the variance
    of the arrivals in short intervals, divided by their mean: 1 for Poisson arrivals of size 1. The
    slowest batches take `inflation` times as long as T(b)."""

    times_s: Mapping[int, float]
    limit_s: float
    dispersion: float = 1.0
    inflation: float = 1.0

    @classmethod
    def of(
        cls,
        policy: BatchPolicy,
        times_s: Mapping[int, float],
        dispersion: float = 1.0,
        inflation: float = 1.0,
    ) -> ExecutorModel:
        """Use the batch sizes and the limit of a policy: its SLO, or else how long requests may
        queue (`batch_times.WaitLimit`)."""
        most = policy.max_tokens or (policy.max_batch_size if policy.is_dynamic else 1)
        usable = {size: each for size, each in times_s.items() if size <= most and each > 0}
        limit_s = policy.slo_latency_s or policy.max_wait_s
        if not limit_s:
            limit_s = max(MIN_WAIT_S, MAX_BATCHES * max(usable.values(), default=0.0))
        return cls(usable, limit_s, dispersion, inflation)

    def sustains(self, rate: float, num_executors: int) -> bool:
        """Whether at most LATE of the requests would be late at this rate."""
        return any(
            self._late(rate, num_executors, size, batch_s) <= LATE
            for size, batch_s in self.times_s.items()
        )

    def max_rate(self, num_executors: int) -> float:
        """Return the highest rate that so many executors sustain; 0 if there is none."""
        if num_executors < 1:
            return 0.0
        low, high = 0.0, self.capacity(num_executors)
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.sustains(middle, num_executors) else (low, middle)
        return low

    def capacity(self, num_executors: int) -> float:
        """Return the rate of executors that are never idle, in batches that fit the limit."""
        rates = [
            num_executors * size / batch_s
            for size, batch_s in self.times_s.items()
            if self._slack_s(num_executors, batch_s) > 0
        ]
        return max(rates, default=0.0)

    def num_needed(self, rate: float, most: int) -> int:
        """Return how many executors sustain the rate; `most` if not even those do."""
        if rate <= 0:
            return 0
        return next((n for n in range(1, most) if self.sustains(rate, n)), most)

    def _slack_s(self, num_executors: int, batch_s: float) -> float:
        """Return what is left of the limit, after the margin that the batcher keeps free."""
        taken_s = batch_s * (1 + 1 / num_executors)
        room_s = (1 - AIM_MARGIN) * self.limit_s - taken_s
        spread_s = min((self.inflation - 1) * batch_s, room_s)
        return self.limit_s - max(MIN_MARGIN * self.limit_s, spread_s) - taken_s

    def _late(self, rate: float, num_executors: int, size: int, batch_s: float) -> float:
        """Return the share of requests that wait longer than the slack, in batches of this size."""
        capacity = num_executors * size / batch_s
        slack_s = self._slack_s(num_executors, batch_s)
        if slack_s <= 0 or rate >= capacity:
            return 1.0
        if rate <= 0:
            return 0.0
        load = rate / capacity
        waits = math.pow(load, math.sqrt(2 * (num_executors + 1)) - 1)
        return waits * math.exp(-2 * (capacity - rate) * slack_s / (load * self.dispersion))
