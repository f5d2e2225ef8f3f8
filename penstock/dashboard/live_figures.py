"""Figures of a version between two readings of its counters: rates, percentiles, batches.

Counters that are lower than before belong to a version that was loaded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from penstock.serving.histogram import Histogram
from penstock.serving.metrics import BUCKETS, ModelMetrics


@dataclass(frozen=True, slots=True)
class VersionCounters:
    """Counters of a version at one time."""

    at: float
    num_answered: int
    num_failed: int
    refused: Mapping[str, int]
    latencies: Sequence[int]
    queue_s: float
    batches: Mapping[int, int]

    @classmethod
    def read(cls, metrics: ModelMetrics, now: float) -> VersionCounters:
        """Requests that were refused, or whose client disconnected, do not count as failed."""
        num_others = sum(metrics.num_refused.values()) + metrics.num_failures["CANCELED"]
        return cls(
            at=now,
            num_answered=metrics.num_success,
            num_failed=sum(metrics.num_failures.values()) - num_others,
            refused=dict(metrics.num_refused),
            latencies=tuple(metrics.phases["request"].counts),
            queue_s=metrics.phases["queue"].total,
            batches=metrics.batch_sizes,
        )

    @classmethod
    def nothing(cls, at: float) -> VersionCounters:
        """Return the counters of a version that has just been loaded."""
        return cls.read(ModelMetrics("", ""), at)

    def has_restarted(self, before: VersionCounters) -> bool:
        return self.num_answered < before.num_answered or self.num_failed < before.num_failed


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What happened between two readings. Unknown values are None."""

    span_s: float
    answered: float
    failed: float
    # Requests by reason.
    refused: Mapping[str, int]
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    queue_s: float | None
    batch_rows: float | None
    batch_sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())

    @classmethod
    def between(cls, before: VersionCounters, now: VersionCounters) -> LiveFigures:
        span_s = max(now.at - before.at, 1e-9)
        num_answered = now.num_answered - before.num_answered
        latencies = subtract(now.latencies, before.latencies)
        batches = {
            size: count - before.batches.get(size, 0)
            for size, count in sorted(now.batches.items())
            if count > before.batches.get(size, 0)
        }
        num_batches = sum(batches.values())
        return cls(
            span_s=span_s,
            answered=num_answered / span_s,
            failed=(now.num_failed - before.num_failed) / span_s,
            refused={
                reason: count - before.refused.get(reason, 0)
                for reason, count in now.refused.items()
                if count > before.refused.get(reason, 0)
            },
            p50_s=quantile(BUCKETS, latencies, 0.5),
            p95_s=quantile(BUCKETS, latencies, 0.95),
            p99_s=quantile(BUCKETS, latencies, 0.99),
            queue_s=(now.queue_s - before.queue_s) / num_answered if num_answered else None,
            batch_rows=sum(size * n for size, n in batches.items()) / num_batches
            if num_batches
            else None,
            batch_sizes=batches,
        )


def subtract(counts: Sequence[int], before: Sequence[int]) -> list[int]:
    """Return the growth of a histogram; all of it if its bounds have changed."""
    if len(counts) != len(before):
        return list(counts)
    return [new - old for new, old in zip(counts, before, strict=True)]


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate a quantile from a histogram, linear within a bucket, as Prometheus does. A value
    beyond the last bound counts as that bound. None if nothing is counted, or without bounds."""
    totals = list(accumulate(counts))
    if not bounds or totals[-1] <= 0:
        return None
    rank = share * totals[-1]
    place = next(index for index, total in enumerate(totals) if total >= rank and total > 0)
    if place >= len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0.0
    inside = rank - (totals[place - 1] if place else 0)
    return low + (bounds[place] - low) * inside / counts[place]


def growth_quantile(histogram: Histogram, before: Sequence[int], share: float) -> float | None:
    """Estimate a quantile of what a histogram has counted since `before`."""
    return quantile(histogram.bounds, subtract(histogram.counts, before), share)
