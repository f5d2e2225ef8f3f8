"""Changes of `instance_group` of a loaded model: workers come and go, the model stays."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doubles import settle
from shard_server import ECHO, Server, Session, run
from test_catalog import CONFIG, Stage, ask
from test_catalog import run as run_catalog

from penstock.config import RateLimit, ScalingConfig
from penstock.serving.instance import Instance
from penstock.serving.instance_change import changes_instances_only
from penstock.serving.supervisor import Supervisor
from penstock.serving.version_loader import network_of
from penstock.wire import frames

TWO, FOUR = replace(ECHO, num_instances=2), replace(ECHO, num_instances=4)


@pytest.mark.parametrize(
    ("change", "is_one"),
    [
        ({}, False),
        ({"num_instances": 3}, True),
        ({"num_instances": 3, "written": "another file"}, True),
        ({"num_instances": 3, "max_batch_size": 2}, False),
        ({"num_instances": 3, "version": "2"}, False),
        ({"num_instances": 3, "options": {"null.x": "1"}}, False),
        ({"num_instances": 3, "scaling": ScalingConfig(1, 3)}, False),
        ({"num_instances": 3, "device": "cuda:0"}, False),
        ({"num_instances": 2, "device": "cpu", "spread": ("cpu", "cuda:0")}, False),
    ],
)
def test_only_the_number_of_instances_may_differ(change: dict, is_one: bool) -> None:
    assert changes_instances_only(ECHO, replace(ECHO, **change)) is is_one


def test_limited_executions_and_gpus_need_a_load() -> None:
    limited = replace(ECHO, rate_limits=(RateLimit("cpu", ()),))
    assert not changes_instances_only(limited, replace(limited, num_instances=2))
    gpu = replace(ECHO, device="cuda:0")
    assert not changes_instances_only(gpu, replace(gpu, num_instances=2))


def pids(server: Server) -> list[int]:
    return [id(life) for life in server.puppets.alive]


async def until_alive(server: Server, number: int) -> None:
    for _ in range(4000):
        await server.puppets.step_all()
        if len(server.puppets.alive) == number:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{len(server.puppets.alive)} workers are alive")


@pytest.mark.parametrize("num_shards", [1, 2])
def test_instances_are_added_and_removed_beside_those_that_stay(num_shards: int) -> None:
    async def scenario(server: Server) -> None:
        await server.load(ECHO)
        model, first = server.catalog.find("echo"), pids(server)
        sent = [server.send(number % num_shards, number) for number in range(20)]
        await server.load(FOUR)
        assert server.catalog.find("echo") is model and model.config.num_instances == 4
        assert len(pids(server)) == 4 and pids(server)[0] == first[0]
        for session in server.sessions:
            workers = session.shard.table.find("echo").workers
            assert [worker.link is not None for worker in workers] == [True] * 4
        sent += [server.send(number % num_shards, number) for number in range(20, 60)]
        await server.load(TWO)
        sent += [server.send(number % num_shards, number) for number in range(60, 80)]
        assert await server.answers(*sent) == list(range(80))
        await until_alive(server, 2)
        assert pids(server)[0] == first[0], "its weights were not loaded again"
        await server.catalog.refresh()
        assert server.catalog.find("echo").metrics.num_success == 80, "statistics go on"
        await server.catalog.find("echo").refresh()
        assert len(server.catalog.find("echo").explain().instances) == 2

    run(scenario, num_shards)


def test_a_shard_that_starts_again_knows_of_all_instances() -> None:
    async def scenario(server: Server) -> None:
        await server.load(FOUR)
        await server.load(ECHO)
        await server.run(server.sessions[0].end())
        server.sessions[0] = Session(server.shards, 0)
        await server.shards.open(0, server.sessions[0])
        await server.load(replace(ECHO, num_instances=3))
        sent = [server.send(number % 2, number) for number in range(30)]
        assert await server.answers(*sent) == list(range(30))

    run(scenario)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_change_that_fails_keeps_the_instances_there_were(
    num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: Server) -> None:
        await server.load(TWO)
        before = pids(server)
        handle = Supervisor.handle

        def fail(supervisor: Supervisor, instance: Instance, frame: frames.FromWorker) -> None:
            if isinstance(frame, frames.WorkerReady) and instance.index >= 2:
                handle(supervisor, instance, frames.StartFailed(("no memory for the weights",)))
                instance.child.life.kill()
            else:
                handle(supervisor, instance, frame)

        monkeypatch.setattr(Supervisor, "handle", fail)
        await server.load(FOUR)
        failure = server.catalog.failure("echo")
        assert "instance_group has changed: no memory for the weights" in failure.problems
        assert pids(server) == before
        model = server.catalog.find("echo")
        assert model.config.num_instances == 2 and model.is_ready
        monkeypatch.setattr(Supervisor, "handle", handle)
        await server.load(FOUR)
        assert server.catalog.failure("echo") is None
        assert len(pids(server)) == 4
        sent = [server.send(number % num_shards, number) for number in range(30)]
        assert await server.answers(*sent) == list(range(30))

    run(scenario, num_shards)


def test_limits_of_a_scaled_model_follow_its_configuration() -> None:
    async def scenario(server: Server) -> None:
        scaled = replace(ECHO, scaling=ScalingConfig(None, 6))
        await server.load(scaled)
        host = network_of(server.catalog.find("echo"))
        assert host.scaler.limits == (1, 6)
        await server.load(replace(scaled, num_instances=3))
        assert network_of(server.catalog.find("echo")) is host
        assert host.scaler.limits == (3, 6)
        assert len(pids(server)) == 3

    run(scenario)


def test_a_change_of_the_files_loads_the_model_anew(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        file = tmp_path / "1" / "model.null"
        file.parent.mkdir()
        file.write_text("one")
        config = replace(CONFIG, artifact=str(file))
        await stage.load(config)
        model = stage.catalog.find("echo")
        await stage.load(replace(config, num_instances=2))
        assert stage.catalog.find("echo") is model
        file.write_text("another one")
        await stage.load(replace(config, num_instances=3))
        assert stage.catalog.find("echo") is not model
        request = ask(5)
        stage.catalog.find("echo").submit(request)
        await stage.puppets.step_all()
        np.testing.assert_array_equal(request.sink.outputs[0]["y"], [[5]])
        await stage.act(settle())

    run_catalog(scenario)
