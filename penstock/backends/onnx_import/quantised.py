"""Quantisation, and operators on quantised tensors, in the arithmetic of the specification.

Integer products are summed as FP64, which is exact for eight bits; the importer replaces Q/DQ pairs
around layers on a GPU by kernels where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from penstock.backends.onnx_import.elementwise import FLOAT8, cast
from penstock.backends.onnx_import.layers import convolve
from penstock.backends.onnx_import.values import (
    DTYPES,
    FOUR_BITS,
    ConvAttributes,
    OnnxOperator,
    positive,
)


def _spread(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Shape a scale or zero point for broadcasting: per tensor, per channel, or per block."""
    if scale.numel() == 1 and not block_size:
        return scale.reshape(())
    axis = positive(axis, x.dim())
    if block_size:
        return scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return scale.reshape([-1 if n == axis else 1 for n in range(x.dim())])


def quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
    types: Sequence[int] = (),
) -> Tensor:
    declared = types[2] if len(types) > 2 else 0
    to: int | torch.dtype = (
        output_dtype or declared or (torch.uint8 if zero is None else zero.dtype)
    )
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    wide = DTYPES[precision] if precision else wide
    values = x.to(wide) / _spread(scale, x, axis, block_size).to(wide)
    dtype = DTYPES[to] if isinstance(to, int) else to
    if dtype in FLOAT8:
        return cast(values, to=dtype, saturate=saturate)
    lowest, highest = (
        FOUR_BITS[to]
        if isinstance(to, int) and to in FOUR_BITS
        else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    )
    values = torch.round(values)
    if zero is not None:
        values = values + _spread(zero, x, axis, block_size).to(wide)
    return values.clamp(lowest, highest).to(torch.int32).to(dtype)


def dequantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    dtype = DTYPES[output_dtype] if output_dtype else scale.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    values = x.to(wide)
    if zero is not None:
        values = values - _spread(zero, x, axis, block_size).to(wide)
    return (values * _spread(scale, x, axis, block_size).to(wide)).to(dtype)


def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lowest, highest = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (highest - lowest) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round((-lowest / scale).clamp(0, 255)).to(torch.uint8)
    return quantize(x, scale, zero), scale, zero


def _centred(x: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    wide = x.double()
    return wide if zero is None else wide - _spread(zero, x, axis, 0).double()


def matmul_integer(
    a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Tensor:
    return (_centred(a, a_zero, -2) @ _centred(b, b_zero, -1)).to(torch.int32)


def conv_integer(
    x: Tensor,
    weight: Tensor,
    x_zero: Tensor | None = None,
    weight_zero: Tensor | None = None,
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    given = _centred(x, x_zero, 1), _centred(weight, weight_zero, 0)
    return convolve(*given, **attributes).to(torch.int32)


def requantize(total: Tensor, factor: Tensor, zero: Tensor, axis: int = 1) -> Tensor:
    values = total * _spread(factor, total, axis, 0).double()
    limits = torch.iinfo(zero.dtype)
    whole = torch.round(values) + zero.double()
    return whole.clamp(limits.min, limits.max).to(zero.dtype)


def qlinear_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
) -> Tensor:
    total = _centred(a, a_zero, -2) @ _centred(b, b_zero, -1)
    factor = a_scale.double() * b_scale.double() / y_scale.double()
    return requantize(total, factor, y_zero, -1)


def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
    *,
    channels_last: int = 0,
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    """Convolve; ONNX Runtime's own operator may have channels last."""
    x = x.movedim(-1, 1) if channels_last else x
    given = _centred(x, x_zero, 1), _centred(weight, weight_zero, 0)
    total = convolve(*given, None if bias is None else bias.double(), **attributes)
    factor = x_scale.double() * weight_scale.double() / y_scale.double()
    found = requantize(total, factor, y_zero)
    return found.movedim(1, -1) if channels_last else found


OPERATORS = {
    "ConvInteger": OnnxOperator(conv_integer),
    "DequantizeLinear": OnnxOperator(dequantize),
    "DynamicQuantizeLinear": OnnxOperator(dynamic_quantize),
    "MatMulInteger": OnnxOperator(matmul_integer),
    "QLinearConv": OnnxOperator(qlinear_conv),
    "QLinearMatMul": OnnxOperator(qlinear_matmul),
    "QuantizeLinear": OnnxOperator(quantize),
}
