"""The machine that is optimised for: what its processor and its libraries can do."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.benchmark import system

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
INT8 = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}
BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
# Beside those that a load test names.
PACKAGES = ("onnx", "onnxscript", "transformers", "tokenizers", "safetensors")


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    num_cores: int
    memory_bytes: int
    # Of /proc/cpuinfo, those that matter for inference (`ISA`).
    isa: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    # Installed packages that a candidate may need, with versions: onnxruntime, openvino, torch, ...
    versions: dict[str, str] = {}

    @property
    def has_int8(self) -> bool:
        """Instructions that multiply bytes several times as fast as floats."""
        return bool(INT8 & set(self.isa))

    @property
    def has_bf16(self) -> bool:
        return bool(BF16 & set(self.isa))


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
