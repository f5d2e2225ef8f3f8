"""The machine: what its processor and its libraries can do, and its state. Values only."""

from __future__ import annotations

import msgspec

INT8 = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}
BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    num_cores: int
    memory_bytes: int
    # CPU flags of /proc/cpuinfo that matter for inference (`ISA`).
    isa: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    # Installed packages that a candidate may need, with versions: onnxruntime, openvino, torch, ...
    versions: dict[str, str] = {}

    @property
    def has_int8(self) -> bool:
        """Whether the CPU has INT8 instructions several times as fast as floats."""
        return bool(INT8 & set(self.isa))

    @property
    def has_bf16(self) -> bool:
        return bool(BF16 & set(self.isa))


class Conditions(msgspec.Struct, frozen=True):
    """State of the machine during a measurement."""

    # Shares of all cores: used by this run, by other processes, and taken by the hypervisor.
    own_cpu: float = 0.0
    foreign_cpu: float = 0.0
    steal: float = 0.0
    # Seconds of the speed probe just before; 0: unknown.
    speed_s: float = 0.0
    # The generator waited for connections: its lateness says nothing about the machine.
    is_generator_waiting: bool = False
    # Load average of the last minute.
    load_average: float = 0.0
    num_cores: int = 0
