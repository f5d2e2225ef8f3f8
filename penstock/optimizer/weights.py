"""Number and datatype of a model's parameters, read from its files without loading them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from penstock.errors import ConfigError

# Names of datatypes in safetensors.
SAFETENSORS = {"F64": "FP64", "F32": "FP32", "F16": "FP16", "BF16": "BF16", "I8": "INT8"}
MAX_HEADER_BYTES = 100 << 20
# Datatypes that count, by their names in ONNX.
ONNX = {"DOUBLE": "FP64", "FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "INT8": "INT8"}
ONNX |= {"UINT8": "INT8"}


def describe(paths: list[Path]) -> str:
    """Return "22.7 M parameters, FP32", or the size of the files if the number is unknown."""
    counts: Counter[str] = Counter()
    for path in paths:
        if path.suffix == ".safetensors":
            counts += _of_safetensors(path)
        elif path.suffix == ".onnx":
            counts += _of_onnx(path)
    if counts:
        (datatype, _), *_ = counts.most_common(1)
        return f"{_short(counts.total())} parameters, {datatype}"
    return f"{sum(path.stat().st_size for path in paths) / 1e6:.1f} MB"


def _short(count: int) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return str(count)


def _of_safetensors(path: Path) -> Counter[str]:
    """Count parameters by datatype. The file starts with the length of its JSON header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, path.stat().st_size):
            raise ConfigError([f"{path}: cannot be read as safetensors"])
        header = json.loads(file.read(length))
    counts: Counter[str] = Counter()
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in SAFETENSORS:
            counts[SAFETENSORS[entry["dtype"]]] += math.prod(entry["shape"])
    return counts


def _of_onnx(path: Path) -> Counter[str]:
    import onnx

    counts: Counter[str] = Counter()
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        name = onnx.TensorProto.DataType.Name(tensor.data_type)
        if name in ONNX:
            counts[ONNX[name]] += math.prod(tensor.dims)
    return counts
