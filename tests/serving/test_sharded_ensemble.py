"""Ensembles of a server with several shards, with core and shards on one event loop."""

import asyncio
from dataclasses import replace

import numpy as np
from doubles import RecordingSink
from shard_server import ECHO, run

from penstock.config import EnsembleStep
from penstock.errors import NotReady
from penstock.serving.ensemble import Ensemble
from penstock.serving.sharded_ensemble import ShardedEnsemble
from penstock.types import Request, TensorSpec, from_array

WHOLE = replace(
    ECHO,
    name="whole",
    backend="ensemble",
    inputs=(TensorSpec("IN", "INT64", (4,)),),
    outputs=(TensorSpec("OUT", "INT64", (4,)),),
    num_instances=0,
    steps=(
        EnsembleStep("echo", "", {"x": "IN"}, {"y": "between"}),
        EnsembleStep("second", "", {"x": "between"}, {"y": "OUT"}),
    ),
)
SECOND = replace(ECHO, name="second")


def send(server, shard: int, number: int) -> Request:
    tensor = from_array("IN", "INT64", np.full((1, 4), number, np.int64))
    request = Request(RecordingSink(), [tensor], 0.0)
    server.sessions[shard].shard.table.find("whole").submit(request)
    return request


async def outputs(server, requests) -> list[int]:
    async with asyncio.timeout(60):
        while not all(request.is_done for request in requests):
            await server.puppets.step_all()
            # Workers claim batches of shards by timers.
            await asyncio.sleep(0.001)
    return [request.sink.outputs[0]["OUT"][0, 0] for request in requests]


def test_each_shard_runs_the_steps_with_its_own_parts_of_the_members():
    async def scenario(server):
        await server.load(WHOLE, ECHO, SECOND)
        assert isinstance(server.catalog.find("whole"), ShardedEnsemble)
        assert isinstance(server.sessions[1].shard.table.find("whole"), Ensemble)
        requests = [send(server, number % 2, number) for number in range(20)]
        assert await outputs(server, requests) == list(range(20))
        await server.catalog.refresh()
        metrics = [server.catalog.find(name).metrics for name in ("whole", "echo", "second")]
        assert [each.num_success for each in metrics] == [20, 20, 20]
        # Batches of members have rows of both shards.
        assert metrics[1].num_executions < 20

    run(scenario, 2)


def test_the_core_adds_up_the_steps_of_all_shards():
    async def scenario(server):
        await server.load(WHOLE, ECHO, SECOND)
        await outputs(server, [send(server, number % 2, number) for number in range(6)])
        model = server.catalog.find("whole")
        await server.run(model.refresh())
        assert [step.num_answered for step in model.explain().steps] == [6, 6]

    run(scenario, 2)


def test_members_are_reloaded_and_unloaded_under_an_ensemble():
    async def scenario(server):
        await server.load(WHOLE, ECHO, SECOND)
        before = [send(server, number % 2, number) for number in range(4)]
        await server.load(replace(SECOND, version="2"))
        after = [send(server, number % 2, number) for number in range(4, 8)]
        assert await outputs(server, before + after) == list(range(8))
        await server.run(server.catalog.unload("second"))
        assert server.catalog.find("whole").reason == "model 'second' is not loaded"
        assert not server.catalog.find("whole").is_ready
        refused = send(server, 1, 9)
        assert isinstance(refused.sink.error, NotReady)
        await server.run(server.catalog.unload("whole"))
        assert "whole" not in [row.name for row in server.catalog.index([])]

    run(scenario, 2)


def test_figures_of_a_shard_that_ends_stay():
    async def scenario(server):
        await server.load(WHOLE, ECHO, SECOND)
        await outputs(server, [send(server, 1, number) for number in range(3)])
        await server.catalog.refresh()
        await server.sessions[1].end()
        await server.catalog.refresh()
        assert server.catalog.find("whole").metrics.num_success == 3

    run(scenario, 2)
