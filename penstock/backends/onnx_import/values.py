"""Values that operators of an imported graph take: tensors, and numbers that are known on the host.

A shape, an axis or a count reaches an operator as Python numbers if the importer knows it, and as a
tensor otherwise; one on the GPU costs a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import torch

Numbers: TypeAlias = torch.Tensor | Sequence[int] | int
Reals: TypeAlias = torch.Tensor | Sequence[float] | float
Compute = Callable[..., object]
# Datatypes of ONNX that torch has, by their number in TensorProto. Torch computes nothing in four
# bits: such integers are unpacked to eight when they are read.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    12: torch.uint32,
    13: torch.uint64,
    14: torch.complex64,
    15: torch.complex128,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    21: torch.uint8,
    22: torch.int8,
}
# Numbers of FP16, BF16, FP32 and FP64.
FLOAT_NUMBERS = (10, 16, 1, 11)
FOUR_BITS = {21: (0, 15), 22: (-8, 7)}


class ConvAttributes(TypedDict, total=False):
    auto_pad: str
    dilations: Sequence[int]
    group: int
    kernel_shape: Sequence[int]
    pads: Sequence[int]
    strides: Sequence[int]


class GemmAttributes(TypedDict, total=False):
    alpha: float
    beta: float
    transA: int
    transB: int


class PoolAttributes(TypedDict, total=False):
    auto_pad: str
    ceil_mode: int
    dilations: Sequence[int]
    kernel_shape: Sequence[int]
    pads: Sequence[int]
    strides: Sequence[int]


@dataclass(frozen=True, slots=True)
class OnnxOperator:
    """How an operator is computed: tensors by position, attributes by keyword. A function with a
    parameter `opset`, `num_outputs`, `device` or `types` (the numbers of its inputs' datatypes)
    gets that too."""

    compute: Compute
    # Positions of inputs whose values are needed on the host: shapes, axes, counts.
    host: tuple[int, ...] = ()


def ints(values: Numbers) -> list[int]:
    if isinstance(values, torch.Tensor):
        return [int(each) for each in values.reshape(-1).tolist()]
    return [values] if isinstance(values, int) else list(values)


def one_int(values: Numbers) -> int:
    return ints(values)[0]


def reals(values: Reals) -> list[float]:
    if isinstance(values, torch.Tensor):
        return [float(each) for each in values.reshape(-1).tolist()]
    return [float(values)] if isinstance(values, int | float) else list(values)


def positive(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis
