"""Whether a level has settled, and whether it grows while it is measured. Pure.

Warm-up ends when the median latency and the throughput of the last third are those of the third
before, as far as their own noise lets one see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.benchmark.stats import Window, histogram, merged, student_t
from penstock.types import Array

# A change from third to third that is called none.
TOLERANCE = 0.05
# Of a drift: rather wait for more than begin too early.
DRIFT_CONFIDENCE = 0.8
# The last two thirds are compared; each needs so many groups of windows to know its noise.
MIN_GROUPS = 12
MAX_GROUPS = 60
MIN_REQUESTS_PER_GROUP = 4
# A queue that grows: the trend is no accident one time in 200, and it matters.
NUM_TREND_GROUPS = 20
MIN_TREND_GROUPS = 6
TREND_DEVIATE = 2.576
MIN_GROWTH = 1.25


class Steadiness(msgspec.Struct, frozen=True):
    """`is_over`: settled, or out of patience."""

    is_steady: bool
    is_over: bool
    # Median latency of the first third and of the last; NaN where nothing was answered.
    first_s: float
    last_s: float


class Trend(msgspec.Struct, frozen=True):
    """`growth`: mean latency of the last third over that of the first."""

    is_growing: bool
    growth: float


def steadiness(windows: Sequence[Window], patience_s: float) -> Steadiness:
    """Of a warm-up so far, whole windows only."""
    third = math.ceil(len(windows) / 3)
    is_steady = _is_steady(windows)
    return Steadiness(
        is_steady,
        is_steady or sum(window.length_s for window in windows) >= patience_s,
        histogram(windows[:third]).percentile(50),
        histogram(windows[-third:] if third else []).percentile(50),
    )


def _is_steady(windows: Sequence[Window]) -> bool:
    num_good = sum(window.num_good for window in windows)
    num_groups = min(len(windows), MAX_GROUPS, num_good // MIN_REQUESTS_PER_GROUP)
    if num_groups < MIN_GROUPS:
        return False
    groups = _groups(windows, num_groups)[num_groups // 3 :]
    medians = np.array([histogram([group]).percentile(50) for group in groups])
    rates = np.array([group.num_arrived / group.length_s for group in groups])
    return _is_same(medians, is_shown=True) and _is_same(rates, is_shown=False)


def _groups(windows: Sequence[Window], num: int) -> list[Window]:
    ends = np.linspace(0, len(windows), num + 1).astype(int).tolist()
    return [merged(windows[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]


def _is_same(values: Array, is_shown: bool) -> bool:
    """Whether the second half of the values is at the level of the first. `is_shown`: it must be
    close; otherwise it only must not be clearly elsewhere."""
    values = values[~np.isnan(values)]
    size = len(values) // 2
    if size < 2 or values.mean() <= 0:
        return False
    relative = values / values.mean()
    before, after = relative[:size], relative[-size:]
    change = abs(float(after.mean() - before.mean()))
    noise = math.sqrt((float(before.var(ddof=1)) + float(after.var(ddof=1))) / 2)
    error = noise * math.sqrt(2 / size)
    # What goes on like this changes by three times as much until the time so far has doubled.
    is_drifting = (
        3 * change > TOLERANCE and change > student_t(2 * size - 2, DRIFT_CONFIDENCE) * error
    )
    if is_drifting:
        return False
    return not is_shown or change + error <= max(TOLERANCE, noise)


def trend(windows: Sequence[Window]) -> Trend:
    """Does latency grow over the span? Then the queue does: the load is above capacity."""
    num_groups = min(len(windows), NUM_TREND_GROUPS)
    means = np.array([histogram([each]).mean() for each in _groups(windows, num_groups)])
    means = means[~np.isnan(means)]
    count = len(means)
    if count < MIN_TREND_GROUPS:
        return Trend(False, math.nan)
    third = count // 3
    growth = float(means[-third:].mean() / means[:third].mean())
    # Kendall's test: of all pairs, how many more rise than fall.
    rising = float(np.sign(means[None, :] - means[:, None])[np.triu_indices(count, 1)].sum())
    deviate = (rising - 1) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return Trend(deviate > TREND_DEVIATE and growth >= MIN_GROWTH, growth)
