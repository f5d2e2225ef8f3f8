"""The real server under more load than it can serve: slo mode beside Triton's rules.

The model computes nothing for 4 ms + 0.75 ms a row, 16 rows at most: 16 rows in 16 ms, a capacity
of 1,000/s. SLO: p99 < 50 ms. The load generator is open-loop and shares the machine's cores with
the server, so its own lateness is part of every figure. Run by `make verify`.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import uvloop
from load import Load
from open_loop import OpenLoop, OpenTally, intended_times, percentile, phases
from served import Served, null_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(120)]

CAPACITY = 1000.0
SLO_S = 0.050
DURATION_S = 6.0
NUM_CONNECTIONS = 256
SLO = 'parameters { key: "penstock.slo" value { string_value: "p99 < 50ms" } }'
# A model that is slower: 32 rows in 148 ms, a capacity of 216/s.
SLOW_SLO = SLO.replace("50ms", "250ms")
SLOW_CAPACITY, SLOW_SLO_S = 32 / 0.148, 0.250
# The default of penstock.max_wait_ms, a batch, and what the client and the sockets add.
MAX_WAIT_S = 1.0 + 0.016 + 0.1
# Normal load, overload, normal load again: seconds of each, and how soon p99 must be normal again.
NORMAL, NORMAL_S = 0.5, 10.0
HIGH, HIGH_S = 5.0, 60.0
RECOVERY_S = 2.0
# Limit of memory growth while 256 connections wait: queues are bounded.
MAX_GROWTH_BYTES = 64 << 20
MAX_LATE_GROWTH_BYTES = 10 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root: Path = tmp_path_factory.mktemp("overload")
    null_model(root, "slo", config=SLO, max_batch=16, a_ms=4, c_ms=0.75)
    null_model(root, "fixed", max_batch=16, a_ms=4, c_ms=0.75)
    null_model(root, "slow", config=SLOW_SLO, max_batch=32, a_ms=20, c_ms=4)
    served = Served(root)
    yield served
    assert served.terminate() == 0


def offer(
    served: Served,
    model: str,
    load: float,
    cv: float,
    slo_s: float = SLO_S,
    num_connections: int = NUM_CONNECTIONS,
) -> OpenTally:
    capacity = SLOW_CAPACITY if model == "slow" else CAPACITY
    times = intended_times(load * capacity, cv, DURATION_S, seed=int(load + cv))
    tally = uvloop.run(OpenLoop(served.port, model, times).run(num_connections))
    print(
        f"\n{model:5} {load:4g}x {'Poisson' if cv == 1 else f'gamma CV {cv:g}':10} "
        f"goodput {tally.goodput(slo_s):5.0f}/s, "
        f"accepted p99 {percentile(tally.answered_s, 0.99) * 1e3:7.1f} ms, "
        f"refused {len(tally.refused_s)} p99 {percentile(tally.refused_s, 0.99) * 1e3:.1f} ms, "
        f"no answer {tally.num_due - len(tally.answered_s) - len(tally.refused_s)}"
    )
    assert tally.num_cut == 0
    assert set(tally.statuses) <= {200, 503}
    return tally


@pytest.mark.parametrize("cv", [1.0, 3.0], ids=["poisson", "gamma3"])
@pytest.mark.parametrize("load", [2.0, 10.0], ids=["2x", "10x"])
def test_slo_mode_keeps_goodput_and_latency(served: Served, load: float, cv: float):
    tally = offer(served, "slo", load, cv)
    assert tally.goodput(SLO_S) >= 0.90 * CAPACITY
    assert percentile(tally.answered_s, 0.99) <= SLO_S
    assert percentile(tally.refused_s, 0.99) <= 0.010
    assert len(tally.answered_s) + len(tally.refused_s) == tally.num_due


@pytest.mark.parametrize("cv", [1.0, 3.0], ids=["poisson", "gamma3"])
@pytest.mark.parametrize("load", [2.0, 10.0], ids=["2x", "10x"])
def test_tritons_rules_beside_it_lose_everything(served: Served, load: float, cv: float):
    tally = offer(served, "fixed", load, cv)
    assert tally.goodput(SLO_S) < 0.5 * CAPACITY


@pytest.mark.parametrize("load", [2.0, 10.0], ids=["2x", "10x"])
def test_slow_models_keep_both_promises_too(served: Served, load: float):
    tally = offer(served, "slow", load, 1.0, SLOW_SLO_S)
    assert tally.goodput(SLOW_SLO_S) >= 0.75 * SLOW_CAPACITY
    assert percentile(tally.answered_s, 0.99) <= SLOW_SLO_S
    assert percentile(tally.refused_s, 0.99) <= 0.010


def test_without_an_slo_no_request_waits_longer_than_the_default(served: Served):
    # As many connections as requests that may wait in the server, and more.
    tally = offer(served, "fixed", 2.0, 1.0, MAX_WAIT_S, num_connections=2000)
    assert tally.goodput(MAX_WAIT_S) >= 0.85 * CAPACITY
    assert percentile(tally.answered_s, 0.99) <= MAX_WAIT_S
    assert percentile(tally.refused_s, 0.99) <= 0.050


def between(values: list[float], due_s: list[float], begin_s: float, end_s: float) -> list[float]:
    """Latencies of the requests that were due in that time."""
    return [each for each, at in zip(values, due_s, strict=True) if begin_s <= at < end_s]


def measure_peak(served: Served) -> float:
    """Requests per second of the model without an SLO, with 64 always in flight."""
    duration_s = 4.0

    async def scenario() -> Load:
        async with Load(served.port, 64, model="fixed") as load:
            await asyncio.sleep(duration_s)
        return load

    return uvloop.run(scenario()).tally.num_good / duration_s


@contextmanager
def sampled_memory(served: Served) -> Iterator[list[int]]:
    """RSS of the core and its workers, once a second."""
    samples: list[int] = []
    is_over = threading.Event()
    core = psutil.Process(served.process.pid)

    def sample() -> None:
        while not is_over.wait(1.0):
            samples.append(sum(each.memory_info().rss for each in (core, *served.workers())))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def test_a_minute_of_5x_overload_and_back(served: Served):
    peak = measure_peak(served)
    parts = [
        (NORMAL * CAPACITY, NORMAL_S),
        (HIGH * CAPACITY, HIGH_S),
        (NORMAL * CAPACITY, NORMAL_S),
    ]
    times = phases(parts, seed=5)
    with sampled_memory(served) as rss:
        tally = uvloop.run(OpenLoop(served.port, "slo", times).run(NUM_CONNECTIONS))
    end_s = NORMAL_S + HIGH_S
    answered = (tally.answered_s, tally.answered_at_s)
    high = between(*answered, NORMAL_S, end_s)
    refused = between(tally.refused_s, tally.refused_at_s, NORMAL_S, end_s)
    late = between(tally.refused_s, tally.refused_at_s, end_s + RECOVERY_S, times[-1])
    goodput = sum(each <= SLO_S for each in high) / HIGH_S
    before_p99_s = percentile(between(*answered, 0.0, NORMAL_S), 0.99)
    after_p99_s = percentile(between(*answered, end_s + RECOVERY_S, times[-1]), 0.99)
    start, begin = rss[int(NORMAL_S) - 2], rss[int(NORMAL_S + HIGH_S / 4)]
    growth, late_growth = max(rss) - start, max(rss[int(NORMAL_S + HIGH_S / 4) :]) - begin
    print(
        f"\n5x for {HIGH_S:.0f} s: goodput {goodput:.0f}/s of peak {peak:.0f}/s, accepted p99 "
        f"{percentile(high, 0.99) * 1e3:.1f} ms, {len(refused)} refused with p99 "
        f"{percentile(refused, 0.99) * 1e3:.1f} ms; normal p99 {before_p99_s * 1e3:.1f} ms before, "
        f"{after_p99_s * 1e3:.1f} ms from {RECOVERY_S:.0f} s after; memory {growth / 1e6:+.1f} MB, "
        f"{late_growth / 1e6:+.1f} MB in the last 45 s"
    )
    assert tally.num_cut == 0 and set(tally.statuses) == {200, 503}
    assert len(tally.answered_s) + len(tally.refused_s) == tally.num_due
    # Normal again: next to nothing is refused.
    assert len(late) <= 0.01 * NORMAL * CAPACITY * NORMAL_S
    assert goodput >= 0.95 * peak
    assert percentile(high, 0.99) <= SLO_S
    assert percentile(refused, 0.99) <= 0.010
    # As before, but for a batch more or less.
    assert after_p99_s <= before_p99_s + 0.016
    assert growth <= MAX_GROWTH_BYTES and late_growth <= MAX_LATE_GROWTH_BYTES
