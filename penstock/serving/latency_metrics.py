"""Latencies of one model that are counted only if the operator asks (`--metrics-config`).

A histogram of the time to the first answer, and summaries of each phase, under Triton's names.
Several shards count apart; their records are added up. Knows no scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.serving.histogram import Histogram, HistogramRecord
from penstock.serving.latency_summary import LatencySummary, SummaryRecord

if TYPE_CHECKING:
    from penstock.types import Timings

# Triton's buckets of the time to the first answer, in milliseconds.
FIRST_RESPONSE_MS = (100.0, 500.0, 2000.0, 5000.0)
REQUEST, QUEUE = "request", "queue"
COMPUTES = ("compute_input", "compute_infer", "compute_output")
CACHE_HIT, CACHE_MISS = "cache_hit", "cache_miss"


@dataclass(frozen=True, slots=True)
class LatencyRecord:
    """What one shard has counted; None is not counted."""

    first_response: HistogramRecord | None = None
    summaries: dict[str, SummaryRecord] = field(default_factory=dict)

    def plus(self, other: LatencyRecord) -> LatencyRecord:
        first, second = self.first_response, other.first_response
        names = {**self.summaries, **other.summaries}
        nothing = SummaryRecord()
        return LatencyRecord(
            second if first is None else first if second is None else first.plus(second),
            {
                name: self.summaries.get(name, nothing).plus(other.summaries.get(name, nothing))
                for name in names
            },
        )


class LatencyMetrics:
    """`first_response` and `summaries` are None if they are not counted."""

    def __init__(
        self,
        buckets_ms: Sequence[float] = FIRST_RESPONSE_MS,
        *,
        has_histogram: bool,
        has_summaries: bool,
        has_cache: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first_response_ms = Histogram(buckets_ms) if has_histogram else None
        # As in Triton, models with a response cache have no summary of whole requests, but of the
        # cache.
        own = (CACHE_HIT, CACHE_MISS) if has_cache else (REQUEST,)
        names = (*own, QUEUE, *COMPUTES) if has_summaries else ()
        self._summaries = {name: LatencySummary() for name in names}
        self._clock = clock

    def add(self, timings: Timings) -> None:
        """Count an answered request."""
        span_s = timings.completed - timings.received
        first = timings.first_response or timings.completed
        self.add_first(first - timings.received)
        if not self._summaries:
            return
        self.observe(REQUEST, span_s)
        self.observe(QUEUE, timings.dispatched - timings.queued)
        for name, value in zip(COMPUTES, timings.compute_s, strict=True):
            self.observe(name, value)

    def add_first(self, seconds: float) -> None:
        """Count the time from a request to its first answer."""
        if self.first_response_ms is not None:
            self.first_response_ms.add(seconds * 1e3)

    def observe(self, name: str, seconds: float) -> None:
        """Count a value in a summary, if there is such a summary."""
        if (summary := self._summaries.get(name)) is not None:
            summary.add(seconds, self._clock())

    def record(self) -> LatencyRecord:
        now, first = self._clock(), self.first_response_ms
        summaries = {name: each.record(now) for name, each in self._summaries.items()}
        return LatencyRecord(None if first is None else first.record(), summaries)
