"""Products of a decoder with its weights: as they are, or in FP8, weights by a scale for each
channel of the output and inputs each token by its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The least that a range is taken for: of all zeros there is none.
SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class Small:
    """Tokens in e4m3, and [tokens, 1] what each is multiplied by."""

    values: Tensor
    scales: Tensor


class AnyProduct(Protocol):
    """x W^T + b, whatever the weights are."""

    def __call__(self, x: Tensor | Small) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Product:
    """x W^T + b."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor | Small) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """The same in e4m3; `scales` are [1, channels]."""

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
    """Each row by its own largest value."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / FP8_MAX
    return Small((wide / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)


def fp8_product(weight: Tensor, bias: Tensor | None) -> Fp8Product:
    small = in_fp8(weight)
    return Fp8Product(small.values, small.scales.t().contiguous(), bias, weight.dtype)
