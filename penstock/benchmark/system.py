"""The machine the load comes from: what it is, and how busy it was while measuring."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

import penstock
from penstock.benchmark.results import Environment, SystemSample

PACKAGES = ("numpy", "onnxruntime", "openvino", "torch", "grpcio", "uvloop")


class Sampler:
    """Looks at the machine when asked; the first look only starts the counting."""

    def __init__(self) -> None:
        self._gpus = Gpus()
        psutil.cpu_percent(None)

    def sample(self, at_s: float) -> SystemSample:
        sample = SystemSample(at_s, psutil.cpu_percent(None), psutil.virtual_memory().used)
        with suppress(Exception):  # Not every virtual machine tells its frequency.
            sample.cpu_mhz = float(psutil.cpu_freq().current)
        self._gpus.add_to(sample)
        return sample

    def close(self) -> None:
        self._gpus.close()


class Gpus:
    """NVIDIA's devices through NVML, where nvidia-ml-py and a driver are installed."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # No package, no driver, no device: nothing to tell.
            return
        self._nvml = pynvml
        self._handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]

    def names(self) -> list[str]:
        names = [self._nvml.nvmlDeviceGetName(handle) for handle in self._handles]
        return [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    def driver(self) -> str:
        if self._nvml is None:
            return ""
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)

    def add_to(self, sample: SystemSample) -> None:
        nvml = self._nvml
        for handle in self._handles:
            with suppress(Exception):  # MIG slices and some clouds refuse single questions.
                sample.gpu_percent.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                sample.gpu_memory_bytes.append(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                sample.gpu_watts.append(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
                sample.gpu_mhz.append(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
            self._handles = []


def environment(address: str) -> Environment:
    gpus = Gpus()
    found = Environment(
        host_cpu=_cpu_name(),
        num_cores=psutil.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        gpus=gpus.names(),
        versions=_versions(gpus.driver()),
        is_server_local=is_local(address),
    )
    gpus.close()
    return found


def is_local(address: str) -> bool:
    """Whether a target's address is on this machine."""
    host = urlsplit(address).hostname
    if host is None:
        return True
    with suppress(OSError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
        own = {a.address for each in psutil.net_if_addrs().values() for a in each}
        return bool(addresses & own)
    return False


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions(driver: str) -> dict[str, str]:
    found = {"penstock": penstock.__version__, "python": platform.python_version()}
    found |= package_versions(PACKAGES)
    if driver:
        found["NVIDIA driver"] = driver
    return found


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found: dict[str, str] = {}
    for package in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
