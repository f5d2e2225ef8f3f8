"""Quantiles of latencies over a sliding window, as a Prometheus summary shows them. Pure.

Values are counted in logarithmic buckets, so a quantile is exact to 1 % of its value whatever the
values are, and the counts of several shards can be added. Knows no metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# As in Triton: a summary forgets values after a minute, in five steps.
WINDOW_S, NUM_STEPS = 60.0, 5
STEP_S = WINDOW_S / NUM_STEPS
# The upper edge of a bucket is this much above its lower edge.
GROWTH = 1.02
_SCALE = 1 / math.log(GROWTH)
# Smaller values count as this one.
SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class SummaryRecord:
    """A summary at one moment: values of the window by bucket; number and sum of all values."""

    buckets: dict[int, int] = field(default_factory=dict)
    count: int = 0
    total: float = 0.0

    def quantile(self, share: float) -> float:
        """Return the value that `share` of the window's values do not exceed; NaN without any."""
        rank = max(1, math.ceil(share * sum(self.buckets.values())))
        for index in sorted(self.buckets):
            rank -= self.buckets[index]
            if rank <= 0:
                # The middle of the bucket, in proportion.
                return math.exp((index - 0.5) / _SCALE)
        return math.nan

    def plus(self, other: SummaryRecord) -> SummaryRecord:
        buckets = Counter(self.buckets) + Counter(other.buckets)
        return SummaryRecord(dict(buckets), self.count + other.count, self.total + other.total)


class LatencySummary:
    """Counts values, in seconds, by the step of time in which they came."""

    __slots__ = ("_count", "_steps", "_total")

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        # Buckets by the number of the step.
        self._steps: dict[int, Counter[int]] = {}

    def add(self, value: float, now: float, count: int = 1) -> None:
        step = int(now / STEP_S)
        buckets = self._steps.get(step)
        if buckets is None:
            self._forget(now)
            buckets = self._steps[step] = Counter()
        buckets[math.ceil(math.log(max(value, SMALLEST)) * _SCALE)] += count
        self._count += count
        self._total += value * count

    def record(self, now: float) -> SummaryRecord:
        self._forget(now)
        return SummaryRecord(dict(_sum(self._steps)), self._count, self._total)

    def _forget(self, now: float) -> None:
        oldest = int(now / STEP_S) - NUM_STEPS
        for step in [step for step in self._steps if step <= oldest]:
            del self._steps[step]


def _sum(steps: Mapping[int, Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for buckets in steps.values():
        total.update(buckets)
    return total
