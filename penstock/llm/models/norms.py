"""Normalisation layers, computed in FP32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Norm(Protocol):
    """Normalisation of the last dimension."""

    @property
    def weight(self) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class WideRmsNorm:
    """RMSNorm that is rounded after its weight, which is in FP32, is applied."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.weight, self.epsilon).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply RMSNorm in FP32, as the models were trained."""
    wide = x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return weight * wide.to(x.dtype)
