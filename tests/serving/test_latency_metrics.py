"""Latencies that are counted on request, and how shards' counts add up."""

from penstock.serving.latency_metrics import LatencyMetrics
from penstock.types import Timings


def timings() -> Timings:
    return Timings(10.0, queued=10.1, dispatched=10.3, compute_s=(0.01, 0.2, 0.02), completed=10.6)


def test_an_answer_counts_in_the_histogram_and_in_each_summary():
    metrics = LatencyMetrics(has_histogram=True, has_summaries=True, clock=lambda: 1.0)
    metrics.add(timings())
    record = metrics.record()
    assert record.first_response is not None
    assert record.first_response.counts == [0, 0, 1, 0, 0]
    assert round(record.first_response.total) == 600
    totals = {name: round(each.total, 6) for name, each in record.summaries.items()}
    assert totals == {
        "request": 0.6,
        "queue": 0.2,
        "compute_input": 0.01,
        "compute_infer": 0.2,
        "compute_output": 0.02,
    }


def test_with_a_cache_the_summary_of_requests_gives_way_to_those_of_the_cache():
    metrics = LatencyMetrics(has_histogram=False, has_summaries=True, has_cache=True)
    metrics.add(timings())
    metrics.observe("cache_hit", 0.5)
    record = metrics.record()
    assert record.first_response is None
    assert "request" not in record.summaries
    assert record.summaries["cache_hit"].count == 1


def test_records_of_shards_add_up():
    both = [LatencyMetrics((1.0, 2.0), has_histogram=True, has_summaries=True) for _ in range(2)]
    for each in both:
        each.add_first(0.0015)
        each.observe("queue", 0.1)
    nothing = LatencyMetrics(has_histogram=False, has_summaries=False).record()
    total = nothing.plus(both[0].record()).plus(both[1].record())
    assert total.first_response is not None
    assert (total.first_response.counts, total.first_response.bounds) == ([0, 2, 0], (1.0, 2.0))
    assert total.summaries["queue"].count == 2
