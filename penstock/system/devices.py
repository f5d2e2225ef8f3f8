"""The GPUs of this machine: what there are, and their current use.

Read from NVML, a C library in every NVIDIA driver. If it is absent or refuses a query, the value is
missing and nothing fails. Indices are CUDA's in our processes: the order of `nvidia-smi`,
restricted by CUDA_VISIBLE_DEVICES. A GPU in MIG mode counts as its slices; CUDA shows a process one
of them, which it must `claim`. Other modules call `read_gpus`; tests replace that function.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NewType

from penstock.errors import ConfigError

# A device of NVML.
Handle = NewType("Handle", object)
SM_CLOCK = 1
# Makes CUDA number GPUs as NVML does; by default the fastest comes first.
CUDA_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# Lets torch's allocator grow its segments, which avoids fragmentation.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Variables of that setting; if the operator has set one, it stays.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# The daemon of MPS, by which kernels of several processes run at the same time: where its files
# are, and what makes a process step back behind the other clients.
MPS_FOLDER, MPS_FOLDER_NAME = "/tmp/nvidia-mps", "CUDA_MPS_PIPE_DIRECTORY"
MPS_PROCESS = "nvidia-cuda-mps"
MPS_BELOW_NORMAL = "CUDA_MPS_CLIENT_PRIORITY", "1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# NVML averages utilisation over about this long, so more frequent queries add nothing.
FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device for models."""

    index: int
    uuid: str
    name: str
    # 0 if unknown, as for GPUs that share the machine's memory.
    total_bytes: int
    # Memory unused by any process.
    free_bytes: int
    # A part of a GPU in MIG mode.
    is_slice: bool = False
    # Such as 9.0; empty if unknown.
    compute_capability: str = ""

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Current use of a GPU; None: not reported."""

    uuid: str
    # Share of about the last second in which a kernel ran, 0 to 1.
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    # Since the driver was loaded.
    energy_joules: float | None = None
    clock_mhz: int | None = None


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that loads a model."""
    is_set = any(name in os.environ for name in ALLOCATOR_NAMES)
    return os.environ | CUDA_ORDER | ({} if is_set else ALLOCATOR)


@cache
def nvml() -> ModuleType | None:
    """Open the library once: it may have to wake every GPU. None: there is no driver."""
    library = importlib.import_module("pynvml")
    with suppress(library.NVMLError):
        library.nvmlInit()
        return library
    return None


def _ask(query: str, *arguments: object) -> Any:
    """Return NVML's answer; None if there is no driver, or it refuses the query, as it does some on
    MIG slices, older GPUs and some clouds."""
    library = nvml()
    if library is not None:
        with suppress(library.NVMLError):
            return getattr(library, f"nvml{query}")(*arguments)
    return None


def driver() -> str:
    """Return the driver's version; empty without one."""
    return _ask("SystemGetDriverVersion") or ""


def read_gpus() -> tuple[Gpu, ...]:
    """List the GPUs that our processes may use; empty without a driver."""
    found: list[Gpu] = []
    for index, handle in enumerate(_handles()):
        memory = _ask("DeviceGetMemoryInfo", handle)
        total, free = (memory.total, memory.free) if memory else (0, 0)
        name, uuid = _ask("DeviceGetName", handle) or "", _uuid(handle)
        capability = ".".join(map(str, _ask("DeviceGetCudaComputeCapability", handle) or ()))
        found.append(Gpu(index, uuid, name, total, free, uuid.startswith("MIG-"), capability))
    return tuple(found)


# The device that this process has claimed, by its name outside of it.
_claimed: dict[str, str] = {}


def claim(device: str) -> str:
    """Return the name of a device in this process, before it uses CUDA. CUDA shows a process only
    one MIG slice, the first, so the process asks for its own."""
    if device in _claimed:
        return _claimed[device]
    if not device.startswith("cuda"):
        return device
    if _claimed:
        there = ", ".join(_claimed)
        raise ConfigError(
            f"device: '{device}': this process uses {there}, and CUDA gives a process one MIG "
            "slice; expected models of one slice, or a server, whose workers are processes"
        )
    gpus = read_gpus()
    own = next((gpu for gpu in gpus if device in (gpu.device, "cuda")), None)
    if own is None or not any(gpu.is_slice for gpu in gpus):
        return device
    os.environ[VISIBLE] = own.uuid
    _claimed[device] = "cuda:0"
    return "cuda:0"


