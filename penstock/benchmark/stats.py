"""Figures and their confidence intervals, all folded from windows: spans of time. Pure.

Requests that queue behind each other are not independent, so errors are estimated from spans of
time, not from single requests: windows are merged into 20 to 39 batches, and the variation between
batches gives the interval (batch means, Student's t).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from penstock.types import Array

BUCKETS_PER_OCTAVE = 128
# Longer than any test; longer durations are counted here.
MAX_S = 1e9
# Batches should be long, but numerous enough to estimate their variance.
MIN_BATCHES = 20
CONFIDENCE = 0.95
# Clustering of slow requests is also estimated where this many times as many are slow.
COMMONER = 4
# Significance level of a comparison.
ALPHA = 0.05
# Two-sided 95 % quantiles of Student's t where the approximation below is too wide.
FEW_DEGREES = {1: 12.706, 2: 4.303, 3: 3.182}

if TYPE_CHECKING:
    Number = float
else:
    # JSON has no NaN; files hold null instead.
    Number = float | None


Key = TypeVar("Key", int, str)


class DurationHistogram(msgspec.Struct):
    """Durations in buckets whose centres are at most 0.4 % off. Sparse: bucket to count.

    Bucket 0 is below 1 ns and also holds negative durations; each later power of two has 128."""

    counts: dict[int, int] = {}

    def add(self, seconds: Array) -> None:
        """Add durations; NaN is skipped."""
        values = np.asarray(seconds, np.float64)
        buckets, counts = np.unique(_buckets(values[~np.isnan(values)]), return_counts=True)
        tally(self.counts, dict(zip(buckets.tolist(), counts.tolist(), strict=True)))

    def merge(self, other: DurationHistogram) -> None:
        tally(self.counts, other.counts)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def percentile(self, percent: float) -> float:
        """Return seconds; NaN when empty."""
        return self.at_rank(_rank(percent / 100, self.total))

    def at_rank(self, rank: int) -> float:
        """Return the duration of this rank, in seconds; the shortest has rank 1. NaN when empty."""
        if not self.counts:
            return math.nan
        buckets = np.array(sorted(self.counts))
        counts = [self.counts[bucket] for bucket in buckets.tolist()]
        ranks = np.cumsum(counts)
        index = min(int(np.searchsorted(ranks, rank)), len(counts) - 1)
        low, high = (float(edge[0]) for edge in _edges(buckets[index : index + 1]))
        inside = (rank - (int(ranks[index]) - counts[index]) - 0.5) / counts[index]
        return low + (high - low) * min(max(inside, 0.0), 1.0)

    def mean(self) -> float:
        """Return seconds; NaN when empty."""
        if not self.counts:
            return math.nan
        lows, highs = _edges(np.array(list(self.counts)))
        return float(np.average((lows + highs) / 2, weights=list(self.counts.values())))

    def num_below(self, seconds: float) -> float:
        """Return how many are shorter; a bucket that contains `seconds` counts in proportion."""
        shares = _shares_below(np.array(list(self.counts), np.int64), seconds)
        return float(shares @ np.array(list(self.counts.values()), np.float64))


def tally(counts: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count


def _buckets(seconds: Array) -> Array:
    mantissas, octaves = np.frexp(np.clip(seconds, 0.5e-9, MAX_S) * 1e9)  # nanoseconds
    inside = ((2 * mantissas - 1) * BUCKETS_PER_OCTAVE).astype(np.int64)
    return np.where(octaves > 0, octaves * BUCKETS_PER_OCTAVE + inside, 0)


def _edges(buckets: Array) -> tuple[Array, Array]:
    """Return the lower and upper bounds of buckets, in seconds."""
    return _lows(buckets), _lows(np.where(buckets > 0, buckets + 1, BUCKETS_PER_OCTAVE))


def _lows(buckets: Array) -> Array:
    octaves, inside = np.divmod(buckets, BUCKETS_PER_OCTAVE)
    lows = np.ldexp((1 + inside / BUCKETS_PER_OCTAVE) * 1e-9, octaves - 1)
    return np.where(buckets > 0, lows, 0.0)


def _shares_below(buckets: Array, seconds: float) -> Array:
    lows, highs = _edges(buckets)
    shares: Array = np.clip((seconds - lows) / (highs - lows), 0.0, 1.0)
    return shares


def _rank(share: float, total: int) -> int:
    return max(1, math.ceil(share * total - 1e-9))


class Window(msgspec.Struct):
    """Requests due in `[start_s, start_s + length_s)`, seconds since measuring began."""

    start_s: float
    length_s: float
    num_due: int = 0
    num_good: int = 0
    # Good answers that arrived in this span, whenever they were due; throughput counts these.
    num_arrived: int = 0
    failures: dict[str, int] = {}
    # By metric, from the due time: latency of good answers; ttft, tpot and itl of streams.
    metrics: dict[str, DurationHistogram] = {}
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    # Good answers that kept every latency limit of the SLO.
    num_in_slo: int | None = None
    # The generator's largest delay behind its schedule.
    max_late_s: float = 0.0

    @property
    def num_failed(self) -> int:
        return self.num_due - self.num_good

    def copy(self) -> Window:
        metrics = {key: DurationHistogram(dict(one.counts)) for key, one in self.metrics.items()}
        return msgspec.structs.replace(self, failures=dict(self.failures), metrics=metrics)


Windows = Sequence[Window]
NO_DURATIONS = DurationHistogram()


class Interval(msgspec.Struct, frozen=True):
    """An estimate and its 95 % confidence interval; NaN: unknown.

    An infinite `high` means too few requests for an upper bound. JSON has neither value: both are
    written as null, and null is read as NaN."""

    value: Number
    low: Number
    high: Number

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, math.nan)

    @property
    def relative_error(self) -> float:
        """Distance to the farther end, relative to the estimate. NaN or infinite: unknown."""
        if not self.value:
            return math.nan
        return max(self.high - self.value, self.value - self.low) / self.value


NOTHING = Interval(math.nan, math.nan, math.nan)


class RatioTest(msgspec.Struct, frozen=True):
    """`ratio` is b over a. `p_value`: the probability of such a ratio if b were not worse than a by
    more than the tolerance."""

    ratio: Interval
    p_value: float


def merged(windows: Windows) -> Window:
    """Merge neighbouring windows into one."""
    whole = windows[0].copy() if windows else Window(0.0, 0.0)
    for window in windows[1:]:
        whole.length_s += window.length_s
        add_counts(whole, window)
    return whole


def column(windows: Windows, field: str) -> Array:
    return np.array([getattr(window, field) for window in windows], np.float64)


def add_counts(window: Window, other: Window) -> None:
    """Add another window's counts; start and length stay."""
    window.num_due += other.num_due
    window.num_good += other.num_good
    window.num_arrived += other.num_arrived
    window.num_input_tokens += other.num_input_tokens
    window.num_output_tokens += other.num_output_tokens
    window.max_late_s = max(window.max_late_s, other.max_late_s)
    tally(window.failures, other.failures)
    for metric, histogram in other.metrics.items():
        window.metrics.setdefault(metric, DurationHistogram()).merge(histogram)
    if other.num_in_slo is not None:
        window.num_in_slo = (window.num_in_slo or 0) + other.num_in_slo


