"""Operators that read or write elements by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.backends.onnx_import.elementwise import UNSIGNED
from penstock.backends.onnx_import.values import Numbers, OnnxOperator, one_int, positive

REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _in_range(indices: Tensor, length: int) -> Tensor:
    indices = indices.long()
    return torch.where(indices < 0, indices + length, indices)


def gather(x: Tensor, indices: Tensor | int, *, axis: int = 0) -> Tensor:
    axis = positive(axis, x.dim())
    if isinstance(indices, int):
        return x.select(axis, indices)
    positions = _in_range(indices, x.shape[axis])
    if not positions.dim():
        return x.index_select(axis, positions.reshape(1)).squeeze(axis)
    found = x.index_select(axis, positions.reshape(-1))
    return found.reshape(*x.shape[:axis], *positions.shape, *x.shape[axis + 1 :])


def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return x.gather(axis, _in_range(indices, x.shape[axis]))


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    outer = x.shape[:batch_dims]
    rows = torch.arange(max(outer.numel(), 1), device=x.device)
    flat = x.reshape(-1, *x.shape[batch_dims:])
    chosen = indices.reshape(len(rows), -1, indices.shape[-1])
    at = [_in_range(chosen[..., n], flat.shape[n + 1]) for n in range(indices.shape[-1])]
    found = flat[(rows[:, None].expand(chosen.shape[:2]), *at)]
    return found.reshape(*indices.shape[:-1], *flat.shape[1 + indices.shape[-1] :])


def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    at = _in_range(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, at, updates)
    return x.scatter_reduce(axis, at, updates, REDUCTIONS[reduction])


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    depth = indices.shape[-1]
    inner = x.shape[depth:]
    flat = x.reshape(-1, *inner)
    at = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for n in range(depth):
        at = at * x.shape[n] + _in_range(indices[..., n], x.shape[n])
    at, updates = at.reshape(-1), updates.reshape(-1, *inner)
    if reduction == "none":
        return flat.index_copy(0, at, updates).reshape(x.shape)
    at = at.reshape(-1, *[1] * len(inner)).expand(updates.shape)
    return flat.scatter_reduce(0, at, updates, REDUCTIONS[reduction]).reshape(x.shape)


def tensor_scatter(
    past: Tensor,
    update: Tensor,
    starts: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    """Write a slice of each row at its own start, as a KV cache does."""
    axis = positive(axis, past.dim())
    at = torch.arange(update.shape[axis], device=past.device)
    first = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device)
    at = at + (first if starts is None else starts.long())[:, None]
    if mode == "circular":
        at = at.remainder(past.shape[axis])
    shape = [1] * past.dim()
    shape[0], shape[axis] = at.shape
    return past.scatter(axis, at.reshape(shape).expand(update.shape), update)


def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(axis, condition.nonzero().reshape(-1))


def nonzero(x: Tensor) -> Tensor:
    return x.nonzero().t()


def one_hot(indices: Tensor, depth: Numbers, values: Tensor, *, axis: int = -1) -> Tensor:
    length = one_int(depth)
    at = indices.long()
    is_there = (at >= -length) & (at < length)
    at = positive(axis, indices.dim() + 1), torch.where(is_there, at.remainder(length), length)
    classes = torch.arange(length, device=indices.device)
    classes = classes.reshape(-1, *[1] * (indices.dim() - at[0]))
    return torch.where(at[1].unsqueeze(at[0]) == classes, values[1], values[0])


def top_k(
    x: Tensor,
    count: Numbers | None = None,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,
    k: int = 0,
) -> tuple[Tensor, Tensor]:
    num = k if count is None else one_int(count)
    # Equal values come in the order of their positions, which torch.topk does not promise.
    wide = x.to(UNSIGNED.get(x.dtype, x.dtype))
    values, at = wide.sort(dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, num).to(x.dtype), at.narrow(axis, 0, num)


def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, ...]:
    found, inverse, counts = torch.unique(
        x, sorted=True, return_inverse=True, return_counts=True, dim=axis
    )
    inverse = inverse.reshape(-1)
    at = torch.arange(len(inverse), device=x.device)
    none = torch.full((len(counts),), len(inverse), dtype=torch.int64, device=x.device)
    first = none.scatter_reduce(0, inverse, at, "amin")
    if not sorted:
        order = first.argsort()
        rank = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        found = found.index_select(0 if axis is None else axis, order)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return found, first, inverse, counts


OPERATORS = {
    "Compress": OnnxOperator(compress),
    "Gather": OnnxOperator(gather),
    "GatherElements": OnnxOperator(gather_elements),
    "GatherND": OnnxOperator(gather_nd),
    "NonZero": OnnxOperator(nonzero),
    "OneHot": OnnxOperator(one_hot, host=(1,)),
    "Scatter": OnnxOperator(scatter_elements),
    "ScatterElements": OnnxOperator(scatter_elements),
    "ScatterND": OnnxOperator(scatter_nd),
    "TensorScatter": OnnxOperator(tensor_scatter),
    "TopK": OnnxOperator(top_k, host=(1,)),
    "Unique": OnnxOperator(unique),
}
