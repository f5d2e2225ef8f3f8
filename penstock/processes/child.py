"""A child process with the socket to it, on an event loop: frames in and out, and its end.

Workers, shards, engines and renderers are children. Knows nothing of what the frames say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from typing import Protocol

from penstock.processes.channel import Datagrams, make_buffer

log = logging.getLogger("penstock.processes")


class Life(Protocol):
    """A running child, whether a process or a thread."""

    sock: socket.socket
    pid: int
    # Once it is dead: whether it was SIGKILLed by neither the core nor the kernel's OOM killer.
    was_killed_outside: bool

    def kill(self) -> None: ...
    def socket_closed(self) -> None: ...
    def has_room_for_another(self) -> bool: ...


# Raises OSError if the process cannot be started, and then leaves nothing behind.
StartLife = Callable[[asyncio.AbstractEventLoop, Callable[[str], None]], Life]


class ChildProcess(Datagrams):
    """One life. `received` gets every datagram, also those sent before the death; then `died` gets
    the reason of the death. OSError if it cannot be started."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start_life: StartLife,
        received: Callable[[memoryview], object],
        died: Callable[[str], None],
    ) -> None:
        self._on_death = died
        self._is_dead = asyncio.Event()
        buffer = make_buffer()  # Before there is a process that would have to be ended.
        self.life = start_life(loop, self._died)
        lost = self.life.socket_closed
        super().__init__(loop, self.life.sock, received, lost, buffer=buffer)

    async def wait(self, seconds: float) -> None:
        """Wait for a child that was asked to stop; kill it after this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_dead.wait()
        except TimeoutError:
            if not self._is_dead.is_set():
                self.life.kill()
            await self._is_dead.wait()

    def _died(self, reason: str) -> None:
        self._is_dead.set()
        self._lost = lambda: None
        try:
            self.read(reads_all=True)
        except Exception:  # Its death must be noticed in any case.
            log.exception("the last frames of a process cannot be read")
        self.close()
        self._sock.close()
        self._on_death(reason)
        # It refers back to this: without the garbage collector neither would be freed.
        del self.life


def limited(start_life: StartLife, memory_bytes: int | None) -> StartLife:
    """Limit each process's private memory (None: no limit). Allocations over it fail."""
    if memory_bytes is None:
        return start_life

    def start(loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> Life:
        life = start_life(loop, on_death)
        if life.pid:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(life.pid, resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        return life

    return start