class _Table:
    """The histograms of one metric, flattened: all buckets, and the window each belongs to."""

    def __init__(self, windows: Windows, metric: str) -> None:
        parts = [window.metrics.get(metric, NO_DURATIONS).counts for window in windows]
        sizes = [len(part) for part in parts]
        values = chain.from_iterable(part.values() for part in parts)
        self._owners = np.repeat(np.arange(len(parts)), sizes)
        self._buckets = np.fromiter(chain.from_iterable(parts), np.int64, sum(sizes))
        self._counts = np.fromiter(values, np.int64, sum(sizes))
        self._num_windows = len(parts)

    def whole(self) -> DurationHistogram:
        sums = np.bincount(self._buckets, self._counts).astype(np.int64)
        filled = np.flatnonzero(sums)
        return DurationHistogram(dict(zip(filled.tolist(), sums[filled].tolist(), strict=True)))

    def totals(self) -> Array:
        """Return the number of durations by window."""
        return self._summed(self._counts)

    def sums_s(self) -> Array:
        lows, highs = _edges(self._buckets)
        return self._summed(self._counts * (lows + highs) / 2)

    def nums_below(self, seconds: float) -> Array:
        return self._summed(self._counts * _shares_below(self._buckets, seconds))

    def _summed(self, parts: Array) -> Array:
        return np.bincount(self._owners, parts, self._num_windows)


def histogram(windows: Windows, metric: str = "latency") -> DurationHistogram:
    """Merge the histograms of all windows."""
    return _Table(windows, metric).whole()


