"""Memory of models that are loaded on demand: the actor, with workers on strings."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import uvloop
from doubles import FakeGpus, Puppets, RecordingSink

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig, ModelMemoryLimit, ScalingConfig
from penstock.errors import NotReady
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.fleet import Fleet
from penstock.types import Request, TensorSpec, from_array

GIB = 1 << 30
CONFIG = ModelConfig(
    name="a",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (1,)),),
    outputs=(TensorSpec("y", "INT64", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    memory=MemoryPolicy(max_slabs=2, spill_bytes=1 << 12),
    scaling=ScalingConfig(on_demand="true", cold_start_s=60.0),
)


class Machine:
    """A catalog whose models take as much memory as their files have, and 64 MiB."""

    def __init__(self, folder: Path, *gpus: int) -> None:
        self._folder = folder
        self.puppets = Puppets(has_room=True)
        self.gpus = FakeGpus(*gpus)
        self.catalog = Catalog(self.puppets, Fleet(0.0, self.gpus))
        self.catalog.memory.limit = ModelMemoryLimit(5 * GIB)

    def config(self, name: str, size: float, **more: object) -> ModelConfig:
        folder = self._folder / name / "1"
        folder.mkdir(parents=True)
        with (folder / "weights").open("wb") as file:
            file.truncate(round(size * GIB))
        return replace(CONFIG, name=name, artifact=str(folder / "weights"), **more)

    async def load(self, *configs: ModelConfig, at_once: tuple[str, ...] = ()) -> None:
        await self.until(self.catalog.load(RepositoryScan(list(configs), {}), at_once))

    async def until(self, change: Awaitable[object]) -> None:
        task = asyncio.ensure_future(change)
        while not task.done():
            await self.step()
        await task

    async def step(self) -> None:
        await self.puppets.step_all()
        await asyncio.sleep(0.001)

    def send(self, name: str, value: int = 7) -> Request:
        request = Request(RecordingSink(), [from_array("x", "INT64", np.array([[value]]))], 0.0)
        self.catalog.find(name).submit(request)
        return request

    async def ask(self, name: str) -> Request:
        request = self.send(name)
        while not request.sink.num_final:
            await self.step()
        return request

    @property
    def loaded(self) -> set[str]:
        ready = (each for each in self.catalog if any(one.is_ready for one in each.processes))
        return {each.config.name for each in ready}

    async def wait(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await self.step()


def run(
    folder: Path,
    scenario: Callable[[Machine], Awaitable[None]],
    gpus: tuple[int, ...] = (),
    runner: Callable[[Coroutine[object, object, None]], None] = asyncio.run,
) -> None:
    async def main() -> None:
        machine = Machine(folder, *gpus)
        await scenario(machine)
        await machine.until(machine.catalog.close())
        assert machine.puppets.alive == []

    runner(main())


def test_the_model_that_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.load(*(machine.config(name, 2) for name in "abc"))
        assert machine.loaded == set() and machine.catalog.is_ready
        for name in "ab":
            assert (await machine.ask(name)).sink.error is None
        assert machine.loaded == {"a", "b"}
        assert (await machine.ask("c")).sink.error is None
        await machine.wait(lambda: machine.loaded == {"b", "c"})
        assert machine.catalog.find("a").is_ready
        row = machine.catalog.index([])[0]
        assert (row.name, row.state) == ("a", "READY")
        assert row.reason.startswith("not in memory (evicted: others needed its memory)")
        lines = {line for each in machine.catalog.memory.families() for line in each.lines}
        size = 2 * GIB + (64 << 20)
        assert {
            'penstock_model_loads{model="a",version="1"} 1',
            'penstock_model_evictions{model="a",version="1"} 1',
            'penstock_model_memory_bytes{model="a",version="1",device="cpu"} 0',
            f'penstock_model_memory_bytes{{model="b",version="1",device="cpu"}} {size}',
            f'penstock_model_memory_limit_bytes{{device="cpu"}} {5 * GIB}',
        } <= lines

    run(tmp_path, scenario)


def test_a_model_that_is_kept_never_goes_and_the_other_is_refused_in_time(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        kept = ScalingConfig(on_demand="keep")
        brief = replace(CONFIG.scaling, cold_start_s=0.3)
        await machine.load(
            machine.config("a", 4, scaling=kept), machine.config("b", 2, scaling=brief)
        )
        assert (await machine.ask("a")).sink.error is None
        error = (await machine.ask("b")).sink.error
        assert isinstance(error, NotReady) and error.retry_after_s is not None
        assert "it needs 2.1 GiB of 5.0 GiB, which others use: a/1 4.1 GiB" in str(error)
        assert machine.loaded == {"a"}

    run(tmp_path, scenario)


def test_a_model_that_can_never_fit_is_refused_and_nothing_goes(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.load(machine.config("a", 2), machine.config("b", 6))
        assert (await machine.ask("a")).sink.error is None
        for _ in range(2):
            error = (await machine.ask("b")).sink.error
            assert isinstance(error, NotReady)
            assert "it needs 6.1 GiB of memory, and models loaded on demand have 5.0 GiB" in str(
                error
            )
        assert machine.loaded == {"a"}
        assert not machine.catalog.find("b").is_ready and machine.catalog.is_ready

    run(tmp_path, scenario)


def test_gpus_have_a_limit_each_and_the_cpu_its_own(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        on_gpu = {"device": "cuda:0", "gpu_memory_bytes": 3 * GIB}
        other = {"device": "cuda:1", "gpu_memory_bytes": 3 * GIB}
        await machine.load(
            machine.config("a", 0, **on_gpu),
            machine.config("b", 0, **other),
            machine.config("c", 4),
            machine.config("d", 0, **on_gpu),
        )
        for name in "abc":
            assert (await machine.ask(name)).sink.error is None
        assert machine.loaded == {"a", "b", "c"}
        assert (await machine.ask("d")).sink.error is None
        await machine.wait(lambda: machine.loaded == {"b", "c", "d"})

    run(tmp_path, scenario, (8 * GIB, 8 * GIB))


def test_idle_models_go_when_others_have_taken_the_memory_of_the_gpu(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        machine.catalog.memory.limit = ModelMemoryLimit(share=1.0)
        on_gpu = {"device": "cuda:0", "gpu_memory_bytes": 3 * GIB}
        await machine.load(*(machine.config(name, 0, **on_gpu) for name in "ab"))
        assert (await machine.ask("a")).sink.error is None
        machine.gpus.used_bytes[0] = 6 * GIB
        request = machine.send("b")
        await machine.wait(lambda: "a" not in machine.loaded)
        machine.gpus.used_bytes[0] = 3 * GIB
        await machine.wait(lambda: bool(request.sink.num_final))
        assert request.sink.error is None

    run(tmp_path, scenario, (8 * GIB,))


def test_a_load_at_once_needs_room_and_keeps_what_there_was(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        kept = ScalingConfig(on_demand="keep")
        brief = replace(CONFIG.scaling, cold_start_s=0.2)
        small = machine.config("b", 0.5, scaling=brief)
        await machine.load(machine.config("a", 4, scaling=kept), small, at_once=("a", "b"))
        assert machine.loaded == {"a", "b"}
        large = replace(machine.config("b2", 4), name="b", version="2", scaling=brief)
        await machine.load(large, at_once=("b",))
        failure = machine.catalog.failure("b")
        assert failure is not None and "which others use: a/1 4.1 GiB (is kept)" in str(failure)
        assert machine.catalog.versions("b") == ["1"]
        assert (await machine.ask("b")).sink.error is None

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("said", "loads_all", "expected"),
    [("", True, "true"), ("", False, ""), ("false", True, "false"), ("keep", True, "keep")],
)
def test_what_a_configuration_says_goes_before_the_server(
    tmp_path: Path, said: str, loads_all: bool, expected: str
) -> None:
    async def scenario(machine: Machine) -> None:
        memory = machine.catalog.memory
        memory.loads_all = loads_all
        chosen = memory.choose(replace(CONFIG, scaling=ScalingConfig(on_demand=said)))
        assert chosen.scaling.on_demand == expected
        language_model = replace(CONFIG, backend="llm", scaling=ScalingConfig())
        assert memory.choose(language_model) == language_model

    run(tmp_path, scenario)


def test_further_instances_are_started_only_where_nothing_must_go(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.load(machine.config("a", 2, num_instances=3), machine.config("b", 0.5))
        assert (await machine.ask("b")).sink.error is None
        assert (await machine.ask("a")).sink.error is None
        [model] = [each for each in machine.catalog if each.config.name == "a"]
        await machine.wait(lambda: sum(each.is_ready for each in model.processes) == 2)
        for _ in range(100):
            await machine.step()
        assert [each.is_ready for each in model.processes] == [True, True]
        assert machine.loaded == {"a", "b"}

    run(tmp_path, scenario)


def cold_starts(machine: Machine, name: str) -> tuple[int, float]:
    """Return the loads of a model and their seconds, as a scrape shows them."""
    lines = [line for each in machine.catalog.memory.families() for line in each.lines]
    found = [
        next(
            float(line.split()[-1])
            for line in lines
            if line.startswith(f'{metric}{{model="{name}"')
        )
        for metric in ("penstock_model_loads", "penstock_cold_start_seconds")
    ]
    return int(found[0]), found[1]


def test_each_load_counts_although_its_client_has_left_and_the_clock_is_coarse(
    tmp_path: Path,
) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.load(machine.config("a", 1))
        model = machine.catalog.find("a")
        for count in range(1, 4):
            request = machine.send("a")
            model.cancel(request)
            await machine.wait(lambda: machine.loaded == {"a"})
            loads, seconds = cold_starts(machine, "a")
            assert loads == count and seconds > 0
            model.host.demand.evict("by hand")
            await machine.wait(lambda: not machine.puppets.alive)

    # The time of its event loop has whole milliseconds, and stands still during a turn.
    run(tmp_path, scenario, runner=uvloop.run)


def test_a_load_counts_although_the_last_worker_was_still_leaving(tmp_path: Path) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.load(machine.config("a", 1))
        assert (await machine.ask("a")).sink.error is None
        machine.catalog.find("a").host.demand.evict("by hand")
        request = machine.send("a")
        await asyncio.sleep(0.1)
        assert not request.sink.num_final
        await machine.wait(lambda: bool(request.sink.num_final))
        assert request.sink.error is None
        assert cold_starts(machine, "a")[0] == 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("count", [1, 3])
def test_explain_says_that_a_model_was_loaded_on_demand_and_what_it_holds(
    tmp_path: Path, count: int
) -> None:
    async def scenario(machine: Machine) -> None:
        await machine.load(machine.config("a", 2, num_instances=count))
        model = machine.catalog.find("a")
        explained = model.explain().scaling
        assert explained == f"0 of 0 to {count} instances: no request has come yet"
        before = datetime.now(UTC).replace(microsecond=0)
        assert (await machine.ask("a")).sink.error is None
        explained = model.explain().scaling
        found = re.fullmatch(
            r"loaded on demand since (\S+); it holds 2.1 GiB on cpu(.*)", explained
        )
        assert found is not None, explained
        assert before <= datetime.fromisoformat(found[1]) <= datetime.now(UTC)
        assert bool(found[2]) == (count > 1), "what is fixed needs no arithmetic"

    run(tmp_path, scenario)
