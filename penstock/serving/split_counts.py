"""What the two versions of a rollout did, as plain values that travel between processes, and their
sum. Pure. `traffic_split` counts, and `operate.rollout_judge` compares."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from penstock.errors import (
    BackendFailed,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    PenstockError,
    QuotaExceeded,
    StorageFull,
)

# What is measured of a request: seconds, and the tokens of a generated text.
LATENCY, TTFT, TPOT, LENGTH = "latency", "ttft", "tpot", "length"
# Upper edges of histograms, in steps of 12 %: seconds from 0.1 ms to 100 s, and tokens.
SECONDS = tuple(10 ** (step / 20 - 4) for step in range(121))
TOKENS = tuple(dict.fromkeys(round(10 ** (step / 20)) for step in range(121)))
# A limit of the promise: what is measured, and its highest value.
Limit = tuple[str, float]


def bounds_of(metric: str) -> tuple[float, ...]:
    return TOKENS if metric == LENGTH else SECONDS


@dataclass(slots=True)
class SideCounts:
    """Requests of one version. Refusals for lack of capacity are in the last bucket of latency and
    TTFT: they are later than any limit. Faults of clients are not counted at all."""

    histograms: dict[str, list[int]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    # Values beyond each limit of the promise.
    late: list[int] = field(default_factory=list)
    # Requests that failed by the fault of the model or the server.
    num_failed: int = 0

    def add(self, metric: str, value: float, limits: tuple[Limit, ...]) -> None:
        bounds = bounds_of(metric)
        counts = self.histograms.setdefault(metric, [0] * (len(bounds) + 1))
        counts[bisect_left(bounds, value)] += 1
        if math.isfinite(value):
            self.totals[metric] = self.totals.get(metric, 0.0) + value
        if len(self.late) < len(limits):
            self.late += [0] * (len(limits) - len(self.late))
        for index, (name, limit) in enumerate(limits):
            if name == metric and value > limit:
                self.late[index] += 1

    def count(self, metric: str = LATENCY) -> int:
        return sum(self.histograms.get(metric, ()))

    @property
    def num_requests(self) -> int:
        """All requests that were answered, refused or failed."""
        return self.count() + self.num_failed

    def above(self, metric: str, edge: int) -> int:
        """Return how many values are above an edge of the histogram."""
        return sum(self.histograms.get(metric, ())[edge + 1 :])

    def merge(self, other: SideCounts) -> None:
        for metric, counts in other.histograms.items():
            known = self.histograms.get(metric) or [0] * len(counts)
            self.histograms[metric] = [a + b for a, b in zip(known, counts, strict=True)]
        for metric, total in other.totals.items():
            self.totals[metric] = self.totals.get(metric, 0.0) + total
        longer, shorter = sorted((self.late, other.late), key=len, reverse=True)
        self.late = [
            count + (shorter[index] if index < len(shorter) else 0)
            for index, count in enumerate(longer)
        ]
        self.num_failed += other.num_failed


@dataclass(slots=True)
class OutputCounts:
    """Rows of one output that both versions computed. `num_disagreeing` may be a fraction: a row of
    several decisions disagrees in part."""

    num_rows: int = 0
    num_disagreeing: float = 0.0
    # Sum and maximum of the distances of rows, each between 0 and 2.
    distance: float = 0.0
    max_distance: float = 0.0

    def merge(self, other: OutputCounts) -> None:
        self.num_rows += other.num_rows
        self.num_disagreeing += other.num_disagreeing
        self.distance += other.distance
        self.max_distance = max(self.max_distance, other.max_distance)


@dataclass(slots=True)
class SplitCounts:
    """All that one shard, or the whole server, has counted for a rollout."""

    stable: SideCounts = field(default_factory=SideCounts)
    candidate: SideCounts = field(default_factory=SideCounts)
    outputs: dict[str, OutputCounts] = field(default_factory=dict)
    # Rows that were compared in all outputs, and those that disagree in one of them.
    num_compared: int = 0
    num_disagreeing: float = 0.0
    # Requests of the candidate that the stable version answered because it was not ready.
    num_fallbacks: int = 0
    # Requests that ran in the other version too, and those that were to and did not.
    num_mirrored: int = 0
    num_dropped: int = 0
    # Number of the rollout, which no other one has.
    rollout: int = 0

    def merge(self, other: SplitCounts) -> None:
        self.stable.merge(other.stable)
        self.candidate.merge(other.candidate)
        for name, counts in other.outputs.items():
            self.outputs.setdefault(name, OutputCounts()).merge(counts)
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTED = ("num_compared", "num_disagreeing", "num_fallbacks", "num_mirrored", "num_dropped")
# Errors that are not the client's.
FAILURES = (BackendFailed, NotReady, StorageFull)
MISSES = (Overloaded, DeadlineExceeded)


def is_failure(error: PenstockError) -> bool:
    """Whether the model or the server is at fault."""
    return isinstance(error, FAILURES)


def is_miss(error: PenstockError) -> bool:
    """Whether the version had too little capacity for the request."""
    return isinstance(error, MISSES) and not isinstance(error, QuotaExceeded)
