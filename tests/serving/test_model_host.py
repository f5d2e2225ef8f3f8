"""The core's part of a model with several shards: one judge, whoever has the requests."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from doubles import FakeClock, Puppets, settle

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model_host import DirectLink, ModelHost
from penstock.types import TensorSpec
from penstock.wire import frames

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=8,
    num_instances=2,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 16),
)


class Shard:
    """A shard's part of the model that has no requests: the test says what it lost."""

    def __init__(self, host: ModelHost, number: int) -> None:
        self.core = DirectLink(host, number)
        self.heard: list[object] = []
        self.workers: dict[int, frames.SetWorker] = {}
        self.quarantine = frames.SetQuarantine({}, {})
        self.reason = ""
        self.num_granted = 0

    def open_model(self, proved: frames.ModelProved) -> None:
        self.heard.append(proved)

    def load_failed(self, problems: Sequence[str]) -> None:
        self.heard.append(tuple(problems))

    def set_worker(self, worker: frames.SetWorker, sock: socket.socket) -> None:
        sock.close()
        self.workers[worker.index] = worker

    def may_try(self) -> None:
        self.num_granted += 1

    def died(self, died: frames.Died) -> None:
        self.heard.append(died)

    def verdict(self, verdict: frames.Verdict) -> None:
        self.heard.append(verdict)

    def set_quarantine(self, quarantine: frames.SetQuarantine) -> None:
        self.quarantine = quarantine

    def set_reason(self, reason: str) -> None:
        self.reason = reason

    def tick(self) -> None:
        self.heard.append("tick")


def run(
    scenario: Callable[[ModelHost, Puppets, list[Shard]], Awaitable[None]],
    config: ModelConfig = CONFIG,
) -> None:
    async def main() -> None:
        puppets = Puppets()
        host = ModelHost(config, puppets, FakeClock(), ModelMetrics("echo", "1"))
        shards = [Shard(host, number) for number in range(3)]
        for number, shard in enumerate(shards[:2]):
            host.join(number, shard)
        loading = asyncio.ensure_future(host.load())
        await puppets.step_all()
        with contextlib.suppress(ConfigError):
            await loading
        await scenario(host, puppets, shards)
        stopping = asyncio.ensure_future(host.stop())
        while not stopping.done():
            await puppets.step_all()
        await stopping

    asyncio.run(main())


async def kill(host: ModelHost, index: int = 0) -> int:
    """Kill the worker of a place; return its life."""
    instance = host.instances[index]
    life = instance.life
    instance.child.life.kill("was killed by SIGSEGV")
    await settle()
    return life


def verdicts(shard: Shard) -> list[frames.Verdict]:
    return [each for each in shard.heard if isinstance(each, frames.Verdict)]


def test_all_shards_hear_of_the_workers_when_all_are_ready():
    async def scenario(host, puppets, shards):
        for shard in shards[:2]:
            (proved,) = shard.heard
            assert isinstance(proved, frames.ModelProved) and len(proved.timings) == 2
            assert sorted(shard.workers) == [0, 1]
            assert {each.life for each in shard.workers.values()} == {1, 2}
        late = shards[2]
        assert late.heard == []
        host.join(2, late)
        assert isinstance(late.heard[0], frames.ModelProved) and sorted(late.workers) == [0, 1]

    run(scenario)


def test_a_death_is_judged_when_all_shards_have_said_what_they_lost():
    async def scenario(host, puppets, shards):
        one, two = shards[:2]
        life = await kill(host)
        died = frames.Died(0, life, "was killed by SIGSEGV")
        assert one.heard[-1] == two.heard[-1] == died
        one.core.lost(frames.Lost(life, 1, b"body", b"key"))
        one.core.lost(frames.Lost(life, 1, b"body", b"key"))
        await settle()
        assert verdicts(one) == [] and host.instances[0].child is None, "nothing before the other"
        two.core.lost(frames.Lost(life))
        assert verdicts(one) == verdicts(two) == [frames.Verdict(life, True, True, True)]
        await puppets.step_all()
        assert host.instances[0].crashes.num_deaths == 0, "the request is to blame"
        assert one.workers[0].life == two.workers[0].life == host.instances[0].life > life

    run(scenario)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (3, 0), (0, 2)])
