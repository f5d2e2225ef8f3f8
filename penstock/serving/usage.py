"""Resource use of the server's processes, the machine and its GPUs, read at a scrape."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.serving.metrics import HostUse, ProcessUse
from penstock.system.devices import Watch


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the server; see `ProcessUse` for the names."""

    pid: int
    role: str
    model: str = ""
    version: str = ""
    instance: str = ""


class Usage:
    """Reads resource use. Utilisation is since the last `read`, so use one per server."""

    def __init__(self, gpus: Watch | None = None) -> None:
        self._gpus = gpus or Watch()
        psutil.cpu_percent(None)

    def begin(self) -> None:
        """Start counting the GPUs' energy. Opens their driver: not for the event loop."""
        self._gpus.uses()

    def read(self, members: Iterable[Member]) -> HostUse:
        """Read the use of this process and of `members`; one that has just exited is left out."""
        processes = []
        for member in (Member(os.getpid(), "core"), *members):
            try:
                processes.append(_use(member))
            except psutil.Error:
                continue
        memory = psutil.virtual_memory()
        return HostUse(
            cpu_utilization=psutil.cpu_percent(None) / 100,
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            processes=processes,
            gpus=self._gpus.uses(),
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine, or of the container if that has less, in bytes."""

    available: int
    total: int


def read_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return the memory available to processes, including reclaimable page cache."""
    machine = psutil.virtual_memory()
    limit = _read_number(cgroups / "memory.max")
    used = _read_number(cgroups / "memory.current")
    if limit is None or used is None or limit >= machine.total:
        return Memory(machine.available, machine.total)
    used -= _read_field(cgroups / "memory.stat", "inactive_file") or 0
    return Memory(min(machine.available, max(0, limit - used)), limit)


def read_oom_kills(
    cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> int | None:
    """Count the kernel's OOM kills in this process's control group, or on the whole machine if the
    group does not report them. None if the count cannot be read, e.g. without free descriptors."""
    group = ""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = line.removeprefix("0::").strip("/")
    for path in (cgroups / group / "memory.events", cgroups / "memory.events"):
        if path.is_file():
            return _read_field(path, "oom_kill")
    return _read_field(proc / "vmstat", "oom_kill")


def _read_number(path: Path) -> int | None:
    """Return None if there is no such file, or it says "max"."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _read_field(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None


def resident_bytes(pid: int) -> int:
    """Return the resident memory; 0 when the process has exited."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def cpu_s(pids: Iterable[int]) -> dict[int, float]:
    """Return CPU time so far, user and system; without processes that have exited."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found


def _use(member: Member) -> ProcessUse:
    process = psutil.Process(member.pid)
    with process.oneshot():
        times = process.cpu_times()
        return ProcessUse(
            member.role,
            process.memory_info().rss,
            times.user + times.system,
            member.model,
            member.version,
            member.instance,
        )
