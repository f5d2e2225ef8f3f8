"""What the numbers say, and how sure that is. Pure: values in, values out.

A `Histogram` has buckets of a constant relative width; a `Window` holds what happened to the
requests that were due in one span of time. Everything reported is folded from windows.
"""

from __future__ import annotations

import msgspec

from penstock.types import Array


class Histogram(msgspec.Struct):
    """Durations in buckets whose middles are at most 0.4 % off. Sparse: bucket to count."""

    counts: dict[int, int] = {}

    def add(self, seconds: Array) -> None:
        raise NotImplementedError

    def merge(self, other: Histogram) -> None:
        raise NotImplementedError

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def percentile(self, percent: float) -> float:
        """Seconds; NaN when empty."""
        raise NotImplementedError

    def mean(self) -> float:
        raise NotImplementedError


class Window(msgspec.Struct):
    """Requests due in `[start_s, start_s + length_s)`, seconds since measuring began."""

    start_s: float
    length_s: float
    num_due: int = 0
    num_good: int = 0
    # Good answers that arrived in this span, whenever they were due: what throughput counts.
    num_arrived: int = 0
    failures: dict[str, int] = {}
    # By metric: latency of good answers; ttft, tpot and itl of streams. From the due time.
    metrics: dict[str, Histogram] = {}
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    # Good answers that kept every latency term of the SLO: each of its limits, by request.
    num_in_slo: int | None = None


class Interval(msgspec.Struct, frozen=True):
    """An estimate and the range that holds the truth 19 times of 20; NaN: cannot be said."""

    value: float
    low: float
    high: float
