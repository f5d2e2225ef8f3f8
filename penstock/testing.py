"""Test doubles that are part of the public package: a worker on strings, sinks, a clock.

`Puppets` stands in for processes: each worker runs the real `Worker` code, one frame at a time,
only when the test says so, and dies when the test says so. No thread, no process, no waiting.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.serving.supervisor import socket_pair
from penstock.serving.worker import Channel, Worker
from penstock.types import Request, Response, to_array


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class RecordingSink:
    """Keeps every answer it gets, outputs copied."""

    def __init__(self) -> None:
        self.answers: list[Response | PenstockError] = []
        self.outputs: list[dict[str, object]] = []
        self.num_final = 0

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self.answers.append(answer)
        self.num_final += final
        if isinstance(answer, Response):
            self.outputs.append({t.name: to_array(t).copy() for t in answer.outputs})

    @property
    def error(self) -> PenstockError | None:
        last = self.answers[-1] if self.answers else None
        return last if isinstance(last, PenstockError) else None


class PuppetLife:
    """One worker. `step` lets it handle a frame; `kill` is a death like any other."""

    pid = 0

    def __init__(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> None:
        self.sock, self._theirs = socket_pair()
        self._worker = Worker(Channel(self._theirs))
        self._loop = loop
        self._on_death = on_death
        self.is_alive = True

    @property
    def has_work(self) -> bool:
        return self.is_alive and bool(select.select([self._theirs], [], [], 0)[0])

    def step(self) -> None:
        if self.has_work and not self._worker.step():
            self.kill("exited with status 0")

    def kill(self, reason: str = "was killed by SIGKILL") -> None:
        if self.is_alive:
            self.is_alive = False
            self._worker.close()
            self._theirs.close()
            self._loop.call_soon(self._on_death, reason)

    def socket_closed(self) -> None:
        self.kill()


class Puppets:
    """Give this as `start_life`; `alive` are the workers that run now."""

    def __init__(self) -> None:
        self._lives: list[PuppetLife] = []

    def __call__(
        self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]
    ) -> PuppetLife:
        life = PuppetLife(loop, on_death)
        self._lives.append(life)
        return life

    @property
    def alive(self) -> list[PuppetLife]:
        return [life for life in self._lives if life.is_alive]

    async def step_all(self) -> None:
        """Let every worker handle what has been sent to it, and the core what they answer."""
        for _ in range(1000):
            await settle()
            busy = [life for life in self.alive if life.has_work]
            if not busy:
                return
            for life in busy:
                life.step()
        raise AssertionError("the workers never came to rest")


async def settle(rounds: int = 6) -> None:
    """Let the event loop deliver what is due."""
    for _ in range(rounds):
        await asyncio.sleep(0)
