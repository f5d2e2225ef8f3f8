"""Limits of rates: against scipy's beta distribution, and for counts that are fractions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from penstock.optimizer.binomial import at_least, lower_limit, upper_limit


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20_000), st.floats(0, 1), st.sampled_from([0.05, 0.0375, 0.001]))
def test_limits_are_those_of_clopper_and_pearson(trials: int, share: float, alpha: float) -> None:
    count = round(trials * share)
    highest = 1.0 if count == trials else beta.ppf(1 - alpha, count + 1, trials - count)
    lowest = 0.0 if count == 0 else beta.ppf(alpha, count, trials - count + 1)
    assert upper_limit(count, trials, alpha) == pytest.approx(highest, rel=1e-7)
    assert lower_limit(count, trials, alpha) == pytest.approx(lowest, rel=1e-7)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5_000), st.floats(0, 1), st.floats(0.001, 0.999))
def test_the_tail_is_the_binomials(trials: int, share: float, rate: float) -> None:
    count = round(trials * share)
    expected = binom.sf(count - 1, trials, rate)
    assert at_least(count, trials, rate) == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_nothing_seen_leaves_about_three_out_of_all() -> None:
    assert upper_limit(0, 1000, 0.05) == pytest.approx(1 - 0.05 ** (1 / 1000))


def test_fractions_lie_between_their_neighbours() -> None:
    limits = [upper_limit(count, 100, 0.05) for count in (2, 2.5, 3)]
    assert limits == sorted(limits)


def test_limits_of_millions() -> None:
    assert upper_limit(10_000, 10_000_000, 0.05) == pytest.approx(0.0010166, rel=1e-3)
