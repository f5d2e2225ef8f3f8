"""Layer norm, and the addition before it, in one pass over memory, in Triton. Pre-norm transformers
need both the sum and its norm.

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.pointwise import launch

# Widest row: a program holds it.
MAX_WIDTH = 8192
# Elements of a program with many rows to do.
MANY_ROWS, ELEMENTS = 4096, 4096


@triton.jit(do_not_specialize=["num_rows", "epsilon"])
def _norm(
    x, residual, weight, bias, total, normed, num_rows, epsilon, WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    at = rows[:, None] * WIDTH + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & is_column[None, :]
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=is_inside)
    value = value - (tl.sum(value, 1) / WIDTH)[:, None]
    value = tl.where(is_column[None, :], value, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + epsilon)[:, None]
    if HAS_WEIGHT:
        value *= tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=is_inside)


FUNCTIONS = (_norm,)


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum, and its norm over the last dimension; without a residual the sum is x."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    width = x.shape[-1]
    num_rows, columns = x.numel() // width, triton.next_power_of_2(width)
    together = max(1, ELEMENTS // columns) if num_rows >= MANY_ROWS else 1
    launch(
        _norm, (triton.cdiv(num_rows, together),),
        x, x if residual is None else residual, x if weight is None else weight,
        x if bias is None else bias, total, normed, num_rows, epsilon, width,
        residual is not None, weight is not None, bias is not None, columns, together, num_warps=4,
    )  # fmt: skip
    return total, normed
