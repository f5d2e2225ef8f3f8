"""Squeeze-and-excitation, alone or with the 1x1 convolution after it, run by the fastest
implementation: the convolution may multiply its input while it reads it."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from penstock.kernels import has_triton
from penstock.kernels.activation import Activation
from penstock.kernels.convolution import (
    IMAGE_RANK,
    MAX_OFFSET,
    REFERENCE,
    TOLERANCE,
    Convolution,
    Run,
    TunedLayer,
    Tuner,
    last,
)


class SqueezeExcite(TunedLayer):
    """Images multiplied by a factor for each channel, which two products compute from the means of
    the channels. Weights are those of linear layers, [out, in]."""

    def __init__(
        self,
        squeeze: torch.nn.Linear,
        inner: Activation,
        excite: torch.nn.Linear,
        outer: Activation,
        tuner: Tuner | None,
    ) -> None:
        super().__init__(tuner)
        self.squeeze, self.excite = squeeze, excite
        self.inner, self.outer = inner, outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != IMAGE_RANK or torch.compiler.is_compiling():
            return self.plain(x)
        return self.chosen.run(x, None, self.plain)

    def __str__(self) -> str:
        hidden, channels = self.squeeze.weight.shape
        return f"gate {channels} {hidden} {self.inner} {self.outer}"

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        sizes, dtype = "x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")
        return f"{self} {sizes} {dtype}"

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self.plain}
        if self.has_kernels(x):
            found["triton"] = lambda x, _: self.by_kernels(x)
        return found

    def has_kernels(self, x: torch.Tensor) -> bool:
        if not has_triton() or x.dtype not in TOLERANCE or x.numel() > MAX_OFFSET:
            return False
        from penstock.kernels import squeeze

        return bool(self.squeeze.out_features <= squeeze.MAX_HIDDEN)

    def plain(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Run torch's operators; an image without a batch has three dimensions."""
        mean = x.mean((-2, -1))
        hidden = self.inner(functional.linear(mean, self.squeeze.weight, self.squeeze.bias))
        factors = functional.linear(hidden, self.excite.weight, self.excite.bias)
        return x * self.outer(factors)[..., None, None]

    def factors(self, x: torch.Tensor) -> torch.Tensor:
        """Return the factor of each image and channel, by our kernels."""
        from penstock.kernels import squeeze

        gate = squeeze.GateWeights(
            *(self.squeeze.weight, self.squeeze.bias, self.excite.weight, self.excite.bias),
            *(self.inner, self.outer),
        )
        return squeeze.factors_of(last(x), gate)

    def by_kernels(self, x: torch.Tensor) -> torch.Tensor:
        from penstock.kernels import squeeze

        return squeeze.multiply(last(x), self.factors(x))


class GatedConvolution(Convolution):
    """A 1x1 convolution of images that squeeze-and-excitation multiplies first."""

    def __init__(self, conv: Convolution, gate: SqueezeExcite, tuner: Tuner | None) -> None:
        super().__init__(
            *(conv.weight, conv.bias, conv.geometry, conv.activation, tuner), conv.adds_last
        )
        self.gate = gate

    @property
    def default(self) -> str:
        return REFERENCE

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        return f"{self.gate} {super().key(x, residual)}"

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        if not self.gate.has_kernels(x) or not self._is_addressable(x):
            return {REFERENCE: self._plain}
        found: dict[str, Run] = {REFERENCE: self._plain}
        for name, run in (("cublas", self._cublas), ("epilogue", self._by_epilogue)):
            found[name] = partial(self._after_gate, run)
        return found | self._own(x, self.gate.factors)

    def _after_gate(self, run: Run, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return run(self.gate.by_kernels(x), residual)

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return super()._plain(self.gate.plain(x), residual)
