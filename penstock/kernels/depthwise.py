"""Depthwise convolution of channels-last images, in Triton: each channel by itself.

A program computes a few rows of a piece of the image for a block of channels. It walks over the
rows of the input and adds each to all output rows that it belongs to, so that a value is read once
for each column of the window instead of once for each tap. Bound by memory: bias, residual and
activation are the epilogue.

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.conv import ConvWindow, empty
from penstock.kernels.pointwise import Epilogue, finished, launch

# Largest window: its taps are unrolled.
MAX_SIZE = 7
MAX_CHANNELS, MAX_WIDTH = 64, 16


@dataclass(frozen=True, slots=True)
class DepthwiseTile:
    """Rows (1, 2 or 4), columns and channels of a program."""

    rows: int
    columns: int
    channels: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.channels}"

    @property
    def num_warps(self) -> int:
        """Eight channels for each thread: one load of 16 bytes in FP16."""
        return min(4, max(1, self.columns * self.channels // (32 * 8)))


@triton.jit
def _write_row(
    total, bias, residual, y, at_c, is_channel, row, image, at_w, NUMBER: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, ADDS_LAST: tl.constexpr,
):  # fmt: skip
    if NUMBER < ROWS:
        at = ((image * OUT_H + row + NUMBER) * OUT_W + at_w)[:, None] * CHANNELS + at_c[None, :]
        is_written = ((row + NUMBER < OUT_H) & (at_w < OUT_W))[:, None] & is_channel[None, :]
        if HAS_BIAS:
            total += tl.load(bias + at_c, mask=is_channel, other=0.0)[None, :].to(tl.float32)
        added = total
        if HAS_RESIDUAL:
            added = tl.load(residual + at, mask=is_written, other=0.0).to(tl.float32)
        total = finished(total, added, HAS_RESIDUAL, KIND, A, B, ADDS_LAST)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=is_written)


@triton.jit
def _depthwise(
    x, weight, bias, residual, y, CHANNELS: tl.constexpr, SIZE_H: tl.constexpr,
    SIZE_W: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, ADDS_LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`weight` is [SIZE_H, SIZE_W, CHANNELS]."""
    WIDE: tl.constexpr = (OUT_W + COLUMNS - 1) // COLUMNS
    HIGH: tl.constexpr = (OUT_H + ROWS - 1) // ROWS
    piece = tl.program_id(0)
    image = piece // (WIDE * HIGH)
    row = piece % (WIDE * HIGH) // WIDE * ROWS
    at_w = piece % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    at_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at_c < CHANNELS
    top = row * STRIDE_H - PAD_H
    left = at_w * STRIDE_W - PAD_W
    # Weights are read once for each column, so that each thread has those of its values.
    every_c = tl.zeros((COLUMNS, 1), dtype=tl.int32) + at_c[None, :]
    is_every = every_c < CHANNELS
    one = tl.zeros((COLUMNS, BLOCK), dtype=tl.float32)
    two, three, four = one, one, one
    for step in tl.static_range((ROWS - 1) * STRIDE_H + SIZE_H):
        is_high = (top + step >= 0) & (top + step < HEIGHT)
        start = ((image * HEIGHT + top + step) * WIDTH + left) * CHANNELS
        for tap in tl.static_range(SIZE_W):
            is_inside = is_high & (left + tap >= 0) & (left + tap < WIDTH)
            address = x + (start + tap * CHANNELS)[:, None] + at_c[None, :]
            mask = is_inside[:, None] & is_channel[None, :]
            value = tl.load(address, mask=mask, other=0.0).to(tl.float32)
            weights = weight + tap * CHANNELS + every_c
            # The input row lies in the window of some of the output rows.
            if step < SIZE_H:
                at = weights + step * SIZE_W * CHANNELS
                one += value * tl.load(at, mask=is_every, other=0.0).to(tl.float32)
            if ROWS > 1 and step >= STRIDE_H and step - STRIDE_H < SIZE_H:
                at = weights + (step - STRIDE_H) * SIZE_W * CHANNELS
                two += value * tl.load(at, mask=is_every, other=0.0).to(tl.float32)
            if ROWS > 2 and step >= 2 * STRIDE_H and step - 2 * STRIDE_H < SIZE_H:
                at = weights + (step - 2 * STRIDE_H) * SIZE_W * CHANNELS
                three += value * tl.load(at, mask=is_every, other=0.0).to(tl.float32)
            if ROWS > 2 and step >= 3 * STRIDE_H and step - 3 * STRIDE_H < SIZE_H:
                at = weights + (step - 3 * STRIDE_H) * SIZE_W * CHANNELS
                four += value * tl.load(at, mask=is_every, other=0.0).to(tl.float32)
    _write_row(
        one, bias, residual, y, at_c, is_channel, row, image, at_w, 0, ROWS, CHANNELS,
        OUT_H, OUT_W, HAS_BIAS, HAS_RESIDUAL, KIND, A, B, ADDS_LAST,
    )  # fmt: skip
    _write_row(
        two, bias, residual, y, at_c, is_channel, row, image, at_w, 1, ROWS, CHANNELS,
        OUT_H, OUT_W, HAS_BIAS, HAS_RESIDUAL, KIND, A, B, ADDS_LAST,
    )  # fmt: skip
    _write_row(
        three, bias, residual, y, at_c, is_channel, row, image, at_w, 2, ROWS, CHANNELS,
        OUT_H, OUT_W, HAS_BIAS, HAS_RESIDUAL, KIND, A, B, ADDS_LAST,
    )  # fmt: skip
    _write_row(
        four, bias, residual, y, at_c, is_channel, row, image, at_w, 3, ROWS, CHANNELS,
        OUT_H, OUT_W, HAS_BIAS, HAS_RESIDUAL, KIND, A, B, ADDS_LAST,
    )  # fmt: skip


