"""A child process that serves this one: started by exec, watched, and killed with all it forked.

Workers, shards, engines and renderers run this way. `start` is the child's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

from penstock.processes.channel import socket_pair
from penstock.processes.endings import describe_status
from penstock.processes.reaper import Reaper, kill_group
from penstock.processes.restarts import spare_fits
from penstock.system import devices, memory
from penstock.system.environment import allowed

# Time for a process that closed its socket to exit by itself, so that its status gives the reason.
END_S = 2.0


class ProcessLife:
    """A worker in its own process: spawned by exec, never only forked; dies with the core. Shards
    run the same way, with another `module`. It leads a process group, which is killed with it."""

    _reaper: ClassVar[Reaper] = Reaper()
    # The kernel's count of OOM kills at the last reading.
    _num_oom_kills: ClassVar[int | None] = None

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[str], None],
        module: str = "penstock.serving.worker",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`environment` is added to the variables that every worker gets."""
        with contextlib.ExitStack() as undo:
            self.sock, theirs = socket_pair()
            undo.callback(self.sock.close)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    env={**allowed(devices.worker_environment()), **environment},
                )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            # SCHED_BATCH: while starting, it does not preempt processes that serve. It resets this
            # when it is ready (`take_part`).
            with contextlib.suppress(OSError):
                os.sched_setscheduler(self._process.pid, os.SCHED_BATCH, os.sched_param(0))
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self.pid = self._process.pid
        self.was_killed_outside = False
        # Whether the core killed it, and the timer for doing so.
        self._is_killed = False
        self._ending: asyncio.TimerHandle | None = None
        if ProcessLife._num_oom_kills is None:
            ProcessLife._num_oom_kills = memory.read_oom_kills()
        self._reaper.watch(self.pid, loop)
        self._loop = loop
        self._on_death = on_death
        loop.add_reader(self._pidfd, self._died)

    def kill(self) -> None:
        self._is_killed = True
        kill_group(self.pid)

    def socket_closed(self) -> None:
        """Kill the worker in END_S unless it exits by itself; it is useless without its socket."""
        if self._ending is None:
            self._ending = self._loop.call_later(END_S, self.kill)

    def has_room_for_another(self) -> bool:
        """Whether the machine's memory has room for one more process as large as this one."""
        machine = memory.read_memory()
        own_bytes = memory.resident_bytes(self.pid)
        return own_bytes > 0 and spare_fits(own_bytes, machine.available, machine.total)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Before `wait`: until then the kernel does not reuse its process group id.
        kill_group(self.pid)
        self._reaper.forget(self.pid)
        if self._ending is not None:
            self._ending.cancel()
        status = self._process.wait()
        is_oom = self._was_out_of_memory()
        self.was_killed_outside = status == -signal.SIGKILL and not (self._is_killed or is_oom)
        if status == -signal.SIGKILL and is_oom:
            reason = "was killed by the kernel for lack of memory"
        else:
            reason = describe_status(status)
        self._on_death(reason)

    @staticmethod
    def _was_out_of_memory() -> bool:
        """Whether the kernel killed a process for lack of memory since the last death."""
        before, now = ProcessLife._num_oom_kills, memory.read_oom_kills()
        if now is None:
            return False
        ProcessLife._num_oom_kills = now
        return before is not None and now > before
