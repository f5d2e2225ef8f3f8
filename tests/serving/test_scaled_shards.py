"""Instances that come and go under several shards: every frame is encoded, workers are on strings.
What the controller decides is given by the test."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from doubles import Puppets
from test_shards import ECHO, Server, run

from penstock.config import ScalingConfig
from penstock.serving.model_host import ModelHost
from penstock.serving.scaling import Observation, ScalingDecision
from penstock.serving.version_loader import network_of

SCALED = replace(ECHO, scaling=ScalingConfig(0, 3, cold_start_s=20.0))


class Watched:
    """A controller that does as the test says, and keeps what it saw."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.seen: list[Observation] = []

    def decide(self, seen: Observation, now: float) -> ScalingDecision:
        self.seen.append(seen)
        return ScalingDecision(self.target, "the test says so")


def controlled(server: Server, target: int) -> tuple[ModelHost, Watched]:
    host = network_of(server.catalog.find("echo"))
    host.scaler.policy = given = Watched(target)
    return host, given


async def until(server: Server, holds: Callable[[], bool]) -> None:
    for _ in range(4000):
        await server.puppets.step_all()
        if holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen")


def ready(host: ModelHost) -> list[int]:
    return [each.index for each in host.processes if each.state == "ready"]


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_shards.Puppets", lambda: Puppets(has_room=True))


def test_all_shards_use_instances_that_are_added_and_lose_nothing_when_they_go():
    async def scenario(server):
        await server.load(SCALED)
        host, given = controlled(server, 3)
        await until(server, lambda: ready(host) == [0, 1, 2])
        for session in server.sessions:
            workers = session.shard.table.find("echo").workers
            assert [worker.state for worker in workers] == ["idle"] * 3
        requests = [server.send(number % 2, number) for number in range(60)]
        given.target = 1
        assert await server.answers(*requests) == list(range(60))
        await until(server, lambda: ready(host) == [0] and len(server.puppets.alive) == 1)
        requests = [server.send(number % 2, number) for number in range(20)]
        assert await server.answers(*requests) == list(range(20))
        for session in server.sessions:
            workers = session.shard.table.find("echo").workers
            assert [worker.state for worker in workers] == ["idle", "not ready", "not ready"]

    run(scenario)


def test_the_core_adds_up_what_the_shards_report():
    async def scenario(server):
        await server.load(SCALED)
        _, given = controlled(server, 1)
        requests = [server.send(number % 2, number) for number in range(40)]
        assert await server.answers(*requests) == list(range(40))
        await until(server, lambda: any(seen.arrivals.short > 10 for seen in given.seen))
        assert given.seen[-1].times_s.keys() == {1, 2, 4, 8}
        assert given.seen[-1].load_s > 0

    run(scenario)


def test_a_request_to_any_shard_wakes_a_model_that_is_scaled_to_zero():
    async def scenario(server):
        await server.load(SCALED)
        host, given = controlled(server, 0)
        models = [session.shard.table.find("echo") for session in server.sessions]
        await until(server, lambda: server.puppets.alive == [] and all(m.is_cold for m in models))
        assert server.catalog.find("echo").is_ready
        assert [entry.state for entry in server.catalog.index([])] == ["READY"]
        assert all(model.is_ready for model in models)
        given.target = 1
        requests = [server.send(number % 2, number) for number in range(1, 7)]
        assert await server.answers(*requests) == list(range(1, 7))
        assert not any(model.is_cold for model in models)
        assert len(server.puppets.alive) == 1

    run(scenario)


def test_a_shard_that_starts_again_knows_that_the_model_is_scaled_to_zero():
    async def scenario(server):
        await server.load(SCALED)
        host, given = controlled(server, 0)
        await until(server, lambda: server.puppets.alive == [])
        lost = server.sessions[1]
        await lost.end()
        server.sessions[1] = type(lost)(server.shards, 1)
        await server.shards.open(1, server.sessions[1])
        await until(server, lambda: server.sessions[1].shard.table.find("echo").is_cold)
        given.target = 1
        assert await server.answers(server.send(1, 8)) == [8]

    run(scenario)


def test_explain_shows_the_instances_that_there_are_and_the_decision():
    async def scenario(server):
        await server.load(SCALED)
        host, given = controlled(server, 2)
        await until(server, lambda: ready(host) == [0, 1])
        model = server.catalog.find("echo")
        await server.run(model.refresh())
        told = model.explain()
        assert [(each.index, each.state) for each in told.instances] == [(0, "idle"), (1, "idle")]
        assert told.scaling == "2 of 0 to 3 instances: the test says so"
        given.target = 0
        await until(server, lambda: server.puppets.alive == [])
        await server.run(model.refresh())
        assert model.explain().instances == [] and model.explain().state == "READY"

    run(scenario)


def test_a_reload_begins_with_as_many_instances_as_run():
    async def scenario(server):
        await server.load(SCALED)
        host, _ = controlled(server, 3)
        await until(server, lambda: ready(host) == [0, 1, 2])
        requests = [server.send(number % 2, number) for number in range(30)]
        await server.load(replace(SCALED, version="2"))
        new = network_of(server.catalog.find("echo"))
        assert new is not host and len(ready(new)) == 3
        assert await server.answers(*requests) == list(range(30))

    run(scenario)


def test_a_model_that_is_unloaded_while_an_instance_starts_leaves_nothing():
    async def scenario(server):
        await server.load(SCALED)
        _, given = controlled(server, 3)
        await asyncio.sleep(0.6)
        assert given.seen, "the others are being started"
        requests = [server.send(number % 2, number) for number in range(10)]
        await server.run(server.catalog.unload("echo"))
        assert await server.answers(*requests) == list(range(10))
        await until(server, lambda: server.puppets.alive == [])

    run(scenario)
