"""Linear layers with integer weights of four or eight bits and 16-bit inputs, for a few rows: there
the time is that of reading weights, so fewer bytes are less time.

Weights lie as ONNX's MatMulNBits has them: along the depth, two to a byte for four bits (the first
in the low half), in groups that share a scale and a zero point. On GPUs a Triton kernel
(`weight_only_gemm`) turns them into floats as it reads them; elsewhere, and for many rows, they are
turned back into a matrix first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels.packed_encoder import uses_kernels

BYTE = 8
BITS = (4, 8)
# Weights of four bits that share a scale.
GROUP = 128
# More rows than this are limited by arithmetic.
MAX_ROWS = 64
# The kernel takes groups of at least so many weights; of fewer, a tile would be too small.
MIN_GROUP = 32
SMALLEST = 1e-8


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """A matrix [width, depth] as bytes [width, depth * bits / 8]; scales [width, groups]; zero
    points alike, or None for the middle of the range."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    depth: int
    bits: int
    # Weights along the depth that share a scale.
    group: int

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def num_bytes(self) -> int:
        parts = (self.packed, self.scales, self.zeros)
        return sum(each.nbytes for each in parts if each is not None)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the weights as floats."""
        width, num_groups = len(self.packed), self.scales.shape[1]
        values = unpacked(self.packed, self.bits)[:, : self.depth].float()
        padded = F.pad(values, (0, num_groups * self.group - self.depth))
        zeros = float(self.middle) if self.zeros is None else self.zeros.float()[:, :, None]
        blocks = (padded.reshape(width, num_groups, self.group) - zeros) * self.scales.float()[
            :, :, None
        ]
        return blocks.reshape(width, -1)[:, : self.depth].to(dtype)

    @property
    def is_regular(self) -> bool:
        """Whether the kernel's steps along the depth do not cross groups."""
        is_power = self.group & (self.group - 1) == 0
        return self.scales.shape[1] == 1 or (is_power and self.group >= MIN_GROUP)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return integers of these bits, a byte each."""
    if bits == BYTE:
        return packed
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def quantise_weight(weight: Tensor, bits: int) -> IntegerWeight:
    """Round a matrix: to eight bits with a scale per row, to four with one per group of 128."""
    width, depth = weight.shape
    weight = weight.float()
    if bits == BYTE:
        scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=SMALLEST)
        values = (weight / scales).round().clamp(-127, 127) + 128
        return IntegerWeight(values.to(torch.uint8), scales, None, depth, bits, depth)
    num_groups = -(-depth // GROUP)
    # The last value again, so that padding changes no range.
    padded = F.pad(weight[None], (0, num_groups * GROUP - depth), mode="replicate")[0]
    groups = padded.reshape(width, num_groups, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=SMALLEST)
    zeros = (-low / scales).round()
    values = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    flat = values.to(torch.uint8).reshape(width, -1)[:, :depth]
    packed = flat[:, 0::2] | (flat[:, 1::2] << 4)
    return IntegerWeight(packed.contiguous(), scales, zeros, depth, bits, GROUP)


def multiply(x: Tensor, weight: IntegerWeight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b."""
    rows = x.reshape(-1, x.shape[-1])
    is_small = 0 < len(rows) <= MAX_ROWS and weight.is_regular
    if not is_small or not uses_kernels(rows) or not weight.packed.is_contiguous():
        return F.linear(x, weight.matrix(x.dtype), bias)
    from penstock.kernels import weight_only_gemm

    found = weight_only_gemm.multiply(rows.contiguous(), weight, bias)
    return found.reshape(*x.shape[:-1], found.shape[1])


class WeightOnlyLinear(nn.Module):
    """A linear layer with integer weights."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        made = quantise_weight(linear.weight.detach(), bits)
        self.register_buffer("packed", made.packed)
        self.register_buffer("scales", made.scales)
        self.register_buffer("zeros", made.zeros)
        self.depth, self.bits, self.group = made.depth, bits, made.group
        self.bias = linear.bias

    @property
    def weights(self) -> IntegerWeight:
        sizes = self.depth, self.bits, self.group
        return IntegerWeight(self.packed, self.scales, self.zeros, *sizes)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weights, self.bias)
