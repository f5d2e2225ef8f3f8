"""Operations between the linear layers of a transformer encoder, each in one pass over memory:
residual with LayerNorm, and GELU; both also in e4m3 as input of an FP8 GEMM, by a given factor or
with a scale per row. `packed_encoder` calls them and has the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
# From this many rows on, a program takes several.
MANY_ROWS, ROWS_TOGETHER = 4096, 4
# Elements per program of GELU: 16 per thread.
ELEMENTS, NUM_WARPS = 4096, 8
# Lower bound of a row's range, for rows that are all zero.
SMALLEST = tl.constexpr(1e-6)


@triton.jit
def _to_e4m3(values, inverse):
    scaled = values * tl.load(inverse)
    return tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)


@triton.jit
def _rows_to_e4m3(values, scales, inverse, rows, num_rows, HAS_FACTOR: tl.constexpr):
    """Scale each row to e4m3 by its largest value, or by a factor, and store its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 1), SMALLEST) / E4M3_MAX
    if HAS_FACTOR:
        scale = scale * 0.0 + 1.0 / tl.load(inverse)
    tl.store(scales + rows, scale, mask=rows < num_rows)
    scaled = values * (1.0 / scale)[:, None]
    return tl.minimum(tl.maximum(scaled, -E4M3_MAX), E4M3_MAX)


@triton.jit
def _activate(value, IS_FAST: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Return GELU of the value."""
    if IS_FAST:
        inner = value * (0.7978845608028654 + 0.035677408136300125 * value * value)
        half = 0.5 * value
        if IS_INTERPRETED:
            tanh = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        else:
            tanh = tl.inline_asm_elementwise(
                "tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1
            )
        value = half * tanh + half
    else:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    return value


@triton.jit
def _add_norm(
    added, residual, weight, bias, out, small, inverse, scales, num_rows, epsilon,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TO_FP8: tl.constexpr,
    BY_ROW: tl.constexpr,
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
        if BY_ROW:
            x = tl.where(is_column[None, :], x, 0.0)
            x = _rows_to_e4m3(x, scales, inverse, rows, num_rows, False)
        else:
            x = _to_e4m3(x, inverse)
        tl.store(small + at, x.to(small.dtype.element_ty), mask=is_inside)


@triton.jit
def _gelu(
    x, out, inverse, num_elements,
    ELEMENTS: tl.constexpr, TO_FP8: tl.constexpr, IS_FAST: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = at < num_elements
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    value = _activate(value, IS_FAST, IS_INTERPRETED)
    if TO_FP8:
        value = _to_e4m3(value, inverse)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _norm_rows(
    x, residual, weight, bias, total, out, scales, inverse, num_rows, epsilon,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
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
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + epsilon)
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    value = value * scale[:, None] * factor[None, :]
    if HAS_BIAS:
        value += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    value = _rows_to_e4m3(value, scales, inverse, rows, num_rows, HAS_FACTOR)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _quantise_rows(
    x, out, scales, inverse, num_rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_GELU: tl.constexpr, IS_FAST: tl.constexpr, IS_INTERPRETED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    at = rows[:, None] * WIDTH + columns[None, :]
    is_inside = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    value = tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_GELU:
        value = _activate(value, IS_FAST, IS_INTERPRETED)
    value = _rows_to_e4m3(value, scales, inverse, rows, num_rows, HAS_FACTOR)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside)


def add_norm(
    added: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.nn.LayerNorm,
    inverse: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the LayerNorm (of the module `norm`) of the sum, and the same in e4m3: multiplied by
    `inverse`, or with a scale per row, which is stored in `scales`; None without either."""
    num_rows, width = added.shape
    assert added.is_contiguous() and residual.is_contiguous()
    out = torch.empty_like(added)
    is_small = inverse is not None or scales is not None
    small = torch.empty_like(added, dtype=torch.float8_e4m3fn) if is_small else None
    together = ROWS_TOGETHER if num_rows >= MANY_ROWS else 1
    _add_norm[(triton.cdiv(num_rows, together),)](
        added, residual, norm.weight, norm.bias, out, small if is_small else out,
        out if inverse is None else inverse, out if scales is None else scales, num_rows, norm.eps,
        width, triton.next_power_of_2(width), together, is_small, scales is not None, num_warps=4,
    )  # fmt: skip
    return out, small


def gelu(
    x: torch.Tensor, inverse: torch.Tensor | None = None, *, is_fast: bool = False
) -> torch.Tensor:
    """Return GELU of each element; with `inverse`, multiplied by it and in e4m3. `is_fast` is the
    tanh form, for which the device has an instruction: up to 5e-4 away from the exact one, less
    than the rounding to e4m3 around 0.01 and above."""
    assert x.is_contiguous()
    out = torch.empty_like(x, dtype=x.dtype if inverse is None else torch.float8_e4m3fn)
    _gelu[(triton.cdiv(x.numel(), ELEMENTS),)](
        x, out, x if inverse is None else inverse, x.numel(), ELEMENTS, inverse is not None,
        is_fast, not x.is_cuda, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def quantise_rows(
    x: torch.Tensor,
    scales: torch.Tensor,
    *,
    inverse: torch.Tensor | None = None,
    has_gelu: bool = False,
    is_fast: bool = False,
) -> torch.Tensor:
    """Quantise rows, or their GELU, to e4m3: by their largest values, or multiplied by `inverse`.
    Their scales are stored in `scales`."""
    assert x.is_contiguous()
    num_rows, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    columns, together = _tile(num_rows, width)
    _quantise_rows[(triton.cdiv(num_rows, together),)](
        x, out, scales, scales if inverse is None else inverse, num_rows, width, columns, together,
        inverse is not None, has_gelu, is_fast, not x.is_cuda, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def norm_rows(
    x: torch.Tensor,
    norm: torch.nn.LayerNorm,
    scales: torch.Tensor,
    inverse: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows plus the residual, and the LayerNorm of that in e4m3 only, scaled as by
    `quantise_rows`; without a residual the first is x."""
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    num_rows, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    total = x if residual is None else torch.empty_like(x)
    columns, together = _tile(num_rows, width)
    has_bias = norm.bias is not None
    _norm_rows[(triton.cdiv(num_rows, together),)](
        x, x if residual is None else residual, norm.weight,
        norm.bias if has_bias else norm.weight, total, out, scales,
        scales if inverse is None else inverse, num_rows, norm.eps, width, columns, together,
        inverse is not None, has_bias, residual is not None, num_warps=4,
    )  # fmt: skip
    return total, out


def _tile(num_rows: int, width: int) -> tuple[int, int]:
    """Return the columns and rows of a program."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, ELEMENTS // columns) if num_rows >= MANY_ROWS else 1
