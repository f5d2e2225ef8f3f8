"""INT8 layers of channels-last images and of matrices, in Triton: the sums of a GEMM are scaled,
added to a residual, activated or limited, and rounded before they are written, so tensors stay in
INT8 between layers.

Values are `round(real / scale) + zero`, from -128 to 127. The epilogue works in units of the
output, up to an activation in those of reals. Sums that fit 22 bits are read as floats without a
conversion: they start at the bits of 1.5 * 2^23, which then is part of the offset. The same number
rounds the result.

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.activation import Activation
from penstock.kernels.conv import NUM_PROGRAMS, PIXEL, ConvWindow, Tile, Workspace, shared_sum
from penstock.kernels.pointwise import activate, launch

# 1.5 * 2^23 and its bits: floats from there on count in steps of one.
SHIFT, SHIFT_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
SHIFT_VALUE = 12582912.0
# Sums below this are read as floats; the largest magnitude of an input.
MAX_SHORT_SUM, MAX_INPUT = 2**22, 128
# Rows of a stem's window, at least, so that a dot product has 32 values; blocks of a program that
# packs an image.
MIN_STEM_ROWS, PACK_BLOCKS = 4, 256
# Shared memory of one program on sm_90.
MAX_SHARED_BYTES = 232448
# With a filling other than 0, the left matrix passes through registers. Triton 3.6 then gave wrong
# sums with three stages (24 to 40 channels, 3x3, with a residual).
MAX_FILLED_STAGES = 2
# Ends of rows that a tile of a stem counts.
MAX_WRAPS = 4
POOL_PIXELS = 32
# Two of the smallest 16-bit integers; the upper bytes of two.
SMALLEST_PAIR, UPPER_BYTES = tl.constexpr(-0x7FFF8000), tl.constexpr(-0x00FF0100)
BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Int8Epilogue:
    """What happens to sums before they are written, in units of the output: times `scale`, plus
    `offset` (both FP32, by channel), plus the residual times a factor, limited. With an activation
    all but the limits are in units of reals, and its result is divided by `unit`, plus `zero`.
    `adds_last`: the residual is added to that, in units of the output."""

    scale: torch.Tensor
    offset: torch.Tensor
    lowest: float
    highest: float
    # INT8, or a float type for which nothing is rounded.
    out: torch.dtype = torch.int8
    residual: torch.Tensor | None = None
    residual_factor: float = 1.0
    activation: Activation | None = None
    unit: float = 1.0
    zero: float = 0.0
    adds_last: bool = False
    # Whether all sums are below MAX_SHORT_SUM. Floats do not need it.
    is_short: bool = False

    @classmethod
    def of(
        cls,
        scale: torch.Tensor,
        offset: torch.Tensor,
        lowest: float,
        highest: float,
        **options: Any,
    ) -> Int8Epilogue:
        """Return the epilogue for a scale and an offset in FP64, by channel."""
        plain = cls(scale, offset, lowest, highest, **options)
        if plain.is_unit_range:
            scale, offset = scale * plain.part, (offset - round(lowest)) * plain.part
        if plain.is_shifted:
            offset = offset - SHIFT_VALUE * scale
        return replace(plain, scale=scale.float(), offset=offset.float())

    @property
    def is_shifted(self) -> bool:
        return self.is_short and self.out == torch.int8

    @property
    def is_unit_range(self) -> bool:
        """Return whether kernels compute with limits of 0 and 1, which cost a GPU nothing."""
        return self.out == torch.int8 and self.activation is None

    @property
    def part(self) -> float:
        """Return one step of the output where the limits are 0 and 1."""
        # Rounding the limits first gives the same integers.
        return 1.0 / max(round(self.highest) - round(self.lowest), 1)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that kernels take for it."""
        factor, lowest, highest = self.residual_factor, self.lowest, self.highest
        if self.is_unit_range:
            factor, lowest = factor * self.part, float(round(lowest))
            highest = round(highest) - lowest
        return factor, lowest, highest, 1.0 / self.unit, self.zero

    @property
    def constants(self) -> tuple[object, ...]:
        """Return the constants that kernels take for it."""
        kind = self.residual is not None, self.is_shifted, self.out == torch.int8
        return *kind, *(self.activation or ("", 0.0, 0.0)), self.adds_last


