"""Images of different sizes into one batch, in one launch: resize, crop, normalise, cast, and write
in the layout that the model wants.

The resize is Pillow's: a triangle or cubic filter as wide as the reduction, first along x, then
along y, each rounded to 8 bits. Each program makes some pixels of one image and reads their
neighbourhood, so nothing between source and batch is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Pixels that a program makes.
BLOCK = 256
# Columns of the table of images; see `pixels.table_row`.
NUM_COLUMNS = tl.constexpr(11)


@triton.jit
def _weight(distance, IS_CUBIC: tl.constexpr):
    """Return the filter's value at a distance."""
    x = tl.abs(distance)
    if IS_CUBIC:
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
        return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))
    return tl.where(x < 1.0, 1.0 - x, 0.0)


@triton.jit
def _to_8_bits(values):
    return tl.minimum(tl.maximum(tl.floor(values + 0.5), 0.0), 255.0)


@triton.jit
def _reach(places, size, resized, SUPPORT: tl.constexpr):
    """Return centres in the source, first and last source pixel, the filter's stretch, and how many
    source pixels a pixel is made of at most."""
    ratio = size.to(tl.float32) / tl.maximum(resized, 1).to(tl.float32)
    stretch = tl.maximum(ratio, 1.0)
    centres = (places.to(tl.float32) + 0.5) * ratio
    first = tl.maximum((centres - SUPPORT * stretch + 0.5).to(tl.int32), 0)
    last = tl.minimum((centres + SUPPORT * stretch + 0.5).to(tl.int32), size)
    count = tl.where(size > 0, (2.0 * SUPPORT * stretch).to(tl.int32) + 2, 0)
    return centres, first, last, stretch, count


@triton.jit
def _place(
    table, batch, row_stride, channel_stride, y_stride, x_stride, width, num_pixels,
    scale, mean_0, mean_1, mean_2, std_0, std_1, std_2,
    IS_CUBIC: tl.constexpr, IS_RAW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = table + tl.program_id(0) * NUM_COLUMNS
    source = tl.load(line).to(tl.pointer_type(tl.uint8))
    source_channel = tl.load(line + 1)
    source_y = tl.load(line + 2)
    source_x = tl.load(line + 3)
    source_height = tl.load(line + 4).to(tl.int32)
    source_width = tl.load(line + 5).to(tl.int32)
    resized_height = tl.load(line + 6).to(tl.int32)
    resized_width = tl.load(line + 7).to(tl.int32)
    top = tl.load(line + 8).to(tl.int32)
    left = tl.load(line + 9).to(tl.int32)
    row = tl.load(line + 10)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = at // width
    x = at % width
    # What is outside of the resized image is black.
    is_image = (at < num_pixels) & (y + top >= 0) & (y + top < resized_height)
    is_image = is_image & (x + left >= 0) & (x + left < resized_width)
    SUPPORT: tl.constexpr = 2.0 if IS_CUBIC else 1.0
    y_centre, y_first, y_last, y_stretch, num_y = _reach(
        y + top, source_height, resized_height, SUPPORT
    )
    x_centre, x_first, x_last, x_stretch, num_x = _reach(
        x + left, source_width, resized_width, SUPPORT
    )
    x_total = tl.zeros([BLOCK], tl.float32)
    for i in range(num_x):
        here = x_first + i
        weight = _weight((here.to(tl.float32) - x_centre + 0.5) / x_stretch, IS_CUBIC)
        x_total += tl.where(here < x_last, weight, 0.0)
    x_total = tl.where(x_total == 0.0, 1.0, x_total)
    y_total = tl.zeros([BLOCK], tl.float32)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for j in range(num_y):
        there = y_first + j
        y_weight = _weight((there.to(tl.float32) - y_centre + 0.5) / y_stretch, IS_CUBIC)
        y_weight = tl.where(there < y_last, y_weight, 0.0)
        y_total += y_weight
        line_red = tl.zeros([BLOCK], tl.float32)
        line_green = tl.zeros([BLOCK], tl.float32)
        line_blue = tl.zeros([BLOCK], tl.float32)
        for i in range(num_x):
            here = x_first + i
            weight = _weight((here.to(tl.float32) - x_centre + 0.5) / x_stretch, IS_CUBIC)
            is_read = is_image & (there < y_last) & (here < x_last)
            pixel = source + there.to(tl.int64) * source_y + here.to(tl.int64) * source_x
            line_red += weight * tl.load(pixel, mask=is_read, other=0).to(tl.float32)
            pixel += source_channel
            line_green += weight * tl.load(pixel, mask=is_read, other=0).to(tl.float32)
            pixel += source_channel
            line_blue += weight * tl.load(pixel, mask=is_read, other=0).to(tl.float32)
        red += y_weight * _to_8_bits(tl.div_rn(line_red, x_total))
        green += y_weight * _to_8_bits(tl.div_rn(line_green, x_total))
        blue += y_weight * _to_8_bits(tl.div_rn(line_blue, x_total))
    y_total = tl.where(y_total == 0.0, 1.0, y_total)
    red = _to_8_bits(tl.div_rn(red, y_total))
    green = _to_8_bits(tl.div_rn(green, y_total))
    blue = _to_8_bits(tl.div_rn(blue, y_total))
    if not IS_RAW:
        red = (red * scale - mean_0) / std_0
        green = (green * scale - mean_1) / std_1
        blue = (blue * scale - mean_2) / std_2
    dtype = batch.dtype.element_ty
    target = batch + row * row_stride + y * y_stride + x * x_stride
    is_pixel = at < num_pixels
    tl.store(target, red.to(dtype), mask=is_pixel)
    tl.store(target + channel_stride, green.to(dtype), mask=is_pixel)
    tl.store(target + 2 * channel_stride, blue.to(dtype), mask=is_pixel)


def place(
    table: torch.Tensor,
    batch: torch.Tensor,
    scale: float,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    is_cubic: bool,
) -> None:
    """Write the images of the table to their rows of a batch [rows, 3, height, width], of any
    strides. UINT8 batches get the values 0 to 255."""
    _, _, height, width = batch.shape
    grid = (len(table), triton.cdiv(height * width, BLOCK))
    _place[grid](
        table, batch, *batch.stride(), width, height * width, scale, *mean, *std,
        IS_CUBIC=is_cubic, IS_RAW=batch.dtype == torch.uint8, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
