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

SAMPLE_S = 0.5
PACKAGES = ("numpy", "onnxruntime", "onnxruntime-gpu", "openvino", "torch", "grpcio", "uvloop")


class SystemWatch:
    """Samples the machine every half second while measuring."""

    def __init__(self, start: float) -> None:
        self.samples: list[SystemSample] = []
        self._start = start
        self._next = start + SAMPLE_S
        psutil.cpu_percent(None)  # Starts psutil's counter.

    def look(self, now: float) -> None:
        if now >= self._next:
            self._next = now + SAMPLE_S
            self.samples.append(take_sample(now - self._start))


def take_sample(at_s: float) -> SystemSample:
    mhz = None
    with suppress(Exception):  # Some virtual machines do not report it.
        mhz = float(psutil.cpu_freq().current)
    gpus = devices.read_uses()
    return SystemSample(
        at_s,
        psutil.cpu_percent(None),
        psutil.virtual_memory().used,
        mhz,
        [100 * gpu.utilization for gpu in gpus if gpu.utilization is not None],
        [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None],
        [gpu.power_watts for gpu in gpus if gpu.power_watts is not None],
        [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz is not None],
    )


def environment(address: str) -> Environment:
    versions = {"penstock": penstock.__version__, "python": platform.python_version()}
    versions |= package_versions(PACKAGES)
    if driver := devices.driver():
        versions["NVIDIA driver"] = driver
    return Environment(
        host_cpu=_cpu_name(),
        num_cores=psutil.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        gpus=[gpu.name for gpu in devices.read_gpus()],
        versions=versions,
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


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found: dict[str, str] = {}
    for package in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
