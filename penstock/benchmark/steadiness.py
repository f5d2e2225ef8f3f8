"""Whether a level has reached steady state, and whether latency grows while measuring. Pure.

Warm-up ends when the median latency and the throughput of the last third match those of the third
before, within their noise.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from penstock.benchmark import stats
from penstock.benchmark.stats import DurationHistogram, Window, Windows
from penstock.types import Array

# A smaller relative change between thirds counts as none.
TOLERANCE = 0.05
# Low on purpose: it is better to warm up longer than to start too early.
DRIFT_CONFIDENCE = 0.8
# The last two thirds are compared; each needs enough groups of windows to estimate its noise.
MIN_GROUPS = 12
MAX_GROUPS = 60
MIN_REQUESTS_PER_GROUP = 4
# A growing queue: significant (one false alarm in 200) and large enough to matter.
NUM_TREND_GROUPS = 20
MIN_TREND_GROUPS = 6
TREND_DEVIATE = 2.576
MIN_GROWTH = 1.25


class Steadiness(msgspec.Struct, frozen=True):
    """`is_over`: settled, or out of time."""

    is_steady: bool
    is_over: bool
    # Median latency of the first and the last third; NaN where nothing was answered.
    first_s: float
    last_s: float


def steadiness(windows: Windows, patience_s: float) -> Steadiness:
    """Judge a warm-up so far; `windows` are complete ones."""
    third = math.ceil(len(windows) / 3)
    is_steady = _is_steady(windows)
    return Steadiness(
        is_steady,
        is_steady or sum(window.length_s for window in windows) >= patience_s,
        stats.histogram(windows[:third]).percentile(50),
        stats.histogram(windows[-third:] if third else []).percentile(50),
    )


def _is_steady(windows: Windows) -> bool:
    num_good = sum(window.num_good for window in windows)
    num_groups = min(len(windows), MAX_GROUPS, num_good // MIN_REQUESTS_PER_GROUP)
    if num_groups < MIN_GROUPS:
        return False
    groups = _groups(windows, num_groups)[num_groups // 3 :]
    medians = np.array([_latency(group).percentile(50) for group in groups])
    rates = np.array([group.num_arrived / group.length_s for group in groups])
    return _is_same(medians, is_shown=True) and _is_same(rates, is_shown=False)


def _groups(windows: Windows, num: int) -> list[Window]:
    ends = np.linspace(0, len(windows), num + 1).astype(int).tolist()
    return [stats.merged(windows[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]


def _latency(window: Window) -> DurationHistogram:
    return window.metrics.get("latency", stats.NO_DURATIONS)


def _is_same(values: Array, is_shown: bool) -> bool:
    """Whether the second half of the values is at the level of the first. With `is_shown` it must
    be close; otherwise it must only not differ clearly."""
    values = values[~np.isnan(values)]
    size = len(values) // 2
    if size < 2 or values.mean() <= 0:
        return False
    relative = values / values.mean()
    before, after = relative[:size], relative[-size:]
    change = abs(float(after.mean() - before.mean()))
    noise = math.sqrt((float(before.var(ddof=1)) + float(after.var(ddof=1))) / 2)
    error = noise * math.sqrt(2 / size)
    # At this pace the change triples by the time the warm-up is twice as long.
    is_clear = change > stats.student_t(2 * size - 2, DRIFT_CONFIDENCE) * error
    if is_clear and 3 * change > TOLERANCE:
        return False
    return not is_shown or change + error <= max(TOLERANCE, noise)


def is_growing(windows: Windows) -> bool:
    """Test whether latency grows over the span: the queue grows, so load exceeds capacity."""
    num_groups = min(len(windows), NUM_TREND_GROUPS)
    means = np.array([_latency(each).mean() for each in _groups(windows, num_groups)])
    means = means[~np.isnan(means)]
    count = len(means)
    if count < MIN_TREND_GROUPS:
        return False
    third = count // 3
    growth = float(means[-third:].mean() / means[:third].mean())
    # Kendall's test: among all pairs, how many more rise than fall.
    rising = float(np.sign(means[None, :] - means[:, None])[np.triu_indices(count, 1)].sum())
    deviate = (rising - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return deviate > TREND_DEVIATE and growth >= MIN_GROWTH
