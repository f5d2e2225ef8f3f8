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

# What a float takes as `penstock.dtype` loads it, and which datatypes of safetensors it changes.
FLOAT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}
FLOATS = ("F64", "F32", "F16", "BF16")
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
    """The artifact, or the files of weights beside it where that is code; float ones as
    `penstock.dtype` loads them."""
    path = Path(config.artifact)
    if not config.artifact or path.suffix != ".py":
        return _size(path) if path.is_file() else 0
    float_bytes = FLOAT_BYTES.get(config.options.get("penstock.dtype", ""))
    return sum(_loaded_bytes(file, float_bytes) for file in path.parent.glob("*.safetensors"))


def _loaded_bytes(file: Path, float_bytes: int | None) -> int:
    """With every float in so many bytes; None leaves them as they are. A file that is none counts
    by its size: what is wrong with it is told by whoever loads it."""
    tensors = _tensors(file) if float_bytes is not None else None
    if tensors is None or float_bytes is None:
        return _size(file)
    return sum(
        float_bytes * math.prod(each.shape)
        if each.dtype in FLOATS
        else each.data_offsets[1] - each.data_offsets[0]
        for each in tensors
    )


def _tensors(file: Path) -> list[_Tensor] | None:
    """What the header says; None: it is no header."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(stream.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return [msgspec.json.decode(raw, type=_Tensor) for raw in header.values()]
    except (OSError, msgspec.MsgspecError):
        return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _measured(config: ModelConfig) -> int | None:
    if not config.manifest:
        return None
    try:
        manifest = manifests.read(Path(config.manifest).parent)
    except ConfigError:  # The worker tells what is wrong with it.
        return None
    found = manifest.evidence.get(GPU_MEMORY) if manifest is not None else None
    return found if isinstance(found, int) and found > 0 else None
