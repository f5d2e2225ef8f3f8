"""Linear layers of a decoder, in the model's type; `fp8`, `int8` and `int4` have the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Small:
    """Tokens in e4m3, and their scales [tokens, 1]."""

    values: Tensor
    scales: Tensor


class AnyLinear(Protocol):
    """Linear layer x W^T + b, for any weight type."""

    def __call__(self, x: Tensor | Small) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + b."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor | Small) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, self.bias)
