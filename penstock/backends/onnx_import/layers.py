"""Convolutions, pooling and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backends.onnx_import.values import (
    DTYPES,
    Numbers,
    OnnxOperator,
    PoolAttributes,
    ints,
    positive,
    reals,
)
from penstock.errors import ConfigError

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}
MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
AVERAGE_POOLS = {2: functional.avg_pool2d, 3: functional.avg_pool3d}
UNPOOLS = {1: functional.max_unpool1d, 2: functional.max_unpool2d, 3: functional.max_unpool3d}
Pads = list[tuple[int, int]]


def same_padding(length: int, window: int, stride: int, is_upper: bool) -> tuple[int, int]:
    """Return the padding with which a window gives ceil(length / stride) results. It is negative
    where strides skip more than the window covers: ONNX Runtime centres what is read then, and the
    specification says nothing."""
    total = (-(-length // stride) - 1) * stride + window - length
    if total < 0:
        # As ONNX Runtime 1.31 rounds, measured for totals from -10 to -1.
        before = max((-total - 1) // 2 if is_upper else (-total - 2) // 2, 0)
        return -before, total + before
    smaller = total // 2
    return (smaller, total - smaller) if is_upper else (total - smaller, smaller)


def padding(
    x: Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    auto_pad: str,
) -> Pads:
    """Return the padding before and after each spatial axis."""
    num = len(window)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        return [
            same_padding(
                x.shape[n + 2],
                (window[n] - 1) * dilations[n] + 1,
                strides[n],
                auto_pad == "SAME_UPPER",
            )
            for n in range(num)
        ]
    if auto_pad == "VALID" or not pads:
        return [(0, 0)] * num
    return [(pads[n], pads[n + num]) for n in range(num)]


def _pool_padding(
    x: Tensor,
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    auto_pad: str,
) -> Pads:
    """As `padding`, but never negative: ONNX Runtime refuses to pool then."""
    around = padding(x, window, strides, dilations, pads, auto_pad)
    return [(max(before, 0), max(after, 0)) for before, after in around]


def flat_pads(pads: Pads) -> list[int]:
    """Return the padding in the order of torch.nn.functional.pad."""
    return [each for pair in reversed(pads) for each in pair]


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:
    num = weight.dim() - 2
    strides, dilations = strides or (1,) * num, dilations or (1,) * num
    around = padding(x, weight.shape[2:], strides, dilations, pads, auto_pad)
    if any(before != after or before < 0 for before, after in around):
        x, around = functional.pad(x, flat_pads(around)), [(0, 0)] * num
    same = tuple(before for before, _ in around)
    return CONVOLUTIONS[num](x, weight, bias, tuple(strides), same, tuple(dilations), group)


def convolve_causally(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with the steps before it, which `state` continues."""
    before = weight.shape[2] - 1
    state = x.new_zeros(*x.shape[:2], before) if state is None else state
    whole = torch.cat([state, x], 2)
    found = functional.conv1d(whole, weight, bias, groups=x.shape[1])
    found = functional.silu(found) if activation in ("silu", "swish") else found
    return found, whole[:, :, whole.shape[2] - before :]


