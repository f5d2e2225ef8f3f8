"""Instances that hang or exceed their memory limit, under load: only their batches fail.

Two instances of a Python model serve a closed loop. A hang is a worker that the kernel stopped, or
model code that does not return; `penstock.hang_s` ends it. Run by `make verify`.
"""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from load import Load
from served import Served, is_alive, python_model

pytestmark = [pytest.mark.verify, pytest.mark.timeout(180)]

HANG_S = 3.0
MAX_BATCH = 4
NUM_CLIENTS = 16
MEMORY_BYTES = 500 << 20
HANGS, ALLOCATES, LEAKS = 13, 15, 16
# Each batch needs 8 MiB: a worker that is out of memory answers none.
CODE = f"""
import time

kept = []

def infer(inputs):
    values = inputs["x"][:, 0].tolist()
    while {HANGS} in values:
        time.sleep(1)
    held = []
    while {ALLOCATES} in values:
        held.append(bytearray(32 << 20))
    while {LEAKS} in values:
        kept.append(bytearray(1 << 20))
    scratch = bytearray(8 << 20)
    time.sleep(0.002)
    return {{"y": inputs["x"]}}
"""
CONFIG = "instance_group { count: 2 kind: KIND_CPU } dynamic_batching { }"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    limits = {"hang_s": HANG_S, "memory_bytes": MEMORY_BYTES}
    server = Served(python_model(tmp_path, "model", CODE, config=CONFIG, **limits))
    yield server
    assert server.terminate() == 0


def put_under_load(served: Served, fault: Callable[[], Awaitable[None]]) -> Load:
    """Serve closed-loop clients from one second before the fault until both instances are ready
    again."""

    async def scenario() -> Load:
        async with Load(served.port, NUM_CLIENTS, model="model") as load:
            await asyncio.sleep(1)
            await fault()
            await wait_for_instances(served)
            await asyncio.sleep(1)
        return load

    return asyncio.run(scenario())


async def wait_for_instances(served: Served) -> None:
    while await asyncio.to_thread(served.num_ready_instances) < 2:
        await asyncio.sleep(0.02)


def describe(load: Load) -> str:
    tally = load.tally
    num_refused = tally.statuses.get(503, 0)
    num_failed = tally.num_sent - tally.num_good - num_refused
    return f"{num_failed} of {tally.num_sent} other requests failed, {num_refused} refused"


def check_others(load: Load, max_failed: int = 0, max_refused: int = 0) -> None:
    """Every client is answered, at most this many times with an error or a refusal."""
    tally = load.tally
    assert tally.num_wrong == tally.num_cut == 0
    assert set(tally.statuses) <= {200, 500, 503}, tally.statuses
    assert tally.statuses.get(500, 0) <= max_failed
    assert tally.statuses.get(503, 0) <= max_refused


def test_a_worker_that_stands_still_is_replaced(served: Served):
    times: list[float] = []

    async def stop_one() -> None:
        victim = served.workers()[0]
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP)
        while is_alive(victim):
            await asyncio.sleep(0.01)
        times.append(time.monotonic() - began)
        await wait_for_instances(served)
        times.append(time.monotonic() - began)

    load = put_under_load(served, stop_one)
    killed_s, replaced_s = times
    print(
        f"\nSIGSTOP, time-out {HANG_S:g} s: killed after {killed_s:.2f} s, replaced after "
        f"{replaced_s:.2f} s, {describe(load)}"
    )
    # Its batch runs again in another worker.
    check_others(load)
    assert killed_s <= HANG_S + 1


def test_a_request_that_never_ends_fails_alone(served: Served):
    """It is tried twice, so two workers hang one after the other."""
    answers: list[tuple[int, dict[str, str], float]] = []

    async def hang() -> None:
        began = time.monotonic()
        status, answer = await asyncio.to_thread(served.infer, "model", "x", "INT32", [HANGS])
        answers.append((status, answer, time.monotonic() - began))

    load = put_under_load(served, hang)
    ((status, answer, took_s),) = answers
    print(
        f"\ncode that never returns, time-out {HANG_S:g} s: given up after two hangs and "
        f"{took_s:.2f} s, {describe(load)}"
    )
    assert status == 500 and "twice" in answer["error"]
    assert took_s <= 2 * (HANG_S + 1)
    check_others(load)


@pytest.mark.parametrize("value", [ALLOCATES, LEAKS], ids=["one batch", "leak"])
def test_only_the_batch_that_exceeds_the_memory_limit_fails(served: Served, value: int):
    """A worker that does not get its memory back is replaced: every later batch would fail."""
    before = {each.pid for each in served.workers()}
    answers: list[tuple[int, dict[str, str]]] = []

    async def exceed() -> None:
        for _ in range(2):
            asked = asyncio.to_thread(served.infer, "model", "x", "INT32", [value])
            answers.append(await asked)
            await asyncio.sleep(3)

    load = put_under_load(served, exceed)
    replaced = before - {each.pid for each in served.workers()}
    print(
        f"\n2 requests beyond the memory limit ({'leak' if value == LEAKS else 'one batch'}): "
        f"{len(replaced)} workers replaced, {describe(load)}"
    )
    for status, answer in answers:
        assert status == 500 and "MemoryError" in answer["error"], answer
    # A leak takes both workers, one after the other: in a batch, and when it is tried alone.
    # Requests that would wait too long for the next ones are refused, each client once a time.
    max_refused = 2 * NUM_CLIENTS if value == LEAKS else 0
    check_others(load, 2 * (MAX_BATCH - 1), max_refused)
    assert bool(replaced) == (value == LEAKS)
