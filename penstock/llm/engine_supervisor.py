"""A model's engine in the core: loading, ready, or being replaced after it died or hung.

Gives each shard's part of the model (`core_link.EnginePart`) a socket to the engine; the core sees
no requests. There is one for each model, however many shards there are. Runs on the core's event
loop.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from penstock.llm import messages
from penstock.processes.channel import socket_pair
from penstock.processes.child import ChildProcess, StartLife
from penstock.processes.life import ProcessLife
from penstock.processes.restarted import RestartedProcess
from penstock.processes.restarts import backoff_s, deaths_in_a_row
from penstock.serving.core_link import EnginePart
from penstock.serving.metrics import ModelMetrics
from penstock.wire import frames

log = logging.getLogger("penstock.llm")
EngineState = Literal["LOADING", "READY", "UNAVAILABLE"]
STOP_S = 5.0
# Numbers of requests for each socket to an engine.
NUMBERS_PER_PART = 1 << 40
EngineLife: StartLife = partial(ProcessLife, module="penstock.llm.engine_main")


class EngineSupervisor:
    """One engine after the other, for one model. `_parts` are the shards' parts of it, by shard.
    They are dropped by `close`, so that an unloaded model is freed without the garbage
    collector."""

    def __init__(
        self,
        settings: messages.EngineSettings,
        metrics: ModelMetrics,
        start_life: StartLife = EngineLife,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = metrics.name
        self.state: EngineState = "LOADING"
        self.reason = ""
        self.ready: frames.EngineReady | None = None
        # When the model was loaded, in seconds since 1970.
        self.loaded_at = 0
        self.process = RestartedProcess[None](
            "engine", self, start_life, self._received, messages.encode(frames.Stop())
        )
        self._parts: dict[int, EnginePart] = {}
        self._part_numbers = itertools.count(1)
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        # How many engines there were.
        self._life = 0
        self._num_deaths = 0
        self._ready_at = 0.0
        self._restart_at = 0.0
        self._is_hung = False
        # How the last engine ended.
        self._ending = ""

    async def close(self) -> None:
        self.state, self.reason = "UNAVAILABLE", "it is unloaded"
        self.process.stop()
        self._parts.clear()
        await self.process.wait(STOP_S)

    def join(self, shard: int, part: EnginePart) -> None:
        """Let a shard use the engine, now or once it is ready."""
        self._parts[shard] = part
        if self.state == "READY":
            self._set_engine(shard, part)
        elif self.state == "UNAVAILABLE":
            part.engine_ended(self._ended)

    def leave(self, shard: int) -> None:
        """Forget a shard that has ended; the engine notices by its socket."""
        self._parts.pop(shard, None)

    def engine_hung(self, life: int, silent_s: float) -> None:
        """Kill an engine that a shard has heard nothing from for too long."""
        if life == self._life and self.process.child is not None:
            self._is_hung = True
            self.process.kill(f"said nothing for {silent_s:.3g} s and was killed")

    @property
    def _ended(self) -> frames.EngineEnded:
        if self.process.is_stopping or self.ready is None:
            return frames.EngineEnded(self._ending, self.reason)
        place = self._restart_at, self.ready.load_s
        return frames.EngineEnded(self._ending, self.reason, *place)

    def _set_engine(self, shard: int, part: EnginePart) -> None:
        """Give a shard and the engine a socket to each other."""
        child = self.process.child
        assert self.ready is not None and child is not None, "its state is READY"
        first = next(self._part_numbers) * NUMBERS_PER_PART
        engine = frames.SetEngine(self._life, self.ready, first, self.loaded_at)
        try:
            ours, theirs = socket_pair()
            with theirs:
                part.set_engine(engine, ours)
                child.send(messages.encode(frames.Attach(shard, self._life)), (theirs.fileno(),))
        except OSError as error:
            self.process.kill(f"could not be connected ({error}) and was killed")

    # The process.

    def launched(self, child: ChildProcess) -> None:
        self._life += 1
        child.send(messages.encode(messages.LoadEngine(messages.VERSION, self._settings)))
        if self.process.num_restarts:
            self._metrics.num_restarts += 1

    def _received(self, datagram: memoryview) -> None:
        message = messages.decode_from_engine(datagram)
        if isinstance(message, frames.StartFailed):
            self.process.problems = message.problems
            return
        self.ready, self.state, self.reason = message, "READY", ""
        self.loaded_at = self.loaded_at or int(time.time())
        self._ready_at = self._clock()
        log.info("%s is ready after %.2f s", self.name, message.load_s, extra={"model": self.name})
        for shard, part in list(self._parts.items()):
            self._set_engine(shard, part)
        self.process.become_ready(None)

    def ended(self, reason: str, was_ready: bool) -> float:
        self.state = "UNAVAILABLE"
        if was_ready:
            # It crashed, or it was killed after being silent for too long.
            self._metrics.num_deaths["hang" if self._is_hung else "crash"] += 1
        self._is_hung = False
        well_s = self._clock() - self._ready_at if was_ready else 0.0
        self._num_deaths = deaths_in_a_row(self._num_deaths, well_s)
        self._ending = reason
        self.reason = "; ".join(self.process.problems) or f"its engine {reason}"
        delay_s = backoff_s(self._num_deaths)
        self._restart_at = self._clock() + delay_s
        for part in list(self._parts.values()):
            part.engine_ended(self._ended)
        return delay_s
