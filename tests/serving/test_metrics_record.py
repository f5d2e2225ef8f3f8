"""Metrics of several shards add up to those of one."""

import random

import msgspec

from penstock.errors import BackendFailed, InvalidRequest, Overloaded
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import MetricsRecord, add, record
from penstock.types import Request


def count(metrics: ModelMetrics, chance: random.Random) -> None:
    """One event of any kind."""
    requests = []
    for _ in range(chance.randint(0, 4)):
        request = Request(None, (), 0.0)
        timings = request.timings
        timings.queued, timings.dispatched = 0.1, 0.1 + chance.random()
        timings.instance_wait_s = chance.random() / 10
        timings.completed = 2 * timings.dispatched
        timings.compute_s = (0.001, chance.random(), 0.002)
        requests.append(request)
    if requests:
        metrics.fold(requests, len(requests), requests[0].timings)
        metrics.batch_tokens.add(100 * len(requests))
    else:
        metrics.refused(chance.choice([Overloaded("full"), InvalidRequest("bad")]))
        metrics.failed("BACKEND", BackendFailed("it died"))
        metrics.fail_s += 1.5
    metrics.padded_bytes += 7
    metrics.padding_bytes += 3
    metrics.num_slow[chance.choice(["ttft", "tpot"])] += 1


def test_the_sum_of_shards_equals_one_that_counted_everything():
    chance = random.Random(1)
    whole, shards = ModelMetrics("m", "1"), [ModelMetrics("m", "1") for _ in range(3)]
    for number in range(200):
        seed = chance.random()
        count(whole, random.Random(seed))
        count(shards[number % 3], random.Random(seed))
    total = ModelMetrics("m", "1")
    for shard in shards:
        sent = msgspec.msgpack.encode(record(shard))
        add(total, msgspec.msgpack.decode(sent, type=MetricsRecord))
    expected, found = record(whole), record(total)
    assert found.batches.keys() == expected.batches.keys()
    for size, values in expected.batches.items():
        assert all(abs(a - b) < 1e-9 for a, b in zip(found.batches[size], values, strict=True))
    assert found.num_refused == expected.num_refused
    assert found.num_failures == expected.num_failures
    assert found.num_slow == expected.num_slow and min(found.num_slow.values()) > 0
    assert found.sums["num_unserved"] > 0 and found.sums["busy_s"] > 0
    for name, phase in expected.phases.items():
        assert found.phases[name].counts == phase.counts
        assert abs(found.phases[name].total - phase.total) < 1e-9
    assert found.sums.keys() == expected.sums.keys()
    assert all(abs(found.sums[name] - value) < 1e-9 for name, value in expected.sums.items())
    assert isinstance(found.sums["num_success"], int), "a scrape shows whole numbers"
