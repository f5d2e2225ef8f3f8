"""CPU use of the machine during a measurement, by this run and by others."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

from penstock.optimizer.results import Conditions
from penstock.optimizer.this_machine import machine_speed_s


class CpuMeter:
    """Counts from construction on. "Own" is this process and all of its descendants."""

    def __init__(self) -> None:
        self._speed_s = machine_speed_s()
        self._began = time.monotonic()
        self._busy_s, self._steal_s = _machine_seconds()
        self._own_s = _own_seconds()

    def read(self) -> Conditions:
        num_cores = os.cpu_count() or 1
        span_s = max(time.monotonic() - self._began, 1e-3) * num_cores
        busy_s, steal_s = _machine_seconds()
        own_s = max(0.0, _own_seconds() - self._own_s)
        foreign_s = max(0.0, busy_s - self._busy_s - own_s)
        return Conditions(
            own_cpu=min(1.0, own_s / span_s),
            foreign_cpu=min(1.0, foreign_s / span_s),
            steal=min(1.0, max(0.0, steal_s - self._steal_s) / span_s),
            speed_s=self._speed_s,
            load_average=os.getloadavg()[0],
            num_cores=num_cores,
        )


def _machine_seconds() -> tuple[float, float]:
    """Return the seconds that all cores computed, and that the hypervisor took, since boot."""
    times = psutil.cpu_times()
    steal_s = float(getattr(times, "steal", 0.0))
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # User time already includes guest time.
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle_s - steal_s - guests_s), steal_s


def _own_seconds() -> float:
    """Return the CPU time of this process and its descendants, including reaped ones."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total
