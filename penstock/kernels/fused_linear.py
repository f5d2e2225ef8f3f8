"""Layers of transformers, each run by the fastest implementation for its sizes: linear layers with
what follows them, layer norm with the addition before it, gated linear units, and attention.

A linear layer is a convolution with a window of one pixel, so it has the same kernels: a GEMM of
cuBLAS with a pass for what it cannot do itself (the exact GELU), or our own kernel with everything
in its epilogue. For few rows the algorithms that cuBLASLt proposes are timed too (`gemm`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.kernels import cublaslt, has_triton
from penstock.kernels.activation import GELU_TANH, Activation
from penstock.kernels.convolution import (
    MAX_OFFSET,
    REFERENCE,
    TOLERANCE,
    ConvGeometry,
    Convolution,
    Run,
    TunedLayer,
    Tuner,
)
from penstock.kernels.gemm import MANY_ROWS

# torch's implementations of attention; the first that fits is not the fastest.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def as_window(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight of a linear layer as that of a convolution."""
    return weight[:, :, None, None]


class FusedLinear(Convolution):
    """A linear layer of tensors [..., in], optionally with a tensor added and an activation; its
    weight is that of a convolution (`as_window`)."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        activation: Activation | None,
        tuner: Tuner | None,
        adds_last: bool = False,
    ) -> None:
        super().__init__(weight, bias, ConvGeometry(), activation, tuner, adds_last)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        is_spread = residual is not None and residual.shape != (*x.shape[:-1], len(self.weight))
        if is_spread or torch.compiler.is_compiling():
            return self._plain(x, residual)
        return self.chosen.run(x, residual, self._plain)

    @property
    def default(self) -> str:
        return REFERENCE

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight.flatten(1)

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        sizes, dtype = "x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")
        steps = self._steps(residual)
        return " ".join((f"linear {sizes} {dtype} to {len(self.weight)}", *steps))

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if x.dtype not in TOLERANCE or not x.numel():
            return found
        found["cublas"] = partial(self._flat, self._by_torch)
        found |= self._by_cublaslt(x, residual)
        image = x.reshape(-1, x.shape[-1], 1, 1)
        if has_triton() and self._is_addressable(image):
            own = self._own(image)
            found |= {
                name: partial(self._flat, partial(self._image, run)) for name, run in own.items()
            }
        return found

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._rest(functional.linear(x, self.matrix, self.bias), residual)

    def _flat(self, run: Run, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Run on matrices."""
        rows = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        found = run(rows, added)
        assert isinstance(found, torch.Tensor)
        return found.view(*x.shape[:-1], len(self.weight))

    def _image(self, run: Run, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Run on images of one pixel."""
        added = None if residual is None else residual[:, :, None, None]
        return run(x[:, :, None, None], added)

    def _by_torch(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._product(x, self.matrix.t(), residual)

    def _by_cublaslt(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        """Return its algorithms. With many rows the device is limited by power, and torch's choice
        was as good (`gemm`)."""
        num_rows = x.numel() // x.shape[-1]
        products = self.chosen.products if x.is_cuda and num_rows < MANY_ROWS else None
        if products is None or self.bias is None or x.dtype not in cublaslt.TYPES:
            return {}
        has_gelu = self.activation == GELU_TANH and (residual is None or self.adds_last)
        width, depth = self.matrix.shape
        form = cublaslt.GemmForm(num_rows, depth, width, x.dtype, x.dtype, has_gelu)
        rest = self._without_activation if has_gelu else self._rest_in_place

        def run(number: int, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            operands = cublaslt.Operands(x.contiguous(), self.matrix, self.bias)
            if not operands.are_aligned:
                return self._by_torch(x, residual)
            return rest(products.multiply(form, operands, number), residual)

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        try:
            count = products.num_algorithms(form, cublaslt.Operands(rows, self.matrix, self.bias))
        except cublaslt.Unavailable:
            return {}
        return {f"cublaslt {n}": partial(self._flat, partial(run, n)) for n in range(count)}

    def _without_activation(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return y if residual is None else y.add_(residual)


class ResidualNorm(TunedLayer):
    """Layer norm over the last dimension. Of a sum, it returns the sum as well."""

    def __init__(self, norm: torch.nn.LayerNorm, tuner: Tuner | None) -> None:
        super().__init__(tuner)
        self.norm = norm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        is_spread = residual is not None and residual.shape != x.shape
        if is_spread or torch.compiler.is_compiling():
            return self._plain(x, residual)
        return self.chosen.run(x, residual, self._plain)

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        sizes, dtype = "x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")
        weights = [name for name in ("weight", "bias") if getattr(self.norm, name) is not None]
        added = ["residual"] * (residual is not None)
        return " ".join((f"norm {sizes} {dtype}", *weights, *added))

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if has_triton() and x.dtype in TOLERANCE and x.numel() <= MAX_OFFSET:
            from penstock.kernels import residual_norm

            if x.shape[-1] <= residual_norm.MAX_WIDTH:
                found["triton"] = self._by_kernel
        return found

    def _plain(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self.norm(x)
        total = x + residual
        return total, self.norm(total)

    def _by_kernel(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        from penstock.kernels import residual_norm

        norm = self.norm
        both = residual_norm.layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
        return both[1] if residual is None else both


class GatedProduct(TunedLayer):
    """What follows the product of a gated linear unit (GEGLU, SwiGLU): one half of it times an
    activation of the other. `is_first`: the activation is that of the first half."""

    def __init__(
        self, axis: int, activation: Activation, is_first: bool, tuner: Tuner | None
    ) -> None:
        super().__init__(tuner)
        self.axis, self.activation, self.is_first = axis, activation, is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_last = self.axis in (-1, x.ndim - 1) and x.shape[-1] % 2 == 0
        if not is_last or torch.compiler.is_compiling():
            return self._plain(x, None)
        return self.chosen.run(x, None, self._plain)

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        sizes, dtype = "x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")
        return f"halves {sizes} {dtype} {'first' if self.is_first else 'second'} {self.activation}"

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if has_triton() and x.dtype in TOLERANCE and 0 < x.numel() <= MAX_OFFSET:
            found["triton"] = self._by_kernel
        return found

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        one, other = x.chunk(2, self.axis)
        if self.is_first:
            return self.activation(one) * other
        return one * self.activation(other)

    def _by_kernel(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        from penstock.kernels import pointwise

        return pointwise.multiply_halves(x, self.activation, self.is_first)


class Attention(TunedLayer):
    """Attention of heads [batch, heads, length, size] without a mask, by one of torch's kernels."""

    def __init__(self, scale: float | None, is_causal: bool, tuner: Tuner | None) -> None:
        super().__init__(tuner)
        self.scale, self.is_causal = scale, is_causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._plain(query, key, value)
        return self.chosen.run(query, key, self._plain, value)

    def key(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
        shapes = " ".join("x".join(map(str, each.shape)) for each in (query, key, value))
        # Some layouts are copied first.
        steps = ",".join("x".join(map(str, each.stride())) for each in (query, key, value))
        dtype = str(query.dtype).removeprefix("torch.")
        return f"attention {shapes} {dtype} steps {steps}{' causal' * self.is_causal} {self.scale}"

    def implementations(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if query.is_cuda and query.ndim == 4:
            found |= {name: partial(self._by, each) for name, each in BACKENDS.items()}
        return found

    def _plain(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, scale=self.scale
        )

    def _by(
        self, backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        with sdpa_kernel(backend):
            return self._plain(query, key, value)


def split_heads(
    qkv: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View [batch, length, 3 * width] as queries, keys and values, [batch, heads, length, size]."""
    heads = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    return heads[0], heads[1], heads[2]


def merge_heads(heads: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, size] as [batch, length, width]: a view, if attention wrote its
    result in that order, as torch's kernels do."""
    return heads.transpose(1, 2).flatten(2)
