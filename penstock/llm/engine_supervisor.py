"""The state of a model's engine in the core: loading, ready, or being replaced after it died or
hung. Runs on the core's event loop. `OpenGenerations` reads what the engine says.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from penstock.errors import BackendFailed, NotReady
from penstock.llm import messages
from penstock.llm.text_metrics import TextMetrics
from penstock.processes.child import ChildProcess, StartLife
from penstock.processes.life import ProcessLife
from penstock.processes.restarted import RestartedProcess
from penstock.processes.restarts import backoff_s, deaths_in_a_row
from penstock.wire.frames import MAX_FRAME_BYTES, StartFailed, Stop

if TYPE_CHECKING:
    from penstock.llm.open_generations import OpenGenerations

log = logging.getLogger("penstock.llm")
EngineState = Literal["LOADING", "READY", "UNAVAILABLE"]
STOP_S = 5.0
SOCKET_OVERHEAD = 1024
# An engine is hung if it is silent for `hang_s` or `SLOWER` times its slowest step, whichever is
# longer; before the first step, for `FIRST_STEP` times `hang_s`.
SLOWER, FIRST_STEP = 20, 10
EngineLife: StartLife = partial(ProcessLife, module="penstock.llm.engine_main")


class EngineSupervisor:
    """One engine after the other, for one model."""

    def __init__(
        self,
        name: str,
        settings: messages.EngineSettings,
        metrics: TextMetrics,
        requests: OpenGenerations,
        start_life: StartLife = EngineLife,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state: EngineState = "LOADING"
        self.reason = ""
        self.ready: messages.Ready | None = None
        # Limit of a datagram.
        self.max_bytes = MAX_FRAME_BYTES
        # When to look whether the engine hangs; None while it is not watched.
        self.watch: asyncio.TimerHandle | None = None
        self.process = RestartedProcess[None](
            "engine", self, start_life, requests.received, messages.encode(Stop())
        )
        self._settings = settings
        self._metrics = metrics
        self._requests = requests
        self._clock = clock
        self._aborted: list[int] = []
        self._num_deaths = 0
        self._ready_at = 0.0
        self._restart_at = 0.0
        self._is_hung = False

    async def close(self) -> None:
        self.state, self.reason = "UNAVAILABLE", "it is unloaded"
        self.process.stop()
        if self.watch is not None:
            self.watch.cancel()
        text = f"model '{self.name}' is unloaded; the answer is cut off"
        self._requests.engine_ended(NotReady(text))
        await self.process.wait(STOP_S)

    def not_ready(self) -> NotReady:
        """Return why it cannot answer, with a retry time that assumes the next engine loads as long
        as the last one."""
        text = f"model '{self.name}' is not ready: {self.reason or 'it is loading'}"
        if self.process.is_stopping or self.ready is None:
            return NotReady(text)
        return NotReady(text, max(0.0, self._restart_at - self._clock()) + self.ready.load_s)

    def send(self, message: messages.ToEngine) -> None:
        if self.process.child is not None:
            self.process.child.send(messages.encode(message))

    def abort(self, request: int) -> None:
        """Abort a request. Those of one iteration of the event loop share a message."""
        if not self._aborted:
            self.process.loop.call_soon(self._send_aborted)
        self._aborted.append(request)

    def _send_aborted(self) -> None:
        requests, self._aborted = tuple(self._aborted), []
        self.send(messages.GiveUp(requests))

    def look_after(self) -> None:
        """Watch the engine while requests are open; kill it if it was silent for too long."""
        self.watch = None
        if self._requests.is_idle or self.process.child is None:
            return
        longest_s, slowest_s = self._settings.hang_s, self._requests.slowest_s
        # It reports every step; before the first, its step time is unknown.
        longest_s = max(longest_s, SLOWER * slowest_s) if slowest_s else FIRST_STEP * longest_s
        left_s = self._requests.heard_at + longest_s - self.process.loop.time()
        if left_s > 0:
            self.watch = self.process.loop.call_later(left_s, self.look_after)
            return
        self._is_hung = True
        self.process.kill(f"said nothing for {longest_s:.3g} s and was killed")

    # The process.

    def launched(self, child: ChildProcess) -> None:
        # The kernel needs part of the send buffer for itself.
        room = child.life.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.max_bytes = min(room - SOCKET_OVERHEAD, MAX_FRAME_BYTES)
        self.send(messages.LoadEngine(messages.VERSION, self._settings))
        if self.process.num_restarts:
            self._metrics.model.num_restarts += 1

    def loaded(self, message: messages.Ready | StartFailed) -> None:
        if isinstance(message, StartFailed):
            self.process.problems = message.problems
            return
        self.ready, self.state, self.reason = message, "READY", ""
        self._ready_at = self._clock()
        self._metrics.loaded(message)
        log.info("%s is ready after %.2f s", self.name, message.load_s, extra={"model": self.name})
        self.process.become_ready(None)

    def ended(self, reason: str, was_ready: bool) -> float:
        self.state = "UNAVAILABLE"
        if was_ready:
            # It crashed, or it was killed after being silent for too long.
            self._metrics.model.num_deaths["hang" if self._is_hung else "crash"] += 1
        self._is_hung = False
        well_s = self._clock() - self._ready_at if was_ready else 0.0
        self._num_deaths = deaths_in_a_row(self._num_deaths, well_s)
        self.reason = "; ".join(self.process.problems) or f"its engine {reason}"
        delay_s = backoff_s(self._num_deaths)
        self._restart_at = self._clock() + delay_s
        error = BackendFailed(f"the engine {reason}; what it had generated is lost")
        self._requests.engine_ended(error)
        return delay_s
