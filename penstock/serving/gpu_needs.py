"""What an instance of a version takes of a GPU's memory, as far as its files say.

In this order: what its configuration states, what was measured for the version's evidence, and else
an estimate: its weights in the precision that they are loaded in, and a fixed sum for the rest.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from penstock import manifest as manifests
from penstock.backends import GPU_MEMORY
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.serving.memory_plan import CONTEXT_BYTES, WORKSPACE_BYTES, Need

SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".pt2", ".onnx", ".data", ".bin")
HALVES = ("fp16", "bf16")
# Datatypes of safetensors that `penstock.dtype` changes, with the bytes they have in the file.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100 << 20


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def need_of(config: ModelConfig) -> Need:
    """Of one instance."""
    if config.gpu_memory_bytes is not None:
        return Need(config.gpu_memory_bytes, "configured")
    if (measured := _measured(config)) is not None:
        return Need(measured + CONTEXT_BYTES, "evidence")
    return Need(weight_bytes(config) + WORKSPACE_BYTES + CONTEXT_BYTES, "estimated")


def weight_bytes(config: ModelConfig) -> int:
    """The files of weights beside the artifact; float ones as `penstock.dtype` loads them."""
    path = Path(config.artifact)
    if not config.artifact or not path.is_file():
        return 0
    is_half = config.options.get("penstock.dtype", "") in HALVES
    total = 0
    for file in sorted(path.parent.rglob("*")):
        if file.suffix not in WEIGHTS or not file.is_file():
            continue
        halved = _halved_bytes(file) if is_half and file.suffix == SAFETENSORS else None
        total += file.stat().st_size if halved is None else halved
    return total


def _halved_bytes(file: Path) -> int | None:
    """Every float in two bytes. None: the file is not one to ask, which whoever loads it tells."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(stream.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        tensors = [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    except (OSError, msgspec.MsgspecError):
        return None
    return sum(
        2 * math.prod(each.shape)
        if each.dtype in FLOATS
        else each.data_offsets[1] - each.data_offsets[0]
        for each in tensors
    )


def _measured(config: ModelConfig) -> int | None:
    if not config.manifest:
        return None
    try:
        manifest = manifests.read(Path(config.manifest).parent)
    except ConfigError:  # The worker tells what is wrong with it.
        return None
    found = manifest.evidence.get(GPU_MEMORY) if manifest is not None else None
    return found if isinstance(found, int) and found > 0 else None
