"""Linear layers in e4m3, in place of nn.Linear: weights with a scale per output channel, inputs
with a scale per row, computed or calibrated.

An input is quantised in one pass over memory, together with the layer norm or GELU that made it
where the caller knows of one (`Fp8Input`); layers that share an input share that pass too. On GPUs
our kernels and the fastest GEMM (`gemm`) run, elsewhere plain torch. `torch_linear` converts models
to these layers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels.packed_encoder import (
    FP8_MAX,
    SMALLEST,
    PackedFp8Linear,
    PackedLinear,
    room_for_scales,
    to_fp8,
    uses_kernels,
)

# Both sides of a weight in e4m3 are multiples of this.
MULTIPLE = 16
# Widest row that a program holds.
MAX_WIDTH = 1 << 15
FusedActivation = Literal["", "gelu", "gelu_tanh"]


class QuantisedRows(NamedTuple):
    """The input of an `E4m3Linear`: e4m3 [rows, width], a scale per row, and the sizes before the
    last of what it was made from."""

    values: Tensor
    scales: Tensor
    sizes: torch.Size


class Fp8Input(nn.Module):
    """Quantises the input of linear layers, after a layer norm or an activation if it has one. With
    a residual, which only norms take, it returns the sum too."""

    def __init__(
        self,
        norm: nn.LayerNorm | None = None,
        activation: FusedActivation = "",
        largest: float | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation
        inverse = None if largest is None else torch.tensor([FP8_MAX / max(largest, SMALLEST)])
        if inverse is not None and norm is not None:
            inverse = inverse.to(norm.weight.device)
        self.register_buffer("inverse", inverse)

    def forward(
        self, x: Tensor, residual: Tensor | None = None
    ) -> QuantisedRows | tuple[Tensor, QuantisedRows]:
        if residual is None:
            return self._quantised(x)
        if x.shape != residual.shape or x.dtype != residual.dtype or not self._fits(x):
            total = x + residual
            return total, self._quantised(total)
        return self._normed(x, residual)

    def _fits(self, x: Tensor) -> bool:
        return uses_kernels(x) and x.shape[-1] <= MAX_WIDTH and x.numel() > 0

    def _normed(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, QuantisedRows]:
        from penstock.kernels import encoder

        assert self.norm is not None
        rows, added = (
            None if each is None else each.reshape(-1, x.shape[-1]).contiguous()
            for each in (x, residual)
        )
        assert rows is not None
        scales = room_for_scales(rows)
        total, small = encoder.norm_rows(rows, self.norm, scales, self.inverse, added)
        return total.view(x.shape), QuantisedRows(small, scales, x.shape[:-1])

    def _quantised(self, x: Tensor) -> QuantisedRows:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        sizes = x.shape[:-1]
        if not self._fits(rows):
            return QuantisedRows(*self.plain(rows), sizes)
        if self.norm is not None:
            return self._normed(x, None)[1]
        from penstock.kernels import encoder

        scales = room_for_scales(rows)
        # The tanh form is closer to GELU than e4m3 is.
        has_gelu = bool(self.activation)
        small = encoder.quantise_rows(
            rows, scales, inverse=self.inverse, has_gelu=has_gelu, is_fast=True
        )
        return QuantisedRows(small, scales, sizes)

    def plain(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and scales by plain torch."""
        if self.norm is not None:
            rows = self.norm(rows)
        if self.activation:
            rows = F.gelu(rows, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        if self.inverse is not None:
            return to_fp8(rows, self.inverse), (1 / self.inverse).expand(len(rows), 1).contiguous()
        largest = rows.float().abs().amax(1, keepdim=True) if rows.numel() else rows.float()[:, :1]
        scales = largest.clamp(min=SMALLEST) / FP8_MAX
        return to_fp8(rows, 1 / scales), scales


class E4m3Linear(nn.Module):
    """A linear layer in e4m3; its input may have been quantised already. A residual is added by the
    GEMM itself if it has the shape and type of the result."""

    def __init__(self, linear: nn.Linear, largest: float | None = None) -> None:
        super().__init__()
        weight = linear.weight.detach()
        bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        self.largest = largest
        self.product = PackedFp8Linear(PackedLinear(weight, bias), None)
        self.quantiser = Fp8Input(largest=largest).to(weight.device)

    def forward(self, x: Tensor | QuantisedRows, residual: Tensor | None = None) -> Tensor:
        given = x if isinstance(x, QuantisedRows) else self.quantiser(x)
        shape = *given.sizes, len(self.product.weight)
        is_same = residual is not None and residual.shape == shape
        if residual is None or not is_same or residual.dtype != self.product.bias.dtype:
            found = self.product.multiply(given.values, given.scales).reshape(shape)
            return found if residual is None else found + residual
        rows = residual.reshape(-1, shape[-1]).contiguous()
        return self.product.multiply(given.values, given.scales, rows).reshape(shape)


def fits(linear: nn.Linear) -> bool:
    """Return whether a layer can be computed in e4m3."""
    return bool(linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0)
