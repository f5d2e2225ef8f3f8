"""What follows a product, in one pass over memory: bias, addition of a tensor and activation.

Kernels that compute the product themselves call `finished` before they write; `finish` is the pass
over the result of a library. `multiply_halves` is that of gated linear units.

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.activation import Activation

# Elements per program: 8 per thread, one load of 16 bytes in FP16.
ELEMENTS, NUM_WARPS = 2048, 8
_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operations on sums before they are written; `adds_last`: the residual is added after the
    activation, not before."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: Activation | None = None
    adds_last: bool = False

    @property
    def constants(self) -> tuple[object, ...]:
        """Return the constants that kernels take for it."""
        kind, a, b = self.activation or ("", 0.0, 0.0)
        has_residual = self.residual is not None
        return self.bias is not None, has_residual, kind, a, b, self.adds_last


@triton.jit
def activate(value, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Return the activation of values in FP32; that of an empty kind is the value."""
    if KIND == "relu":
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "clamp":
        value = tl.maximum(value, A, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, B, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "leaky_relu":
        value = tl.where(value > 0, value, value * A)
    elif KIND == "sigmoid":
        value = 1.0 / (1.0 + tl.exp(-value))
    elif KIND == "silu":
        value = value / (1.0 + tl.exp(-value))
    elif KIND == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = value * (1.5957691216057308 + 0.07135481627260025 * value * value)
        value = value / (1.0 + tl.exp(-inner))
    elif KIND == "hard_sigmoid" or KIND == "hard_swish":
        gate = value * 0.16666666666666666 + 0.5
        if KIND == "hard_sigmoid":
            gate = value * A + B
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        gate = tl.minimum(gate, 1.0, propagate_nan=tl.PropagateNan.ALL)
        value = value * gate if KIND == "hard_swish" else gate
    else:
        tl.static_assert(KIND == "")
    return value


@triton.jit
def finished(
    total, added, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, ADDS_LAST: tl.constexpr,
):  # fmt: skip
    """Return sums in FP32 with a residual and an activation applied, in this order or the other."""
    if HAS_RESIDUAL and not ADDS_LAST:
        total += added.to(tl.float32)
    total = activate(total, KIND, A, B)
    if HAS_RESIDUAL and ADDS_LAST:
        total += added.to(tl.float32)
    return total


@triton.jit
def _finish(
    x, bias, residual, y, num_elements, CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, ADDS_LAST: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = at < num_elements
    total = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at % CHANNELS).to(tl.float32)
    added = total
    if HAS_RESIDUAL:
        added = tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
    total = finished(total, added, HAS_RESIDUAL, KIND, A, B, ADDS_LAST)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=is_inside)


@triton.jit
def _multiply_halves(
    x, y, num_elements, WIDTH: tl.constexpr, IS_FIRST: tl.constexpr, KIND: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = at < num_elements
    first = x + at + at // WIDTH * WIDTH
    one = tl.load(first, mask=is_inside, other=0.0).to(tl.float32)
    other = tl.load(first + WIDTH, mask=is_inside, other=0.0).to(tl.float32)
    if IS_FIRST:
        one = activate(one, KIND, A, B)
    else:
        other = activate(other, KIND, A, B)
    value = one * other
    tl.store(y + at, value.to(y.dtype.element_ty), mask=is_inside)


FUNCTIONS = (_finish, _multiply_halves)


def finish(x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """Apply the epilogue to sums, in place. Channels are the last dimension in memory: images are
    channels-last, and so is the residual."""
    channels = x.shape[1] if x.ndim == 4 else x.shape[-1]
    bias, residual = epilogue.bias, epilogue.residual
    launch(
        _finish, (triton.cdiv(x.numel(), ELEMENTS),),
        x, x if bias is None else bias, x if residual is None else residual, x, x.numel(),
        channels, *epilogue.constants, ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return x


def multiply_halves(x: torch.Tensor, activation: Activation, is_first: bool) -> torch.Tensor:
    """Split the last dimension in two, apply the activation to the first half or to the second, and
    multiply both."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    launch(
        _multiply_halves, (triton.cdiv(y.numel(), ELEMENTS),),
        x, y, y.numel(), width, is_first, *activation, ELEMENTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


@contextlib.contextmanager
def compiling(num_threads: int) -> Iterator[None]:
    """Compile the kernels called inside in `num_threads` threads, without running them: results are
    garbage. Compile errors are raised when a kernel is run."""
    with ThreadPoolExecutor(num_threads) as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        token = _is_ahead.set(True)
        try:
            with mode:
                yield
        finally:
            _is_ahead.reset(token)


def launch(
    kernel: triton.JITFunction, grid: tuple[int, ...], *args: object, **options: int
) -> None:
    """Run a kernel, or only compile it inside `compiling`."""
    if _is_ahead.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)
