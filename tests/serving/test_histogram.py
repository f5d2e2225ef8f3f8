"""Histograms: which bucket a value is in, and how records add up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.histogram import Histogram
from penstock.serving.metrics import BUCKETS


@pytest.mark.parametrize("index", range(len(BUCKETS)))
def test_a_bucket_holds_its_upper_edge_and_not_the_next_number(index: int) -> None:
    histogram = Histogram(BUCKETS)
    histogram.add(BUCKETS[index])
    histogram.add(math.nextafter(BUCKETS[index], math.inf))
    expected = [0] * (len(BUCKETS) + 1)
    expected[index] = expected[index + 1] = 1
    assert histogram.counts == expected


def test_nothing_is_too_small_or_too_large_for_a_bucket() -> None:
    histogram = Histogram(BUCKETS)
    histogram.add(0.0)
    histogram.add(1e9)
    assert (histogram.counts[0], histogram.counts[-1], histogram.count) == (1, 1, 2)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 100))))
def test_count_and_sum_are_those_of_what_was_added(added: list[tuple[float, int]]) -> None:
    histogram = Histogram(BUCKETS)
    for value, count in added:
        histogram.add(value, count)
    assert histogram.count == sum(count for _, count in added)
    assert histogram.total == pytest.approx(math.fsum(value * count for value, count in added))


def test_records_add_up():
    first, second = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    first.add(1.5)
    second.add(9.0, 2)
    total = first.record().plus(second.record())
    assert (total.counts, total.total, total.bounds) == ([0, 1, 2], 19.5, (1.0, 2.0))
