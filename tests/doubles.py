"""Test doubles: workers, sinks, GPUs and simulated load.

`Puppets` stands in for processes: each worker runs the real `Worker` code, one frame at a time, and
advances or crashes only when the test says so. No thread, no process, no waiting. `FakeGpus` are
simulated devices on which the `null` backend runs. `simulate` drives a batcher through a load with
executors that only take time, on a simulated clock.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import Overloaded, PenstockError
from penstock.processes.channel import Channel, socket_pair
from penstock.serving.batcher import Batcher
from penstock.serving.plan import UNPLANNED, Ticket
from penstock.serving.slo_batcher import SloBatcher
from penstock.serving.worker import Worker
from penstock.system.devices import Gpu
from penstock.types import Request, Response, to_array


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeGpus:
    """Pass this as a fleet's `read`. `used_bytes` is what a driver would report as used, by GPU."""

    def __init__(self, *total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.used_bytes = [0] * len(total_bytes)

    def __call__(self) -> tuple[Gpu, ...]:
        return tuple(
            Gpu(index, f"GPU-{index}", "Made Up", total, total - used)
            for index, (total, used) in enumerate(
                zip(self._total_bytes, self.used_bytes, strict=True)
            )
        )


class RecordingSink:
    """Keeps every answer, with copied outputs."""

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
    """One worker. `step` lets it handle a frame; `kill` is a crash."""

    pid = 0
    was_killed_outside = False

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[str], None],
        has_room: bool = False,
    ) -> None:
        self.sock, self._theirs = socket_pair()
        self._has_room = has_room
        self._worker = Worker(Channel(self._theirs))
        self._loop = loop
        self._on_death = on_death
        self.is_alive = True

    @property
    def has_work(self) -> bool:
        return self.is_alive and self._worker.has_work

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

    def has_room_for_another(self) -> bool:
        return self._has_room


class Puppets:
    """Pass this as `start_life`; `alive` are the running workers. `has_room`: there is memory for
    spare workers."""

    def __init__(self, *, has_room: bool = False) -> None:
        self._lives: list[PuppetLife] = []
        self._has_room = has_room

    def __call__(
        self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]
    ) -> PuppetLife:
        life = PuppetLife(loop, on_death, self._has_room)
        self._lives.append(life)
        return life

    @property
    def alive(self) -> list[PuppetLife]:
        return [life for life in self._lives if life.is_alive]

    async def step_all(self) -> None:
        """Let every worker handle its frames, and the core their answers, until all are idle."""
        for _ in range(1000):
            await settle()
            busy = [life for life in self.alive if life.has_work]
            if not busy:
                return
            for life in busy:
                life.step()
        raise AssertionError("the workers never came to rest")


async def settle(rounds: int = 6) -> None:
    """Run the event loop for a few turns."""
    for _ in range(rounds):
        await asyncio.sleep(0)


@dataclass
class Outcomes:
    """Time from arrival to answer or refusal of each request of a simulated load."""

    latencies_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    batch_rows: list[int] = field(default_factory=list)

    def num_within(self, slo_s: float) -> int:
        return sum(latency <= slo_s for latency in self.latencies_s)


class _Simulation:
    """One-row requests, executors that take `duration_of(rows)` (or of tokens, if requests have
    any), and a clock that jumps."""

    def __init__(
        self,
        batcher: Batcher | SloBatcher,
        num_executors: int,
        duration_of: Callable[[int], float],
    ) -> None:
        self._batcher = batcher
        self._duration_of = duration_of
        self._num_idle = num_executors
        self._running: list[tuple[float, int, float, list[Request]]] = []
        self._num_batches = 0
        self._sink = RecordingSink()
        self.outcomes = Outcomes()

    @property
    def next_end(self) -> float:
        return self._running[0][0] if self._running else math.inf

    @property
    def next_wake(self) -> float:
        batcher = self._batcher
        wake_at = batcher.wake_at if self._num_idle else batcher.next_expiry
        return math.inf if wake_at is None else wake_at

    def arrive(self, now: float, num_tokens: int) -> None:
        request = Request(self._sink, (), now)
        request.ticket = Ticket(UNPLANNED)
        request.timings.queued = now
        request.num_tokens = num_tokens
        try:
            self._batcher.add(request, "shape", now)
        except Overloaded:
            self.outcomes.refusals_s.append(0.0)

    def end_batches(self, now: float) -> None:
        while self._running and self._running[0][0] <= now:
            _, _, started, batch = heapq.heappop(self._running)
            self._num_idle += 1
            has_budget = self._batcher.policy.max_tokens is not None
            size = _tokens(batch) if has_budget else len(batch)
            self._batcher.observe("shape", size, started, now)
            self.outcomes.latencies_s += [now - request.timings.queued for request in batch]

    def pump(self, now: float) -> None:
        self._refuse(now)
        while self._num_idle:
            batch = self._batcher.next(now)
            if batch is None:
                break
            self._num_idle -= 1
            self._num_batches += 1
            self.outcomes.batch_rows.append(len(batch))
            end = now + self._duration_of(_tokens(batch) or len(batch))
            heapq.heappush(self._running, (end, self._num_batches, now, batch))
        self._refuse(now)

    def _refuse(self, now: float) -> None:
        for request in self._batcher.expire(now):
            self.outcomes.refusals_s.append(now - request.timings.queued)


def _tokens(batch: Sequence[Request]) -> int:
    return sum(request.num_tokens for request in batch)


def simulate(
    batcher: Batcher | SloBatcher,
    arrivals: Sequence[float],
    duration_of: Callable[[int], float],
    num_executors: int = 1,
    tokens: Sequence[int] = (),
) -> Outcomes:
    """Run a batcher through arrivals (ascending times) until everything has ended. `tokens` are the
    tokens of each request; batches then take time by their tokens."""
    simulation = _Simulation(batcher, num_executors, duration_of)
    index = 0
    while True:
        arrival = arrivals[index] if index < len(arrivals) else math.inf
        now = min(arrival, simulation.next_end, simulation.next_wake)
        if now == math.inf:
            return simulation.outcomes
        if now == arrival:
            simulation.arrive(now, tokens[index] if tokens else 0)
            index += 1
        simulation.end_batches(now)
        simulation.pump(now)
