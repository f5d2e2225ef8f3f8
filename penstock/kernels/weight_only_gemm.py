"""Matrix products with integer weights, for a few rows: weights are read once, as they lie, and
become floats in registers. The depth is split among programs where there are few of them; their
sums are added in a fixed order, so a row's result does not depend on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from penstock.kernels.integer_weights import IntegerWeight

# Columns and depth of a tile.
COLUMNS, DEPTH = 32, 128
# Programs to start, where the depth can be split; least steps of each, and most parts.
NUM_PROGRAMS, MIN_STEPS, MAX_PARTS = 512, 4, 16
# Rows that tensor cores multiply at a time.
LEAST_ROWS = 16
# Elements per program that adds parts.
ELEMENTS = 1024


@triton.jit
def _multiply(
    x, packed, scales, zeros, bias, out, num_rows, depth, width, num_bytes, num_groups, group,
    num_steps, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < width
    first = tl.program_id(1) * num_steps
    line = packed + columns.to(tl.int64) * num_bytes
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(num_steps):
        start = (first + step) * DEPTH
        which = tl.minimum(start // group, num_groups - 1)
        zero = 1 << (BITS - 1)
        if HAS_ZEROS:
            zero = tl.load(zeros + columns * num_groups + which, mask=is_column, other=0.0)
            zero = zero.to(tl.float32)[None, :]
        if BITS == 4:
            pairs = tl.arange(0, DEPTH // 2)
            at = start + 2 * pairs
            place = start // 2 + pairs
            is_inside = at < depth
            mask = is_inside[:, None] & is_column[None, :]
            both = tl.load(line[None, :] + place[:, None], mask=mask, other=0)
            given = x + rows[:, None] * depth + at[None, :]
            is_given = is_row[:, None] & is_inside[None, :]
            even = tl.load(given, mask=is_given, other=0.0)
            odd = tl.load(given + 1, mask=is_given & (at + 1 < depth)[None, :], other=0.0)
            # Exact in FP32, and then in 16 bits too.
            low = (both & 15).to(tl.float32) - zero
            high = (both >> 4).to(tl.float32) - zero
            found = tl.dot(even, low.to(x.dtype.element_ty))
            found += tl.dot(odd, high.to(x.dtype.element_ty))
        else:
            at = start + tl.arange(0, DEPTH)
            is_inside = at < depth
            mask = is_inside[:, None] & is_column[None, :]
            values = tl.load(line[None, :] + at[:, None], mask=mask, other=0)
            given = x + rows[:, None] * depth + at[None, :]
            even = tl.load(given, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            found = tl.dot(even, (values.to(tl.float32) - zero).to(x.dtype.element_ty))
        scale = tl.load(scales + columns * num_groups + which, mask=is_column, other=0.0)
        total += found * scale.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    part = out + tl.program_id(1).to(tl.int64) * num_rows * width
    at = part + rows[:, None] * width + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_parts(
    parts, bias, out, num_elements, width, num_parts, HAS_BIAS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_inside = at < num_elements
    total = tl.zeros((ELEMENTS,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + part * num_elements + at, mask=is_inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % width, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_inside)


def multiply(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b for contiguous rows."""
    assert x.is_contiguous() and weight.packed.is_contiguous()
    num_rows, depth = x.shape
    width, num_groups = weight.scales.shape
    rows = max(LEAST_ROWS, triton.next_power_of_2(num_rows))
    step = DEPTH if num_groups == 1 else min(DEPTH, weight.group)
    num_steps = triton.cdiv(depth, step)
    num_columns = triton.cdiv(width, COLUMNS)
    num_parts = max(1, min(NUM_PROGRAMS // num_columns, num_steps // MIN_STEPS, MAX_PARTS))
    steps_each = triton.cdiv(num_steps, num_parts)
    num_parts = triton.cdiv(num_steps, steps_each)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    sums = out if num_parts == 1 else out.new_empty(num_parts, num_rows, width, dtype=torch.float32)
    is_whole = num_parts == 1 and bias is not None
    zeros = weight.scales if weight.zeros is None else weight.zeros
    _multiply[(num_columns, num_parts, 1)](
        x, weight.packed, weight.scales.contiguous(), zeros.contiguous(),
        bias if is_whole else x, sums, num_rows, depth, width, weight.packed.shape[1], num_groups,
        weight.group, steps_each, weight.bits, weight.zeros is not None, is_whole, rows, COLUMNS,
        step, num_warps=4, num_stages=4,
    )  # fmt: skip
    if num_parts > 1:
        count = num_rows * width
        _add_parts[(triton.cdiv(count, ELEMENTS),)](
            sums, x if bias is None else bias, out, count, width, num_parts, bias is not None,
            ELEMENTS, num_warps=4,
        )  # fmt: skip
    return out