@triton.jit
def _finish(
    total, scale, offset, residual, factor, lowest, highest, inverse, zero,
    HAS_RESIDUAL: tl.constexpr, IS_SHORT: tl.constexpr, IS_INT8: tl.constexpr,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ADDS_LAST: tl.constexpr,
):  # fmt: skip
    # If the sums are floats already, `offset` has the shift times the scale in it.
    v = total.to(tl.float32, bitcast=IS_SHORT) * scale + offset
    if HAS_RESIDUAL and not ADDS_LAST:
        v += residual.to(tl.float32) * factor
    if KIND != "":
        v = activate(v, KIND, A, B) * inverse + zero
    if HAS_RESIDUAL and ADDS_LAST:
        v += residual.to(tl.float32) * factor
    if IS_INT8 and KIND == "":
        # The limits are 0 and 1; `highest` is the number of steps between them.
        v = tl.minimum(tl.maximum(v, 0.0), 1.0) * highest + (SHIFT + lowest)
    else:
        v = tl.minimum(tl.maximum(v, lowest), highest)
        if IS_INT8:
            v += SHIFT
    if IS_INT8:
        v = v.to(tl.int32, bitcast=True).to(tl.int8)
    return v


@triton.jit
def _by_column(values, at_n):
    return tl.load(values + at_n)[None, :]