def test_no_request_is_blamed_for_a_death_in_company_also_of_another_shard(first, second):
    async def scenario(host, puppets, shards):
        one, two = shards[:2]
        for _ in range(2):
            life = await kill(host)
            one.core.lost(frames.Lost(life, first, b"a" if first == 1 else b""))
            two.core.lost(frames.Lost(life, second, b"b" if second == 1 else b""))
            assert verdicts(two)[-1] == frames.Verdict(life, False, False, True)
            host.instances[0].crashes.recovered()
            await asyncio.sleep(0.11)  # The second restart in a row waits for 0.1 s.
            await puppets.step_all()
        assert one.quarantine == frames.SetQuarantine({}, {})

    run(scenario)


def test_a_quarantine_reaches_every_shard_before_the_verdict():
    async def scenario(host, puppets, shards):
        one, two = shards[:2]
        for teller, other in ((one, two), (two, one)):
            life = await kill(host)
            other.core.lost(frames.Lost(life))
            assert two.quarantine.bodies == {}
            teller.core.lost(frames.Lost(life, 1, b"poison"))
            await puppets.step_all()
        assert one.quarantine.bodies.keys() == two.quarantine.bodies.keys() == {b"poison"}
        host.join(2, shards[2])
        assert shards[2].quarantine == one.quarantine

    run(scenario)


def test_an_answer_of_any_shard_shows_that_the_model_works():
    async def scenario(host, puppets, shards):
        one, two = shards[:2]
        for number in range(20):
            life = await kill(host)
            two.core.lost(frames.Lost(life))
            one.core.lost(frames.Lost(life, 1, b"poison %d" % number))
            assert verdicts(one)[-1].is_excused and verdicts(two)[-1].awaits_answer
            two.core.answered()
            await puppets.step_all()
        assert host.instances[0].crashes.num_deaths == 0

    run(scenario)


def test_a_death_with_which_nothing_was_lost_counts_towards_a_crash_loop():
    async def scenario(host, puppets, shards):
        life = await kill(host)
        for shard in shards[:2]:
            shard.core.lost(frames.Lost(life))
        assert verdicts(shards[0]) == [frames.Verdict(life, False, False, False)]
        assert host.instances[0].crashes.num_deaths == 1
        assert shards[1].reason == "its worker was killed by SIGSEGV"

    run(scenario)


def test_a_leaving_worker_is_stopped_when_every_shard_has_its_answers():
    async def scenario(host, puppets, shards):
        one, two = shards[:2]
        instance = host.instances[1]
        host.supervisor.handle(instance, frames.Leaving("its memory is full"))
        life = instance.life
        one.core.left(1, life)
        await puppets.step_all()
        assert instance.child is not None and instance.life == life
        two.core.left(1, life)
        for shard in (one, two):
            await puppets.step_all()
            shard.core.lost(frames.Lost(life))
        await puppets.step_all()
        assert instance.is_ready and instance.life > life
        assert one.workers[1].life == two.workers[1].life == instance.life

    run(scenario)


def test_a_worker_that_hangs_is_killed_once_and_only_by_its_own_number(caplog):
    async def scenario(host, puppets, shards):
        instance = host.instances[0]
        shards[0].core.hung(0, instance.life + 1)
        await settle()
        assert instance.child is not None
        shards[0].core.hung(0, instance.life)
        shards[1].core.hung(0, instance.life)
        await settle()
        assert instance.child is None and instance.is_hung
        for shard in shards[:2]:
            shard.core.lost(frames.Lost(instance.life))

    run(scenario)
    assert caplog.text.count("hangs; killing") == 1


def test_shards_hear_why_a_model_cannot_be_loaded():
    async def scenario(host, puppets, shards):
        assert host.state == "UNAVAILABLE"
        assert any("no_such_option" in str(each) for each in shards[1].heard)

    run(scenario, replace(CONFIG, options={"null.no_such_option": "1"}))
