"""A model with a kernel of its own: a residual is added and normalised in one pass over memory.

torch takes several kernels for it and writes what is in between. The layer runs the kernel on a
GPU, and on a CPU where Triton interprets it (TRITON_INTERPRET=1, for tests); elsewhere it is
torch's operators, which also say what the kernel has to give.
"""

from __future__ import annotations

import os

import torch
from torch import nn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

WIDTH = 256
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if triton is not None:

    @triton.jit
    def add_and_normalise(x, residual, weight, y, width, epsilon, BLOCK: tl.constexpr):  # noqa: PLR0913
        """One row by each program. Sums are in FP32, whatever the rows are."""
        row = tl.program_id(0)
        at = tl.arange(0, BLOCK)
        is_inside = at < width
        value = tl.load(x + row * width + at, mask=is_inside, other=0.0).to(tl.float32)
        value += tl.load(residual + row * width + at, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + epsilon)
        weights = tl.load(weight + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(y + row * width + at, (value * scale * weights).to(y.dtype.element_ty), is_inside)


def by_torch(x, residual, weight, epsilon):
    value = x.float() + residual.float()
    scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)
    return (value * scale * weight.float()).to(x.dtype)


def by_kernel(x, residual, weight, epsilon):
    """Nothing here waits for the GPU or copies from it, so a CUDA graph may hold it."""
    x, residual = x.contiguous(), residual.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    add_and_normalise[(x.numel() // width,)](x, residual, weight, y, width, epsilon, BLOCK=block)
    return y


class AddNorm(nn.Module):
    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x, residual):
        has_kernel = triton is not None and (x.is_cuda or IS_INTERPRETED)
        run = by_kernel if has_kernel else by_torch
        return run(x, residual, self.weight, self.epsilon)


class Network(nn.Module):
    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(AddNorm(width) for _ in range(depth))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(nn.functional.gelu(layer(x)), x)
        return {"y": x}


def factory():
    return Network()
