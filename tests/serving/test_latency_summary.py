"""Quantiles over a sliding window, against numpy's of the same values."""

import math

import numpy as np
import pytest

from penstock.serving.latency_summary import STEP_S, WINDOW_S, LatencySummary, SummaryRecord


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_a_quantile_is_that_of_the_values_to_one_per_cent(share: float):
    values = np.random.default_rng(1).lognormal(-6, 1.5, 5000)
    summary = LatencySummary()
    for value in values:
        summary.add(value, 10.0)
    exact = np.quantile(values, share, method="inverted_cdf")
    assert summary.record(10.0).quantile(share) == pytest.approx(exact, rel=0.0101)


def test_values_are_forgotten_after_a_minute_but_still_counted():
    summary = LatencySummary()
    summary.add(1.0, 0.0)
    summary.add(2.0, WINDOW_S - STEP_S, count=3)
    assert summary.record(WINDOW_S - STEP_S).quantile(0.01) == pytest.approx(1.0, rel=0.01)
    later = summary.record(WINDOW_S)
    assert later.quantile(0.01) == pytest.approx(2.0, rel=0.01)
    empty = summary.record(1000.0)
    assert math.isnan(empty.quantile(0.5))
    assert (empty.count, empty.total) == (4, 7.0)


def test_records_of_shards_add_up_to_one_of_all_values():
    first, second, whole = LatencySummary(), LatencySummary(), LatencySummary()
    for index in range(100):
        (first if index % 3 else second).add(index / 1e3, 5.0)
        whole.add(index / 1e3, 5.0)
    total = first.record(5.0).plus(second.record(5.0))
    assert total.buckets == whole.record(5.0).buckets
    assert total.count == 100
    assert SummaryRecord().plus(total).total == pytest.approx(whole.record(5.0).total)
