"""Properties of this machine, read from the system."""

from __future__ import annotations

import hashlib
import os
import time
import timeit
from contextlib import suppress
from pathlib import Path

import psutil

from penstock.benchmark import system
from penstock.optimizer.machine import Conditions, Machine


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


# Instruction sets that matter for inference, as /proc/cpuinfo spells them.
ISA = (
    *("avx2", "f16c", "avx512f", "avx512_vnni", "avx_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"),
    # ARM: INT8 dot products, INT8 matmuls, BF16.
    *("asimddp", "i8mm", "bf16"),
)
# In addition to those that a load test reports.
PACKAGES = (
    *("onnx", "onnxscript", "transformers", "tokenizers", "safetensors"),
    *("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
)

# Long enough for the clock to ramp up: probes of 25 ms differed by 14 % on a quiet machine (16
# cores, 2026-11).
PROBE_BYTES, NUM_PROBES = 1 << 19, 300


def read_machine() -> Machine:
    found, cpuinfo = system.environment(""), ""
    with suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
    return Machine(
        cpu=found.host_cpu,
        # Cores that this process may use: a container or taskset may limit them.
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=found.memory_bytes,
        isa=isa_of(cpuinfo),
        gpus=tuple(found.gpus),
        versions=found.versions | system.package_versions(PACKAGES),
    )


def machine_speed_s() -> float:
    """Return the time of a fixed piece of work: the fastest of many short runs. Other programs can
    only slow it down, so this reflects the clock and the host rather than the load."""
    data = bytes(PROBE_BYTES)
    seconds = timeit.repeat(lambda: hashlib.sha256(data).digest(), repeat=NUM_PROBES, number=1)
    return round(min(seconds), 9)


def isa_of(cpuinfo: str) -> tuple[str, ...]:
    """Return the instruction sets of the first processor; all processors have the same."""
    for line in cpuinfo.splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return tuple(name for name in ISA if name in flags.split())
    return ()
