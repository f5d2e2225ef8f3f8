"""Squeeze-and-excitation of channels-last images, in Triton: two kernels for the mean over the
pixels, both products and both activations, instead of about ten. A third multiplies the images,
unless a convolution does that while it reads them (`conv.convolve`).

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.activation import Activation
from penstock.kernels.conv import NUM_PROGRAMS
from penstock.kernels.pointwise import ELEMENTS, NUM_WARPS, activate, launch

# Pixels and channels of a step of the sum, and channels of a step of the products.
PIXELS, CHANNELS, STEP = 32, 64, 64
# Largest number of hidden channels: a program holds all of them.
MAX_HIDDEN = 512
MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class GateWeights:
    """The two products: `squeeze` [hidden, channels], `excite` [channels, hidden]; biases may be
    None; what follows each."""

    squeeze: torch.Tensor
    squeeze_bias: torch.Tensor | None
    excite: torch.Tensor
    excite_bias: torch.Tensor | None
    inner: Activation
    outer: Activation


@triton.jit(do_not_specialize=["num_parts"])
def _sum(
    x, sums, num_parts, NUM_PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a part of the pixels of an image, to [images, parts, channels]."""
    image = tl.program_id(0) // num_parts
    part = tl.program_id(0) % num_parts
    at_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at_c < CHANNELS
    share = tl.cdiv(NUM_PIXELS, num_parts)
    end = tl.minimum((part + 1) * share, NUM_PIXELS)
    total = tl.zeros((PIXELS, BLOCK), dtype=tl.float32)
    for first in range(part * share, end, PIXELS):
        pixel = first + tl.arange(0, PIXELS)
        mask = (pixel < end)[:, None] & is_channel[None, :]
        address = x + (image * NUM_PIXELS + pixel)[:, None] * CHANNELS + at_c[None, :]
        total += tl.load(address, mask=mask, other=0.0).to(tl.float32)
    written = sums + tl.program_id(0) * CHANNELS + at_c
    tl.store(written, tl.sum(total, 0), mask=is_channel)


@triton.jit(do_not_specialize=["num_parts"])
def _excite(
    sums, squeeze, squeeze_bias, excite, excite_bias, factors, num_parts,
    NUM_PIXELS: tl.constexpr, CHANNELS: tl.constexpr, HIDDEN: tl.constexpr,
    HAS_INNER: tl.constexpr, HAS_OUTER: tl.constexpr,
    INNER: tl.constexpr, INNER_A: tl.constexpr, INNER_B: tl.constexpr,
    OUTER: tl.constexpr, OUTER_A: tl.constexpr, OUTER_B: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute the factors of one image; WIDE is HIDDEN rounded up."""
    image = tl.program_id(0)
    at_h = tl.arange(0, WIDE)
    at_c = tl.arange(0, STEP)
    is_hidden = at_h < HIDDEN
    hidden = tl.zeros((WIDE,), dtype=tl.float32)
    if HAS_INNER:
        hidden += tl.load(squeeze_bias + at_h, mask=is_hidden, other=0.0).to(tl.float32)
    for first in range(0, CHANNELS, STEP):
        is_channel = first + at_c < CHANNELS
        total = tl.zeros((STEP,), dtype=tl.float32)
        for part in range(num_parts):
            address = sums + (image * num_parts + part) * CHANNELS + first + at_c
            total += tl.load(address, mask=is_channel, other=0.0)
        mask = is_hidden[:, None] & is_channel[None, :]
        address = squeeze + at_h[:, None] * CHANNELS + first + at_c[None, :]
        weight = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        hidden += tl.sum(weight * (total / NUM_PIXELS)[None, :], 1)
    hidden = activate(hidden, INNER, INNER_A, INNER_B)
    for first in range(0, CHANNELS, STEP):
        is_channel = first + at_c < CHANNELS
        mask = is_channel[:, None] & is_hidden[None, :]
        address = excite + (first + at_c)[:, None] * HIDDEN + at_h[None, :]
        weight = tl.load(address, mask=mask, other=0.0).to(tl.float32)
        factor = tl.sum(weight * hidden[None, :], 1)
        if HAS_OUTER:
            bias = tl.load(excite_bias + first + at_c, mask=is_channel, other=0.0)
            factor += bias.to(tl.float32)
        factor = activate(factor, OUTER, OUTER_A, OUTER_B)
        written = factors + image * CHANNELS + first + at_c
        tl.store(written, factor.to(factors.dtype.element_ty), mask=is_channel)


@triton.jit
def _multiply(
    x, factors, y, num_elements, NUM_PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = at < num_elements
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    which = at // (NUM_PIXELS * CHANNELS) * CHANNELS + at % CHANNELS
    value *= tl.load(factors + which, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=is_inside)


FUNCTIONS = (_sum, _excite, _multiply)


def factors_of(x: torch.Tensor, gate: GateWeights) -> torch.Tensor:
    """Return the factor of each image and channel, [n, c], for channels-last images [n, c, h, w].

    Hidden channels are at most MAX_HIDDEN."""
    batch, channels, height, width = x.shape
    num_pixels, hidden = height * width, len(gate.squeeze)
    blocks = triton.cdiv(channels, CHANNELS)
    # As many programs as the GPU runs at once, of a few steps at least.
    most = min(MAX_PARTS, triton.cdiv(num_pixels, 4 * PIXELS))
    num_parts = max(1, min(most, 2 * NUM_PROGRAMS // (batch * blocks)))
    sums = torch.empty((batch, num_parts, channels), dtype=torch.float32, device=x.device)
    launch(
        _sum, (batch * num_parts, blocks),
        x, sums, num_parts, num_pixels, channels, PIXELS, CHANNELS, num_warps=4,
    )  # fmt: skip
    factors = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    inner, outer = gate.squeeze_bias, gate.excite_bias
    launch(
        _excite, (batch,),
        sums, gate.squeeze, x if inner is None else inner, gate.excite,
        x if outer is None else outer, factors, num_parts, num_pixels, channels, hidden,
        inner is not None, outer is not None, *gate.inner, *gate.outer,
        max(16, triton.next_power_of_2(hidden)), STEP, num_warps=8,
    )  # fmt: skip
    return factors


def multiply(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply channels-last images [n, c, h, w] by a factor for each image and channel."""
    _, channels, height, width = x.shape
    y = torch.empty_like(x)
    launch(
        _multiply, (triton.cdiv(x.numel(), ELEMENTS),),
        x, factors, y, x.numel(), height * width, channels, ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return y
