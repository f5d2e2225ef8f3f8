"""Python models are reloaded when their files change."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from doubles import RecordingSink

from penstock.repository.model_source import resolve
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control, Reloader
from penstock.serving.supervisor import ThreadLife
from penstock.types import Request, Response, from_array, to_array

CODE = "def f(x: int) -> int:\n    return x + {}\n"


def write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


async def ask(catalog: Catalog, value: int) -> int:
    sink = RecordingSink()
    tensor = from_array("x", "INT64", np.array([value]))
    catalog.find("adds").submit(Request(sink, [tensor], 0.0))
    while not sink.answers:
        await asyncio.sleep(0.001)
    answer = sink.answers[0]
    assert isinstance(answer, Response), answer
    return int(to_array(answer.outputs[0])[0])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


def test_a_change_is_served_and_a_broken_one_leaves_the_old_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "adds.py"
    path.write_text(CODE.format(1))

    async def scenario() -> None:
        catalog = Catalog(start_life=ThreadLife)
        control = Control(catalog, str(path), is_explicit=False)
        await catalog.load(resolve(path).read())
        watching = asyncio.ensure_future(Reloader(catalog, control, interval_s=0.01).run())
        assert await ask(catalog, 1) == 2
        await asyncio.sleep(0.1)
        assert "changed" not in caplog.text

        write(path, CODE.format(10))

        async def is_new() -> bool:
            return await ask(catalog, 1) == 11

        await until(is_new)
        write(path, "def f(x: int) -> int:\n    return (")

        async def is_told() -> bool:
            return "keeps the code it had" in caplog.text

        await until(is_told)
        assert await ask(catalog, 1) == 11 and catalog.is_ready
        await asyncio.sleep(0.1)
        assert caplog.text.count("cannot be loaded") == 1
        write(path, CODE.format(100))

        async def is_newest() -> bool:
            return await ask(catalog, 1) == 101

        await until(is_newest)
        path.unlink()

        async def is_gone() -> bool:
            return "no such file" in caplog.text

        await until(is_gone)
        assert await ask(catalog, 1) == 101
        watching.cancel()
        await catalog.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())


def test_a_change_before_the_first_check_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "adds.py"
    path.write_text(CODE.format(1))

    async def scenario() -> None:
        catalog = Catalog(start_life=ThreadLife)
        control = Control(catalog, str(path), is_explicit=False)
        await catalog.load(resolve(path).read())
        assert await ask(catalog, 1) == 2
        write(path, CODE.format(10))
        watching = asyncio.ensure_future(Reloader(catalog, control, interval_s=0.01).run())

        async def is_new() -> bool:
            return await ask(catalog, 1) == 11

        await until(is_new)
        watching.cancel()
        await catalog.close()

    asyncio.run(scenario())


def test_a_candidate_is_no_change_of_the_model(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / "adds" / version).mkdir(parents=True)
        (tmp_path / "adds" / version / "model.py").write_text(CODE.format(version))
    served = "version_policy { specific { versions: 1 } }"
    (tmp_path / "adds" / "config.pbtxt").write_text(f'backend: "python"\n{served}\n')

    async def scenario() -> None:
        catalog = Catalog(start_life=ThreadLife)
        control = Control(catalog, str(tmp_path), is_explicit=True)
        await catalog.load(resolve(tmp_path).read())
        reloaded: list[str] = []

        async def note(name: str) -> None:
            reloaded.append(name)

        control.reload = note
        watching = asyncio.ensure_future(Reloader(catalog, control, interval_s=0.01).run())
        await asyncio.sleep(0.1)
        await catalog.add_candidate(await control.read("adds", "2"))
        await asyncio.sleep(0.3)
        assert reloaded == []
        assert [each.config.version for each in catalog] == ["1", "2"]
        watching.cancel()
        await catalog.close()

    asyncio.run(scenario())
