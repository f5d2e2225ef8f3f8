"""What must hold under load while things break. Timing-sensitive: run by `make verify`."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from load import Load
from served import EXAMPLES, Served, null_model, num_sockets
from waiting import wait_until

pytestmark = [pytest.mark.verify, pytest.mark.timeout(180)]

TWO = "instance_group { count: 2 kind: KIND_CPU }"


@pytest.fixture(params=["1", "2"], ids=["core", "shards"])
def faulty(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """`one` and `two` instances that take 2 ms; 13 kills its worker, 14 takes half a second."""
    options = {"a_ms": 2, "crash_on": 13, "stall_on": 14, "stall_ms": 500}
    null_model(tmp_path, "one", **options)
    null_model(tmp_path, "two", config=TWO, **options)
    served = Served(tmp_path, "--shards", request.param)
    yield served
    if served.process.poll() is None:
        assert served.terminate() == 0


def kill_and_time(served: Served) -> float:
    """Kill one worker; how long until all instances are ready again."""
    victim = served.workers()[0].pid
    wanted = served.num_ready_instances()
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while True:
        # Asked only after the death was noticed, so the count is not an old one.
        if not psutil.pid_exists(victim) and served.num_ready_instances() == wanted:
            return time.monotonic() - began
        time.sleep(0.005)


def find_ready(served: Served) -> list[int]:
    """Workers that are not loading any more, by the log."""
    ready = {int(pid) for pid in re.findall(r"ready on cpu .*\(pid (\d+)\)", served.logged())}
    return sorted(ready & {worker.pid for worker in served.workers()})


def check_nothing_lost(load: Load) -> None:
    tally = load.tally
    assert tally.num_wrong == 0
    assert tally.num_cut == 0
    assert set(tally.statuses) == {200}, tally.statuses
    assert tally.num_good == tally.num_sent


@pytest.mark.parametrize("num_instances", [1, 2])
def test_kill_9_under_load_loses_nothing(tmp_path: Path, num_instances: int):
    groups = f"instance_group {{ count: {num_instances} kind: KIND_CPU }}"
    served = Served(null_model(tmp_path, "model", config=groups, a_ms=2))

    async def scenario() -> tuple[Load, float, float]:
        # How long a start takes while the machine is busy: most of it is loading libraries.
        async with Load(served.port, 16, model="model") as load:
            load_s = await asyncio.to_thread(kill_and_time, served)
        async with Load(served.port, 16, model="model") as load:
            await asyncio.sleep(1)
            back_s = await asyncio.to_thread(kill_and_time, served)
            await asyncio.sleep(1)
        return load, load_s, back_s

    load, load_s, back_s = asyncio.run(scenario())
    assert served.terminate() == 0
    tally = load.tally
    print(
        f"\n{num_instances} instances: {tally.num_good} good, longest gap "
        f"{tally.longest_gap_s:.3f} s, back after {back_s:.3f} s"
    )
    check_nothing_lost(load)
    assert back_s < 1.0 + load_s
    assert tally.longest_gap_s < 1.0 + load_s


def test_a_request_that_kills_its_worker_fails_alone_under_load(faulty: Served):
    async def scenario() -> tuple[Load, list]:
        async with Load(faulty.port, 16, model="two") as load:
            await asyncio.sleep(0.5)
            poison = await asyncio.gather(
                *(asyncio.to_thread(faulty.infer, "two", "x", "INT32", [13]) for _ in range(3))
            )
            await asyncio.sleep(0.5)
        return load, poison

    load, poison = asyncio.run(scenario())
    # They have the same body: once it has killed twice, by whichever of them, it is refused.
    texts = {500: "was killed by SIGABRT while running it, twice", 422: "killed its worker"}
    assert all(texts[status] in answer["error"] for status, answer in poison)
    check_nothing_lost(load)


def test_abandoned_requests_delay_the_next_by_at_most_one_batch(faulty: Served):
    async def scenario() -> float:
        load = Load(faulty.port, 0, model="one")
        writers = []
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", faulty.port)
            writer.write(load.message(load.payload(14)))
            writers.append(writer)
        await asyncio.sleep(0.2)
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)
        began = time.monotonic()
        status, _ = await asyncio.to_thread(faulty.infer, "one", "x", "INT32", [1])
        assert status == 200
        return time.monotonic() - began

    waited_s = asyncio.run(scenario())
    print(f"\nthe next request waited {waited_s:.3f} s; one batch takes 0.502 s")
    assert waited_s < 0.502 + 0.25


def test_sigterm_under_load(faulty: Served):
    async def scenario() -> tuple[Load, float, int]:
        async with Load(faulty.port, 16, model="two") as load:
            await asyncio.sleep(1)
            # One slow request keeps the drain going long enough to look at it.
            slow = asyncio.create_task(asyncio.to_thread(faulty.infer, "one", "x", "INT32", [14]))
            await asyncio.sleep(0.1)
            processes = faulty.processes()
            began = time.monotonic()
            faulty.process.send_signal(signal.SIGTERM)
            while await asyncio.to_thread(faulty.status, "/v2/health/ready") == 200:
                await asyncio.sleep(0.001)
            noticed_s = time.monotonic() - began
            status, answer = await slow
            assert (status, answer["outputs"][0]["data"]) == (200, [14])
            code = await asyncio.to_thread(faulty.finish, processes)
            load.stop()
        return load, noticed_s, code

    load, noticed_s, code = asyncio.run(scenario())
    print(f"\nnot ready after {noticed_s:.3f} s, statuses {load.tally.statuses}, exit {code}")
    assert code == 0
    assert noticed_s < 0.1
    assert load.tally.num_wrong == 0
    assert set(load.tally.statuses) == {200, 503}


@pytest.mark.parametrize(
    "duration_s",
    [
        pytest.param(20, id="20s"),
        pytest.param(600, id="10min", marks=pytest.mark.timeout(720)),
    ],
)
def test_a_random_killer(tmp_path: Path, duration_s: int):
    """An instance that is ready is killed every second; each time the clients are served on."""
    null_model(tmp_path, "two", config=TWO, a_ms=2)
    chance = random.Random(1)

    async def scenario(served: Served) -> tuple[Load, int]:
        kills = 0
        async with Load(served.port, 16, model="two") as load:
            ends = time.monotonic() + duration_s
            while time.monotonic() < ends:
                await asyncio.sleep(1)
                ready = find_ready(served)
                if ready:
                    os.kill(chance.choice(ready), signal.SIGKILL)
                    kills += 1
        return load, kills

    with Served(tmp_path) as served:
        load, kills = asyncio.run(scenario(served))
    tally = load.tally
    print(
        f"\n{kills} kills in {duration_s} s: {tally.num_sent - tally.num_good} of "
        f"{tally.num_sent} requests lost, statuses {tally.statuses}, longest gap "
        f"{tally.longest_gap_s:.2f} s, p99 {tally.percentile_s(0.99) * 1e3:.1f} ms"
    )
    assert kills >= 0.7 * duration_s
    assert tally.num_wrong == tally.num_cut == 0
    assert tally.num_good >= 0.999 * tally.num_sent
    # Both instances may be gone at once; a start on a busy machine takes seconds.
    assert tally.longest_gap_s < 5


def test_a_killer_of_shards_for_twenty_seconds(tmp_path: Path):
    """Only who was connected to a killed shard is cut off, and nobody is answered twice."""
    null_model(tmp_path, "two", config=TWO, a_ms=2)
    served = Served(tmp_path, "--shards", "3")
    chance = random.Random(1)

    async def scenario() -> tuple[Load, int, int]:
        kills = num_own = 0
        async with Load(served.port, 32, model="two") as load:
            ends = time.monotonic() + 20
            while time.monotonic() < ends:
                await asyncio.sleep(1)
                shards = served.shards()
                # One stays that listens, so that there is always somebody to answer.
                if len(shards) > 1:
                    victim = chance.choice(shards)
                    os.kill(victim.pid, signal.SIGSTOP)
                    num_own += num_sockets(victim)
                    # It dies at work, not at rest.
                    os.kill(victim.pid, signal.SIGCONT)
                    await asyncio.sleep(0.02)
                    os.kill(victim.pid, signal.SIGKILL)
                    kills += 1
        return load, kills, num_own

    load, kills, num_own = asyncio.run(scenario())
    ended = dict(successes_and_cancels(served))
    tally = load.tally
    print(
        f"\n{kills} kills of {num_own} connections, {tally.num_cut} cut, {tally.num_good} good, "
        f"statuses {tally.statuses}, {ended}"
    )
    assert tally.num_wrong == 0 and set(tally.statuses) == {200}
    assert tally.num_good + tally.num_cut >= tally.num_sent
    # A connection that a dying shard never accepted is cut too.
    assert tally.num_cut <= 2 * num_own
    # What was computed was seen, or was being computed for somebody who was cut off. A killed shard
    # loses the counts of its last second.
    assert ended["success"] <= tally.num_good + tally.num_cut
    assert ended["pending"] == 0
    assert served.terminate() == 0


def successes_and_cancels(served: Served) -> Iterator[tuple[str, int]]:
    text = served.get("/metrics")[1].decode()
    for name, metric in (
        ("success", r"nv_inference_request_success{model=\"two\",version=\"1\"}"),
        ("cancelled", r"nv_inference_request_failure{.*reason=\"CANCELED\"}"),
        ("pending", r"nv_inference_pending_request_count{.*}"),
    ):
        yield name, int(re.search(rf"^{metric} (\d+)", text, re.M)[1])


def test_a_shard_that_stands_still_is_replaced(tmp_path: Path):
    served = Served(null_model(tmp_path, "two", a_ms=2), "--shards", "2")
    wait_until(lambda: served.has_shards(2))
    victim, other = served.shards()
    os.kill(victim.pid, signal.SIGSTOP)
    # It is killed when it has not answered for ten seconds.
    while victim.is_running():
        time.sleep(0.1)
    statuses = set()
    while len(served.shards()) < 2:
        time.sleep(0.1)
    for value in range(50):
        statuses.add(served.infer("two", "x", "INT32", [value])[0])
    assert statuses == {200}
    assert other.pid in {shard.pid for shard in served.shards()}
    assert served.terminate() == 0


@pytest.mark.parametrize("num_shards", ["1", "2"])
def test_canaries_under_load_on_the_example(num_shards: str):
    served = Served(EXAMPLES, "--shards", num_shards)

    async def scenario() -> Load:
        async with Load(served.port, 64) as load:
            while load.tally.num_sent < 100_000:
                await asyncio.sleep(0.1)
        return load

    load = asyncio.run(scenario())
    assert served.terminate() == 0
    check_nothing_lost(load)
    print(f"\n{load.tally.num_good} answers, every bit checked")


@pytest.mark.timeout(1200)
def test_500_cycles_of_unload_and_load_cost_the_core_at_most_2_mb(tmp_path: Path):
    """Grew by 350 KiB a cycle while unloaded models waited for the garbage collector."""
    null_model(tmp_path, "model")
    served = Served(tmp_path, "--model-control-mode", "explicit", "--load-model", "model")
    core = psutil.Process(served.process.pid)

    def cycle(count: int) -> int:
        """Return the core's memory after this many cycles."""
        for _ in range(count):
            for verb in ("unload", "load"):
                status, answer = served.post(f"/v2/repository/models/model/{verb}")
                assert status == 200, answer
        return core.memory_info().rss

    before = cycle(20)
    num_fds = core.num_fds()
    grown = cycle(500) - before
    print(f"\n500 cycles: {grown / 1e6:+.2f} MB, from {before / 1e6:.1f} MB")
    assert core.num_fds() <= num_fds + 1, "but for one that is being closed"
    assert served.terminate() == 0
    assert grown <= 2e6
