"""The first things that a child process does. `life` is the parent's side."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys

from penstock.processes.endings import die_with_parent
from penstock.system import allocator, logs


def take_part() -> None:
    """Return all threads of this process to normal scheduling (see `life.ProcessLife`)."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def begin_life() -> socket.socket | None:
    """Set up a process started as `python -m MODULE FD PARENT` and return its socket; None if its
    parent has exited already."""
    parent = int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:
        return None
    # Ctrl-C in a terminal signals the whole group; the parent decides when this process stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(logs.from_environment())
    allocator.keep_freed_memory()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)


def limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more data than it has now."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmData:"))
    most = (int(line.split()[1]) << 10) + num_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
