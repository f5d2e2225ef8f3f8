"""Choose whether an engine's threads spin or sleep while they wait for each other.

OpenMP threads spin, which is faster on dedicated cores. If other processes need the same cores, a
spinning thread takes the time of the thread it waits for, and steps take a hundred times as long.
The load of others is measured before torch is loaded, since OpenMP reads its policy then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from penstock.system.cores import read_quota

VARIABLE = "OMP_WAIT_POLICY"
SPIN, SLEEP = "ACTIVE", "PASSIVE"
SAMPLE_S = 0.25
# Load of others that is ignored: any machine has that much in the background.
SPARE_CORES = 0.25


@dataclass(frozen=True, slots=True)
class CpuLoad:
    """Cores available to the engine, and how many of them others use."""

    num_cores: int
    others: float
    # CPU quota of the cgroup, in cores.
    quota: float | None = None


def choose(load: CpuLoad, num_threads: int) -> tuple[str, str]:
    """Return the policy and the reason."""
    if load.quota is not None and load.quota < num_threads:
        return SLEEP, f"{num_threads} threads share a quota of {load.quota:g} cores"
    used = f"others use {load.others:.2f} of {load.num_cores} cores"
    if num_threads > 1 and num_threads + load.others > load.num_cores + SPARE_CORES:
        return SLEEP, used
    return SPIN, used


def apply(
    num_threads: int,
    environment: MutableMapping[str, str] = os.environ,
    measure: Callable[[], CpuLoad] | None = None,
) -> str:
    """Set the policy, unless the operator did; return it with the reason."""
    if VARIABLE in environment:
        return f"{environment[VARIABLE]} (set by {VARIABLE})"
    policy, reason = choose((measure or measure_load)(), num_threads)
    environment[VARIABLE] = policy
    return f"{policy} ({reason})"


def measure_load() -> CpuLoad:
    """Measure the load, without the server's own processes: they load now, and idle later."""
    cores, own = os.sched_getaffinity(0), server_processes(os.getppid())
    began, before = time.monotonic(), busy_s(cores) - process_s(own)
    time.sleep(SAMPLE_S)
    took_s = time.monotonic() - began
    others = busy_s(cores) - process_s(own) - before
    return CpuLoad(len(cores), max(0.0, others / took_s), read_quota())


def busy_s(cores: Collection[int]) -> float:
    """Return the seconds that these cores have been busy."""
    times = [each for core, each in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    seconds = [each.user + each.nice + each.system + each.irq + each.softirq for each in times]
    return float(sum(seconds))


def server_processes(core: int) -> list[psutil.Process]:
    """Return the core process and its children."""
    with suppress(psutil.Error):
        process = psutil.Process(core)
        return [process, *process.children()]
    return []


def process_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of these processes; those that are gone count as 0."""
    seconds = 0.0
    for each in processes:
        with suppress(psutil.Error):
            times = each.cpu_times()
            seconds += times.user + times.system
    return seconds
