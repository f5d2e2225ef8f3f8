"""The core's side of an engine process: starts it, sends it messages, and replaces it when it dies
or hangs. Runs on the core's event loop. Knows no requests: a listener gets what the engine says.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from penstock.errors import BackendFailed, ConfigError, InvalidRequest, NotReady
from penstock.llm import messages
from penstock.llm.text_metrics import Death, TextMetrics
from penstock.processes.child import ChildProcess, StartLife
from penstock.processes.life import ProcessLife
from penstock.processes.restarts import MAX_LOAD_DEATHS, backoff_s, deaths_in_a_row
from penstock.wire.frames import MAX_FRAME_BYTES

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
    """One engine after the other, for one model. Its event loop is the one that runs `start`."""

    def __init__(
        self,
        name: str,
        settings: messages.EngineSettings,
        metrics: TextMetrics,
        listener: OpenGenerations,
        start_life: StartLife = EngineLife,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state: EngineState = "LOADING"
        self.reason = ""
        self.ready: messages.Ready | None = None
        self.last_report: messages.StepReport | None = None
        self.num_restarts = 0
        self._settings = settings
        self._metrics = metrics
        self._listener = listener
        self._start_life = start_life
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[None] | None = None
        self._aborted: list[int] = []
        self._child: ChildProcess | None = None
        self._most_bytes = MAX_FRAME_BYTES
        self._num_deaths = 0
        self._ready_at = 0.0
        self._is_stopping = False
        self._restart: asyncio.TimerHandle | None = None
        self._restart_at = 0.0
        self._slowest_s = 0.0
        # When the engine last sent a message or was idle, by the loop's clock.
        self._heard = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._is_hung = False

    async def start(self) -> None:
        """Start the engine and wait until it is ready. ConfigError if it cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._launch()
        await self._loaded

    async def close(self) -> None:
        self._is_stopping = True
        self.state, self.reason = "UNAVAILABLE", "it is unloaded"
        if self._loaded is not None:
            self._loaded.cancel()
        for timer in (self._restart, self._watch):
            if timer is not None:
                timer.cancel()
        text = f"model '{self.name}' is unloaded; the answer is cut off"
        self._listener.engine_ended(NotReady(text))
        if self._child is not None:
            self.send(messages.StopEngine())
            await self._child.wait(STOP_S)

    @property
    def pid(self) -> int:
        return 0 if self._child is None else self._child.life.pid

    def not_ready(self) -> NotReady:
        """Return why it cannot answer, with a retry time that assumes the next engine loads as long
        as the last one."""
        text = f"model '{self.name}' is not ready: {self.reason or 'it is loading'}"
        if self._is_stopping or self.ready is None:
            return NotReady(text)
        return NotReady(text, max(0.0, self._restart_at - self._clock()) + self.ready.load_s)

    # Messages to the engine.

    def encode(self, request: messages.GenerateRequest) -> bytes:
        """Encode a request. InvalidRequest if it does not fit a datagram."""
        try:
            data = messages.encode(request)
        except OverflowError:
            raise InvalidRequest("a number has more than 64 bits") from None
        if len(data) > self._most_bytes:
            raise InvalidRequest(
                f"the request takes {len(data)} bytes; expected at most {self._most_bytes}"
            )
        return data

    def send_request(self, data: bytes) -> None:
        """Send an encoded request, and watch the engine until the listener is idle again. The
        listener counts the request as open afterwards."""
        assert self._child is not None, "its state is READY"
        self._child.send(data)
        if self._listener.is_idle:
            self._heard = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._longest_silence_s, self._look_after)

    def send(self, message: messages.ToEngine) -> None:
        if self._child is not None:
            self._child.send(messages.encode(message))

    def abort(self, request: int) -> None:
        """Abort a request. Those of one iteration of the event loop share a message."""
        if not self._aborted:
            self._loop.call_soon(self._send_aborted)
        self._aborted.append(request)

    def _send_aborted(self) -> None:
        requests, self._aborted = tuple(self._aborted), []
        self.send(messages.GiveUp(requests))

    # The process.

    @property
    def _longest_silence_s(self) -> float:
        """How long the engine may be silent. It reports every step; before the first, its step time
        is unknown."""
        if not self._slowest_s:
            return FIRST_STEP * self._settings.hang_s
        return max(self._settings.hang_s, SLOWER * self._slowest_s)

    def _look_after(self) -> None:
        """Kill an engine that was silent for too long while requests are open."""
        self._watch = None
        if self._listener.is_idle or self._child is None:
            return
        left_s = self._heard + self._longest_silence_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look_after)
            return
        self._is_hung = True
        self._child.life.kill()

    def _launch(self) -> None:
        try:
            self._child = ChildProcess(self._loop, self._start_life, self._receive, self._died)
        except OSError as error:
            self._ended(f"could not be started ({error})")
            return
        # The largest datagram: the kernel needs part of its send buffer for itself.
        room = self._child.life.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._most_bytes = min(room - SOCKET_OVERHEAD, MAX_FRAME_BYTES)
        self.send(messages.LoadEngine(messages.VERSION, self._settings))

    def _receive(self, data: memoryview) -> None:
        self._heard = self._loop.time()
        self._handle(messages.decode_from_engine(data))

    def _handle(self, message: messages.FromEngine) -> None:
        if isinstance(message, messages.StepReport):
            self._slowest_s = max(self._slowest_s, message.step_s)
            self._metrics.step(message)
            self.last_report = message
            self._listener.engine_said(message)
        elif isinstance(message, messages.Ready):
            self._become_ready(message)
        elif isinstance(message, messages.LoadFailed):
            self.reason = "; ".join(message.problems)
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_exception(ConfigError(message.problems))
        else:
            self._listener.engine_said(message)

    def _become_ready(self, message: messages.Ready) -> None:
        self.ready, self.state, self.reason = message, "READY", ""
        self._ready_at = self._clock()
        self._metrics.loaded(message)
        log.info("%s is ready after %.2f s", self.name, message.load_s, extra={"model": self.name})
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)

    def _died(self, reason: str) -> None:
        self._child = None
        cause: Death = "crash"
        if self._is_hung:
            reason = f"said nothing for {self._longest_silence_s:.3g} s and was killed"
            cause, self._is_hung = "hang", False
        if not self._is_stopping:
            self._ended(reason, cause)

    def _ended(self, reason: str, cause: Death = "crash") -> None:
        was_ready, self.state = self.state == "READY", "UNAVAILABLE"
        if was_ready:
            self._metrics.died(cause)
        well_s = self._clock() - self._ready_at if was_ready else 0.0
        self._num_deaths = deaths_in_a_row(self._num_deaths, well_s)
        error = BackendFailed(f"the engine {reason}; what it had generated is lost")
        self._listener.engine_ended(error)
        loaded = self._loaded
        assert loaded is not None, "an engine is launched by `start`"
        if not loaded.done() and self._num_deaths >= MAX_LOAD_DEATHS:
            text = f"the engine {reason} while loading, {MAX_LOAD_DEATHS} times"
            loaded.set_exception(ConfigError([self.reason or text]))
        if loaded.done() and self.ready is None:
            return
        self.reason = self.reason or f"its engine {reason}"
        delay_s = backoff_s(self._num_deaths)
        self.num_restarts += 1
        text = "%s: the engine %s; restart in %.1f s"
        log.warning(text, self.name, reason, delay_s, extra={"model": self.name, "reason": reason})
        self._restart = self._loop.call_later(delay_s, self._launch)
        self._restart_at = self._clock() + delay_s
        self._metrics.restarted()
