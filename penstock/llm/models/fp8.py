"""Linear layers in FP8, with a scale per output channel for weights and per token for inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.llm.models.linear import Small

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# Lower bound of a range, for rows that are all zero.
SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """Linear layer in e4m3; `scales` are [1, channels]."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    def __call__(self, x: Tensor | Small) -> Tensor:
        taken = x if isinstance(x, Small) else in_fp8(x)
        if not taken.values.is_cuda:
            return self._plain(taken)
        return torch._scaled_mm(
            taken.values,
            self.weight.t(),
            scale_a=taken.scales,
            scale_b=self.scales,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )

    def _plain(self, x: Small) -> Tensor:
        found = x.values.float() @ self.weight.t().float() * self.scales * x.scales
        return (found if self.bias is None else found + self.bias.float()).to(self.dtype)


def in_fp8(x: Tensor) -> Small:
    """Quantise each row with its own scale."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    return Small((wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)


def fp8_linear(weight: Tensor, bias: Tensor | None) -> Fp8Linear:
    small = in_fp8(weight)
    return Fp8Linear(small.values, small.scales.t().contiguous(), bias, weight.dtype)
