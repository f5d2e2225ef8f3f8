"""Resource use of the server's processes, the machine and its GPUs, read at a scrape."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from penstock.serving.metrics import Labels
from penstock.system.devices import GpuUse, Watch


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Use of one process. Its `process` label: core, worker, grpc_front or http_front."""

    labels: Labels
    resident_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class HostUse:
    """Use of machine and processes; `cpu_utilization` of all cores since the last scrape."""

    cpu_utilization: float
    memory_total_bytes: int
    memory_used_bytes: int
    processes: Sequence[ProcessUse] = ()
    gpus: Sequence[GpuUse] = ()


@dataclass(frozen=True, slots=True)
class FrontUse:
    """A front process. `front` numbers it if there are several; `num_connections` None: unknown."""

    protocol: str
    num_restarts: int
    front: str = ""
    num_connections: int | None = None
    # In the log.
    name: str = ""
    # 0 while no process runs.
    pid: int = 0

    @property
    def labels(self) -> Labels:
        return {"protocol": self.protocol, **({"front": self.front} if self.front else {})}


class ProcessUsage:
    """Reads resource use. Utilisation is since the last `read`, so use one per server."""

    def __init__(self, gpus: Watch | None = None) -> None:
        self._gpus = gpus or Watch()
        psutil.cpu_percent(None)

    def begin(self) -> None:
        """Start counting the GPUs' energy. Opens their driver: not for the event loop."""
        self._gpus.uses()

    def read(self, members: Iterable[tuple[int, Labels]] = ()) -> HostUse:
        """Read the use of this process and of `members`; one that has just exited is left out."""
        processes = []
        for pid, labels in ((os.getpid(), {"process": "core"}), *members):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                with process.oneshot():
                    times, resident_bytes = process.cpu_times(), process.memory_info().rss
                processes.append(ProcessUse(labels, resident_bytes, times.user + times.system))
        memory = psutil.virtual_memory()
        return HostUse(
            cpu_utilization=psutil.cpu_percent(None) / 100,
            memory_total_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            processes=processes,
            gpus=self._gpus.uses(),
        )


def cpu_s(pids: Iterable[int]) -> dict[int, float]:
    """Return CPU time so far, user and system; without processes that have exited."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found