def mps() -> str:
    """Return whether MPS runs: `on`, `off`, or what is known."""
    folder = Path(os.environ.get(MPS_FOLDER_NAME) or MPS_FOLDER)
    with suppress(OSError, ValueError):
        number = int((folder / f"{MPS_PROCESS}-control.pid").read_text())
        if Path(f"/proc/{number}/comm").read_text().startswith(MPS_PROCESS):
            return "on"
    # Behind the wall of a container its process cannot be seen.
    return f"unknown: {folder} is there" if (folder / "control").exists() else "off"


def read_uses() -> tuple[GpuUse, ...]:
    """Return the current use of each GPU."""
    return tuple(map(_use, _handles()))


def memory_of(pid: int, index: int) -> int | None:
    """Return the memory of a process on a GPU in bytes, with the driver's overhead for it; None if
    the driver does not tell, as in containers with process numbers of their own."""
    handle = next((each for at, each in enumerate(_handles()) if at == index), None)
    processes = None if handle is None else _ask("DeviceGetComputeRunningProcesses", handle)
    found = [each.usedGpuMemory for each in processes or () if each.pid == pid]
    return found[0] if found else None


def _use(handle: Handle) -> GpuUse:
    memory = _ask("DeviceGetMemoryInfo", handle)
    rates = _ask("DeviceGetUtilizationRates", handle)
    power = _ask("DeviceGetPowerUsage", handle)
    limit = _ask("DeviceGetPowerManagementLimit", handle)
    energy = _ask("DeviceGetTotalEnergyConsumption", handle)
    return GpuUse(
        uuid=_uuid(handle),
        utilization=rates and rates.gpu / 100,
        memory_total_bytes=memory and memory.total,
        memory_used_bytes=memory and memory.used,
        power_watts=None if power is None else power / 1e3,
        power_limit_watts=None if limit is None else limit / 1e3,
        energy_joules=None if energy is None else energy / 1e3,
        clock_mhz=_ask("DeviceGetClockInfo", handle, SM_CLOCK),
    )


def _handles() -> Iterator[Handle]:
    """Yield devices in CUDA's order; like CUDA, stop at the first invalid name. A GPU in MIG mode
    is its slices."""
    visible = os.environ.get(VISIBLE)
    names = map(str, range(_num_gpus())) if visible is None else visible.split(",")
    for name in names:
        handle = _find(name.strip())
        if handle is None:
            return
        yield from _slices(handle) or (handle,)


def _slices(handle: Handle) -> list[Handle]:
    """Return the MIG slices of a GPU; empty if it is not in MIG mode, or is a slice itself."""
    modes = _ask("DeviceGetMigMode", handle)
    if not modes or not modes[0]:
        return []
    places = range(_ask("DeviceGetMaxMigDeviceCount", handle) or 0)
    found = [_ask("DeviceGetMigDeviceHandleByIndex", handle, place) for place in places]
    return [each for each in found if each is not None]


def _find(name: str) -> Handle | None:
    """Find a GPU by index, by the prefix of its UUID, or a MIG slice by its full UUID."""
    found: Handle | None = None
    if name.isascii() and name.isdigit():
        found = _ask("DeviceGetHandleByIndex", int(name))
    elif name.startswith("MIG-"):
        found = _ask("DeviceGetHandleByUUID", name)
    elif name.startswith("GPU-"):
        gpus = (_ask("DeviceGetHandleByIndex", index) for index in range(_num_gpus()))
        found = next((gpu for gpu in gpus if _uuid(gpu).startswith(name)), None)
    return found


def _num_gpus() -> int:
    return _ask("DeviceGetCount") or 0


def _uuid(handle: Handle) -> str:
    return _ask("DeviceGetUUID", handle) or ""


class Watch:
    """Use of the GPUs, at most a second old; energy since the first query. For any thread."""

    def __init__(
        self,
        read: Callable[[], Sequence[GpuUse]] = read_uses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._uses: tuple[GpuUse, ...] = ()
        self._first_joules: dict[str, float] = {}

    def uses(self) -> tuple[GpuUse, ...]:
        with self._lock:
            now = self._clock()
            if self._read_at is None or now - self._read_at >= FRESH_S:
                self._uses, self._read_at = tuple(map(self._since_first, self._read())), now
            return self._uses

    def _since_first(self, use: GpuUse) -> GpuUse:
        if use.energy_joules is None:
            return use
        first = self._first_joules.setdefault(use.uuid, use.energy_joules)
        return replace(use, energy_joules=use.energy_joules - first)