def convolve_deformed(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] = (1, 1),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    offset_group: int = 1,
    pads: Sequence[int] = (0, 0, 0, 0),
    strides: Sequence[int] = (1, 1),
) -> Tensor:
    """Convolve images at positions moved by offsets: sample each window, then multiply."""
    height, width = weight.shape[2:]
    rows, columns = offset.shape[2:]
    n, channels = x.shape[:2]
    moves = offset.reshape(n, offset_group, height * width, 2, rows, columns)
    y = torch.arange(rows, device=x.device)[:, None] * strides[0] - pads[0]
    z = torch.arange(columns, device=x.device) * strides[1] - pads[1]
    at_y = torch.arange(height, device=x.device).repeat_interleave(width)[:, None, None]
    at_z = torch.arange(width, device=x.device).repeat(height)[:, None, None]
    down = moves[:, :, :, 0] + (y + at_y * dilations[0])
    across = moves[:, :, :, 1] + (z + at_z * dilations[1])
    sizes = max(x.shape[3] - 1, 1), max(x.shape[2] - 1, 1)
    grid = torch.stack([across * 2 / sizes[0] - 1, down * 2 / sizes[1] - 1], -1)
    images = x.reshape(n * offset_group, channels // offset_group, *x.shape[2:])
    grid = grid.reshape(n * offset_group, height * width * rows, columns, 2)
    seen = functional.grid_sample(images, grid.to(x.dtype), align_corners=True)
    seen = seen.reshape(n, offset_group, -1, height * width, rows, columns)
    if mask is not None:
        seen = seen * mask.reshape(n, offset_group, 1, height * width, rows, columns)
    parts = seen.reshape(n, group, channels // group * height * width, rows * columns)
    found = weight.reshape(group, len(weight) // group, -1) @ parts
    found = found.reshape(n, len(weight), rows, columns)
    return found if bias is None else found + bias[:, None, None]


def convolve_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    output_padding: Sequence[int] = (),
    output_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:
    num = weight.dim() - 2
    strides, dilations = strides or (1,) * num, dilations or (1,) * num
    extra = output_padding or (0,) * num
    whole = TRANSPOSED[num](x, weight, bias, tuple(strides), 0, 0, group, tuple(dilations))
    # The whole result is cut (or padded with what no input reaches) to the size that is asked for.
    spans = [(weight.shape[n + 2] - 1) * dilations[n] + 1 for n in range(num)]
    full = [strides[n] * (x.shape[n + 2] - 1) + spans[n] for n in range(num)]
    wanted = list(output_shape[-num:]) if output_shape else []
    if not wanted and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        # As ONNX Runtime: a kernel smaller than the stride is not padded.
        wanted = [min(full[n] + extra[n], x.shape[n + 2] * strides[n]) for n in range(num)]
    around: Pads = []
    for n in range(num):
        if wanted:
            total = full[n] + extra[n] - wanted[n]
            smaller = total // 2
            is_upper = auto_pad == "SAME_UPPER"
            around.append((smaller, total - smaller) if is_upper else (total - smaller, smaller))
        else:
            around.append((pads[n], pads[n + num]) if pads else (0, 0))
    cuts = [(-before, extra[n] - after) for n, (before, after) in enumerate(around)]
    if bias is None or not any(after > 0 for _, after in cuts):
        return functional.pad(whole, flat_pads(cuts))
    column = bias.reshape(1, -1, *[1] * num)
    return functional.pad(whole - column, flat_pads(cuts)) + column


def _ceil_pads(
    x: Tensor, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int], around: Pads
) -> Pads:
    """Lengthen the padding so that the last, partial window counts; one that begins in the padding
    does not."""
    longer = []
    for n, (before, after) in enumerate(around):
        span = (window[n] - 1) * dilations[n] + 1
        length = x.shape[n + 2]
        count = -(-(length + before + after - span) // strides[n]) + 1
        if (count - 1) * strides[n] >= length + before:
            count -= 1
        longer.append((before, max((count - 1) * strides[n] + span - length - before, after)))
    return longer


def max_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] = (),
    kernel_shape: Sequence[int],
    pads: Sequence[int] = (),
    storage_order: int = 0,
    strides: Sequence[int] = (),
    num_outputs: int,
) -> Tensor | tuple[Tensor, Tensor]:
    num = len(kernel_shape)
    strides, dilations = strides or (1,) * num, dilations or (1,) * num
    around = _pool_padding(x, kernel_shape, strides, dilations, pads, auto_pad)
    if ceil_mode:
        around = _ceil_pads(x, kernel_shape, strides, dilations, around)
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = functional.pad(x, flat_pads(around), value=lowest) if any(map(any, around)) else x
    # On CPUs torch pools floats only; every integer of eight bits is one.
    values = padded if x.is_floating_point() else padded.float()
    found, at = (
        MAX_POOLS[num](
            values, tuple(kernel_shape), tuple(strides), 0, tuple(dilations), return_indices=True
        )
        if num_outputs > 1
        else (
            MAX_POOLS[num](values, tuple(kernel_shape), tuple(strides), 0, tuple(dilations)),
            None,
        )
    )
    found = found.to(x.dtype)
    return found if at is None else (found, _positions(at, x, padded, around, storage_order))


def _positions(at: Tensor, x: Tensor, padded: Tensor, around: Pads, storage_order: int) -> Tensor:
    """Turn positions in a padded image into ONNX's, which count through the whole tensor."""
    sizes, lengths = padded.shape[2:], x.shape[2:]
    parts: list[Tensor] = []
    for n in reversed(range(len(sizes))):
        parts.insert(0, at % sizes[n] - around[n][0])
        at = at // sizes[n]
    axes = range(len(sizes)) if not storage_order else reversed(range(len(sizes)))
    inner = torch.zeros_like(at)
    for n in axes:
        inner = inner * lengths[n] + parts[n]
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device) * math.prod(lengths)
    return inner + planes.reshape(*x.shape[:2], *[1] * len(sizes))


