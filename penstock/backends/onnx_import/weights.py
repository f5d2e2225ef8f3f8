"""Tensors of an ONNX file as torch tensors that share its memory.

External weights are mapped, so that the workers of a model share the pages of the file.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from onnx import TensorProto, external_data_helper, numpy_helper

from penstock.backends.onnx_import.values import DTYPES, FOUR_BITS
from penstock.errors import ConfigError


class BrokenFile(ConfigError):
    """The file, or one of its weight files, cannot be read by any engine."""


def read_tensor(proto: TensorProto, folder: Path) -> torch.Tensor:
    """Return the tensor. Raise ConfigError for datatypes that torch does not have."""
    if proto.data_type not in DTYPES:
        name = TensorProto.DataType.Name(proto.data_type)
        raise ConfigError(
            [f"tensor '{proto.name}': datatype {name} is not supported on this engine"]
        )
    dtype, shape = DTYPES[proto.data_type], tuple(proto.dims)
    if proto.data_type in FOUR_BITS:
        if _is_external(proto):
            external_data_helper.load_external_data_for_tensor(proto, str(folder))
        return torch.from_numpy(numpy_helper.to_array(proto).astype(np.int8)).to(dtype)
    if _is_external(proto):
        return _mapped(proto, folder, dtype).reshape(shape)
    if not proto.HasField("raw_data"):
        return _copied(numpy_helper.to_array(proto), dtype).reshape(shape)
    raw = proto.raw_data
    return _shared(raw, dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def _copied(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy. Types that numpy does not have itself, such as bfloat16, go by their bits."""
    if dtype.itemsize <= 2 and dtype.is_floating_point and dtype != torch.float16:
        bits = np.uint8 if dtype.itemsize == 1 else np.uint16
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    return torch.from_numpy(np.array(array)).to(dtype)


def _is_external(proto: TensorProto) -> bool:
    return bool(proto.data_location == TensorProto.EXTERNAL)


def _shared(raw: bytes | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # The memory is read-only, and so is a model's weight.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(raw, dtype=dtype)


def _mapped(proto: TensorProto, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    entries = {entry.key: entry.value for entry in proto.external_data}
    path = (folder / entries["location"]).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise BrokenFile([f"tensor '{proto.name}': '{entries['location']}' is outside the folder"])
    count = int(entries.get("length", 0)) or int(np.prod(proto.dims)) * dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype)
    try:
        memory = np.memmap(path, np.uint8, "r", int(entries.get("offset", 0)), (count,))
    except (OSError, ValueError) as error:
        where = f"tensor '{proto.name}': external data '{entries['location']}'"
        why = f"has no {count} bytes at offset {entries.get('offset', 0)}"
        if isinstance(error, FileNotFoundError):
            why = "is missing; it belongs beside the model"
        elif isinstance(error, OSError):
            why = f"cannot be read: {error.strerror}"
        raise BrokenFile([f"{where} {why}"]) from None
    return _shared(memory, dtype)
