"""Operators that move, repeat, join or cut elements without computing them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import.values import (
    DTYPES,
    Numbers,
    OnnxOperator,
    Reals,
    ints,
    one_int,
    positive,
)

CPU = torch.device("cpu")
PAD_MODES = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def shape(x: Tensor, *, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64, device=CPU)


def size(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64, device=CPU)


def reshape(
    x: Tensor, to: Numbers | None = None, *, allowzero: int = 0, shape: Sequence[int] = ()
) -> Tensor:
    wanted = list(shape) if to is None else ints(to)
    if not allowzero:
        wanted = [x.shape[n] if each == 0 else each for n, each in enumerate(wanted)]
    if -1 in wanted and 0 in wanted and not x.numel():
        # Torch does not know the size that is left out; it is that of the other sizes.
        known = math.prod(abs(size) or 1 for size in wanted)
        rest = math.prod(size or 1 for size in x.shape) // known
        wanted = [rest if size == -1 else size for size in wanted]
    return x.reshape(wanted)


def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    first = positive(axis, x.dim())
    return x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:]))


def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    return x.permute(*(reversed(range(x.dim())) if perm is None else perm))


def squeeze(x: Tensor, chosen: Numbers | None = None, *, axes: Sequence[int] = ()) -> Tensor:
    where = list(axes) if chosen is None else ints(chosen)
    return x.squeeze(tuple(where)) if where else x.squeeze()


def unsqueeze(x: Tensor, chosen: Numbers | None = None, *, axes: Sequence[int] = ()) -> Tensor:
    where = list(axes) if chosen is None else ints(chosen)
    rank = x.dim() + len(where)
    for axis in sorted(positive(each, rank) for each in where):
        x = x.unsqueeze(axis)
    return x


def expand(x: Tensor, to: Numbers) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(ints(to))))


def tile(x: Tensor, repeats: Numbers) -> Tensor:
    return x.repeat(ints(repeats))


def concat(*given: Tensor, axis: int = 1) -> Tensor:
    return torch.cat(given, axis)


def split(
    x: Tensor,
    sizes: Numbers | None = None,
    *,
    axis: int = 0,
    split: Sequence[int] = (),
    num_outputs: int,
) -> tuple[Tensor, ...]:
    wanted = list(split) if sizes is None else ints(sizes)
    length = x.shape[axis]
    if not wanted:
        part = -(-length // num_outputs)
        wanted = [max(0, min(part, length - part * n)) for n in range(num_outputs)]
    found: tuple[Tensor, ...] = torch.split(x, wanted, axis)
    return found


def take_slice(
    x: Tensor,
    first: Numbers | None = None,
    last: Numbers | None = None,
    chosen: Numbers | None = None,
    by: Numbers | None = None,
    *,
    starts: Sequence[int] = (),
    ends: Sequence[int] = (),
    axes: Sequence[int] | None = None,
) -> Tensor:
    begin = list(starts) if first is None else ints(first)
    end = list(ends) if last is None else ints(last)
    where = ints(chosen) if chosen is not None else list(axes or range(len(begin)))
    steps = [1] * len(begin) if by is None else ints(by)
    for start, stop, axis, step in zip(begin, end, where, steps, strict=True):
        x = _slice_one(x, positive(axis, x.dim()), slice(start, stop, step))
    return x


def _slice_one(x: Tensor, axis: int, wanted: slice) -> Tensor:
    start, stop, step = wanted.indices(x.shape[axis])
    if step > 0:
        return x[(slice(None),) * axis + (slice(start, max(start, stop), step),)]
    positions = torch.arange(len(range(start, stop, step)), device=x.device) * step + start
    return x.index_select(axis, positions)


def pad(
    x: Tensor,
    widths: Numbers | None = None,
    filling: Reals | None = None,
    chosen: Numbers | None = None,
    *,
    mode: str = "constant",
    pads: Sequence[int] = (),
    value: float = 0.0,
) -> Tensor:
    sizes = list(pads) if widths is None else ints(widths)
    axes = list(range(x.dim())) if chosen is None else ints(chosen)
    around = [(0, 0)] * x.dim()
    for number, axis in enumerate(axes):
        around[axis] = sizes[number], sizes[number + len(axes)]
    if mode == "constant":
        fill = value if filling is None else filling
        fill = fill.item() if isinstance(fill, Tensor) else fill
        fill = fill[0] if isinstance(fill, Sequence) else fill
        return functional.pad(x, [each for pair in reversed(around) for each in pair], value=fill)
    for axis, (before, after) in enumerate(around):
        if before or after:
            x = _pad_one(x, axis, before, after, PAD_MODES[mode])
    return x


def _pad_one(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """Pad one axis by copies of its own elements; negative widths cut."""
    length = x.shape[axis]
    positions = torch.arange(-before, length + after, device=x.device)
    if mode == "replicate":
        positions = positions.clamp(0, length - 1)
    elif mode == "circular":
        positions = positions.remainder(length)
    else:
        period = max(2 * (length - 1), 1)
        positions = positions.remainder(period)
        positions = torch.where(positions >= length, period - positions, positions)
    return x.index_select(axis, positions)


def constant_of_shape(
    wanted: Numbers,
    *,
    value: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Tensor:
    return torch.full(tuple(ints(wanted)), value, dtype=dtype, device=device)


def make_range(
    start: Tensor | float,
    limit: Tensor | float,
    delta: Tensor | float,
    *,
    stash_type: int | None = None,
    types: Sequence[int] = (),
    device: torch.device = CPU,
) -> Tensor:
    given = [start, limit, delta]
    dtypes = [each.dtype for each in given if isinstance(each, Tensor)]
    numbers = [each.item() if isinstance(each, Tensor) else each for each in given]
    is_float = any(isinstance(each, float) for each in numbers)
    dtype = dtypes[0] if dtypes else torch.float32 if is_float else torch.int64
    dtype = DTYPES.get(types[0], dtype) if types else dtype
    first, last, step = numbers
    count = max(math.ceil((last - first) / step), 0)
    positions = torch.arange(count, device=device, dtype=torch.float64 if is_float else torch.int64)
    return (first + positions * step).to(dtype)


def eye_like(x: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    wanted = x.dtype if dtype is None else DTYPES[dtype]
    ones = torch.ones(x.shape, device=x.device, dtype=torch.float32)
    return torch.diagonal_scatter(torch.zeros_like(ones), ones.diagonal(k), k).to(wanted)


def depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    inner = c // blocksize**2
    if mode == "DCR":
        parts = x.reshape(n, blocksize, blocksize, inner, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, inner, blocksize, blocksize, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, inner, h * blocksize, w * blocksize)


def space_to_depth(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return parts.permute(*order).reshape(n, -1, h // blocksize, w // blocksize)


def trilu(x: Tensor, diagonal: Numbers | None = None, *, upper: int = 1) -> Tensor:
    k = 0 if diagonal is None else one_int(diagonal)
    return torch.triu(x, k) if upper else torch.tril(x, k)


def center_crop_pad(x: Tensor, to: Numbers, *, axes: Sequence[int] | None = None) -> Tensor:
    where = range(x.dim()) if axes is None else axes
    for axis, wanted in zip(where, ints(to), strict=True):
        length = x.shape[axis]
        if wanted < length:
            x = x.narrow(axis, (length - wanted) // 2, wanted)
        elif wanted > length:
            before = (wanted - length) // 2
            at = positive(axis, x.dim())
            around = [0, 0] * (x.dim() - 1 - at) + [before, wanted - length - before]
            x = functional.pad(x, around)
    return x


def reverse_sequence(
    x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0
) -> Tensor:
    moved = x.movedim((batch_axis, time_axis), (0, 1))
    at = torch.arange(moved.shape[1], device=x.device)
    lengths = lengths.to(x.device)[:, None]
    order = torch.where(at < lengths, lengths - 1 - at, at)
    order = order.reshape(*order.shape, *[1] * (moved.dim() - 2)).expand(moved.shape)
    return moved.gather(1, order).movedim((0, 1), (batch_axis, time_axis))


def identity(x: Tensor) -> Tensor:
    return x


OPERATORS = {
    "CenterCropPad": OnnxOperator(center_crop_pad, host=(1,)),
    "Concat": OnnxOperator(concat),
    "ConstantOfShape": OnnxOperator(constant_of_shape, host=(0,)),
    "DepthToSpace": OnnxOperator(depth_to_space),
    "Expand": OnnxOperator(expand, host=(1,)),
    "EyeLike": OnnxOperator(eye_like),
    "Flatten": OnnxOperator(flatten),
    "Identity": OnnxOperator(identity),
    "Pad": OnnxOperator(pad, host=(1, 2, 3)),
    "Range": OnnxOperator(make_range, host=(0, 1, 2)),
    "Reshape": OnnxOperator(reshape, host=(1,)),
    "ReverseSequence": OnnxOperator(reverse_sequence),
    "Shape": OnnxOperator(shape),
    "Size": OnnxOperator(size),
    "Slice": OnnxOperator(take_slice, host=(1, 2, 3, 4)),
    "SpaceToDepth": OnnxOperator(space_to_depth),
    "Split": OnnxOperator(split, host=(1,)),
    "Squeeze": OnnxOperator(squeeze, host=(1,)),
    "Tile": OnnxOperator(tile, host=(1,)),
    "Transpose": OnnxOperator(transpose),
    "Trilu": OnnxOperator(trilu, host=(1,)),
    "Unsqueeze": OnnxOperator(unsqueeze, host=(1,)),
}
