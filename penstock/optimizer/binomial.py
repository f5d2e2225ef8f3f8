"""Binomial distribution: tails, and exact limits of a rate. Pure.

Counts and trials may be fractions, so the same formulas predict the effect of more trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_TERMS = 100_000
PRECISION = 1e-13


def upper_limit(count: float, num_trials: float, alpha: float) -> float:
    """Return the highest rate with probability `alpha` of `count` or fewer (Clopper-Pearson)."""
    if count >= num_trials:
        return 1.0
    return _solved(lambda rate: at_least(count + 1, num_trials, rate) - (1 - alpha))


def lower_limit(count: float, num_trials: float, alpha: float) -> float:
    """Return the lowest rate that gives `count` or more with probability `alpha`."""
    if count <= 0:
        return 0.0
    return _solved(lambda rate: at_least(count, num_trials, rate) - alpha)


def at_least(count: float, num_trials: float, rate: float) -> float:
    if count <= 0:
        return 1.0
    if count > num_trials:
        return 0.0
    return _incomplete_beta(count, num_trials - count + 1, rate)


def _solved(rising: Callable[[float], float]) -> float:
    """Return the root of a function that increases between 0 and 1."""
    low, high = 0.0, 1.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta: a continued fraction that converges left of the mean."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a
    return front / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Evaluate 1 + d1 / (1 + d2 / (1 + ...)) from the front (Lentz's method)."""
    tiny = 1e-300
    value, above, below = 1.0, 1.0, 0.0
    for term in range(1, MAX_TERMS):
        half = term // 2
        if term % 2:
            step = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            step = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        below = 1 / ((1 + step * below) or tiny)
        above = (1 + step / above) or tiny
        value *= above * below
        if abs(above * below - 1) < PRECISION:
            break
    return value
