"""The GPUs of this machine: what there are, and their current use.

Read from NVML, a C library in every NVIDIA driver, so no package is needed. If it is absent or
refuses a query, the value is missing and nothing fails. Indices are CUDA's in our processes: the
order of `nvidia-smi`, restricted by CUDA_VISIBLE_DEVICES. Other modules call `read_gpus`; tests
replace that function.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

Answer = TypeVar("Answer")

LIBRARY = "libnvidia-ml.so.1"
# Makes CUDA number GPUs as NVML does; by default the fastest comes first.
CUDA_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# Lets torch's allocator grow its segments, which avoids fragmentation.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Variables of that setting; if the operator has set one, it stays.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
TEXT_BYTES = 128
SM_CLOCK = 1
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


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Rates(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class NvmlError(Exception):
    """An NVML query failed."""


class Nvml:
    """The opened library, usable from any thread. NvmlError if it cannot be opened."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(str(error)) from None
        self._call("nvmlInit_v2")

    def driver(self) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def gpus(self, visible: str | None = None) -> tuple[Gpu, ...]:
        """List the GPUs; `visible` is CUDA_VISIBLE_DEVICES, None if it is not set."""
        found: list[Gpu] = []
        for index, handle in enumerate(self._handles(visible)):
            memory = _Memory()
            self._answers("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            uuid, name = (self._text(call, handle) for call in ("GetUUID", "GetName"))
            found.append(Gpu(index, uuid, name, memory.total, memory.free))
        return tuple(found)

    def uses(self, visible: str | None = None) -> tuple[GpuUse, ...]:
        return tuple(self._use(handle) for handle in self._handles(visible))

    def _use(self, handle: ctypes.c_void_p) -> GpuUse:
        memory, rates = _Memory(), _Rates()
        # MIG slices and some clouds refuse certain queries.
        has_memory = self._answers("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        has_rates = self._answers("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
        power = self._number("nvmlDeviceGetPowerUsage", handle)
        limit = self._number("nvmlDeviceGetPowerManagementLimit", handle)
        energy = self._number("nvmlDeviceGetTotalEnergyConsumption", handle)
        return GpuUse(
            uuid=self._text("GetUUID", handle),
            utilization=rates.gpu / 100 if has_rates else None,
            memory_total_bytes=memory.total if has_memory else None,
            memory_used_bytes=memory.used if has_memory else None,
            power_watts=None if power is None else power / 1e3,
            power_limit_watts=None if limit is None else limit / 1e3,
            energy_joules=None if energy is None else energy / 1e3,
            clock_mhz=self._number("nvmlDeviceGetClockInfo", handle, ctypes.c_int(SM_CLOCK)),
        )

    def _handles(self, visible: str | None) -> Iterator[ctypes.c_void_p]:
        """Yield handles in CUDA's order; like CUDA, stop at the first invalid name."""
        if visible is None:
            for index in range(self._count()):
                yield self._by_index(index)
            return
        for name in visible.split(","):
            try:
                yield self._by_name(name.strip())
            except NvmlError:
                return

    def _by_name(self, name: str) -> ctypes.c_void_p:
        """Find a GPU by index, by the prefix of its UUID, or a MIG slice by its full UUID."""
        if name.isascii() and name.isdigit():
            return self._by_index(int(name))
        if name.startswith("GPU-"):
            for index in range(self._count()):
                handle = self._by_index(index)
                if self._text("GetUUID", handle).startswith(name):
                    return handle
        if not name.startswith("MIG-"):
            raise NvmlError(f"no GPU '{name}'")
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
        return handle

    def _count(self) -> int:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return count.value

    def _by_index(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _text(self, what: str, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._call(f"nvmlDevice{what}", handle, text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode(errors="replace")

    def _number(self, name: str, *arguments: object) -> int | None:
        # Wide enough for all of them; a narrower value fills the lower half.
        value = ctypes.c_ulonglong(0)
        return value.value if self._answers(name, *arguments, ctypes.byref(value)) else None

    def _answers(self, name: str, *arguments: object) -> bool:
        with suppress(NvmlError):
            self._call(name, *arguments)
            return True
        return False

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._library, name)(*arguments)
        except AttributeError:  # An older driver.
            raise NvmlError(f"{name} is not there") from None
        if status != 0:
            raise NvmlError(f"{name} gave {status}")


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that loads a model."""
    is_set = any(name in os.environ for name in ALLOCATOR_NAMES)
    return os.environ | CUDA_ORDER | ({} if is_set else ALLOCATOR)


@cache
def nvml() -> Nvml | None:
    """Open the library once: it may have to wake every GPU. None: there is no driver."""
    with suppress(NvmlError):
        return Nvml()
    return None


def _asked(question: Callable[[Nvml], Answer], otherwise: Answer) -> Answer:
    """Return NVML's answer, or `otherwise` without a driver or an answer."""
    library = nvml()
    if library is not None:
        with suppress(NvmlError):
            return question(library)
    return otherwise


def read_gpus() -> tuple[Gpu, ...]:
    """List the GPUs that our processes may use; empty without a driver."""
    return _asked(lambda library: library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES")), ())


def read_uses() -> tuple[GpuUse, ...]:
    """Return the current use of each GPU."""
    return _asked(lambda library: library.uses(os.environ.get("CUDA_VISIBLE_DEVICES")), ())


def driver() -> str:
    """Return the driver's version; empty without one."""
    return _asked(Nvml.driver, "")


class Watch:
    """Current use of the GPUs, queried at most once a second; energy counts from the first query.
    Usable from any thread."""

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