@triton.jit
def _first(ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_SHORT: tl.constexpr):
    return tl.full((ROWS, COLUMNS), SHIFT_BITS if IS_SHORT else 0, dtype=tl.int32)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x, weight, scale, offset, residual, y, num_rows, factor, lowest, highest, inverse,
    zero, OUT: tl.constexpr, DEPTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_SHORT: tl.constexpr, IS_INT8: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, ADDS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Rows times weights [OUT, DEPTH]. A program takes tile after tile, so that it reads the next
    while it writes the last."""
    WIDE: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    num_tiles = tl.cdiv(num_rows, ROWS) * WIDE
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=NUM_STAGES, flatten=True
    ):
        m = tile // WIDE * ROWS
        n = tile % WIDE * COLUMNS
        total = _first(ROWS, COLUMNS, IS_SHORT)
        for k in range(0, DEPTH, STEP):
            a = x.load([m, k])
            b = weight.load([n, k])
            total = tl.dot(a, b.T, total, out_dtype=tl.int32)
        added = 0
        if HAS_RESIDUAL:
            added = residual.load([m, n])
        at_n = n + tl.arange(0, COLUMNS)
        value = _finish(
            total, _by_column(scale, at_n), _by_column(offset, at_n), added,
            factor, lowest, highest, inverse, zero,
            HAS_RESIDUAL, IS_SHORT, IS_INT8, KIND, A, B, ADDS_LAST,
        )  # fmt: skip
        y.store([m, n], value.to(y.dtype))


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kept(
    x, weight, scale, offset, residual, y, num_rows, factor, lowest, highest, inverse,
    zero, OUT: tl.constexpr, DEPTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_SHORT: tl.constexpr, IS_INT8: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, ADDS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """As `_multiply`, for small depths: a program keeps its rows and takes all columns in turn."""
    m = tl.program_id(0) * ROWS
    a = x.load([m, 0])
    for n in tl.range(0, OUT, COLUMNS, num_stages=NUM_STAGES):
        b = weight.load([n, 0])
        added = 0
        if HAS_RESIDUAL:
            added = residual.load([m, n])
        total = tl.dot(a, b.T, _first(ROWS, COLUMNS, IS_SHORT), out_dtype=tl.int32)
        at_n = n + tl.arange(0, COLUMNS)
        value = _finish(
            total, _by_column(scale, at_n), _by_column(offset, at_n), added,
            factor, lowest, highest, inverse, zero,
            HAS_RESIDUAL, IS_SHORT, IS_INT8, KIND, A, B, ADDS_LAST,
        )  # fmt: skip
        y.store([m, n], value.to(y.dtype))


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_down(
    x, weight, scale, offset, residual, y, num_rows, factor, lowest, highest, inverse,
    zero, OUT: tl.constexpr, DEPTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_SHORT: tl.constexpr, IS_INT8: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, ADDS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """As `_multiply`, for small depths: a program keeps its weights and goes down the rows."""
    WIDE: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    n = tl.program_id(0) % WIDE * COLUMNS
    at_n = n + tl.arange(0, COLUMNS)
    s = _by_column(scale, at_n)
    c = _by_column(offset, at_n)
    b = weight.load([n, 0])
    for tile in tl.range(
        tl.program_id(0) // WIDE, tl.cdiv(num_rows, ROWS), tl.num_programs(0) // WIDE,
        num_stages=NUM_STAGES,
    ):  # fmt: skip
        m = tile * ROWS
        added = 0
        if HAS_RESIDUAL:
            added = residual.load([m, n])
        a = x.load([m, 0])
        total = tl.dot(a, b.T, _first(ROWS, COLUMNS, IS_SHORT), out_dtype=tl.int32)
        value = _finish(
            total, s, c, added, factor, lowest, highest, inverse, zero,
            HAS_RESIDUAL, IS_SHORT, IS_INT8, KIND, A, B, ADDS_LAST,
        )  # fmt: skip
        y.store([m, n], value.to(y.dtype))


@triton.jit(do_not_specialize=["num_rows", "split"])
def _convolve_int8(
    x, weight, scale, offset, residual, y, parts, arrived, num_rows, split,
    factor, lowest, highest, inverse, zero,
    OUT: tl.constexpr, IN: tl.constexpr, SIZE_H: tl.constexpr, SIZE_W: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_SHORT: tl.constexpr, IS_INT8: tl.constexpr,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ADDS_LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_SPLIT: tl.constexpr,
    FILLING: tl.constexpr,
):  # fmt: skip
    """A convolution as one GEMM whose left matrix is gathered tap by tap. `weight` is [OUT, SIZE_H,
    SIZE_W, IN]; FILLING is the value around the image, which is prefetched only if it is 0."""
    tile = tl.program_id(0)
    WIDE: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    at_m = tile // WIDE * ROWS + tl.arange(0, ROWS)
    at_n = tile % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    at_k = tl.arange(0, DEPTH)
    is_row = at_m < num_rows
    # Rows past the end read the first row, and are not written.
    row = tl.where(is_row, at_m, 0)
    pixel = row % (OUT_H * OUT_W)
    top = pixel // OUT_W * STRIDE_H - PAD_H
    left = pixel % OUT_W * STRIDE_W - PAD_W
    base = row // (OUT_H * OUT_W) * (HEIGHT * WIDTH * IN) + top * (WIDTH * IN) + left * IN
    PER_TAP: tl.constexpr = (IN + DEPTH - 1) // DEPTH
    IS_EVEN: tl.constexpr = IN % DEPTH == 0 and OUT % COLUMNS == 0
    NUM_STEPS: tl.constexpr = SIZE_H * SIZE_W * PER_TAP
    weights = weight + at_n[None, :] * (SIZE_H * SIZE_W * IN) + at_k[:, None]
    begin = 0
    end = NUM_STEPS
    if IS_SPLIT:
        share = tl.cdiv(NUM_STEPS, split)
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, NUM_STEPS)
    total = _first(ROWS, COLUMNS, IS_SHORT and not IS_SPLIT)
    for step in range(begin, end):
        tap = step // PER_TAP
        tap_h = tap // SIZE_W
        tap_w = tap % SIZE_W
        first = step % PER_TAP * DEPTH
        start = base + tap_h * (WIDTH * IN) + tap_w * IN + first
        is_high = (top + tap_h >= 0) & (top + tap_h < HEIGHT)
        is_inside = is_high & (left + tap_w >= 0) & (left + tap_w < WIDTH)
        if IS_EVEN:
            b = tl.load(weights + (tap * IN + first))
            if PAD_H > 0 or PAD_W > 0:
                a = tl.load(x + (start[:, None] + at_k[None, :]), mask=is_inside[:, None], other=0)
            else:
                a = tl.load(x + (start[:, None] + at_k[None, :]))
        else:
            is_channel = first + at_k < IN
            is_weight = is_channel[:, None] & (at_n < OUT)[None, :]
            b = tl.load(weights + (tap * IN + first), mask=is_weight, other=0)
            is_value = is_inside[:, None] & is_channel[None, :]
            a = tl.load(x + (start[:, None] + at_k[None, :]), mask=is_value, other=0)
        if FILLING != 0:
            # The weights of channels past the last are zero.
            a = tl.where(is_inside[:, None], a, FILLING).to(tl.int8)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    is_last = True
    if IS_SPLIT:
        total, is_last = shared_sum(total, parts, arrived, split, ROWS, COLUMNS)
        if IS_SHORT:
            total += SHIFT_BITS
    if is_last:
        at = at_m[:, None] * OUT + at_n[None, :]
        is_written = is_row[:, None] & (at_n < OUT)[None, :]
        added = 0
        if HAS_RESIDUAL:
            added = tl.load(residual + at, mask=is_written, other=0)
        value = _finish(
            total, _by_column(scale, at_n), _by_column(offset, at_n), added,
            factor, lowest, highest, inverse, zero,
            HAS_RESIDUAL, IS_SHORT, IS_INT8, KIND, A, B, ADDS_LAST,
        )  # fmt: skip
        tl.store(y + at, value.to(y.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=["num_rows"])
def _stem(
    x, weight, rest, scale, offset, y, num_rows, factor, lowest, highest, inverse, zero,
    OUT: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    STEP_N: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    TAP_BYTES: tl.constexpr, DEPTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_SHORT: tl.constexpr, IS_INT8: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr,
    B: tl.constexpr, ADDS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PIXELS: tl.constexpr, NUM_WRAPS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A convolution of a packed image: a row of the window is TAP_BYTES contiguous bytes. A program
    keeps its weights and takes tile after tile. With two PIXELS, a row of the tile is a pair of
    neighbours, which share most of their windows; `rest` are the weights of the block that only the
    second has."""
    WIDE: tl.constexpr = (PIXELS * OUT + COLUMNS - 1) // COLUMNS
    ROW: tl.constexpr = OUT_W // PIXELS
    at_n = tl.program_id(0) % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    at_k = tl.arange(0, DEPTH)
    tap = at_k // TAP_BYTES * STEP_H + at_k % TAP_BYTES
    is_column = at_n < PIXELS * OUT
    b = tl.load(weight + at_n[None, :] * DEPTH + at_k[:, None], mask=is_column[None, :], other=0)
    if PIXELS == 2:
        REST: tl.constexpr = DEPTH // TAP_BYTES * STEP_W
        at_r = tl.arange(0, REST)
        tap_r = at_r // STEP_W * STEP_H + TAP_BYTES + at_r % STEP_W
        b_r = tl.load(rest + at_n[None, :] * REST + at_r[:, None])
    s = _by_column(scale, at_n % OUT)
    c = _by_column(offset, at_n % OUT)
    for tile in tl.range(
        tl.program_id(0) // WIDE, tl.cdiv(num_rows, ROWS), tl.num_programs(0) // WIDE,
        num_stages=NUM_STAGES,
    ):  # fmt: skip
        at_m = tile * ROWS + tl.arange(0, ROWS)
        is_row = at_m < num_rows
        if NUM_WRAPS > 0:
            # Count on from the tile's first pixel instead of dividing for each.
            first = tile * ROWS % (OUT_H * ROW)
            column = first % ROW + tl.arange(0, ROWS)
            row = first // ROW + tl.zeros((ROWS,), dtype=tl.int32)
            for _ in tl.static_range(NUM_WRAPS):
                row = tl.where(column >= ROW, row + 1, row)
                column = tl.where(column >= ROW, column - ROW, column)
            base = tile * ROWS // (OUT_H * ROW) * STEP_N + row * STEP_H + column * (PIXELS * STEP_W)
            base = tl.where(row >= OUT_H, base + (STEP_N - OUT_H * STEP_H), base)
            base = tl.where(is_row, base, 0)
        else:
            known = tl.where(is_row, at_m, 0)
            pixel = known % (OUT_H * ROW)
            base = known // (OUT_H * ROW) * STEP_N
            base += pixel // ROW * STEP_H + pixel % ROW * (PIXELS * STEP_W)
        a = tl.load(x + (base[:, None] + tap[None, :]))
        total = tl.dot(a, b, _first(ROWS, COLUMNS, IS_SHORT), out_dtype=tl.int32)
        if PIXELS == 2:
            a_r = tl.load(x + (base[:, None] + tap_r[None, :]))
            total = tl.dot(a_r, b_r, total, out_dtype=tl.int32)
        value = _finish(
            total, s, c, 0, factor, lowest, highest, inverse, zero,
            HAS_RESIDUAL, IS_SHORT, IS_INT8, KIND, A, B, ADDS_LAST,
        )  # fmt: skip
        at = at_m[:, None] * (PIXELS * OUT) + at_n[None, :]
        tl.store(y + at, value.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _rounded(value, inverse, zero):
    value = tl.minimum(tl.maximum(value.to(tl.float32) * inverse + zero, -128.0), 127.0)
    return (value + SHIFT).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit(do_not_specialize=["num_blocks", "step_n", "step_c", "step_h", "step_w"])
def _pack_int8(
    x, y, num_blocks, step_n, step_c, step_h, step_w, inverse, zero, CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BLOCKS_H: tl.constexpr, BLOCKS_W: tl.constexpr,
    ABOVE: tl.constexpr, BEFORE: tl.constexpr, SIDE: tl.constexpr, WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantise and pad an image of few channels, and write it in blocks of SIDE x SIDE pixels of
    WIDE channels."""
    at_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at_e = tl.arange(0, SIDE * SIDE * WIDE)
    channel = at_e % WIDE
    row = at_b[:, None] % (BLOCKS_H * BLOCKS_W) // BLOCKS_W * SIDE + at_e // (SIDE * WIDE) - ABOVE
    column = at_b[:, None] % BLOCKS_W * SIDE + at_e // WIDE % SIDE - BEFORE
    is_inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    is_block = at_b < num_blocks
    start = at_b[:, None] // (BLOCKS_H * BLOCKS_W) * step_n + row * step_h + column * step_w
    mask = is_inside & is_block[:, None] & (channel < CHANNELS)[None, :]
    value = tl.load(x + start + channel[None, :] * step_c, mask=mask, other=0.0)
    written = y + at_b[:, None] * (SIDE * SIDE * WIDE) + at_e[None, :]
    tl.store(written, _rounded(value, inverse, zero), mask=is_block[:, None])


@triton.jit
def _quantize(x, y, size, inverse, zero, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < size, other=0.0)
    tl.store(y + at, _rounded(value, inverse, zero), mask=at < size)


@triton.jit
def _dequantize(x, y, size, scale, zero, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    value = (tl.load(x + at, mask=at < size, other=0).to(tl.float32) - zero) * scale
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < size)


@triton.jit
def _add(a, b, y, size, factor_a, factor_b, offset, lowest, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = tl.load(a + at, mask=at < size, other=0).to(tl.float32) * factor_a + offset
    v += tl.load(b + at, mask=at < size, other=0).to(tl.float32) * factor_b
    tl.store(y + at, _rounded(tl.maximum(v, lowest), 1.0, 0.0), mask=at < size)


@triton.jit
def _larger_pairs(a, b):
    """The larger ones of two 16-bit integers in each word."""
    return tl.inline_asm_elementwise(
        "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit(do_not_specialize=["num_pixels"])
def _pool_int8(
    x, y, num_pixels, CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, PIXELS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_WORDS: tl.constexpr,
):  # fmt: skip
    """With IS_WORDS, x and y are words of four channels. They are compared as 16-bit integers,
    whose upper bytes decide: once as they are, and once with the lower bytes moved up."""
    at_p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    at_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_pixel = at_p < num_pixels
    is_channel = at_c < CHANNELS
    image = at_p // (OUT_H * OUT_W)
    top = at_p % (OUT_H * OUT_W) // OUT_W * STRIDE_H - PAD_H
    left = at_p % OUT_W * STRIDE_W - PAD_W
    LEAST: tl.constexpr = SMALLEST_PAIR if IS_WORDS else -128
    best = tl.full((PIXELS, COLUMNS), LEAST, dtype=tl.int32)
    low = best
    for tap in tl.static_range(SIZE_H * SIZE_W):
        # Pixels outside are replaced by the nearest inside, which the window has as well.
        row = tl.minimum(tl.maximum(top + tap // SIZE_W, 0), HEIGHT - 1)
        column = tl.minimum(tl.maximum(left + tap % SIZE_W, 0), WIDTH - 1)
        start = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
        addresses = x + (start[:, None] + at_c[None, :])
        value = tl.load(addresses, mask=is_pixel[:, None] & is_channel[None, :], other=0)
        if IS_WORDS:
            best = _larger_pairs(best, value)
            low = _larger_pairs(low, value << 8)
        else:
            best = tl.maximum(best, value.to(tl.int32))
    if IS_WORDS:
        best = (best & UPPER_BYTES) | ((low >> 8) & ~UPPER_BYTES)
    written = y + (at_p[:, None] * CHANNELS + at_c[None, :])
    tl.store(written, best.to(y.dtype.element_ty), mask=is_pixel[:, None] & is_channel[None, :])


# All kernels of this file.
FUNCTIONS = (
    *(_multiply, _multiply_kept, _multiply_down, _convolve_int8, _stem, _pack_int8),
    *(_quantize, _dequantize, _pool_int8, _add),
)


def is_short(weight: torch.Tensor) -> bool:
    """Return whether all sums of INT8 weights [out, ...] are below MAX_SHORT_SUM, so that they are
    read as floats without a conversion. What that loses is far below one step of INT8."""
    largest = int(weight.int().abs().flatten(1).sum(1).max())
    return largest * MAX_INPUT < MAX_SHORT_SUM


def row_tiles(num_rows: int, depth: int, out: int, row_bytes: Iterable[int]) -> list[Tile]:
    """Return the tiles of `multiply` worth trying; `split` is the number of programs per processor,
    negative for programs that keep their weights, 0 for those that keep their rows. None if rows do
    not begin at multiples of 16 bytes: `row_bytes` are those of the result and of the residual."""
    if depth % 16 or any(size % 16 for size in row_bytes):
        return []
    step = next((size for size in (128, 64) if depth % size == 0), 128 if depth > 64 else 64)
    if num_rows < 64 * NUM_PROGRAMS // 2:
        return [Tile(64, columns, step, 4, 3, 2) for columns in (32, 64)]
    shapes = [(128, 128, 4, 2), (64, 128, 4, 2), (128, 64, 4, 2)]
    if out % 256 == 0:
        shapes += [(64, 256, 4, 2), (128, 256, 8, 1)]
    if out <= 64:
        shapes = [(128, 64, 4, 2), (256, 64, 8, 1), (128, 32, 4, 2)]
    found = [Tile(rows, columns, step, w, 3, per) for rows, columns, w, per in shapes]
    if depth in (32, 64, 128, 256) and out % 64 == 0 and out > 64:
        found.append(Tile(128, 64, depth, 4, 3, 0))
    if depth in (128, 256, 512) and out % 128 == 0:
        found += [Tile(64, 128, depth, 4, stages, -2) for stages in (3, 4) if stages * depth < 2048]
    return found


def multiply(
    x: torch.Tensor, weight: torch.Tensor, epilogue: Int8Epilogue, tile: Tile
) -> torch.Tensor:
    """Multiply rows [num_rows, depth] by weights [out, depth]."""
    num_rows, depth = x.shape
    out = weight.shape[0]
    y = torch.empty((num_rows, out), dtype=epilogue.out, device=x.device)
    residual = y if epilogue.residual is None else epilogue.residual
    describe = TensorDescriptor.from_tensor
    tensors = (
        describe(x, [tile.rows, tile.depth]),
        describe(weight, [tile.columns, tile.depth]),
        epilogue.scale,
        epilogue.offset,
        describe(residual, [tile.rows, tile.columns]),
        describe(y, [tile.rows, tile.columns]),
    )
    sizes = (out, depth, *epilogue.constants, tile.rows, tile.columns)
    num_tiles, wide = tile.count(num_rows, out), -(-out // tile.columns)
    if tile.split > 0:
        num_programs = min(num_tiles, NUM_PROGRAMS * tile.split)
        kernel, steps = _multiply, [tile.depth, tile.num_stages]
    elif tile.split < 0:
        num_programs = max(wide, min(num_tiles, NUM_PROGRAMS * -tile.split) // wide * wide)
        kernel, steps = _multiply_down, [tile.num_stages]
    else:
        num_programs = -(-num_rows // tile.rows)
        kernel, steps = _multiply_kept, [tile.num_stages]
    grid = (num_programs,)
    numbers = epilogue.numbers
    launch(kernel, grid, *tensors, num_rows, *numbers, *sizes, *steps, num_warps=tile.num_warps)
    return y


def window_tiles(num_rows: int, out: int, channels: int, num_taps: int) -> list[Tile]:
    """Return the tiles of `convolve_int8` worth trying."""
    depth = next((size for size in (128, 64, 32) if channels % size == 0), 0)
    depth = depth or min(64, max(32, triton.next_power_of_2(channels)))
    if -(-num_rows // 128) * -(-out // 128) >= NUM_PROGRAMS:
        shapes = ((128, 128, 8, 3), (128, 128, 4, 3), (128, 64, 4, 4), (256, 64, 8, 3))
        found = [Tile(r, c, depth, w, s) for r, c, w, s in shapes if out % c == 0]
        found = [tile for tile in found if tile.columns == 128 or out % 128 or depth < 128]
        return found or [Tile(128, 32 if out <= 32 else 64, depth, 4, 4)]
    num_steps = num_taps * -(-channels // depth)
    found = []
    for rows, columns in ((64, 32), (64, 64), (128, 64)):
        if out % columns == 0 or columns == 32:
            num_tiles = -(-num_rows // rows) * -(-out // columns)
            split = 1
            while num_tiles * split * 2 <= 264 and num_steps // (split * 2) >= 2 and split < 16:
                split *= 2
            found.append(Tile(rows, columns, depth, 4, 4, split))
            if split > 1 and columns == 32:
                found.append(Tile(rows, columns, depth, 4, 4, split // 2))
    return found


def convolve_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: ConvWindow,
    filling: int,
    epilogue: Int8Epilogue,
    tile: Tile,
    workspace: Workspace,
) -> torch.Tensor:
    """Convolve images [n, c, h, w]; images and weight are channels-last."""
    batch, channels, height, width = x.shape
    out, size_h, size_w = weight.shape[0], *window.size
    out_h, out_w = window.out(height, width)
    y = torch.empty((batch, out_h, out_w, out), dtype=epilogue.out, device=x.device)
    num_rows = batch * out_h * out_w
    num_tiles = -(-num_rows // tile.rows) * -(-out // tile.columns)
    if tile.split > 1:
        assert workspace.has_room(tile, num_tiles), (tile, num_tiles)
    residual = y if epilogue.residual is None else epilogue.residual
    num_stages = min(tile.num_stages, MAX_FILLED_STAGES) if filling else tile.num_stages
    launch(
        _convolve_int8, (num_tiles, tile.split),
        x, weight, epilogue.scale, epilogue.offset, residual, y,
        workspace.parts.view(torch.int32), workspace.arrived, num_rows, tile.split,
        *epilogue.numbers, out, channels, size_h, size_w, height, width, out_h, out_w,
        *window.stride, *window.padding,
        *epilogue.constants,
        tile.rows, tile.columns, tile.depth, tile.split > 1, filling,
        num_warps=tile.num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def pack_stem(weight: torch.Tensor, stride: int) -> torch.Tensor:
    """Pack INT8 weights [out, few, height, width] for `convolve_stem`, as [out, rows, bytes]: a
    window begins with a block of `stride` x `stride` pixels, so its rows are contiguous and begin
    at multiples of a block. What fills up the last blocks is zero."""
    out, channels, high, wide = weight.shape
    rows, columns = (1 << (-(-size // stride) - 1).bit_length() for size in (high, wide))
    rows, columns = max(rows, MIN_STEM_ROWS), max(columns, -(-16 // (stride * stride * PIXEL)))
    spread = weight.new_zeros(out, rows * stride, columns * stride, PIXEL)
    spread[:, :high, :wide, :channels] = weight.permute(0, 2, 3, 1)
    blocks = spread.view(out, rows, stride, columns, stride, PIXEL).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(out, rows, -1)


def pair_stem(packed: torch.Tensor, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed weights for pairs of neighbours, [2 * out, rows, bytes], and those of the block
    that only the second of them has: its window begins one block later."""
    out, rows, tap_bytes = packed.shape
    block = stride * stride * PIXEL
    pairs = packed.new_zeros(2 * out, rows, tap_bytes + block)
    pairs[:out, :, :tap_bytes] = packed
    pairs[out:, :, block:] = packed
    return pairs[..., :tap_bytes].contiguous(), pairs[..., tap_bytes:].contiguous()


def stem_tiles(num_rows: int, out: int, depth: int, rest: int = 0) -> list[Tile]:
    """Return the tiles of `convolve_stem` worth trying; `split` is the number of programs per
    processor. Tiles with twice the channels are for pairs of pixels; `rest` is the depth that only
    the second pixel has, or 0 without pairs."""
    columns = 64 if out % 64 == 0 else 32
    if num_rows // 128 < NUM_PROGRAMS:
        return [Tile(64, columns, depth, 4, 3, 4)]
    shapes = [(128, 4, 2, 2), (64, 4, 4, 2), (128, 8, 2, 2)]
    found = [Tile(rows, columns, depth, w, s, per) for rows, w, s, per in shapes]
    if out == columns and rest:
        pairs = Tile(64, 2 * out, depth, 4, 3, 2), Tile(128, 2 * out, depth, 8, 3, 1)
        found += [tile for tile in pairs if _stem_bytes(tile, depth + rest) <= MAX_SHARED_BYTES]
    return found


def _stem_bytes(tile: Tile, depth: int) -> int:
    """Return the shared memory that a program needs: images by stage, weights, outputs."""
    return (tile.rows * tile.num_stages + tile.columns) * depth + tile.rows * tile.columns


def convolve_stem(
    x: torch.Tensor,
    packed: torch.Tensor,
    window: ConvWindow,
    levels: tuple[float, int],
    epilogue: Int8Epilogue,
    tile: Tile,
    rest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve images of floats with few channels, in any memory format, with the same stride in
    both directions: they are quantised with `levels` (scale and zero), padded, and packed in
    blocks first. `packed` is what `pack_stem` made; or it and `rest` are what `pair_stem` made."""
    batch, channels, height, width = x.shape
    (side, _), (pad_h, pad_w) = window.stride, window.padding
    out_h, out_w = window.out(height, width)
    block = side * side * PIXEL
    num_columns, rows, tap_bytes = packed.shape
    num_pixels = 1 if rest is None else 2
    out = num_columns // num_pixels
    # The last windows may go past the image.
    high, wide = out_h - 1 + rows, out_w - 1 + tap_bytes // block
    num_blocks = batch * high * wide
    packed_x = torch.empty(num_blocks * block, dtype=torch.int8, device=x.device)
    scale, zero = levels
    launch(
        _pack_int8, (-(-num_blocks // PACK_BLOCKS),),
        x, packed_x, num_blocks, *x.stride(), 1.0 / scale, float(zero), channels, height, width,
        high, wide, pad_h, pad_w, side, PIXEL, PACK_BLOCKS, num_warps=4,
    )  # fmt: skip
    y = torch.empty((batch, out_h, out_w, out), dtype=epilogue.out, device=x.device)
    num_rows, depth = batch * out_h * out_w // num_pixels, rows * tap_bytes
    row = out_w // num_pixels
    columns = -(-num_columns // tile.columns)
    # Ends of rows in a tile; 0: too many to count them, or more than one image.
    num_wraps = -(-tile.rows // row)
    num_wraps = num_wraps if num_wraps <= MAX_WRAPS and tile.rows <= out_h * row else 0
    num_programs = min(-(-num_rows // tile.rows), NUM_PROGRAMS * tile.split) * columns
    launch(
        _stem, (num_programs,),
        packed_x, packed, packed if rest is None else rest, epilogue.scale, epilogue.offset, y,
        num_rows, *epilogue.numbers, out, out_h, out_w,
        high * wide * block, wide * block, block, tap_bytes, depth,
        *epilogue.constants, tile.rows, tile.columns, num_pixels, num_wraps, tile.num_stages,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def pool_int8(x: torch.Tensor, window: ConvWindow) -> torch.Tensor:
    """Max-pool channels-last images."""
    batch, channels, height, width = x.shape
    out_h, out_w = window.out(height, width)
    y = torch.empty((batch, out_h, out_w, channels), dtype=x.dtype, device=x.device)
    given, made = x.permute(0, 2, 3, 1), y
    # Triton's interpreter has no assembler.
    is_words = x.is_cuda and channels % 4 == 0
    if is_words:
        given, made, channels = given.view(torch.int32), y.view(torch.int32), channels // 4
    num_pixels = batch * out_h * out_w
    block = min(64, triton.next_power_of_2(channels))
    launch(
        _pool_int8, (-(-num_pixels // POOL_PIXELS), -(-channels // block)),
        given, made, num_pixels, channels, height, width, out_h, out_w,
        *window.size, *window.stride, *window.padding, POOL_PIXELS, block, is_words,
        num_warps=4,
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def quantize_int8(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    """Quantise a dense tensor; the result has its strides."""
    y = torch.empty_like(x, dtype=torch.int8)
    launch(_quantize, (-(-x.numel() // BLOCK),), x, y, x.numel(), 1.0 / scale, float(zero), BLOCK)
    return y


def dequantize_int8(x: torch.Tensor, scale: float, zero: int, out: torch.dtype) -> torch.Tensor:
    y = torch.empty_like(x, dtype=out)
    launch(_dequantize, (-(-x.numel() // BLOCK),), x, y, x.numel(), scale, float(zero), BLOCK)
    return y


def add_int8(
    a: torch.Tensor, b: torch.Tensor, factors: tuple[float, float], offset: float, lowest: float
) -> torch.Tensor:
    """Add dense tensors of the same shape and strides, in units of the output."""
    y, size = torch.empty_like(a), a.numel()
    launch(_add, (-(-size // BLOCK),), a, b, y, size, *factors, offset, lowest, BLOCK)
    return y
