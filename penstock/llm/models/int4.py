"""Linear layers with four-bit weights on CPUs, in groups of 32 with a scale and a zero point each;
inputs are rounded to BF16.

Weights arrive dequantised. Those that were four-bit before, such as Q4_0 and Q4_1 of GGUF files,
are recovered: the values of a group lie on a grid of at most 16 points, and the group gets that
grid. Only scales and zero points are rounded, to BF16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.llm.exact_attention import ROWS
from penstock.llm.models.linear import AnyLinear, Small

GROUP = 32
# The number of channels must be a multiple of this.
MULTIPLE = 16
# Steps between the smallest and the largest value of a group: fewer than 15 if a group does not use
# its whole grid.
MOST_STEPS, FEWEST_STEPS = 15, 8
# The 4-bit number that stands for the zero point.
MIDDLE = 8
SMALLEST = 1e-30


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """x W^T + b, with FP32 inputs and outputs."""

    packed: Tensor
    # [groups, channels, 2], in BF16.
    scales_and_zeros: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor | Small) -> Tensor:
        assert isinstance(x, Tensor)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self.packed, GROUP, self.scales_and_zeros
        )
        wide: Tensor = found.float()
        return wide if self.bias is None else wide.add_(self.bias)


@dataclass(frozen=True, slots=True)
class FixedRowsLinear:
    """x W^T + b in FP32, in matrices of `ROWS` rows: BLAS rounds differently for fewer rows, and
    the result of a token must not depend on the batch size."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor | Small) -> Tensor:
        assert isinstance(x, Tensor)
        tiles = F.pad(x, (0, 0, 0, -len(x) % ROWS)).unflatten(0, (-1, ROWS))
        found = torch.bmm(tiles, self.weight.t().expand(len(tiles), -1, -1))
        wide = found.flatten(0, 1)[: len(x)]
        return wide if self.bias is None else wide + self.bias


def int4_linear(weight: Tensor, bias: Tensor | None) -> AnyLinear:
    """Return a four-bit linear layer, or an FP32 one if torch does not take its size."""
    channels, width = weight.shape
    if channels % MULTIPLE or width % GROUP:
        return FixedRowsLinear(weight, bias)
    numbers, scales, zeros = in_int4(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
    both = torch.stack([scales, zeros], 2).transpose(0, 1).contiguous().bfloat16()
    return Int4Linear(packed, both, bias)


def in_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [channels, width] numbers from 0 to 15, and [channels, groups] scales and zero points:
    a value is (number - 8) x scale + zero."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    numbers = torch.zeros_like(groups)
    scales = torch.zeros_like(least)
    error = torch.full_like(least, torch.inf)
    for steps in range(MOST_STEPS, FEWEST_STEPS - 1, -1):
        scale = ((most - least) / steps).clamp(min=SMALLEST)
        places = (groups - least) / scale
        rounded = places.round()
        off = ((places - rounded) * scale).square().sum(2, keepdim=True)
        is_better = off < error * 0.5
        error = torch.where(is_better, off, error)
        scales = torch.where(is_better, scale, scales)
        numbers = torch.where(is_better, rounded, numbers)
    zeros = least + MIDDLE * scales
    return numbers.flatten(1).to(torch.uint8), scales[:, :, 0], zeros[:, :, 0]
