"""A run's generator processes as the conductor sees them: asked together, heard one by one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from penstock.benchmark.messages import (
    LENGTH,
    Answer,
    Broken,
    Opened,
    Prepare,
    Prepared,
    Progress,
    Question,
    SetUp,
    decode_answer,
    encode,
)
from penstock.benchmark.pacer import Load
from penstock.errors import ConfigError

A = TypeVar("A")


class Member:
    """One generator. `report` gets its progress, everything else waits in order for `expect`."""

    def __init__(
        self, process: asyncio.subprocess.Process, report: Callable[[Progress], None]
    ) -> None:
        # Why it cannot go on; empty while it can.
        self.problems: list[str] = []
        self._process = process
        self._report = report
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._listening = asyncio.ensure_future(self._listen())

    def ask(self, question: Question) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(encode(question))

    async def expect(self, kind: type[A]) -> A:
        answer = await self._answers.get()
        if isinstance(answer, Broken):
            self._answers.put_nowait(answer)  # It stays broken.
            raise ConfigError(answer.problems)
        if not isinstance(answer, kind):
            raise AssertionError(f"a generator said {answer!r}, expected {kind.__name__}")
        return answer

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        reader = self._process.stdout
        while True:
            try:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                answer = decode_answer(await reader.readexactly(size))
            except asyncio.IncompleteReadError:
                break
            if isinstance(answer, Progress):
                self._report(answer)
            else:
                self._put(answer)
        code = await self._process.wait()
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        self._put(Broken([f"a generator process ended {how}"]))

    def _put(self, answer: Answer) -> None:
        if isinstance(answer, Broken) and not self.problems:
            self.problems = answer.problems
        self._answers.put_nowait(answer)

    async def close(self) -> None:
        """End it; a generator that does not go by itself is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        await self._listening


class Crew:
    """All generators of a run."""

    def __init__(self, report: Callable[[int, Progress], None]) -> None:
        self._report = report
        self.members: list[Member] = []

    async def start(self, setups: Sequence[SetUp]) -> list[Opened]:
        """One after the other: the first measures what only a first request sees."""
        opened = []
        for setup in setups:
            member = Member(await self._spawn(), partial(self._report, setup.index))
            self.members.append(member)
            member.ask(setup)
            opened.append(await member.expect(Opened))
        return opened

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.benchmark.generator",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the conductor's business.
        )

    async def prepare(self, load: Load, seed: int) -> None:
        self.ask(Prepare(load, seed))
        await self.expect(Prepared)

    def ask(self, question: Question) -> None:
        for member in self.members:
            member.ask(question)

    async def expect(self, kind: type[A]) -> list[A]:
        return [await member.expect(kind) for member in self.members]

    def problem(self) -> list[str]:
        return next((member.problems for member in self.members if member.problems), [])

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))
