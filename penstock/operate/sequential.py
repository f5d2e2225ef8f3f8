"""Sequential tests: they may be looked at after every observation, and stopped at any time. Pure.

A test is an e-process, a bet against a hypothesis: its capital starts at 1 and does not grow on
average while the hypothesis is true. The probability that the capital ever reaches 1 / alpha is
then at most alpha (Ville's inequality), however often it is looked at and for however long.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# Parts of the capital that are bet. Small ones find small excesses, large ones large excesses soon.
FRACTIONS = np.array((0.02, 0.05, 0.1, 0.25, 0.5, 0.9))
# Parts of the capital: bet from the first observation on, invested bit by bit, so that an excess
# that begins late is found as well, and set aside for `invest`.
AT_ONCE, SPREAD, ASIDE = 0.4, 0.3, 0.3
# Capital is not counted beyond this; JSON has no infinity.
MOST = 1e300
# Simulations by which the power of a test is measured, and their seed.
NUM_TWINS, SEED = 100, 20_027
PRECISION = 1e-9
Floats = npt.NDArray[np.float64]


class ExcessTest:
    """Tests the hypothesis that ratios, observed over allowed, are at most 1 on average.

    Valid if the expectation of each ratio, given all that was observed before, is at most 1 under
    the hypothesis. Ratios are not negative and need no upper bound. The events behind one ratio may
    depend on each other in any way: let one ratio cover all that belongs together.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.num_observations = 0
        # One row for each stream of observations; twins have several.
        self._capitals: Floats = np.zeros((1, len(FRACTIONS)))
        # Capital that is not invested yet, the part of it that is set aside, and what the next
        # observation invests.
        self._reserve, self._aside, self._due = 1.0, ASIDE, AT_ONCE
        self._highest: Floats = np.ones(1)

    @property
    def e_value(self) -> float:
        return float(self._values()[0])

    @property
    def highest(self) -> float:
        """The highest e-value so far."""
        return float(self._highest[0])

    @property
    def is_rejected(self) -> bool:
        """Whether the evidence against the hypothesis has ever reached 1 / alpha."""
        return bool(self.rejections[0])

    @property
    def rejections(self) -> npt.NDArray[np.bool_]:
        """The same for each stream."""
        return self._highest >= 1 / self.alpha

    def add(self, ratios: float | Floats) -> None:
        """Add one observation, of each stream."""
        self.num_observations += 1
        spread = SPREAD / (self.num_observations * (self.num_observations + 1))
        invested, self._due = self._due + spread, 0.0
        self._reserve = max(0.0, self._reserve - invested)
        gains = 1 - FRACTIONS + FRACTIONS * np.reshape(ratios, (-1, 1))
        grown = (self._capitals + invested / len(FRACTIONS)) * gains
        self._capitals = np.minimum(grown, MOST)
        self._highest = np.maximum(self._highest, self._values())

    def invest(self) -> None:
        """Bet half of what is set aside from the next observation on. Call it when something
        changes that may cause an excess, whatever was observed."""
        stake = self._aside / 2
        self._aside -= stake
        self._due += stake

    def twins(self, number: int = NUM_TWINS) -> ExcessTest:
        """Return a test of `number` streams that all begin where this one is."""
        made = ExcessTest(self.alpha)
        made.num_observations = self.num_observations
        made._reserve, made._aside, made._due = self._reserve, self._aside, self._due
        made._capitals = np.repeat(self._capitals, number, axis=0)
        made._highest = np.ones(number)
        return made

    def _values(self) -> Floats:
        values: Floats = np.minimum(self._reserve + self._capitals.sum(axis=1), MOST)
        return values


class PowerCheck:
    """Measures the probability with which a running test finds that a share is `share`, if it is so
    from now on: runs twins of the test on simulated events at the same times."""

    def __init__(self, test: ExcessTest, share: float) -> None:
        self.share = share
        self._twins = test.twins()
        self._random = np.random.default_rng(SEED)

    @property
    def power(self) -> float:
        return float(np.mean(self._twins.rejections))

    def add(self, num_events: int, num_allowed: float) -> None:
        """Follow an observation of the test: of `num_events`, `num_allowed` were allowed."""
        counts = self._random.binomial(num_events, self.share, NUM_TWINS)
        self._twins.add(counts / num_allowed)


def num_needed(limit: float, share: float, alpha: float) -> int:
    """Return after how many single events a test of `limit` finds on average that their share is
    `share`. Events that are observed together need more."""
    growths = share * np.log(1 - FRACTIONS + FRACTIONS / limit)
    growth = float(np.max(growths + (1 - share) * np.log(1 - FRACTIONS)))
    assert growth > 0, f"a share of {share} cannot be told from {limit}"
    return math.ceil(math.log(len(FRACTIONS) / (AT_ONCE * alpha)) / growth)


def share_interval(count: float, total: float, alpha: float) -> tuple[float, float]:
    """Return the confidence sequence of a share: it covers the true share at all times together
    with a probability of at least 1 - alpha, if the events are independent. (Robbins' method: a
    mixture of binomials with a beta distribution.)"""
    if total <= 0:
        return 0.0, 1.0
    best, limit = count / total, math.log(1 / alpha)

    def is_outside(share: float) -> bool:
        return _log_mixture(count, total, share) >= limit

    return _edge(0.0, best, is_outside), _edge(1.0, best, is_outside)


def _edge(outer: float, inner: float, is_outside: Callable[[float], bool]) -> float:
    """Return the border between a point outside and one inside; the first if it is inside too."""
    if not is_outside(outer):
        return outer
    while abs(outer - inner) > PRECISION:
        middle = (outer + inner) / 2
        if is_outside(middle):
            outer = middle
        else:
            inner = middle
    return outer


def _log_mixture(count: float, total: float, share: float) -> float:
    """Return the logarithm of the mixture's likelihood over that of `share`."""
    others = total - count
    if (share <= 0 and count > 0) or (share >= 1 and others > 0):
        return math.inf
    mixed = _log_beta(count + 0.5, others + 0.5) - _log_beta(0.5, 0.5)
    own = count * math.log(share) if count else 0.0
    return mixed - own - (others * math.log1p(-share) if others else 0.0)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
