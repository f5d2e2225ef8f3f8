"""How many rows (or tokens) of a model arrive per second, over a short and a long window. Pure.

Fed with totals, at intervals of any length: a shard that starts again counts from 0. Time is an
argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

# The short window shows bursts, the long one is the present rate without noise. Fluctuations are
# measured over the last.
SHORT_S = 3.0
LONG_S = 30.0
KEPT_S = 120.0
# The variance of fewer intervals says little.
MIN_INTERVALS = 16
MAX_DISPERSION = 20.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Rates per second; `dispersion` is variance / mean of the arrivals in the intervals between
    looks, at least 1. Nothing has arrived for `idle_s`."""

    short: float = 0.0
    long: float = 0.0
    dispersion: float = 1.0
    idle_s: float = 0.0

    @property
    def has_burst(self) -> bool:
        """Whether the short window has more than fluctuations of the long one explain: three
        standard deviations."""
        expected = max(self.long, 1 / LONG_S)
        return self.short > expected + 3 * math.sqrt(self.dispersion * expected / SHORT_S)


class Increments:
    """Differences of totals that several sources count; a source that starts again counts from
    0."""

    def __init__(self) -> None:
        self._totals: dict[Hashable, float] = {}

    def count(self, source: Hashable, total: float) -> float:
        """Return what a source has counted since it last said so."""
        before = self._totals.get(source, 0.0)
        self._totals[source] = total
        return total - before if total >= before else total

    def forget(self, source: Hashable) -> None:
        """Drop a source that has ended."""
        self._totals.pop(source, None)


class ArrivalRates:
    def __init__(self, now: float) -> None:
        # When the last arrivals were counted.
        self._looked_at = self.arrived_at = now
        self._totals = Increments()
        self.forget = self._totals.forget
        self._new = 0.0
        # Ends of intervals, their lengths, and what arrived in them.
        self._intervals: deque[tuple[float, float, float]] = deque()

    def count(self, source: Hashable, total: float, now: float) -> None:
        """Note how much has arrived at a source so far."""
        new = self._totals.count(source, total)
        if new > 0:
            self._new += new
            self.arrived_at = now

    def touch(self, now: float) -> None:
        """Count the time without arrivals from now on."""
        self.arrived_at = now

    def look(self, now: float) -> Arrivals:
        """End an interval, and return the rates now."""
        took_s = now - self._looked_at
        if took_s > 0:
            self._intervals.append((now, took_s, self._new))
            self._looked_at, self._new = now, 0.0
        while self._intervals and self._intervals[0][0] <= now - KEPT_S:
            self._intervals.popleft()
        idle_s = now - self.arrived_at
        return Arrivals(self._rate(SHORT_S, now), self._rate(LONG_S, now), self._spread(), idle_s)

    def _rate(self, window_s: float, now: float) -> float:
        inside = [each for each in self._intervals if each[0] > now - window_s]
        seconds = sum(took_s for _, took_s, _ in inside)
        # The first seconds say little of what follows.
        seconds = max(seconds, min(window_s, SHORT_S))
        return sum(arrived for _, _, arrived in inside) / seconds

    def _spread(self) -> float:
        """Return the dispersion, for intervals of any length."""
        seconds = sum(took_s for _, took_s, _ in self._intervals)
        total = sum(arrived for _, _, arrived in self._intervals)
        if len(self._intervals) < MIN_INTERVALS or total <= 0:
            return 1.0
        rate = total / seconds
        # Each interval's squared deviation is expected to be dispersion x its mean.
        ratios = [(n - rate * s) ** 2 / (rate * s) for _, s, n in self._intervals]
        return min(MAX_DISPERSION, max(1.0, sum(ratios) / (len(ratios) - 1)))