def max_unpool(
    x: Tensor,
    at: Tensor,
    to: Numbers | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:
    num = len(kernel_shape)
    steps = strides or (1,) * num
    around = pads or (0,) * (2 * num)
    plain = [
        (x.shape[n + 2] - 1) * steps[n] + kernel_shape[n] - around[n] - around[n + num]
        for n in range(num)
    ]
    shape = list(x.shape[:2]) + plain
    flat = x.new_zeros(math.prod(shape)).scatter(0, at.reshape(-1), x.reshape(-1)).reshape(shape)
    if to is None:
        return flat
    rest = [(0, wanted - found) for wanted, found in zip(ints(to)[2:], plain, strict=True)]
    return functional.pad(flat, flat_pads(rest))


def average_pool(
    x: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] = (),
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:
    num = len(kernel_shape)
    strides, dilations = strides or (1,) * num, dilations or (1,) * num
    around = _pool_padding(x, kernel_shape, strides, dilations, pads, auto_pad)
    longer = _ceil_pads(x, kernel_shape, strides, dilations, around) if ceil_mode else around
    is_plain = longer == around and all(each == 1 for each in dilations)
    if num in AVERAGE_POOLS and is_plain and (count_include_pad or not any(map(any, around))):
        x = functional.pad(x, flat_pads(around)) if any(map(any, around)) else x
        return AVERAGE_POOLS[num](x, tuple(kernel_shape), tuple(strides))
    counted = torch.ones_like(x[:1, :1])
    if count_include_pad:
        counted = functional.pad(counted, flat_pads(around), value=1.0)
        rest = [(0, late - early) for (_, early), (_, late) in zip(around, longer, strict=True)]
        counted = functional.pad(counted, flat_pads(rest))
    else:
        counted = functional.pad(counted, flat_pads(longer))
    x = functional.pad(x, flat_pads(longer))
    return _window_sums(x, kernel_shape, strides, dilations) / _window_sums(
        counted, kernel_shape, strides, dilations
    )


def _window_sums(
    x: Tensor, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Tensor:
    """Sum each window, one axis after the other."""
    for n, length in enumerate(window):
        span = (length - 1) * dilations[n] + 1
        x = x.unfold(n + 2, span, strides[n])[..., :: dilations[n]].sum(-1)
    return x


def lp_pool(x: Tensor, *, p: int = 2, **attributes: Unpack[PoolAttributes]) -> Tensor:
    window = attributes["kernel_shape"]
    powers = average_pool(x.abs() ** p, count_include_pad=1, **attributes)
    return (powers * math.prod(window)) ** (1 / p)


def global_pool(reduce: Callable[..., Tensor]) -> OnnxOperator:
    def call(x: Tensor) -> Tensor:
        return reduce(x, tuple(range(2, x.dim())), keepdim=True)

    return OnnxOperator(call)


def global_lp_pool(x: Tensor, *, p: int = 2) -> Tensor:
    return (x.abs() ** p).sum(tuple(range(2, x.dim())), keepdim=True) ** (1 / p)


def batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    spatial: int = 1,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    if not spatial:
        raise ConfigError("BatchNormalization: spatial = 0 is not supported")
    if not training_mode:
        return functional.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
    axes = (0, *range(2, x.dim()))
    now, spread = x.mean(axes), x.var(axes, unbiased=False)
    found = functional.batch_norm(x, now, spread, scale, bias, False, 0.0, epsilon)
    rest = mean * momentum + now * (1 - momentum), var * momentum + spread * (1 - momentum)
    return (found, *rest) if num_outputs > 1 else found


def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    if x[0, 0].numel() > 1:
        return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)
    # A single element minus its mean is 0: only the bias is left.
    return torch.zeros_like(x) + bias.reshape(-1, *[1] * (x.dim() - 2))


def group_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    epsilon: float = 1e-5,
    num_groups: int,
    stash_type: int = 1,
) -> Tensor:
    if len(scale) == num_groups != x.shape[1]:
        # Opset 18 has a scale for each group.
        scale, bias = (each.repeat_interleave(x.shape[1] // num_groups) for each in (scale, bias))
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    first = positive(axis, x.dim())
    shape = x.shape[first:]
    scale = scale.expand(shape)
    bias = None if bias is None else bias.expand(shape)
    found = functional.layer_norm(x, shape, scale, bias, epsilon)
    if num_outputs == 1:
        return found
    wide = x.to(DTYPES[stash_type])
    axes = tuple(range(first, x.dim()))
    mean = wide.mean(axes, keepdim=True)
    spread = (wide.var(axes, unbiased=False, keepdim=True) + epsilon).rsqrt()
    return found, mean, spread


def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    shape = x.shape[positive(axis, x.dim()) :]
    return functional.rms_norm(x, shape, scale.expand(shape), epsilon)


def lp_normalization(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    length = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return torch.where(length == 0, torch.zeros_like(x), x / length)


def local_response(
    x: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int
) -> Tensor:
    before = (size - 1) // 2
    squares = functional.pad((x * x).movedim(1, -1), (before, size - 1 - before))
    sums = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (bias + alpha / size * sums) ** beta


def mean_variance(x: Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> Tensor:
    where = tuple(axes)
    mean = x.mean(where, keepdim=True)
    spread = ((x * x).mean(where, keepdim=True) - mean * mean).sqrt()
    return (x - mean) / (spread + 1e-9)


def dropout(
    x: Tensor,
    ratio: Tensor | float | None = None,
    training_mode: Tensor | bool | None = None,
    *,
    seed: int = 0,
    num_outputs: int,
    **old: object,
) -> Tensor | tuple[Tensor, Tensor]:
    if training_mode is not None and bool(training_mode):
        rate = 0.5 if ratio is None else reals(ratio)[0]
        if rate:
            raise ConfigError(["operator Dropout is random in training mode; export for inference"])
    return (x, torch.ones_like(x, dtype=torch.bool)) if num_outputs > 1 else x


def col2im(
    x: Tensor,
    image: Numbers,
    block: Numbers,
    *,
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Tensor:
    sizes, window = ints(image), ints(block)
    num = len(sizes)
    strides, dilations = strides or (1,) * num, dilations or (1,) * num
    around = [(pads[n], pads[n + num]) for n in range(num)] if pads else [(0, 0)] * num
    full = [size + before + after for size, (before, after) in zip(sizes, around, strict=True)]
    counts = [(full[n] - (window[n] - 1) * dilations[n] - 1) // strides[n] + 1 for n in range(num)]
    position = torch.zeros((), dtype=torch.int64, device=x.device)
    for n in range(num):
        offsets = torch.arange(window[n], device=x.device) * dilations[n]
        starts = torch.arange(counts[n], device=x.device) * strides[n]
        shape = [1] * (2 * num)
        shape[n], shape[num + n] = window[n], counts[n]
        position = position * full[n] + (offsets[:, None] + starts[None]).reshape(shape)
    rows, channels = x.shape[0], x.shape[1] // math.prod(window)
    flat = position.reshape(-1)
    found = x.new_zeros(rows, channels, math.prod(full))
    found = found.index_add(2, flat, x.reshape(rows, channels, -1)).reshape(rows, channels, *full)
    return functional.pad(found, flat_pads([(-before, -after) for before, after in around]))


OPERATORS = {
    "AveragePool": OnnxOperator(average_pool),
    "BatchNormalization": OnnxOperator(batch_norm),
    "Col2Im": OnnxOperator(col2im, host=(1, 2)),
    "CausalConvWithState": OnnxOperator(convolve_causally),
    "Conv": OnnxOperator(convolve),
    "ConvTranspose": OnnxOperator(convolve_transposed),
    "DeformConv": OnnxOperator(convolve_deformed),
    "Dropout": OnnxOperator(dropout, host=(1, 2)),
    "GlobalAveragePool": global_pool(torch.mean),
    "GlobalLpPool": OnnxOperator(global_lp_pool),
    "GlobalMaxPool": global_pool(torch.amax),
    "GroupNormalization": OnnxOperator(group_norm),
    "InstanceNormalization": OnnxOperator(instance_norm),
    "LRN": OnnxOperator(local_response),
    "LayerNormalization": OnnxOperator(layer_norm),
    "LpNormalization": OnnxOperator(lp_normalization),
    "LpPool": OnnxOperator(lp_pool),
    "MaxPool": OnnxOperator(max_pool),
    "MaxUnpool": OnnxOperator(max_unpool, host=(2,)),
    "MeanVarianceNormalization": OnnxOperator(mean_variance),
    "RMSNormalization": OnnxOperator(rms_norm),
}
