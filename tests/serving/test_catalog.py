"""Loading, swapping and unloading models, with workers on strings."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import NotFound, NotReady
from penstock.repository import Found
from penstock.serving.catalog import Catalog
from penstock.testing import Puppets, RecordingSink, settle
from penstock.types import Request, TensorSpec, from_array

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (1,)),),
    outputs=(TensorSpec("y", "INT64", (1,)),),
    max_batch_size=4,
    batching=BatchPolicy(4, is_dynamic=True),
    memory=MemoryPolicy(spill_bytes=1 << 12),
)
BROKEN = replace(CONFIG, options={"null.a_ms": "soon"})


def ask(value: int) -> Request:
    return Request(RecordingSink(), [from_array("x", "INT64", np.array([[value]]))], 0.0)


class Stage:
    """`fails` says what the next starts of workers end with, None for those that succeed."""

    def __init__(self) -> None:
        self.puppets = Puppets()
        self.fails: list[Exception | None] = []
        self.catalog = Catalog(start_life=self._start)

    def _start(self, loop, on_death):
        error = self.fails.pop(0) if self.fails else None
        if error is not None:
            raise error
        return self.puppets(loop, on_death)

    async def act(self, change) -> None:
        """Carry out a change while the workers do what they are told."""
        task = asyncio.ensure_future(change)
        while not task.done():
            await self.puppets.step_all()
            await asyncio.sleep(0)
        await task

    async def load(self, *configs: ModelConfig, **problems: list[str]) -> None:
        await self.act(self.catalog.load(Found(list(configs), problems)))


def run(scenario) -> None:
    async def main() -> None:
        stage = Stage()
        await scenario(stage)
        await stage.act(stage.catalog.close())
        assert stage.puppets.alive == []

    asyncio.run(main())


def states(catalog: Catalog, *names: str) -> list[tuple[str, str, str]]:
    return [(e.name, e.version, e.state) for e in catalog.index(names)]


def test_the_highest_version_answers_unless_one_is_named():
    async def scenario(stage):
        await stage.load(CONFIG, replace(CONFIG, version="10"), replace(CONFIG, version="9"))
        assert stage.catalog.find("echo").config.version == "10"
        assert stage.catalog.find("echo", "9").config.version == "9"
        assert stage.catalog.versions("echo") == ["1", "9", "10"]
        with pytest.raises(NotFound, match="'echo' version 2 is not found; loaded: 1, 9, 10"):
            stage.catalog.find("echo", "2")
        with pytest.raises(NotFound, match="unknown model: 'other' is not found; loaded: echo$"):
            stage.catalog.find("other")
        await stage.load(*(replace(CONFIG, name=f"m{number:02}") for number in range(12)))
        with pytest.raises(NotFound, match=r"loaded: echo, m00, .*, m08 and 3 more$"):
            stage.catalog.find("other")

    run(scenario)


def test_one_bad_model_does_not_disturb_the_others():
    async def scenario(stage):
        await stage.load(CONFIG, replace(BROKEN, name="bad"), unread=["config.pbtxt: nonsense"])
        assert stage.catalog.find("echo").is_ready
        assert not stage.catalog.is_ready
        with pytest.raises(NotReady, match="'unread' could not be loaded: config.pbtxt: nonsense"):
            stage.catalog.find("unread")
        with pytest.raises(NotReady, match="'soon' is not a number"):
            stage.catalog.find_all("bad")
        await stage.act(stage.catalog.unload("bad"))
        with pytest.raises(NotFound):
            stage.catalog.find("bad")
        await stage.load(replace(BROKEN, name="bad"))
        assert sorted(f.name for f in stage.catalog.failures) == ["bad", "unread"]
        assert states(stage.catalog, "echo", "idle") == [
            ("bad", "", "UNAVAILABLE"),
            ("echo", "1", "READY"),
            ("idle", "", ""),
            ("unread", "", "UNAVAILABLE"),
        ]

    run(scenario)


def test_a_reload_switches_in_one_step_and_loses_nothing():
    async def scenario(stage):
        await stage.load(CONFIG)
        old = stage.catalog.find("echo")
        running, waiting = ask(1), ask(2)
        old.submit(running)
        await settle()
        old.submit(waiting)
        await stage.load(replace(CONFIG, version="2"))
        new = stage.catalog.find("echo")
        assert new is not old and new.config.version == "2"
        assert stage.catalog.versions("echo") == ["2"]
        for _ in range(50):
            await stage.puppets.step_all()
        assert running.sink.error is waiting.sink.error is None
        assert len(stage.puppets.alive) == 1, "the old worker has left"

    run(scenario)


def test_a_failed_reload_keeps_the_old_model():
    async def scenario(stage):
        await stage.load(CONFIG)
        old = stage.catalog.find("echo")
        await stage.load(CONFIG, replace(BROKEN, version="2"))
        assert stage.catalog.find("echo") is old and old.is_ready
        assert stage.catalog.is_ready, "what is served still is"
        assert "'soon' is not a number" in stage.catalog.failure("echo").problems[0]
        await stage.load(CONFIG)
        assert stage.catalog.failure("echo") is None

    run(scenario)


def test_unloading_answers_what_was_admitted_first():
    async def scenario(stage):
        await stage.load(CONFIG)
        model = stage.catalog.find("echo")
        running = ask(1)
        model.submit(running)
        await settle()
        await stage.act(stage.catalog.unload("echo"))
        with pytest.raises(NotFound):
            stage.catalog.find("echo")
        for _ in range(20):
            await stage.puppets.step_all()
        assert running.sink.error is None
        assert stage.puppets.alive == []
        await stage.act(stage.catalog.unload("never loaded"))

    run(scenario)


def test_loads_and_unloads_of_one_model_do_not_race():
    async def scenario(stage):
        changes = []
        for number in range(1, 6):
            config = replace(CONFIG, version=str(number))
            changes.append(stage.catalog.load(Found([config])))
            changes.append(stage.catalog.unload("echo"))
        changes.append(stage.catalog.load(Found([replace(CONFIG, version="6")])))
        await stage.act(asyncio.gather(*changes))
        assert stage.catalog.versions("echo") == ["6"]
        assert stage.catalog.find("echo").is_ready

    run(scenario)


NO_PROCESS = BlockingIOError(11, "Resource temporarily unavailable")


def test_a_worker_that_gets_no_process_is_tried_again():
    async def scenario(stage):
        stage.fails = [None, NO_PROCESS]
        await stage.load(CONFIG, replace(CONFIG, version="2"))
        assert stage.catalog.versions("echo") == ["1", "2"]
        model = stage.catalog.find("echo")
        stage.fails = [NO_PROCESS, NO_PROCESS]
        stage.puppets.alive[-1].kill()
        await settle()
        assert not model.is_ready
        async with asyncio.timeout(20):
            while not model.is_ready:
                await stage.puppets.step_all()
                await asyncio.sleep(0.005)
        assert stage.fails == []

    run(scenario)


def test_workers_that_never_get_a_process_fail_the_load():
    async def scenario(stage):
        stage.fails = [None, NO_PROCESS, NO_PROCESS, NO_PROCESS]
        await stage.load(CONFIG, replace(CONFIG, version="2"))
        assert stage.catalog.failure("echo").problems == (
            "the worker could not be started ([Errno 11] Resource temporarily unavailable) "
            "while loading, 3 times",
        )
        assert stage.puppets.alive == [], "not even that of version 1"

    run(scenario)


def test_a_load_that_fails_in_an_unknown_way_leaves_no_worker():
    async def scenario(stage):
        stage.fails = [None, ValueError("unheard of")]
        with pytest.raises(ExceptionGroup):
            await stage.load(CONFIG, replace(CONFIG, version="2"))
        assert stage.puppets.alive == []
        assert list(stage.catalog) == []

    run(scenario)
