"""One child process after the other for a long-lived service: started, replaced when it dies, and
stopped. Engines and renderers of language models run this way.

Knows neither what the messages say nor how long to wait before a restart; its owner does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.errors import ConfigError
from penstock.processes.child import ChildProcess, StartLife
from penstock.processes.restarts import MAX_LOAD_DEATHS

log = logging.getLogger("penstock.processes")
Loaded = TypeVar("Loaded")


class ProcessOwner(Protocol):
    name: str

    def launched(self, child: ChildProcess) -> None:
        """A process was started; send it the first message."""

    def ended(self, reason: str, was_ready: bool) -> float:
        """A process has died or could not be started; return the seconds to the next start."""


class RestartedProcess(Generic[Loaded]):
    """Its event loop is the one that runs `start`. Invariant: `child` is the running process."""

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        kind: str,
        owner: ProcessOwner,
        start_life: StartLife,
        received: Callable[[memoryview], object],
        stop: bytes,
        load_s: float | None = None,
    ) -> None:
        """`stop` is the message that asks a process to exit; one that is not ready after `load_s`
        is killed."""
        self.child: ChildProcess | None = None
        self.is_ready = self.is_stopping = False
        self.num_restarts = 0
        # Deaths since one was ready, and what the last one said about them.
        self.num_deaths = 0
        self.problems: Sequence[str] = ()
        self._kind, self._owner = kind, owner
        self._start_life, self._received = start_life, received
        self._stop, self._load_s = stop, load_s
        # Ends the load of a process, then the delay before the next one.
        self._timer: asyncio.TimerHandle | None = None
        self._loaded: asyncio.Future[Loaded] | None = None
        # Why the owner killed the process.
        self._killed_for = ""

    @property
    def pid(self) -> int:
        return 0 if self.child is None else self.child.life.pid

    @property
    def was_loaded(self) -> bool:
        return self._loaded is not None and self._loaded.done()

    async def start(self) -> Loaded:
        """Start a process and wait until it is ready. ConfigError if it cannot load."""
        self.loop = asyncio.get_running_loop()
        self._loaded = self.loop.create_future()
        self._launch()
        return await self._loaded

    def stop(self) -> None:
        """Ask the process to exit; none is started any more."""
        self.is_stopping = True
        self._stop_timer()
        if self._loaded is not None:
            self._loaded.cancel()
        if self.child is not None:
            self.child.send(self._stop)

    async def wait(self, seconds: float) -> None:
        """Wait for the exit after `stop`; kill the process after this time."""
        if self.child is not None:
            await self.child.wait(seconds)

    def kill(self, reason: str = "") -> None:
        """Kill the process; `reason` describes its death better than its exit status."""
        if self.child is not None:
            self._killed_for = reason
            self.child.life.kill()

    def become_ready(self, loaded: Loaded) -> None:
        self._stop_timer()
        self.is_ready, self.num_deaths = True, 0
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(loaded)

    def _launch(self) -> None:
        self.problems = ()
        try:
            self.child = ChildProcess(self.loop, self._start_life, self._received, self._died)
        except OSError as error:
            self._ended(f"could not be started ({error})")
            return
        if self._load_s is not None:
            self._timer = self.loop.call_later(self._load_s, self._end_load, self._load_s)
        self._owner.launched(self.child)

    def _end_load(self, load_s: float) -> None:
        self.problems = (f"{self._kind}: loading took longer than {load_s:g} s",)
        self.kill()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _died(self, reason: str) -> None:
        self.child = None
        self._stop_timer()
        reason, self._killed_for = self._killed_for or reason, ""
        if not self.is_stopping:
            self._ended(reason)

    def _ended(self, reason: str) -> None:
        was_ready, self.is_ready = self.is_ready, False
        self.num_deaths += 1
        delay_s = self._owner.ended(reason, was_ready)
        loaded, name = self._loaded, self._owner.name
        assert loaded is not None, "`start` launches the first one"
        if not loaded.done() and (self.problems or self.num_deaths >= MAX_LOAD_DEATHS):
            text = f"the {self._kind} {reason} while loading, {self.num_deaths} times"
            loaded.set_exception(ConfigError(self.problems or [text]))
            return
        self.num_restarts += 1
        text = "%s: the %s %s; restart in %.1f s"
        extra = {"model": name, "reason": reason}
        log.warning(text, name, self._kind, reason, delay_s, extra=extra)
        self._timer = self.loop.call_later(delay_s, self._launch)