FUNCTIONS = (_depthwise,)


def tiles_of(out_h: int, out_w: int, channels: int, size: int) -> list[DepthwiseTile]:
    """Return the tiles worth trying: several rows read less, one gives more programs. Fewer for
    large windows, as unrolled taps take seconds to compile."""
    block = min(MAX_CHANNELS, max(16, triton.next_power_of_2(channels)))
    widest = max(4, min(MAX_WIDTH, triton.next_power_of_2(out_w)))
    # As wide as leaves the fewest columns empty.
    columns = min(widest, max(4, widest // 2), key=lambda size: (-(-out_w // size) * size, -size))
    counts = [rows for rows in ((1, 2, 4) if size <= 3 else (1, 4)) if rows < 2 * out_h]
    found = [DepthwiseTile(rows, columns, block) for rows in counts]
    if block == MAX_CHANNELS and size <= 3:
        found.append(DepthwiseTile(counts[-1], columns, block // 2))
    return found


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights [channels, 1, height, width] as [height, width, channels]."""
    return weight[:, 0].permute(1, 2, 0).contiguous()


def convolve(
    x: torch.Tensor,
    packed: torch.Tensor,
    window: ConvWindow,
    epilogue: Epilogue,
    tile: DepthwiseTile,
) -> torch.Tensor:
    """Convolve channels-last images [n, c, h, w] with a window for each channel."""
    batch, channels, height, width = x.shape
    out_h, out_w = window.out(height, width)
    y = empty(x, batch, channels, out_h, out_w)
    num_pieces = batch * -(-out_h // tile.rows) * -(-out_w // tile.columns)
    bias, residual = epilogue.bias, epilogue.residual
    launch(
        _depthwise, (num_pieces, -(-channels // tile.channels)),
        x, packed, y if bias is None else bias, y if residual is None else residual, y,
        channels, *window.size, height, width, out_h, out_w, *window.stride, *window.padding,
        *epilogue.constants, tile.rows, tile.columns, tile.channels, num_warps=tile.num_warps,
    )  # fmt: skip
    return y
