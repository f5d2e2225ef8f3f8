"""What lies between the products of a transformer's layer, each in one pass over memory: residual
with LayerNorm, and GELU; both also in e4m3 for a product that multiplies in FP8. `torch_packing`
calls them and has the same in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
# From so many rows on, several go to one program.
MANY_ROWS, ROWS_TOGETHER = 4096, 4
# Elements of one program of the GELU: 16 a thread.
ELEMENTS, NUM_WARPS = 4096, 8


@triton.jit
def _to_e4m3(values, inverse):
    scaled = values * tl.load(inverse)
    return tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)


@triton.jit
def _add_norm(
    added, residual, weight, bias, out, small, inverse, num_rows, epsilon,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TO_FP8: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    at = rows[:, None] * WIDTH + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & is_column[None, :]
    x = tl.load(added + at, mask=is_inside, other=0.0).to(tl.float32)
    x += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
    x = x - (tl.sum(x, 1) / WIDTH)[:, None]
    x = tl.where(is_column[None, :], x, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    x = x * scale[:, None] * factor[None, :] + shift[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=is_inside)
    if TO_FP8:
        tl.store(small + at, _to_e4m3(x, inverse).to(small.dtype.element_ty), mask=is_inside)


@triton.jit
def _gelu(
    x, out, inverse, num_elements,
    ELEMENTS: tl.constexpr, TO_FP8: tl.constexpr, IS_FAST: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = at < num_elements
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if IS_FAST:
        inner = value * (0.7978845608028654 + 0.035677408136300125 * value * value)
        half = 0.5 * value
        bent = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1
        )
        value = half * bent + half
    else:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    if TO_FP8:
        value = _to_e4m3(value, inverse)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)


def add_norm(added: Any, residual: Any, norm: Any, inverse: Any = None) -> tuple[Any, Any]:
    """LayerNorm (the module `norm`) of the sum; and the same, multiplied by `inverse`, in e4m3
    where that is given, else None."""
    num_rows, width = added.shape
    assert added.is_contiguous() and residual.is_contiguous()
    out = torch.empty_like(added)
    is_small = inverse is not None
    small = torch.empty_like(added, dtype=torch.float8_e4m3fn) if is_small else None
    together = ROWS_TOGETHER if num_rows >= MANY_ROWS else 1
    _add_norm[(triton.cdiv(num_rows, together),)](
        added, residual, norm.weight, norm.bias, out, small if is_small else out,
        inverse if is_small else out, num_rows, norm.eps, width, triton.next_power_of_2(width),
        together, is_small, num_warps=4,
    )  # fmt: skip
    return out, small


def gelu(x: Any, inverse: Any = None, *, is_fast: bool = False) -> Any:
    """Of each element; multiplied by `inverse` and in e4m3 where that is given. `is_fast` is the
    form with tanh, which the device has an instruction for: up to 5e-4 away from the exact one,
    less than the rounding to e4m3 around 0.01 and above."""
    assert x.is_contiguous()
    out = torch.empty_like(x, dtype=x.dtype if inverse is None else torch.float8_e4m3fn)
    _gelu[(triton.cdiv(x.numel(), ELEMENTS),)](
        x, out, x if inverse is None else inverse, x.numel(), ELEMENTS, inverse is not None,
        is_fast, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
