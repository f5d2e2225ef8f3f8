"""What this machine is, read from the system."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from penstock.benchmark import system
from penstock.optimizer.machine import Machine

# Instructions that matter for inference, as /proc/cpuinfo spells them.
ISA = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    # Of ARM: products of bytes, matrices of them, BF16.
    "asimddp",
    "i8mm",
    "bf16",
)
# Beside those that a load test names.
PACKAGES = ("onnx", "onnxscript", "transformers", "tokenizers", "safetensors")

# Long enough for the clock to rise: 25 ms told 14 % apart on a quiet machine (16 cores, 2026-11).
PROBE_BYTES, NUM_PROBES = 1 << 19, 300


def read_machine() -> Machine:
    found = system.environment("")
    return Machine(
        cpu=found.host_cpu,
        # Those that this process may use, which a container or taskset may have made fewer.
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=found.memory_bytes,
        isa=isa_of(_cpuinfo()),
        gpus=tuple(found.gpus),
        versions=found.versions | system.package_versions(PACKAGES),
    )


def machine_speed_s() -> float:
    """What a fixed piece of work takes now. The fastest of many short runs: other programs can only
    make it slower, so this tells the clock and the host rather than the load."""
    data = bytes(PROBE_BYTES)
    seconds = []
    for _ in range(NUM_PROBES):
        began = time.perf_counter()
        hashlib.sha256(data).digest()
        seconds.append(time.perf_counter() - began)
    return round(min(seconds), 9)


def isa_of(cpuinfo: str) -> tuple[str, ...]:
    """Of the first processor; all of a machine have the same."""
    for line in cpuinfo.splitlines():
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return tuple(name for name in ISA if name in flags.split())
    return ()


def _cpuinfo() -> str:
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""
