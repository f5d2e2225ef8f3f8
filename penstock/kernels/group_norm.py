"""Group norm of channels-last images, with an addition by channel before it and an activation after
it, in Triton.

Statistics are in FP32: each lane of a tile keeps the mean and the sum of squared deviations of its
pixels (Welford), and lanes are combined in a fixed order. `whole` is one kernel with a program for
each group of an image, which reads the group twice. `in_parts` is three: sums of parts of the
pixels, the statistics of each group, and the pass that writes; it fills the GPU for large images,
and reads all channels of a pixel together.

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.activation import Activation
from penstock.kernels.conv import NUM_PROGRAMS
from penstock.kernels.pointwise import activate, launch

# Pixels and channels of a step of `in_parts`, and elements of one of `whole`.
PIXELS, CHANNELS, ELEMENTS = 32, 64, 4096
# Most parts of an image, and values of a group that a program combines.
MAX_PARTS, MAX_COMBINED = 64, 8192
# Channels of a group that a program holds.
MAX_SIZE = 4096
# Elements of a group that one program may read: a large one leaves the others idle.
MAX_WHOLE = 1 << 17


@dataclass(frozen=True, slots=True)
class GroupNormForm:
    """What is computed; `weight` and `bias` [channels] may be None."""

    num_groups: int
    epsilon: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: Activation | None = None

    @property
    def steps(self) -> tuple[object, ...]:
        """Return the activation as constants of kernels."""
        return tuple(self.activation or ("", 0.0, 0.0))


@triton.jit
def _moments(
    x, image, first, end, num_pixels, at_c, is_channel,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return mean and sum of squared deviations of each channel, of a part of the pixels."""
    lanes = tl.arange(0, PIXELS)
    mean = tl.zeros((PIXELS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((PIXELS, BLOCK), dtype=tl.float32)
    steps = 0.0
    for start in range(first, end, PIXELS):
        pixel = start + lanes
        mask = (pixel < end)[:, None] & is_channel[None, :]
        address = x + (image * num_pixels + pixel)[:, None] * CHANNELS + at_c[None, :]
        value = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        steps += 1.0
        off = tl.where(mask, value - mean, 0.0)
        mean += off * (1.0 / steps)
        squares += off * (value - mean)
    # Lanes at the end have one pixel less, or none.
    count = tl.maximum((end - first - lanes + PIXELS - 1) // PIXELS, 0).to(tl.float32)[:, None]
    total = tl.maximum(end - first, 1).to(tl.float32)
    # Relative to one of them, so that a constant has no deviation.
    base = tl.sum(tl.where(lanes[:, None] == 0, mean, 0.0), 0)
    middle = base + tl.sum((mean - base[None, :]) * count, 0) / total
    off = mean - middle[None, :]
    return middle, tl.sum(squares + off * off * count, 0)


@triton.jit
def _statistics(mean, squares, count, is_first, is_inside, total, epsilon):
    """Return mean and inverse deviation of a group, of those of its parts and channels, which are
    of `count` pixels."""
    base = tl.sum(tl.sum(tl.where(is_first, mean, 0.0), 1), 0)
    off = tl.where(is_inside, mean - base, 0.0)
    middle = base + tl.sum(tl.sum(off * count, 1), 0) / total
    off = tl.where(is_inside, mean - middle, 0.0)
    spread = tl.sum(tl.sum(tl.where(is_inside, squares, 0.0) + off * off * count, 1), 0)
    return middle, tl.rsqrt(spread / total + epsilon)


@triton.jit(do_not_specialize=["num_pixels", "epsilon"])
def _whole(
    x, added, weight, bias, y, num_pixels, epsilon, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    HAS_ADDED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one group of SIZE channels of an image."""
    NUM_GROUPS: tl.constexpr = CHANNELS // SIZE
    image = tl.program_id(0) // NUM_GROUPS
    within = tl.arange(0, BLOCK)
    is_channel = within < SIZE
    at_c = tl.program_id(0) % NUM_GROUPS * SIZE + within
    mean, squares = _moments(
        x, image, 0, num_pixels, num_pixels, at_c, is_channel, CHANNELS, PIXELS, BLOCK
    )
    moved = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_ADDED:
        moved += tl.load(added + image * CHANNELS + at_c, mask=is_channel, other=0.0)
    count = num_pixels.to(tl.float32)
    middle, factor = _statistics(
        (mean + moved)[None, :], squares[None, :], count, (within == 0)[None, :],
        is_channel[None, :], count * SIZE, epsilon,
    )  # fmt: skip
    center = middle - moved
    factors = tl.zeros((BLOCK,), dtype=tl.float32) + factor
    if HAS_WEIGHT:
        factors *= tl.load(weight + at_c, mask=is_channel, other=0.0).to(tl.float32)
    offset = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_BIAS:
        offset += tl.load(bias + at_c, mask=is_channel, other=0.0).to(tl.float32)
    for start in range(0, num_pixels, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        mask = (pixel < num_pixels)[:, None] & is_channel[None, :]
        at = (image * num_pixels + pixel)[:, None] * CHANNELS + at_c[None, :]
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        value = (value - center[None, :]) * factors[None, :] + offset[None, :]
        value = activate(value, KIND, A, B)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pixels", "num_parts", "share"])
def _sum_parts(
    x, means, squares, num_pixels, num_parts, share, CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write mean and squared deviations of `share` pixels, to [images, parts, channels]."""
    image = tl.program_id(0) // num_parts
    first = tl.program_id(0) % num_parts * share
    end = tl.minimum(first + share, num_pixels)
    at_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at_c < CHANNELS
    mean, square = _moments(
        x, image, first, end, num_pixels, at_c, is_channel, CHANNELS, PIXELS, BLOCK
    )
    at = tl.program_id(0) * CHANNELS + at_c
    tl.store(means + at, mean, mask=is_channel)
    tl.store(squares + at, square, mask=is_channel)


@triton.jit(do_not_specialize=["num_pixels", "num_parts", "share", "epsilon"])
def _combine(
    means, squares, added, weight, centers, factors, num_pixels, num_parts, share, epsilon,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, HAS_ADDED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what is subtracted from each channel of a group, and what it is multiplied by."""
    NUM_GROUPS: tl.constexpr = CHANNELS // SIZE
    image = tl.program_id(0) // NUM_GROUPS
    within = tl.arange(0, BLOCK)
    is_channel = within < SIZE
    at_c = tl.program_id(0) % NUM_GROUPS * SIZE + within
    part = tl.arange(0, PARTS)
    mask = (part < num_parts)[:, None] & is_channel[None, :]
    at = (image * num_parts + part)[:, None] * CHANNELS + at_c[None, :]
    mean = tl.load(means + at, mask=mask, other=0.0)
    square = tl.load(squares + at, mask=mask, other=0.0)
    moved = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_ADDED:
        moved += tl.load(added + image * CHANNELS + at_c, mask=is_channel, other=0.0)
    count = tl.maximum(tl.minimum(share, num_pixels - part * share), 0).to(tl.float32)[:, None]
    is_first = (part == 0)[:, None] & (within == 0)[None, :]
    total = num_pixels.to(tl.float32) * SIZE
    middle, factor = _statistics(
        mean + moved[None, :], square, count, is_first, mask, total, epsilon
    )
    at = image * CHANNELS + at_c
    tl.store(centers + at, middle - moved, mask=is_channel)
    scale = tl.zeros((BLOCK,), dtype=tl.float32) + factor
    if HAS_WEIGHT:
        scale *= tl.load(weight + at_c, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(factors + at, scale, mask=is_channel)


@triton.jit(do_not_specialize=["num_pixels", "num_tiles"])
def _scale(
    x, centers, factors, bias, y, num_pixels, num_tiles, CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0) // num_tiles
    pixel = tl.program_id(0) % num_tiles * PIXELS + tl.arange(0, PIXELS)
    at_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at_c < CHANNELS
    mask = (pixel < num_pixels)[:, None] & is_channel[None, :]
    at = (image * num_pixels + pixel)[:, None] * CHANNELS + at_c[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    center = tl.load(centers + image * CHANNELS + at_c, mask=is_channel, other=0.0)
    factor = tl.load(factors + image * CHANNELS + at_c, mask=is_channel, other=0.0)
    value = (value - center[None, :]) * factor[None, :]
    if HAS_BIAS:
        value += tl.load(bias + at_c, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    value = activate(value, KIND, A, B)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


FUNCTIONS = (_whole, _sum_parts, _combine, _scale)


def whole(x: torch.Tensor, form: GroupNormForm, added: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise channels-last images [n, c, h, w], to which `added` [n, c] is added first; groups
    have at most MAX_SIZE channels."""
    batch, channels, height, width = x.shape
    num_pixels, size = height * width, channels // form.num_groups
    block = triton.next_power_of_2(size)
    pixels = max(1, min(ELEMENTS // block, triton.next_power_of_2(num_pixels)))
    y = torch.empty_like(x)
    weight, bias = form.weight, form.bias
    launch(
        _whole, (batch * form.num_groups,),
        x, x if added is None else added, x if weight is None else weight,
        x if bias is None else bias, y, num_pixels, form.epsilon, channels, size,
        added is not None, weight is not None, bias is not None, *form.steps, pixels, block,
        num_warps=8 if pixels * block >= ELEMENTS else 4,
    )  # fmt: skip
    return y


def in_parts(
    x: torch.Tensor, form: GroupNormForm, added: torch.Tensor | None = None
) -> torch.Tensor:
    """Do the same as `whole`, with many programs for an image."""
    batch, channels, height, width = x.shape
    num_pixels, size = height * width, channels // form.num_groups
    block, blocks = triton.next_power_of_2(size), triton.cdiv(channels, CHANNELS)
    # As many programs as the GPU runs at once, of a few steps at least.
    most = min(MAX_PARTS, MAX_COMBINED // block, triton.cdiv(num_pixels, 4 * PIXELS))
    num_parts = max(1, min(most, 4 * NUM_PROGRAMS // (batch * blocks)))
    share = triton.cdiv(num_pixels, num_parts)
    sums = torch.empty((2, batch, num_parts, channels), dtype=torch.float32, device=x.device)
    launch(
        _sum_parts, (batch * num_parts, blocks),
        x, sums[0], sums[1], num_pixels, num_parts, share, channels, PIXELS, CHANNELS, num_warps=4,
    )  # fmt: skip
    found = torch.empty((2, batch, channels), dtype=torch.float32, device=x.device)
    weight, bias = form.weight, form.bias
    launch(
        _combine, (batch * form.num_groups,),
        sums[0], sums[1], x if added is None else added, x if weight is None else weight,
        found[0], found[1], num_pixels, num_parts, share, form.epsilon, channels, size,
        added is not None, weight is not None, triton.next_power_of_2(num_parts), block,
        num_warps=4,
    )  # fmt: skip
    y = torch.empty_like(x)
    num_tiles = triton.cdiv(num_pixels, PIXELS)
    launch(
        _scale, (batch * num_tiles, blocks),
        x, found[0], found[1], x if bias is None else bias, y, num_pixels, num_tiles, channels,
        bias is not None, *form.steps, PIXELS, CHANNELS, num_warps=4,
    )  # fmt: skip
    return y
