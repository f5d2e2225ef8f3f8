"""A histogram of a scrape: counts per bucket, and the same as a plain value. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """`bounds` are given where they differ by model."""

    counts: list[int]
    total: float
    bounds: tuple[float, ...] = ()

    def plus(self, other: HistogramRecord) -> HistogramRecord:
        """Return the sum of two histograms with the same bounds."""
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return HistogramRecord(counts, self.total + other.total, self.bounds)


class Histogram:
    """Counts per bucket, and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def record(self) -> HistogramRecord:
        return HistogramRecord(list(self.counts), self.total, tuple(self.bounds))

    @property
    def count(self) -> int:
        return sum(self.counts)
