"""Reductions over axes, cumulative ones, and the positions of extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.backends.onnx_import.values import (
    Compute,
    Numbers,
    OnnxOperator,
    ints,
    one_int,
    positive,
)

Reduce = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _reduction(reduce: Reduce) -> OnnxOperator:
    def call(
        x: Tensor,
        chosen: Numbers | None = None,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Tensor:
        where = list(axes or ()) if chosen is None else ints(chosen)
        if not where and noop_with_empty_axes:
            # The elementwise part stays: a reduction over no axis.
            return reduce(x.unsqueeze(0), (0,), False)
        every = sorted({positive(axis, x.dim()) for axis in where}) or range(x.dim())
        if not x.dim():
            return reduce(x.unsqueeze(0), (0,), False)
        return reduce(x, tuple(every), bool(keepdims))

    return OnnxOperator(call, host=(1,))


def add_up(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)


def multiply(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    for axis in reversed(axes):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def average(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    # As ONNX Runtime: the average of nothing is zero.
    if (empty := _filled(x, axes, keep, 0)) is not None:
        return empty
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    return x.double().mean(axes, keepdim=keep).to(x.dtype)


def _filled(x: Tensor, axes: tuple[int, ...], keep: bool, fill: float) -> Tensor | None:
    """Return the result of reducing no elements; None if there are some."""
    if all(x.shape[axis] for axis in axes):
        return None
    return add_up(x, axes, keep) + fill


def largest(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if x.dtype == torch.bool:
        return add_up(x.to(torch.int32), axes, keep) > 0
    if (empty := _filled(x, axes, keep, _bounds(x.dtype)[0])) is not None:
        return empty
    return torch.amax(x, axes, keepdim=keep)


def smallest(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    if x.dtype == torch.bool:
        return add_up((~x).to(torch.int32), axes, keep) == 0
    if (empty := _filled(x, axes, keep, _bounds(x.dtype)[1])) is not None:
        return empty
    return torch.amin(x, axes, keepdim=keep)


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return float("-inf"), float("inf")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def log_sum_exp(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return torch.logsumexp(x, axes, keepdim=keep)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize <= 2 and x.is_floating_point() else x.dtype


def norm(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    # Squares of 16 bits overflow early.
    wide = x.to(_wide(x)) if x.is_floating_point() else x.double()
    return add_up(wide * wide, axes, keep).sqrt().to(x.dtype)


def add_squares(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    """Sum up squares in FP32 or better, in one pass: squares of 16 bits overflow early."""
    return torch.linalg.vector_norm(x, 2, axes, keep, dtype=_wide(x)).square()


def average_squares(x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    return add_squares(x, axes, keep) / max(1, math.prod(x.shape[axis] for axis in axes))


def _arg(find: Callable[..., Tensor]) -> OnnxOperator:
    def call(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if not select_last_index:
            return find(x, axis, keepdim=bool(keepdims))
        found = find(x.flip(axis), axis, keepdim=bool(keepdims))
        return x.shape[axis] - 1 - found

    return OnnxOperator(call)


def _cumulative(compute: Callable[..., Tensor], neutral: int) -> OnnxOperator:
    def call(x: Tensor, chosen: Numbers, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        axis = one_int(chosen)
        x = x.flip(axis) if reverse else x
        if exclusive and x.shape[axis]:
            first = torch.full_like(x.narrow(axis, 0, 1), neutral)
            x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
        x = compute(x, axis, dtype=x.dtype)
        return x.flip(axis) if reverse else x

    return OnnxOperator(call, host=(1,))


OPERATORS = {
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumProd": _cumulative(torch.cumprod, 1),
    "CumSum": _cumulative(torch.cumsum, 0),
    "ReduceL1": _reduction(lambda x, axes, keep: add_up(x.abs(), axes, keep)),
    "ReduceL2": _reduction(norm),
    "ReduceLogSum": _reduction(lambda x, axes, keep: add_up(x, axes, keep).log()),
    "ReduceLogSumExp": _reduction(log_sum_exp),
    "ReduceMax": _reduction(largest),
    "ReduceMean": _reduction(average),
    "ReduceMin": _reduction(smallest),
    "ReduceProd": _reduction(multiply),
    "ReduceSum": _reduction(add_up),
    "ReduceSumSquare": _reduction(lambda x, axes, keep: add_up(x * x, axes, keep)),
}
# Means and sums of squares, in FP32 for 16 bits.
MEAN_OF_SQUARES = _reduction(average_squares).compute
SUM_OF_SQUARES = _reduction(add_squares).compute
# Sums of 16 bits whose results are in FP32, by the function that gives 16 bits.
WIDE: Mapping[Compute, Compute] = {
    OPERATORS[name].compute: _reduction(reduce).compute
    for name, reduce in {
        "ReduceL1": lambda x, axes, keep: add_up(x.abs().to(_wide(x)), axes, keep),
        "ReduceL2": lambda x, axes, keep: add_squares(x, axes, keep).sqrt(),
        "ReduceMean": lambda x, axes, keep: average(x.to(_wide(x)), axes, keep),
        "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=_wide(x)),
        "ReduceSumSquare": add_squares,
    }.items()
}
