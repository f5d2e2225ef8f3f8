"""GPU memory that one instance of a version needs, from its files.

The first known of: the configured size, the size measured for the version's evidence, and an
estimate from its weights at their loaded precision plus a fixed amount for the rest.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from penstock.backends import GPU_MEMORY
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import manifest as manifests
from penstock.serving.memory_plan import CONTEXT_BYTES, WORKSPACE_BYTES, Need

# Bytes of a float by `penstock.dtype`, and the safetensors datatypes that the setting converts.
FLOAT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4}
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100 << 20


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_headers = msgspec.json.Decoder(_Tensor)


def need_of(config: ModelConfig) -> Need:
    """Return the GPU memory that one instance needs."""
    if config.gpu_memory_bytes is not None:
        return Need(config.gpu_memory_bytes, "configured")
    if (measured := _measured(config)) is not None:
        return Need(measured + CONTEXT_BYTES, "evidence")
    return Need(weight_bytes(config) + WORKSPACE_BYTES + CONTEXT_BYTES, "estimated")


def weight_bytes(config: ModelConfig) -> int:
    """Return the size of the artifact or, if that is code, of the safetensors files beside it, with
    floats as `penstock.dtype` loads them."""
    path = Path(config.artifact)
    if not config.artifact or path.suffix != ".py":
        return _size(path) if path.is_file() else 0
    float_bytes = FLOAT_BYTES.get(config.options.get("penstock.dtype", ""))
    return sum(_loaded_bytes(file, float_bytes) for file in path.parent.glob("*.safetensors"))


def _loaded_bytes(file: Path, float_bytes: int | None) -> int:
    """Return the size of a file's tensors with floats of `float_bytes` each; None keeps their size.
    An invalid file counts with its file size: loading it reports the error."""
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
    """Return the tensors in the file's header; None if the header is invalid."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(stream.read(size), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return [_headers.decode(raw) for raw in header.values()]
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
    except ConfigError:  # The worker reports the error.
        return None
    found = manifest.evidence.get(GPU_MEMORY) if manifest is not None else None
    return found if isinstance(found, int) and found > 0 else None
