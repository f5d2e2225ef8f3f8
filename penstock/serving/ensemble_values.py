"""Values in tensors of an ensemble: what conditions read, and what defaults become. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.config import Comparison, TensorDefault
from penstock.errors import BackendFailed
from penstock.repository.ensemble_cases import Value, holds
from penstock.types import DATATYPES, Tensor, TensorSpec, from_array, num_elements, to_array

# A tensor, or the value of one whose shape depends on who takes it.
TensorValue = Tensor | TensorDefault


def all_hold(condition: Sequence[Comparison], tensors: Mapping[str, TensorValue]) -> bool:
    """Whether a condition holds; BackendFailed if it cannot be decided."""
    return all(holds(each, _read_value(each, tensors[each.tensor])) for each in condition)


def _read_value(comparison: Comparison, tensor: TensorValue) -> Value:
    name = comparison.tensor
    if isinstance(tensor, TensorDefault):
        if tensor.value is None:
            raise BackendFailed(f"'{name}' is empty; a condition reads one element")
        return tensor.value
    if num_elements(tensor.shape) != 1:
        shape = list(tensor.shape)
        raise BackendFailed(f"'{name}' has shape {shape}; a condition reads one element")
    element = to_array(tensor).reshape(-1)[0]
    if tensor.datatype == "BYTES":
        return bytes(element).decode(errors="replace")
    if tensor.datatype == "BF16":
        element = (element.astype(np.uint32) << 16).view(np.float32)
    value = float(element)
    if math.isnan(value):
        raise BackendFailed(f"'{name}' is NaN, which is neither less nor more than any number")
    return value


def make_default(
    default: TensorDefault, spec: TensorSpec, num_rows: int, *, has_batch: bool
) -> Tensor:
    """Return a default as a tensor like this one: variable dimensions are 1, or 0 without a
    value."""
    value = default.value
    dims = tuple(max(size, 0) if value is None else abs(size) for size in spec.shape)
    shape = (num_rows, *dims) if has_batch else dims
    if spec.datatype == "BYTES":
        texts = np.full(shape, "" if value is None else str(value), dtype=np.object_)
        return from_array(spec.name, spec.datatype, texts)
    number = 0.0 if value is None else float(value)
    if spec.datatype == "BF16":
        bits = np.full(shape, number, np.float32).view(np.uint32) >> 16
        return from_array(spec.name, spec.datatype, bits.astype(np.uint16))
    return from_array(
        spec.name, spec.datatype, np.full(shape, number, DATATYPES[spec.datatype].numpy)
    )
