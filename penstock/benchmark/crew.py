"""The generator processes of a run, as the conductor sees them."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from penstock.benchmark import messages
from penstock.benchmark.pacer import Load
from penstock.errors import ConfigError
from penstock.processes import framing
from penstock.processes.endings import describe_status

A = TypeVar("A")


class GeneratorProcess:
    """One generator. `report` receives its progress; all other answers queue for `expect`."""

    def __init__(
        self, process: Process, report: Callable[[messages.GeneratorReport], None]
    ) -> None:
        # Why the generator failed; empty while it works.
        self.problems: list[str] = []
        self._process = process
        self._report = report
        self._answers: asyncio.Queue[messages.Answer] = asyncio.Queue()
        self._listening = asyncio.ensure_future(self._listen())

    def ask(self, question: messages.Question) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(framing.frame(messages.encode(question)))

    async def expect(self, kind: type[A]) -> A:
        answer = await self._answers.get()
        if isinstance(answer, messages.Broken):
            self._answers.put_nowait(answer)  # Every later `expect` fails too.
            raise ConfigError(answer.problems)
        if not isinstance(answer, kind):
            raise AssertionError(f"a generator said {answer!r}, expected {kind.__name__}")
        return answer

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while (body := await framing.read(self._process.stdout)) is not None:
            answer = messages.decode_answer(body)
            if isinstance(answer, messages.GeneratorReport):
                self._report(answer)
            else:
                self._put(answer)
        code = await self._process.wait()
        self._put(messages.Broken([f"a generator process {describe_status(code)}"]))

    def _put(self, answer: messages.Answer) -> None:
        if isinstance(answer, messages.Broken) and not self.problems:
            self.problems = answer.problems
        self._answers.put_nowait(answer)

    async def close(self) -> None:
        """Close the generator's stdin, and kill the process if it does not exit within 5 s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        await self._listening


class GeneratorPool:
    """All generators of a run."""

    def __init__(self, report: Callable[[int, messages.GeneratorReport], None]) -> None:
        self._report = report
        self.members: list[GeneratorProcess] = []

    async def start(self, setups: Sequence[messages.SetUp]) -> list[messages.TargetOpened]:
        """Start generators one at a time: the first one measures the cold start."""
        opened = []
        for setup in setups:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.benchmark.generator"),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,  # The conductor handles Ctrl-C.
            )
            member = GeneratorProcess(process, partial(self._report, setup.index))
            self.members.append(member)
            member.ask(setup)
            opened.append(await member.expect(messages.TargetOpened))
        return opened

    async def prepare(self, load: Load, seed: int) -> None:
        self.ask(messages.PrepareLoad(load, seed))
        await self.expect(messages.LoadPrepared)

    def ask(self, question: messages.Question) -> None:
        for member in self.members:
            member.ask(question)

    async def expect(self, kind: type[A]) -> list[A]:
        return [await member.expect(kind) for member in self.members]

    def problem(self) -> list[str]:
        return next((member.problems for member in self.members if member.problems), [])

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))
