"""Reloads, killed workers, overload and slow clients at the same time. Run by `make verify`.

The model computes nothing for 8 ms + 1.5 ms a row, 16 rows at most, in two instances: 1,000/s. SLO:
p99 < 100 ms. Requests come at 0.4 of that, and 5 s in 20 at five times as much.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from open_loop import OpenLoop, OpenTally, percentile, phases
from served import Served, null_model
from slow_clients import SlowClients

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]

CONFIG = """
parameters { key: "penstock.slo" value { string_value: "p99 < 100ms" } }
instance_group { count: 2 kind: KIND_CPU }
"""
CAPACITY, SLO_S = 1000.0, 0.100
NORMAL, HIGH = 0.4 * CAPACITY, 5 * CAPACITY
NORMAL_S, HIGH_S = 15.0, 5.0
KILL_EVERY_S, RELOAD_EVERY_S = 10.0, 15.0
# After a fault, requests may take longer, or be refused, for this long.
WINDOW_S = 2.0
SLOW = {"idle": 1000, "head": 100, "body": 100}


@dataclass
class Faults:
    """When they happened, since the beginning, and whether each reload succeeded."""

    kills_s: list[float] = field(default_factory=list)
    reloads_s: list[float] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    @property
    def all_s(self) -> list[float]:
        return [*self.kills_s, *self.reloads_s]


async def kill_now_and_then(served: Served, client: OpenLoop, faults: Faults) -> None:
    chance = random.Random(24)
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        workers = await asyncio.to_thread(served.workers)
        faults.kills_s.append(time.monotonic() - client.began)
        os.kill(chance.choice(workers).pid, signal.SIGKILL)


async def reload_now_and_then(served: Served, client: OpenLoop, faults: Faults) -> None:
    while True:
        await asyncio.sleep(RELOAD_EVERY_S)
        faults.reloads_s.append(time.monotonic() - client.began)
        status, _ = await asyncio.to_thread(served.post, "/v2/repository/models/model/load")
        faults.statuses.append(status)


async def run_all(served: Served, times: list[float]) -> tuple[OpenTally, Faults]:
    client, faults = OpenLoop(served.port, "model", times), Faults()
    breaking = [
        asyncio.ensure_future(each(served, client, faults))
        for each in (kill_now_and_then, reload_now_and_then)
    ]
    tally = await client.run(256)
    for task in breaking:
        task.cancel()
    ended = await asyncio.gather(*breaking, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
    return tally, faults


def is_outside(at_s: float, begins_s: Sequence[float], length_s: float) -> bool:
    return not any(begin <= at_s < begin + length_s for begin in begins_s)


@pytest.mark.parametrize("duration_s", [60, 600], ids=["1min", "10min"])
def test_everything_at_once(tmp_path: Path, duration_s: int):
    null_model(tmp_path, "model", config=CONFIG, max_batch=16, a_ms=8, c_ms=1.5)
    served = Served(tmp_path, "--model-control-mode", "explicit", "--load-model", "model")
    num_bursts = int(duration_s / (NORMAL_S + HIGH_S))
    times = phases([(NORMAL, NORMAL_S), (HIGH, HIGH_S)] * num_bursts, seed=24)
    bursts_s = [NORMAL_S + number * (NORMAL_S + HIGH_S) for number in range(num_bursts)]
    slow = SlowClients(served.port)
    try:
        slow.open(**SLOW)
        tally, faults = uvloop.run(run_all(served, times))
        num_slow = sum(each.num_opened for each in slow.open().values())
    finally:
        slow.close()
    # A refusal is an answer where there is more load than capacity, or just after a fault.
    strange = [
        at
        for at in tally.refused_at_s
        if is_outside(at, bursts_s, HIGH_S + 1) and is_outside(at, faults.all_s, WINDOW_S)
    ]
    num_good = len(tally.answered_s)
    num_unanswered = tally.num_due - num_good - len(tally.refused_s)
    num_failed = sum(n for status, n in tally.statuses.items() if status not in (200, 503))
    num_lost = len(strange) + num_unanswered + num_failed
    availability = num_good / (num_good + num_lost)
    calm = [
        latency
        for latency, at in zip(tally.answered_s, tally.answered_at_s, strict=True)
        if is_outside(at, faults.all_s, WINDOW_S)
    ]
    print(
        f"\nmixed faults, {duration_s} s: {availability:.4%} of {num_good + num_lost} accepted "
        f"requests answered, p99 {percentile(calm, 0.99) * 1e3:.1f} ms outside faults and "
        f"{percentile(tally.answered_s, 0.99) * 1e3:.1f} ms in all; {len(faults.kills_s)} kills, "
        f"{len(faults.reloads_s)} reloads, {num_bursts} bursts of 5x, {num_slow} slow connections, "
        f"{len(tally.refused_s)} refused"
    )
    assert set(faults.statuses) == {200}
    assert tally.num_cut == 0
    assert availability >= 0.999
    assert percentile(calm, 0.99) <= SLO_S
    assert served.status("/v2/health/ready") == 200
    assert served.terminate() == 0
