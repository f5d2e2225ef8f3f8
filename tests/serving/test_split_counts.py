"""Counts of a rollout and their sum over shards."""

import math

import msgspec

from penstock.errors import (
    BackendFailed,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    Overloaded,
    QuotaExceeded,
)
from penstock.serving.split_counts import (
    LATENCY,
    LENGTH,
    SECONDS,
    OutputCounts,
    SideCounts,
    SplitCounts,
    is_failure,
    is_miss,
)

LIMITS = ((LATENCY, 0.02), (LATENCY, 0.001), (LENGTH, 10.0))


def side(*values: float) -> SideCounts:
    counts = SideCounts()
    for value in values:
        counts.add(LATENCY, value, LIMITS)
    return counts


def test_values_beyond_limits_are_counted_exactly() -> None:
    counts = side(0.02, 0.0200001, 0.0005, math.inf)
    assert counts.late == [2, 3, 0]
    assert counts.count() == counts.num_requests == 4
    assert counts.totals[LATENCY] < 0.05


def test_values_above_an_edge() -> None:
    counts = side(0.001, 0.01, 0.1, math.inf)
    edge = next(index for index, bound in enumerate(SECONDS) if bound >= 0.01)
    assert counts.above(LATENCY, edge) == 2
    assert counts.above("ttft", edge) == 0


def test_shards_are_added_up_and_travel() -> None:
    one = SplitCounts(side(0.01), side(0.03), {"y": OutputCounts(2, 0.5, 0.1, 0.1)}, 2, 0.5, 1)
    other = SplitCounts(SideCounts(num_failed=1), side(0.03, 0.5), num_mirrored=4, num_dropped=2)
    other.outputs["y"] = OutputCounts(1, 1.0, 0.4, 0.4)
    total = SplitCounts()
    for each in (other, one):
        total.merge(msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=SplitCounts))
    assert total.stable.num_requests == 2
    assert total.candidate.late == [3, 3, 0]
    assert total.outputs == {"y": OutputCounts(3, 1.5, 0.5, 0.4)}
    assert (total.num_compared, total.num_disagreeing, total.num_fallbacks) == (2, 0.5, 1)
    assert (total.num_mirrored, total.num_dropped) == (4, 2)


def test_faults_of_clients_are_neither_failures_nor_misses() -> None:
    failures = [BackendFailed("x"), NotReady("x")]
    misses = [Overloaded("x"), DeadlineExceeded("x")]
    others = [InvalidRequest("x"), QuotaExceeded("x"), Cancelled("x")]
    assert all(is_failure(each) and not is_miss(each) for each in failures)
    assert all(is_miss(each) and not is_failure(each) for each in misses)
    assert not any(is_miss(each) or is_failure(each) for each in others)
