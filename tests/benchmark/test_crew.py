"""Generators as real processes: asked together, and missed when they die."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import psutil
import pytest
from child_processes import children_running
from null_models import make
from waiting import until

from penstock.benchmark import generator
from penstock.benchmark.crew import GeneratorPool
from penstock.benchmark.exchange import floats
from penstock.benchmark.messages import (
    Answer,
    Broken,
    Count,
    Counted,
    Ended,
    GeneratorReport,
    Go,
    LoadPrepared,
    PrepareLoad,
    Question,
    SetUp,
    StopLoad,
    encode,
)
from penstock.benchmark.pacer import Closed, Flat, Open
from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.in_process import InProcess
from penstock.data import InputSpec
from penstock.errors import BackendFailed, ConfigError
from penstock.processes import framing


def setup(address: object, index: int = 0, num_processes: int = 1) -> SetUp:
    target = TargetSpec(str(address))
    return SetUp(target, InputSpec(), index, num_processes, is_first=index == 0)


Scenario = Callable[[GeneratorPool, list[GeneratorReport]], Coroutine[None, None, None]]


def run(scenario: Scenario) -> None:
    async def whole() -> None:
        heard: list[GeneratorReport] = []
        crew = GeneratorPool(lambda _, progress: heard.append(progress))
        try:
            await scenario(crew, heard)
        finally:
            await crew.close()

    asyncio.run(whole())


def num_answered(heard: list[GeneratorReport]) -> int:
    return sum(len(each.columns.failed) for each in heard)


def test_two_generators_share_an_open_load(tmp_path: Path) -> None:
    async def scenario(crew: GeneratorPool, heard: list[GeneratorReport]) -> None:
        model = make(tmp_path, a_ms=1)
        first, second = await crew.start([setup(model, 0, 2), setup(model, 1, 2)])
        assert first.cold_start.first_s > 0 and first.cold_start.load_s > 0
        assert second.cold_start.first_s is None
        load = Open(Flat(200.0), "constant")
        await crew.prepare(load, 3)
        start = time.monotonic() + 0.02
        end = start + 0.6 + 0.5 / 200
        crew.ask(Go(start))
        crew.ask(StopLoad(end, 60.0))
        await crew.expect(Ended)
        due = np.sort(np.concatenate([floats(each.columns.due) for each in heard]))
        # Without those that left because this process told them of the end too late.
        due = due[due < end]
        assert len(due) == 0.6 * 200 + 1
        assert np.diff(due) == pytest.approx(1 / 200, abs=1e-6)
        assert not any(failed for each in heard for failed in each.columns.failed)
        # What one asks for, the server has done.
        crew.members[0].ask(Count())
        counted = await crew.members[0].expect(Counted)
        assert counted.counters.num_success >= len(due) // 2

    run(scenario)


def test_a_load_can_follow_another(tmp_path: Path) -> None:
    async def scenario(crew: GeneratorPool, heard: list[GeneratorReport]) -> None:
        await crew.start([setup(make(tmp_path, a_ms=1))])
        for load in (Closed(4), Open(Flat(50.0)), Closed(1)):
            heard.clear()
            await crew.prepare(load, 3)
            crew.ask(Go(time.monotonic()))
            await until(lambda: num_answered(heard) > 2)
            crew.ask(StopLoad(time.monotonic(), 60.0))
            await crew.expect(Ended)
            assert heard[-1].in_flight == 0

    run(scenario)


def test_patience_ends(tmp_path: Path) -> None:
    """What is under way when it does, has failed; the generator can be used again."""

    async def scenario(crew: GeneratorPool, heard: list[GeneratorReport]) -> None:
        await crew.start([setup(make(tmp_path, max_batch=1, a_ms=700))])
        await crew.prepare(Closed(2), 0)
        crew.ask(Go(time.monotonic()))
        await asyncio.sleep(0.1)
        crew.ask(StopLoad(time.monotonic(), 0.1))
        await crew.expect(Ended)
        assert [each.columns.failures for each in heard if each.columns.failures] == [["cancelled"]]
        await crew.prepare(Closed(1), 0)

    run(scenario)


@pytest.mark.slow
def test_patience_can_become_shorter(tmp_path: Path) -> None:
    """Said twice, answered once."""

    async def scenario(crew: GeneratorPool, heard: list[GeneratorReport]) -> None:
        await crew.start([setup(make(tmp_path, max_batch=1, a_ms=5000))])
        await crew.prepare(Closed(1), 0)
        crew.ask(Go(time.monotonic()))
        await asyncio.sleep(0.1)
        crew.ask(StopLoad(time.monotonic(), 60.0))
        crew.ask(StopLoad(time.monotonic(), 0.1))
        await crew.expect(Ended)
        assert [each.columns.failures for each in heard if each.columns.failures] == [["cancelled"]]
        crew.ask(StopLoad(time.monotonic(), 0.1))
        # The next answer is the one to the next question.
        await crew.prepare(Closed(1), 0)

    run(scenario)


def framed(question: Question) -> bytes:
    return framing.frame(encode(question))


def test_an_end_that_goes_wrong_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it for ever."""

    class Stubborn(InProcess):
        async def close(self) -> None:
            await super().close()
            raise BackendFailed("it does not go")

    monkeypatch.setattr(generator, "open_target", Stubborn)
    told: list[Answer] = []

    async def scenario() -> None:
        questions = asyncio.StreamReader()

        def hear(answer: Answer) -> None:
            told.append(answer)
            if isinstance(answer, LoadPrepared):
                moment = time.monotonic()
                questions.feed_data(framed(Go(moment)) + framed(StopLoad(moment + 0.1, 0.0)))

        model = make(tmp_path, max_batch=1, a_ms=500)
        questions.feed_data(framed(setup(model)) + framed(PrepareLoad(Closed(1), 0)))
        with pytest.raises(BackendFailed):
            async with asyncio.timeout(60):
                await generator.run(questions, hear)

    asyncio.run(scenario())
    assert told[-1] == Broken(["it does not go"])


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("no/such/folder", "no such file or folder"),
        ("http://127.0.0.1:1/v2/models/x", "http://127.0.0.1:1"),
        ("gopher://x", "unknown protocol 'gopher'"),
    ],
)
def test_what_cannot_be_opened_is_said_in_words(address: str, text: str) -> None:
    async def scenario(crew: GeneratorPool, heard: list[GeneratorReport]) -> None:
        with pytest.raises(ConfigError, match=text):
            await crew.start([setup(address)])

    run(scenario)


def test_a_generator_that_dies_is_noticed(tmp_path: Path) -> None:
    async def scenario(crew: GeneratorPool, heard: list[GeneratorReport]) -> None:
        await crew.start([setup(make(tmp_path, a_ms=1))])
        await crew.prepare(Closed(1), 0)
        crew.ask(Go(time.monotonic()))
        assert crew.problem() == []
        (child,) = children_running("penstock.benchmark.generator")
        os.kill(child.pid, signal.SIGKILL)
        await until(crew.problem)
        assert crew.problem() == ["a generator process was killed by SIGKILL"]
        crew.ask(StopLoad(time.monotonic(), 1.0))
        with pytest.raises(ConfigError, match="SIGKILL"):
            await crew.expect(Ended)

    run(scenario)


def test_generators_go_when_the_conductor_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        others = psutil.Process().children()
        crew = GeneratorPool(lambda *_: None)
        await crew.start([setup(make(tmp_path, a_ms=1))])
        children = [each for each in psutil.Process().children() if each not in others]
        await crew.close()
        assert children
        assert [each for each in children if each.is_running()] == []

    asyncio.run(scenario())
