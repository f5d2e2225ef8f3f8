"""The machine that sends the load: what it is, and how busy it was while measuring."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

import penstock
from penstock.benchmark.results import Environment, SystemSample
from penstock.system import devices

PACKAGES = ("numpy", "onnxruntime", "openvino", "torch", "grpcio", "uvloop")


class Sampler:
    """Samples the machine; the first CPU reading only starts psutil's counter."""

    def __init__(self) -> None:
        psutil.cpu_percent(None)

    def sample(self, at_s: float) -> SystemSample:
        sample = SystemSample(at_s, psutil.cpu_percent(None), psutil.virtual_memory().used)
        with suppress(Exception):  # Some virtual machines do not report it.
            sample.cpu_mhz = float(psutil.cpu_freq().current)
        for use in devices.read_uses():
            _add(use, sample)
        return sample


def _add(use: devices.GpuUse, sample: SystemSample) -> None:
    if use.utilization is not None:
        sample.gpu_percent.append(100 * use.utilization)
    if use.memory_used_bytes is not None:
        sample.gpu_memory_bytes.append(use.memory_used_bytes)
    if use.power_watts is not None:
        sample.gpu_watts.append(use.power_watts)
    if use.clock_mhz is not None:
        sample.gpu_mhz.append(use.clock_mhz)


def environment(address: str) -> Environment:
    return Environment(
        host_cpu=_cpu_name(),
        num_cores=psutil.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        gpus=[gpu.name for gpu in devices.read_gpus()],
        versions=_versions(devices.driver()),
        is_server_local=is_local(address),
    )


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
    """Return the versions of the packages that are installed."""
    found: dict[str, str] = {}
    for package in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
