"""The machine that is optimised for: what its processor and its libraries can do. Values only."""

from __future__ import annotations

import msgspec


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    num_cores: int
    memory_bytes: int
    # Of /proc/cpuinfo, those that matter for inference: avx2, avx512f, avx512_vnni, avx_vnni,
    # amx_int8, amx_bf16, avx512_bf16, avx512_fp16, f16c.
    isa: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    # Installed packages that a candidate may need, with versions: onnxruntime, openvino, torch, ...
    versions: dict[str, str] = {}

    @property
    def has_int8(self) -> bool:
        """Instructions that multiply bytes several times as fast as floats."""
        return bool({"avx512_vnni", "avx_vnni", "amx_int8"} & set(self.isa))

    @property
    def has_bf16(self) -> bool:
        return bool({"avx512_bf16", "amx_bf16"} & set(self.isa))
