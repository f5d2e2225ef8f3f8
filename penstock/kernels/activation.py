"""Activations that kernels apply before they write: what they are, and the same in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch.nn import functional


class Activation(NamedTuple):
    """A function of each element. `a` and `b` are its numbers: the slope of `leaky_relu`, the
    bounds of `clamp`, factor and offset of `hard_sigmoid`; zero for the others."""

    kind: str
    a: float = 0.0
    b: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return TORCH[self.kind](x, self.a, self.b)

    def __str__(self) -> str:
        numbers = [f"{each:g}" for each in (self.a, self.b) if self.a or self.b]
        return " ".join((self.kind, *numbers))


TORCH: Mapping[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "relu": lambda x, a, b: functional.relu(x),
    "clamp": lambda x, a, b: torch.clamp(x, a, b),
    "leaky_relu": lambda x, a, b: functional.leaky_relu(x, a),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "silu": lambda x, a, b: functional.silu(x),
    "gelu": lambda x, a, b: functional.gelu(x),
    "gelu_tanh": lambda x, a, b: functional.gelu(x, approximate="tanh"),
    "hard_sigmoid": lambda x, a, b: torch.clamp(x * a + b, 0, 1),
    "hard_swish": lambda x, a, b: functional.hardswish(x),
}
RELU, RELU6 = Activation("relu"), Activation("clamp", 0.0, 6.0)
SIGMOID, SILU = Activation("sigmoid"), Activation("silu")
GELU, GELU_TANH = Activation("gelu"), Activation("gelu_tanh")
HARD_SIGMOID, HARD_SWISH = Activation("hard_sigmoid", 1 / 6, 0.5), Activation("hard_swish")
