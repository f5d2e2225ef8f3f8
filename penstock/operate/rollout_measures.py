"""The measures that a rollout compares, read from the counts of both versions. Pure.

Each measure returns totals since the rollout began; `rollout_checks` tests what a second adds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.operate.rollout_checks import NOTHING, Totals
from penstock.serving.split_counts import SideCounts, SplitCounts, bounds_of

# Values of the stable version from which its own distribution is known well enough.
MIN_REFERENCE = 100
# Seconds of the stable version whose batches give the usual compute time of each size.
NUM_RECENT = 10
# A version that runs rarely takes longer for each batch: its weights have left the caches, and its
# threads sleep. A copy of the stable version with 5 % of its requests took 1.7 to 2.5 times as long
# (two cores, 2026-11-18). So seconds in which the candidate runs less than ALIKE of the stable
# version's number of batches are costly only beyond RARE times what is allowed.
ALIKE, RARE = 0.5, 4.0
# Seconds of a batch that are no cost: models of microseconds differ by more for no reason.
NO_COST_S = 2e-4
# Number of batches and their total seconds, by rows.
Batches = Mapping[int, tuple[int, float]]
# The buckets of a histogram.
Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RolloutReading:
    """All that is known of both versions, since the rollout began."""

    counts: SplitCounts
    stable_batches: Batches = field(default_factory=dict)
    candidate_batches: Batches = field(default_factory=dict)
    # Crashes and hangs of workers.
    stable_deaths: int = 0
    candidate_deaths: int = 0
    is_ready: bool = True
    # Why the candidate is not ready.
    reason: str = ""


Measure = Callable[[RolloutReading], Totals]


def failures(reading: RolloutReading) -> Totals:
    candidate, stable = reading.counts.candidate, reading.counts.stable
    own = float(candidate.num_failed), candidate.num_requests
    return Totals(*own, float(stable.num_failed), stable.num_requests)


def disagreements(reading: RolloutReading) -> Totals:
    return Totals(reading.counts.num_disagreeing, reading.counts.num_compared)


def lateness(metric: str, index: int) -> Measure:
    """Count values beyond the limit number `index` of the promise."""

    def count(side: SideCounts) -> tuple[float, int]:
        late = side.late[index] if index < len(side.late) else 0
        return float(late), side.count(metric)

    def read(reading: RolloutReading) -> Totals:
        return Totals(*count(reading.counts.candidate), *count(reading.counts.stable))

    return read


class BeyondQuantile:
    """Counts values above a quantile of the stable version's, or else below it. The quantile is
    that of all seconds before, from MIN_REFERENCE values on, so it follows a load that changes.
    Values near the quantile count as equal to it: texts that all end at the same limit are neither
    longer nor shorter."""

    def __init__(self, metric: str, share: float, *, is_above: bool = True) -> None:
        """`share` of the stable version's values are above the quantile, or below it, at most."""
        self._metric = metric
        self._share = share
        self._is_above = is_above
        self._totals = NOTHING
        # Histograms of the candidate and the stable version at the last look.
        self._before: tuple[Counts, Counts] = ((), ())
        self._edge: int | None = None

    @property
    def limit(self) -> float | None:
        """The quantile; None: not known yet, or no value is below it."""
        if self._edge is None or self._edge < 0:
            return None
        return bounds_of(self._metric)[self._edge]

    def __call__(self, reading: RolloutReading) -> Totals:
        counts = reading.counts
        sides = counts.candidate, counts.stable
        now = tuple(tuple(side.histograms.get(self._metric, ())) for side in sides)
        if self._edge is not None:
            second = (self._count(*pair) for pair in zip(now, self._before, strict=True))
            (wrong, total), (stable_wrong, stable_total) = second
            new = Totals(wrong, total, stable_wrong, stable_total)
            self._totals = self._totals.plus(new)
        self._before = now[0], now[1]
        self._edge = self._find(counts.stable)
        return self._totals

    def _count(self, now: Counts, before: Counts) -> tuple[float, int]:
        assert self._edge is not None
        total, above = sum(now), sum(now[self._edge + 1 :])
        total, above = total - sum(before), above - sum(before[self._edge + 1 :])
        return float(above if self._is_above else total - above), total

    def _find(self, stable: SideCounts) -> int | None:
        total = stable.count(self._metric)
        if total < MIN_REFERENCE:
            return None
        edges = range(len(bounds_of(self._metric)))
        most = self._share * total
        if self._is_above:
            return next((edge for edge in edges if stable.above(self._metric, edge) <= most), None)
        return sum(total - stable.above(self._metric, edge) <= most for edge in edges) - 1


class CostlySeconds:
    """Counts seconds in which rows of the candidate computed longer than allowed: more than `ratio`
    times as long as rows in batches of the same size of the stable version. A
    candidate with much less to do may take RARE times as long."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._num_costly = self._num_seconds = 0
        self._before: tuple[Batches, Batches] = ({}, {})
        self._recent: deque[Batches] = deque(maxlen=NUM_RECENT)
        # Compute time over the stable version's, of the seconds in which both had alike load.
        self._took_s = self._expected_s = 0.0

    @property
    def ratio(self) -> float | None:
        """The candidate's compute time over the stable version's, so far; None: not compared."""
        return self._took_s / self._expected_s if self._expected_s else None

    def __call__(self, reading: RolloutReading) -> Totals:
        stable, candidate = reading.stable_batches, reading.candidate_batches
        own, new = since(stable, self._before[0]), since(candidate, self._before[1])
        self._recent.append(own)
        self._before = stable, candidate
        is_alike = _num_batches(new) >= ALIKE * _num_batches(own)
        took_s, expected_s = self._compare(new)
        if expected_s > 0:
            if is_alike:
                self._took_s += took_s
                self._expected_s += expected_s
            self._num_seconds += 1
            allowed = self._ratio if is_alike else RARE * self._ratio
            allowed_s = allowed * expected_s + NO_COST_S * _num_batches(new)
            self._num_costly += took_s > allowed_s
        return Totals(float(self._num_costly), self._num_seconds)

    def _compare(self, new: Batches) -> tuple[float, float]:
        """Return the seconds that batches took, and those that the stable version's would have."""
        took_s = expected_s = 0.0
        for size, (count, seconds) in new.items():
            known = [each[size] for each in self._recent if size in each]
            if total := sum(number for number, _ in known):
                took_s += seconds
                expected_s += count * sum(spent for _, spent in known) / total
        return took_s, expected_s


def _num_batches(batches: Batches) -> int:
    return sum(count for count, _ in batches.values())


def since(now: Batches, before: Batches) -> Batches:
    """Return the batches that are new."""
    found: dict[int, tuple[int, float]] = {}
    for size, (count, seconds) in now.items():
        old_count, old_seconds = before.get(size, (0, 0.0))
        if count > old_count:
            found[size] = count - old_count, seconds - old_seconds
    return found
