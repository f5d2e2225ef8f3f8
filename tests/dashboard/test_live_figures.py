"""Rates, percentiles and batch sizes between two readings of counters."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dashboard.live_figures import LiveFigures, VersionCounters, growth_quantile, quantile
from penstock.errors import BackendFailed, Cancelled, InvalidRequest, Overloaded
from penstock.serving.metrics import BUCKETS, Histogram, ModelMetrics
from penstock.types import Request


def fold(metrics: ModelMetrics, *spans_s: float, num_rows: int | None = None) -> None:
    batch = []
    for span_s in spans_s:
        request = Request(None, (), 0.0)
        request.timings.completed = span_s
        request.timings.queued, request.timings.dispatched = 0.0, span_s / 2
        batch.append(request)
    metrics.fold(batch, num_rows or len(batch), batch[0].timings)


def test_figures_are_those_between_two_readings() -> None:
    metrics = ModelMetrics("m", "1")
    fold(metrics, 9.0, 9.0)
    metrics.refused(Overloaded("full"))
    before = VersionCounters.read(metrics, 10.0)
    fold(metrics, 0.02, 0.02, 0.02, 0.02)
    fold(metrics, 0.04, num_rows=8)
    for error in (Overloaded("full"), Overloaded("full"), InvalidRequest("no")):
        metrics.refused(error)
    metrics.failed("BACKEND", BackendFailed("died"))
    metrics.failed("CANCELED", Cancelled("left"))
    found = LiveFigures.between(before, VersionCounters.read(metrics, 12.0))
    assert (found.answered, found.failed) == (2.5, 0.5)
    assert found.refused == {"queue_full": 2, "invalid": 1}
    assert found.batch_sizes == {4: 1, 8: 1} and found.batch_rows == 6
    assert found.queue_s == pytest.approx(0.012)
    assert 0.01 <= found.p50_s <= 0.025 < found.p99_s <= 0.05


def test_without_requests_nothing_is_known() -> None:
    counters = VersionCounters.read(ModelMetrics("m", "1"), 1.0)
    found = LiveFigures.between(counters, counters)
    assert found.answered == 0
    assert found.p99_s is found.queue_s is found.batch_rows is None


def test_a_version_that_was_loaded_again_counts_from_the_start() -> None:
    metrics = ModelMetrics("m", "1")
    empty = VersionCounters.read(metrics, 2.0)
    fold(metrics, 0.1)
    assert empty.has_restarted(VersionCounters.read(metrics, 1.0))
    assert not VersionCounters.read(metrics, 3.0).has_restarted(empty)


@given(
    st.lists(st.floats(1e-5, 29.0), min_size=1, max_size=300), st.sampled_from([0.5, 0.95, 0.99])
)
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    histogram = Histogram(BUCKETS)
    for value in values:
        histogram.add(value)
    found = quantile(BUCKETS, histogram.counts, share)
    true = float(np.quantile(values, share, method="inverted_cdf"))
    place = next(index for index, bound in enumerate(BUCKETS) if true <= bound)
    low = BUCKETS[place - 1] if place else 0.0
    assert low - 1e-12 <= found <= BUCKETS[place] + 1e-12


def test_quantiles_at_the_edges() -> None:
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [0, 0, 5], 0.5) == 2.0
    assert quantile((1.0, 2.0), [4, 0, 0], 0.5) == 0.5
    assert quantile((), [3], 0.5) is None


def test_growth_has_only_what_is_new() -> None:
    histogram, chance = Histogram(BUCKETS), random.Random(1)
    for _ in range(100):
        histogram.add(5 + chance.random())
    before = list(histogram.counts)
    assert growth_quantile(histogram, before, 0.5) is None
    histogram.add(0.02)
    assert 0.01 <= growth_quantile(histogram, before, 0.5) <= 0.025
    assert growth_quantile(histogram, [], 0.5) > 1
