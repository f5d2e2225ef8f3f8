"""Memory of the machine and its processes, and the kernel's kills for lack of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of the machine, or of the container if that has less, in bytes."""

    available: int
    total: int


def read_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> MachineMemory:
    """Return the memory available to processes, including reclaimable page cache."""
    machine = psutil.virtual_memory()
    limit = _read_number(cgroups / "memory.max")
    used = _read_number(cgroups / "memory.current")
    if limit is None or used is None or limit >= machine.total:
        return MachineMemory(machine.available, machine.total)
    used -= _read_field(cgroups / "memory.stat", "inactive_file") or 0
    return MachineMemory(min(machine.available, max(0, limit - used)), limit)


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


def proportional_bytes(pid: int) -> int:
    """Return the resident memory, in which each page counts by the part of its processes that this
    is; 0 when the process has exited."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.AccessDenied, AttributeError):
            return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    return 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory; 0 when the process has exited."""
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