def _batched(values: Array) -> Array:
    """Sum neighbouring windows into batches; the remainder joins the last batch."""
    size = max(1, len(values) // MIN_BATCHES)
    return np.add.reduceat(values, np.arange(0, len(values) - size + 1, size))


def num_batches(num_windows: int) -> int:
    return num_windows // max(1, num_windows // MIN_BATCHES)


def student_t(num_degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the two-sided quantile of Student's t, by Wallace's approximation; within 0.5 % from 4
    degrees of freedom."""
    if confidence == CONFIDENCE and num_degrees in FEW_DEGREES:
        return FEW_DEGREES[num_degrees]
    normal = NormalDist().inv_cdf(0.5 + confidence / 2)
    wide = normal * (8 * num_degrees + 3) / (8 * num_degrees + 1)
    return math.sqrt(num_degrees * math.expm1(wide**2 / num_degrees))


def _as_normal(t: float, num_degrees: float) -> float:
    """Return the normal deviate with the same tail probability as this t."""
    size = math.sqrt(num_degrees * math.log1p(t**2 / num_degrees))
    return math.copysign(size * (8 * num_degrees + 1) / (8 * num_degrees + 3), t)


def _error_of_sum(parts: Array, sizes: Array, share: float) -> float:
    """Return the standard error of the sum of `parts`, each expected to be `share` of its size."""
    residuals = _batched(parts - share * sizes)
    count = len(residuals)
    return math.sqrt(count / (count - 1) * float(np.sum(residuals**2)))


def ratio_interval(parts: Array, sizes: Array, confidence: float = CONFIDENCE) -> Interval:
    """Return sum of `parts` over sum of `sizes`, both by window: a rate, a mean, a share."""
    total = float(np.sum(sizes))
    if total <= 0:
        return NOTHING
    value = float(np.sum(parts)) / total
    if len(parts) < 2:
        return Interval(value, math.nan, math.nan)
    points = student_t(num_batches(len(parts)) - 1, confidence)
    half = points * _error_of_sum(parts, sizes, value) / total
    return Interval(value, max(value - half, 0.0), value + half)


def share_interval(parts: Array, sizes: Array, confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of a share between 0 and 1 (Wilson's): even 50 of 50 does not prove 100
    %. Requests that fail together reduce the effective sample size."""
    total = float(np.sum(sizes))
    plain = ratio_interval(parts, sizes, confidence)
    if math.isnan(plain.low):
        return plain
    share = plain.value
    independent = share * (1 - share) * total
    seen = _error_of_sum(parts, sizes, share) ** 2
    num = total / max(1.0, seen / independent) if independent > 0 else total
    points = student_t(num_batches(len(parts)) - 1, confidence)
    middle = share + points**2 / (2 * num)
    half = points * math.sqrt(share * (1 - share) / num + points**2 / (4 * num**2))
    scale = 1 + points**2 / num
    return Interval(share, max((middle - half) / scale, 0.0), min((middle + half) / scale, 1.0))


def throughput_interval(windows: Windows, confidence: float = CONFIDENCE) -> Interval:
    """Return good answers per second."""
    return ratio_interval(column(windows, "num_arrived"), column(windows, "length_s"), confidence)


def mean_interval(
    windows: Windows, metric: str = "latency", confidence: float = CONFIDENCE
) -> Interval:
    """Return the mean of a metric over good answers."""
    table = _Table(windows, metric)
    return ratio_interval(table.sums_s(), table.totals(), confidence)


def percentile_interval(
    windows: Windows,
    metric: str,
    percent: float,
    *,
    with_failures: bool = False,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Return a percentile and its confidence interval.

    `with_failures` counts requests without a good answer as infinitely slow. The interval is
    computed on ranks: the number of requests beyond the estimate varies from batch to batch, more
    than for independent requests, and that variation sets how many ranks lower and higher the ends
    lie.
    """
    share = percent / 100
    table = _Table(windows, metric)
    whole = table.whole()
    num_good = whole.total
    never = [window.num_failed if with_failures else 0 for window in windows]
    total = num_good + sum(never)
    if not total:
        return NOTHING

    def at(rank: int) -> float:
        return whole.at_rank(rank) if rank <= num_good else math.inf

    value = at(_rank(share, total))
    if len(windows) < 2 or share >= 1:
        return Interval(value, math.nan, math.nan)
    sizes = table.totals() + never
    cluster = 1.0
    for level in _levels(share):
        below = table.nums_below(at(_rank(level, total)))
        seen = _error_of_sum(below, sizes, float(np.sum(below)) / total)
        cluster = max(cluster, seen**2 / (level * (1 - level) * total))
    beyond = (1 - share) * total
    points = student_t(num_batches(len(windows)) - 1, confidence)
    fewest, most = _count_range(beyond / (cluster * share), points, is_rare=share > 0.5)
    low, high = total - beyond * most, total - beyond * fewest
    return Interval(
        value,
        at(math.ceil(low)) if low > 0 else 0.0,
        # Less than one request lies beyond: no observed latency is a safe upper bound.
        at(math.ceil(high)) if beyond * fewest >= 1 else math.inf,
    )


def _count_range(count: float, points: float, *, is_rare: bool) -> tuple[float, float]:
    """Return the lowest and highest expectation compatible with `count` independent events, as
    multiples of `count`. Rare events use the Poisson limits of Wilson and Hilferty: a handful of
    events bounds the expectation from below, which a symmetric interval would not."""
    if not is_rare:
        half = points / math.sqrt(count)
        return max(0.0, 1 - half), 1 + half
    least = 1 - 1 / (9 * count) - points / (3 * math.sqrt(count))
    more = count + 1
    most = 1 - 1 / (9 * more) + points / (3 * math.sqrt(more))
    return max(0.0, least) ** 3, most**3 * more / count


def _levels(share: float) -> list[float]:
    """Return the percentiles at which clustering is estimated: the one asked for and, for a tail,
    the one with four times as many requests beyond. A run that saw few clusters of slow requests
    would otherwise conclude that they do not cluster, just when its percentile is too low."""
    common = 1 - COMMONER * (1 - share)
    return [share, common] if common >= 0.5 else [share]


def compare(
    a: Windows, b: Windows, metric: str, percent: float, tolerance: float = 0.0
) -> RatioTest:
    """Test whether b is slower than a by more than `tolerance` (0.05: 5 %) and chance."""
    return _compared(
        percentile_interval(a, metric, percent),
        percentile_interval(b, metric, percent),
        (num_batches(len(a)) - 1, num_batches(len(b)) - 1),
        tolerance,
    )


def compare_throughput(a: Windows, b: Windows, tolerance: float = 0.0) -> RatioTest:
    """Test whether b has less throughput than a by more than `tolerance` and chance."""
    degrees = (num_batches(len(b)) - 1, num_batches(len(a)) - 1)
    # Lower is worse: swap the sides.
    turned = _compared(throughput_interval(b), throughput_interval(a), degrees, tolerance)
    ends = turned.ratio.value, turned.ratio.high, turned.ratio.low
    return RatioTest(Interval(*(1 / each if each else math.inf for each in ends)), turned.p_value)


def _compared(a: Interval, b: Interval, degrees: tuple[int, int], tolerance: float) -> RatioTest:
    """Compare logarithms, each side with the error in the direction of the other side: intervals
    of percentiles are not symmetric."""
    if not all(0 < side.value < math.inf and side.low >= 0 for side in (a, b)):
        return RatioTest(NOTHING, math.nan)
    log_ratio = math.log(b.value / a.value)
    downwards = math.hypot(_log(b.value, b.low), _log(a.high, a.value))
    upwards = math.hypot(_log(b.high, b.value), _log(a.value, a.low))
    logs = (log_ratio, log_ratio - downwards, log_ratio + upwards)
    ratio = Interval(*(math.exp(each) if each < 700 else math.inf for each in logs))
    error_b = _log(b.value, b.low) / student_t(degrees[1])
    error_a = _log(a.high, a.value) / student_t(degrees[0])
    excess = log_ratio - math.log1p(tolerance)
    return RatioTest(ratio, _p_value(excess, (error_b, error_a), degrees))


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 else math.inf


def _p_value(excess: float, errors: tuple[float, float], degrees: tuple[int, int]) -> float:
    error = math.hypot(*errors)
    if math.isinf(error):
        return 0.5
    if error == 0:
        return 0.0 if excess > 0 else 1.0
    # Welch's degrees of freedom.
    upper, lower = ((each / error) ** 4 for each in errors)
    num_degrees = 1 / (upper / degrees[1] + lower / degrees[0])
    return 1 - NormalDist().cdf(_as_normal(excess / error, num_degrees))
