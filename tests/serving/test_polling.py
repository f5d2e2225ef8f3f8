"""Poll mode: what is served follows the repository."""

import asyncio
import functools
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles import RecordingSink

from penstock.errors import NotAllowed, NotFound
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.polling import Poller
from penstock.serving.supervisor import ThreadLife
from penstock.types import Request, Response, from_array, to_array

CODE = "def f(x: int) -> int:\n    return x + {}\n"


Test = Callable[..., Coroutine[Any, Any, None]]


def in_loop(test: Test) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **given: Any) -> None:
        asyncio.run(test(*args, **given))

    return run


class Polled:
    """A server's parts over a repository of Python models that add a number."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        self.catalog = Catalog(start_life=ThreadLife)
        self.control = Control(self.catalog, str(root), is_explicit=False, is_polling=True)
        self.poller = Poller(self.control, interval_s=1.0)
        self.now = 0.0

    def write(self, name: str, number: int | str, version: str = "1") -> None:
        folder = self.root / name / version
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.py").write_text(CODE.format(number))

    async def start(self) -> None:
        sources = self.control.sources
        await self.catalog.load(sources.read_named(sources.names()))

    async def poll(self, times: int = 2) -> None:
        for _ in range(times):
            self.now += 1.0
            await self.poller.poll(self.now)

    async def answer(self, name: str) -> int:
        sink = RecordingSink()
        request = Request(sink, [from_array("x", "INT64", np.array([1]))], 0.0)
        self.catalog.find(name).submit(request)
        async with asyncio.timeout(60):
            while not sink.answers:
                await asyncio.sleep(0.001)
        answer = sink.answers[0]
        assert isinstance(answer, Response), answer
        return int(to_array(answer.outputs[0])[0])


@in_loop
async def test_new_changed_and_removed_models_are_followed(tmp_path):
    polled = Polled(tmp_path)
    await polled.start()
    assert list(polled.catalog) == [], "an empty repository is served until models come"
    polled.write("a", 1)
    await polled.poll(1)
    with pytest.raises(NotFound):
        polled.catalog.find("a")
    await polled.poll(1)
    assert await polled.answer("a") == 2
    first = polled.catalog.find("a")
    await polled.poll()
    assert polled.catalog.find("a") is first, "loading a model does not change it"
    polled.write("a", 10, version="2")
    await polled.poll()
    assert await polled.answer("a") == 11
    shutil.rmtree(tmp_path / "a")
    await polled.poll(1)
    assert await polled.answer("a") == 11
    await polled.poll(1)
    with pytest.raises(NotFound):
        polled.catalog.find("a")
    await polled.catalog.close()


@in_loop
async def test_a_model_that_cannot_be_loaded_keeps_the_old_one_and_stops_nothing(tmp_path, caplog):
    polled = Polled(tmp_path)
    polled.write("a", 1)
    polled.poller = Poller(polled.control, interval_s=1.0)
    await polled.start()
    polled.write("a", "(")
    polled.write("b", 5)
    await polled.poll()
    assert (await polled.answer("a"), await polled.answer("b")) == (2, 6)
    assert polled.catalog.failure("a") is not None
    await polled.poll(3)
    assert caplog.text.count("a cannot be loaded") == 1, "not tried again until it changes"
    polled.write("a", 100)
    await polled.poll()
    assert await polled.answer("a") == 101 and polled.catalog.failure("a") is None
    await polled.catalog.close()


@in_loop
async def test_a_copy_under_way_is_not_served(tmp_path):
    polled = Polled(tmp_path)
    await polled.start()
    polled.write("a", "(")
    for number in range(3):
        await polled.poll(1)
        polled.write("a", f"({number}" + " " * number)
    assert polled.catalog.failure("a") is None
    polled.write("a", 7)
    await polled.poll()
    assert await polled.answer("a") == 8
    await polled.catalog.close()


@in_loop
async def test_a_repository_that_cannot_be_read_unloads_nothing(tmp_path, caplog):
    polled = Polled(tmp_path / "models")
    polled.write("a", 1)
    polled.poller = Poller(polled.control, interval_s=1.0)
    await polled.start()
    polled.root.rename(tmp_path / "elsewhere")
    await polled.poll(3)
    assert caplog.text.count("cannot be read") == 1, "told once"
    assert await polled.answer("a") == 2
    await polled.catalog.close()


@in_loop
async def test_a_bug_ends_no_poll(tmp_path, caplog):
    polled = Polled(tmp_path)
    await polled.start()
    asked: list[str] = []

    async def fail(name: str) -> None:
        asked.append(name)
        raise RuntimeError("a bug")

    polled.control.reload = fail
    for name in ("a", "b"):
        polled.write(name, 1)
        await polled.poll()
    assert asked == ["a", "b"] and "a could not be changed" in caplog.text


@in_loop
async def test_polls_go_on_by_themselves(tmp_path):
    polled = Polled(tmp_path)
    poller = Poller(polled.control, interval_s=0.01)
    running = asyncio.ensure_future(poller.run())
    polled.write("a", 1)
    async with asyncio.timeout(60):
        while "a" not in [model.config.name for model in polled.catalog]:
            await asyncio.sleep(0.01)
    running.cancel()
    await polled.catalog.close()


@in_loop
async def test_clients_may_not_load_while_polling(tmp_path):
    polled = Polled(tmp_path)
    refused = "explicit model load / unload is not allowed if polling is enabled"
    for change in (polled.control.load("a"), polled.control.unload("a")):
        with pytest.raises(NotAllowed, match=refused):
            await change
