"""Convolution and max pooling of channels-last images, in Triton.

A convolution is one GEMM whose left matrix is never materialised (implicit GEMM): each program
gathers the pixels under its rows tap by tap. Bias, residual and activation are the epilogue; with
one tap, the input may be multiplied by a factor for each image and channel first (prologue). With
few rows, several programs share the sum of one tile (`split`), and the last to arrive adds the
parts in a fixed order, so results are deterministic.

With TRITON_INTERPRET=1 in the environment, before this file is imported, all of it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl

from penstock.kernels.pointwise import Epilogue, finished, launch

# Channels of a packed pixel: images with at most this many are widened to it.
PIXEL = 4
# About as many programs as the largest GPUs run at once.
NUM_PROGRAMS = 132
# Bytes of one row that a program reads at a time.
MAX_DEPTH_BYTES = 128
POOL_PIXELS, POOL_CHANNELS = 32, 64
PACK_PIXELS = 512
# Channels that are read at once; images with another number of them are not aligned.
ALIGNED = 8
# Largest number of columns of a tile.
MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes: rows (pixels) and columns (channels) of a program, input channels per step, and
    the number of programs that share one sum."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    split: int = 1

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))

    def count(self, num_rows: int, num_columns: int) -> int:
        """Return the number of tiles of a matrix."""
        return -(-num_rows // self.rows) * -(-num_columns // self.columns)


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """Window of a convolution or pooling; pairs are (height, width)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def out(self, height: int, width: int) -> tuple[int, int]:
        sizes = zip((height, width), self.size, self.stride, self.padding, strict=True)
        high, wide = ((length + 2 * p - size) // stride + 1 for length, size, stride, p in sizes)
        return high, wide


class Workspace:
    """Memory for the parts of programs that share a tile. For one stream: concurrent convolutions
    would overwrite each other. Its address is fixed, so CUDA graphs can use it."""

    def __init__(self, device: torch.device | str, num_floats: int = 8 << 20) -> None:
        self.parts = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(8192, dtype=torch.int32, device=device)

    def has_room(self, tile: Tile, num_tiles: int) -> bool:
        num_floats = num_tiles * tile.split * tile.rows * tile.columns
        return num_tiles <= len(self.arrived) and num_floats <= len(self.parts)


@triton.jit
def _place(num_rows, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows and columns of this program's tile. Consecutive tiles share their inputs: a few
    rows of tiles are processed column by column."""
    tile = tl.program_id(0)
    GROUP: tl.constexpr = 8
    first = tile // (GROUP * WIDE) * GROUP
    high = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    at_m = (first + tile % (GROUP * WIDE) % high) * ROWS + tl.arange(0, ROWS)
    at_n = tile % (GROUP * WIDE) // high * COLUMNS + tl.arange(0, COLUMNS)
    return at_m, at_n


@triton.jit
def shared_sum(total, parts, arrived, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum over all programs of this tile, and whether this one writes it. Sums and parts
    are of one datatype, of four bytes."""
    tile = tl.program_id(0)
    size: tl.constexpr = ROWS * COLUMNS
    part = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mine = parts + tile * split * size + part
    # Bypass L1, so that other programs see it.
    tl.store(mine + tl.program_id(1) * size, total, cache_modifier=".cg")
    tl.debug_barrier()
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == split - 1
    if is_last:
        total = tl.zeros_like(total)
        for number in range(split):
            total += tl.load(mine + number * size, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return total, is_last


@triton.jit
def _flat_rows(
    x, factors, base, first, at_k, IN: tl.constexpr, DEPTH: tl.constexpr, HAS_SCALE: tl.constexpr
):  # fmt: skip
    """Read rows of the matrix, times their factors. Channels past the end of a row are zero."""
    addresses = x + (base[:, None] + first + at_k[None, :])
    if IN % DEPTH == 0:
        a = tl.load(addresses)
        if HAS_SCALE:
            factor = tl.load(factors + first)
            a = (a.to(tl.float32) * factor.to(tl.float32)).to(a.dtype)
    else:
        is_channel = (first + at_k < IN)[None, :]
        a = tl.load(addresses, mask=is_channel, other=0.0)
        if HAS_SCALE:
            factor = tl.load(factors + first, mask=is_channel, other=0.0)
            a = (a.to(tl.float32) * factor.to(tl.float32)).to(a.dtype)
    return a


@triton.jit
def _window_rows(
    x, start, is_inside, first, at_k, IN: tl.constexpr, DEPTH: tl.constexpr,
    IS_PADDED: tl.constexpr,
):  # fmt: skip
    """Read the pixels under one tap of the window; those outside the image are zero."""
    addresses = x + (start[:, None] + at_k[None, :])
    mask = is_inside[:, None]
    if IN % DEPTH != 0:
        mask = mask & (first + at_k < IN)[None, :]
    if IS_PADDED or IN % DEPTH != 0:
        a = tl.load(addresses, mask=mask, other=0.0)
    else:
        a = tl.load(addresses)
    return a


@triton.jit(do_not_specialize=["num_rows", "split"])
def _convolve(
    x, weight, scale, bias, residual, y, parts, arrived, num_rows, split,
    OUT: tl.constexpr, IN: tl.constexpr, SIZE_H: tl.constexpr, SIZE_W: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    STEP_N: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ADDS_LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_SPLIT: tl.constexpr, IS_FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`weight` is [OUT, SIZE_H, SIZE_W, IN]. IS_FLAT: one tap and stride 1, so rows of the image
    are rows of the matrix. `scale` is [images, IN], for flat ones only."""
    at_m, at_n = _place(num_rows, (OUT + COLUMNS - 1) // COLUMNS, ROWS, COLUMNS)
    at_k = tl.arange(0, DEPTH)
    is_row = at_m < num_rows
    # Rows and columns past the end read the first ones, and are not written.
    row = tl.where(is_row, at_m, 0)
    IS_RAGGED: tl.constexpr = IN % DEPTH != 0
    column = at_n
    if OUT % COLUMNS != 0:
        column = tl.where(at_n < OUT, at_n, 0)
    top = 0
    left = 0
    if IS_FLAT:
        base = row * IN
    else:
        pixel = row % (OUT_H * OUT_W)
        top = pixel // OUT_W * STRIDE_H - PAD_H
        left = pixel % OUT_W * STRIDE_W - PAD_W
        base = row // (OUT_H * OUT_W) * STEP_N + top * STEP_H + left * STEP_W
    PER_TAP: tl.constexpr = (IN + DEPTH - 1) // DEPTH
    NUM_STEPS: tl.constexpr = SIZE_H * SIZE_W * PER_TAP
    weights = weight + column[None, :] * (SIZE_H * SIZE_W * IN) + at_k[:, None]
    factors = scale + (row // (HEIGHT * WIDTH) * IN)[:, None] + at_k[None, :]
    begin = 0
    end = NUM_STEPS
    if IS_SPLIT:
        share = tl.cdiv(NUM_STEPS, split)
        begin = tl.program_id(1) * share
        end = tl.minimum(begin + share, NUM_STEPS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(begin, end):
        tap = 0
        first = step * DEPTH
        if not IS_FLAT:
            tap = step // PER_TAP
            first = step % PER_TAP * DEPTH
        if IS_FLAT:
            a = _flat_rows(x, factors, base, first, at_k, IN, DEPTH, HAS_SCALE)
        else:
            tap_h = tap // SIZE_W
            tap_w = tap % SIZE_W
            start = base + tap_h * STEP_H + tap_w * STEP_W + first
            is_high = (top + tap_h >= 0) & (top + tap_h < HEIGHT)
            is_inside = is_high & (left + tap_w >= 0) & (left + tap_w < WIDTH)
            IS_PADDED: tl.constexpr = PAD_H > 0 or PAD_W > 0
            a = _window_rows(x, start, is_inside, first, at_k, IN, DEPTH, IS_PADDED)
        if IS_RAGGED:
            is_channel = (first + at_k < IN)[:, None]
            b = tl.load(weights + (tap * IN + first), mask=is_channel, other=0.0)
        else:
            b = tl.load(weights + step * DEPTH)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    is_last = True
    if IS_SPLIT:
        total, is_last = shared_sum(total, parts, arrived, split, ROWS, COLUMNS)
    if is_last:
        at = at_m[:, None] * OUT + at_n[None, :]
        is_written = is_row[:, None]
        if OUT % COLUMNS != 0:
            is_written = is_written & (at_n < OUT)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + column)[None, :].to(tl.float32)
        added = total
        if HAS_RESIDUAL:
            added = tl.load(residual + at, mask=is_written, other=0.0).to(tl.float32)
        total = finished(total, added, HAS_RESIDUAL, KIND, A, B, ADDS_LAST)
        tl.store(y + at, total.to(y.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=["num_pixels"])
def _pool(
    x, y, num_pixels, CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    SIZE_H: tl.constexpr, SIZE_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at_p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    at_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_pixel = at_p < num_pixels
    is_channel = at_c < CHANNELS
    image = at_p // (OUT_H * OUT_W)
    top = at_p % (OUT_H * OUT_W) // OUT_W * STRIDE_H - PAD_H
    left = at_p % OUT_W * STRIDE_W - PAD_W
    best = tl.full((PIXELS, BLOCK), float("-inf"), dtype=tl.float32)
    for tap in tl.static_range(SIZE_H * SIZE_W):
        # Pixels outside are replaced by the nearest inside, which the window has as well.
        row = tl.minimum(tl.maximum(top + tap // SIZE_W, 0), HEIGHT - 1)
        column = tl.minimum(tl.maximum(left + tap % SIZE_W, 0), WIDTH - 1)
        start = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
        addresses = x + start[:, None] + at_c[None, :]
        mask = is_pixel[:, None] & is_channel[None, :]
        value = tl.load(addresses, mask=mask, other=0.0).to(tl.float32)
        best = tl.maximum(best, value, propagate_nan=tl.PropagateNan.ALL)
    mask = is_pixel[:, None] & is_channel[None, :]
    written = y + at_p[:, None] * CHANNELS + at_c[None, :]
    tl.store(written, best.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pixels", "step_n", "step_c", "step_h", "step_w"])
def _pack(
    x, y, num_pixels, step_n, step_c, step_h, step_w, CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PACKED_H: tl.constexpr, PACKED_W: tl.constexpr,
    ABOVE: tl.constexpr, BEFORE: tl.constexpr, WIDE: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    at_p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    at_c = tl.arange(0, WIDE)
    is_pixel = at_p < num_pixels
    row = at_p % (PACKED_H * PACKED_W) // PACKED_W - ABOVE
    column = at_p % PACKED_W - BEFORE
    is_inside = is_pixel & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    start = at_p // (PACKED_H * PACKED_W) * step_n + row * step_h + column * step_w
    addresses = x + start[:, None] + at_c[None, :] * step_c
    value = tl.load(addresses, mask=is_inside[:, None] & (at_c < CHANNELS)[None, :], other=0.0)
    written = y + at_p[:, None] * WIDE + at_c[None, :]
    tl.store(written, value, mask=is_pixel[:, None])


# All kernels of this file.
FUNCTIONS = (_convolve, _pool, _pack)


def tiles_of(
    num_rows: int, out_channels: int, in_channels: int, num_taps: int, item_bytes: int = 2
) -> list[Tile]:
    """Return the tiles worth trying: few, because each is compiled. Empty if the input channels are
    not aligned, and for many rows and taps, where cuDNN was faster at every size (H200,
    ResNet-50)."""
    if in_channels % ALIGNED:
        return []
    depth = _depth(in_channels, item_bytes)
    if -(-num_rows // 128) * -(-out_channels // 128) >= NUM_PROGRAMS:
        return _large_tiles(out_channels, depth) if num_taps == 1 else []
    num_steps = num_taps * -(-in_channels // depth)
    found = []
    for columns in (32, 64):
        # Of a ragged matrix, twice as many columns may be half empty.
        if columns == 32 or -(-out_channels // 32) % 2 == 0:
            num_tiles = -(-num_rows // 64) * -(-out_channels // columns)
            split = 1
            while num_tiles * split * 2 <= 200 and num_steps // (split * 2) >= 2 and split < 16:
                split *= 2
            # Wide tiles shared by many programs never won.
            if columns == 32 or split <= 2:
                found.append(Tile(64, columns, depth, 4, 4, split))
    return found


def _depth(in_channels: int, item_bytes: int) -> int:
    """Return the channels per step: as many as fit the shared memory, unless most are empty."""
    sizes = [size for size in (64, 32, 16) if size * item_bytes <= MAX_DEPTH_BYTES]
    # A step costs about as much as eight channels.
    return min(sizes, key=lambda size: (-(-in_channels // size) * (size + 8), -size))


def _large_tiles(out_channels: int, depth: int) -> list[Tile]:
    whole = [size for size in (MAX_COLUMNS, 128, 64, 32) if out_channels % size == 0]
    if MAX_COLUMNS in whole:
        found = {128, MAX_COLUMNS}
    elif whole and whole[0] >= 64:
        found = {whole[0]}
    else:
        # The fewest empty columns, and one tile for all, which reads the rows once.
        cover = max(32, min(128, triton.next_power_of_2(out_channels)))
        least = min((32, 64, 128), key=lambda size: -(-out_channels // size) * (size + 16))
        found = {cover, least}
    return [
        Tile(128, columns, depth, *((8, 3) if columns >= 128 else (4, 4)))
        for columns in sorted(found)
    ]


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: ConvWindow,
    epilogue: Epilogue,
    tile: Tile,
    workspace: Workspace,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve images [n, c, h, w]; images and weight are channels-last. `scale` [n, c] multiplies
    the images first, for windows of one pixel with stride 1."""
    batch, channels, height, width = x.shape
    out_h, out_w = window.out(height, width)
    y = empty(x, batch, weight.shape[0], out_h, out_w)
    steps = height * width * channels, width * channels, channels
    is_flat = window.size == window.stride == (1, 1) and window.padding == (0, 0)
    sizes = (channels, *window.size, height, width, out_h, out_w, *window.stride, *window.padding)
    assert is_flat or scale is None, window
    _launch_convolve((x, weight, y, scale), (*sizes, *steps), epilogue, tile, (workspace, is_flat))
    return y


def _launch_convolve(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    sizes: tuple[int, ...],
    epilogue: Epilogue,
    tile: Tile,
    way: tuple[Workspace, bool],
) -> None:
    x, weight, y, scale = tensors
    workspace, is_flat = way
    num_rows, out_channels = y.numel() // y.shape[1], y.shape[1]
    num_tiles = tile.count(num_rows, out_channels)
    if tile.split > 1:
        assert workspace.has_room(tile, num_tiles), (tile, num_tiles)
    bias, residual = epilogue.bias, epilogue.residual
    is_exact = x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    launch(
        _convolve, (num_tiles, tile.split),
        x, weight, y if scale is None else scale, y if bias is None else bias,
        y if residual is None else residual, y,
        workspace.parts, workspace.arrived, num_rows, tile.split, out_channels, *sizes,
        scale is not None, *epilogue.constants,
        tile.rows, tile.columns, tile.depth, tile.split > 1, is_flat,
        "ieee" if is_exact else "tf32", num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def num_packed(width: int) -> int:
    """Return the pixels that are read at once for a window of this width."""
    return 1 << max(2, (width - 1).bit_length())


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Pack weights for `convolve_packed`: [out, few, height, width] to [out, height, pixels,
    PIXEL]. Padding is on the left, so that reads begin at a multiple of the stride."""
    out, channels, high, wide = weight.shape
    pixels = num_packed(wide)
    packed = weight.new_zeros(out, high, pixels, PIXEL)
    packed[:, :, pixels - wide :, :channels] = weight.permute(0, 2, 3, 1)
    return packed


def packed_tile(num_rows: int, out_channels: int, width: int) -> Tile:
    columns = 64 if out_channels % 64 == 0 else 32
    is_large = num_rows // 128 >= NUM_PROGRAMS
    depth = num_packed(width) * PIXEL
    return Tile(128 if is_large else 64, columns, depth, 4, 4)


def convolve_packed(
    x: torch.Tensor,
    packed: torch.Tensor,
    window: ConvWindow,
    epilogue: Epilogue,
    tile: Tile,
    workspace: Workspace,
) -> torch.Tensor:
    """Convolve images with few channels, in any memory format: they are padded and widened first,
    so that a row of the window is contiguous."""
    batch, channels, height, width = x.shape
    out, size_h, pixels, _ = packed.shape
    out_h, out_w = window.out(height, width)
    pad_h, pad_w = window.padding
    before = pad_w + pixels - window.size[1]
    high, wide = height + 2 * pad_h, -(-(before + width + pad_w) // 4) * 4
    # The last row reads past its end.
    num_values = batch * high * wide * PIXEL
    widened = torch.empty(num_values + pixels * PIXEL, dtype=x.dtype, device=x.device)
    launch(
        _pack, (-(-(num_values // PIXEL) // PACK_PIXELS),),
        x, widened, num_values // PIXEL, *x.stride(), channels, height, width, high, wide,
        pad_h, before, PIXEL, PACK_PIXELS, num_warps=4,
    )  # fmt: skip
    y = empty(x, batch, out, out_h, out_w)
    steps = high * wide * PIXEL, wide * PIXEL, PIXEL
    sizes = (pixels * PIXEL, size_h, 1, high, wide, out_h, out_w, *window.stride, 0, 0, *steps)
    _launch_convolve((widened, packed, y, None), sizes, epilogue, tile, (workspace, False))
    return y


def max_pool(x: torch.Tensor, window: ConvWindow) -> torch.Tensor:
    """Max-pool channels-last images without indices, which torch's operator also writes."""
    batch, channels, height, width = x.shape
    out_h, out_w = window.out(height, width)
    y = empty(x, batch, channels, out_h, out_w)
    num_pixels = batch * out_h * out_w
    block = min(POOL_CHANNELS, triton.next_power_of_2(channels))
    launch(
        _pool, (-(-num_pixels // POOL_PIXELS), -(-channels // block)),
        x, y, num_pixels, channels, height, width, out_h, out_w,
        *window.size, *window.stride, *window.padding, POOL_PIXELS, block, num_warps=4,
    )  # fmt: skip
    return y


def empty(like: torch.Tensor, batch: int, channels: int, high: int, wide: int) -> torch.Tensor:
    y = torch.empty((batch, high, wide, channels), dtype=like.dtype, device=like.device)
    return y.permute(0, 3, 1, 2)
