"""INT8 layers, run by the fastest implementation for their sizes: our kernels (`int8`), or plans of
cuDNN's graph API for windows of several pixels (`cudnn_int8`). The `Tuner` of `convolution` times
and checks them. On a CPU, and for sizes that are not known at load, torch computes the same in
floats, which is exact."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from penstock.kernels import cudnn_int8, has_triton
from penstock.kernels.activation import Activation
from penstock.kernels.convolution import (
    IMAGE_RANK,
    REFERENCE,
    ConvGeometry,
    Pair,
    Run,
    TunedLayer,
    Tuner,
)

if TYPE_CHECKING:
    from penstock.kernels.conv import ConvWindow, Tile
    from penstock.kernels.int8_triton import Int8Epilogue

LOWEST, HIGHEST = -128, 127
# Most channels of a layer that can take an image of floats, and its strides and windows.
STEM_CHANNELS, STEM_STRIDES, MAX_STEM_WINDOW = 4, (1, 2, 4), 8
MAX_ELEMENTS = 2**31 - 1
# Rows from which cuDNN is tried: its plans take long to build.
MIN_CUDNN_ROWS = 4096
# Multiple of channels to which scales are filled up: the widest tile.
CHANNEL_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Levels:
    """How a tensor is quantised: a value is round(real / scale) + zero, limited to INT8."""

    scale: float
    zero: int = 0

    def __str__(self) -> str:
        return f"{self.scale:.6g}{f'{self.zero:+d}' if self.zero else ''}"


@dataclass(frozen=True, slots=True)
class Int8Shape:
    """A layer besides its weights."""

    given: Levels
    # None: the result is a float.
    out: Levels | None
    # Limits of the real result, of an activation.
    lowest: float = -math.inf
    highest: float = math.inf
    # None: no residual, or one of floats.
    added: Levels | None = None
    geometry: ConvGeometry = ConvGeometry()
    # One that does more than limit the real result; there are no other limits then.
    activation: Activation | None = None
    # The residual is added after the activation, not before.
    adds_last: bool = False

    @property
    def unit(self) -> float:
        """Unit of the sums: the step of the output, but 1 before an activation."""
        return 1.0 if self.out is None or self.activation is not None else self.out.scale


class Int8Layer(TunedLayer):
    """A convolution, or a matmul of rows, with INT8 inputs and weights, and what follows it.

    `scale` and `offset` are kept as bits, so that a cast of the module to 16 bits does not touch
    them. A stem takes floats and quantises them itself.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        shape: Int8Shape,
        tuner: Tuner | None,
        *,
        is_stem: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`weight` has INT8 values [out, in, h, w], or [out, in] of a matmul; `dtype` is that of a
        result in floats, until the module is cast."""
        super().__init__(tuner)
        self.shape = shape
        self.is_matmul = weight.ndim != IMAGE_RANK
        if self.is_matmul:
            kept = weight.contiguous()
        else:
            kept = weight.contiguous(memory_format=torch.channels_last)
        self.register_buffer("weight", kept)
        real = weight_scale.double().expand(len(weight)).contiguous()
        unit = shape.unit
        scale = real * shape.given.scale / unit
        offset = torch.zeros_like(real) if bias is None else bias.double() / unit
        # Padding has the value of zero too, so this holds for every pixel.
        offset = offset - shape.given.zero * scale * weight.double().flatten(1).sum(1)
        if shape.out is not None and shape.activation is None:
            offset = offset + shape.out.zero
        if shape.added is not None and not shape.adds_last:
            offset = offset - shape.added.zero * shape.added.scale / unit
        self.is_stem = is_stem
        kept_values = {"scale": scale, "offset": offset}
        if has_triton():
            from penstock.kernels import int8_triton

            if is_stem:
                stride = shape.geometry.stride[0]
                packed = int8_triton.pack_stem(kept, stride)
                self.register_buffer("packed", packed)
                pairs, rest = int8_triton.pair_stem(packed, stride)
                self.register_buffer("pairs", pairs)
                self.register_buffer("pairs_rest", rest)
            self.is_short = int8_triton.is_short(weight)
            own = int8_triton.Int8Epilogue.of(
                scale,
                offset,
                *self.limits,
                out=torch.float32 if shape.out is None else torch.int8,
                activation=shape.activation,
                is_short=self.is_short,
            )
            kept_values |= {"own_scale": own.scale, "own_offset": own.offset}
        # Tiles may go past the last channel.
        padding = -len(weight) % CHANNEL_BLOCK
        for name, each in kept_values.items():
            padded = functional.pad(each.float(), (0, padding))
            self.register_buffer(f"{name}_bits", padded.view(torch.int32))
        # It gets the float type of the model when the module is cast.
        self.register_buffer("marker", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def limits(self) -> tuple[float, float]:
        """Limits of the result, in its own units."""
        out = self.shape.out
        if out is None:
            return self.shape.lowest, self.shape.highest
        lowest, highest = (
            min(max(LOWEST, limit / out.scale + out.zero), HIGHEST)
            for limit in (self.shape.lowest, self.shape.highest)
        )
        return lowest, highest

    @property
    def factor(self) -> float:
        """Factor of the residual, in units of the sums, or of the output after an activation."""
        shape = self.shape
        unit = shape.out.scale if shape.adds_last and shape.out is not None else shape.unit
        return (1.0 if shape.added is None else shape.added.scale) / unit

    @property
    def _zero(self) -> float:
        """The number added after an activation: the zero points of the output and of a residual."""
        shape = self.shape
        zero = 0.0 if shape.out is None else float(shape.out.zero)
        if shape.adds_last and shape.added is not None:
            zero -= self.factor * shape.added.zero
        return zero

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._plain(x, residual)
        if not self.is_matmul:
            is_broadcast = residual is not None and residual.shape != self._out_shape(x)
            return (self._plain if is_broadcast else self._run)(x, residual)
        out_shape = (*x.shape[:-1], len(self.weight))
        if residual is not None and residual.shape != out_shape:
            return self._plain(x, residual)
        rows = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(len(rows), -1).contiguous()
        return self._run(rows, added).view(out_shape)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        found = self.chosen.run(x, residual, self._plain)
        assert isinstance(found, torch.Tensor)
        return found

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        geometry = self.shape.geometry
        sizes = "x".join(map(str, x.shape))
        window = "x".join(map(str, self.weight.shape))
        parts = [f"int8 {sizes} {_name(x.dtype)} by {window}", f"to {self._out_dtype}"]
        if not self.is_matmul:
            parts += [f"stride {geometry.stride[0]}x{geometry.stride[1]}"]
            parts += [f"padding {geometry.padding[0]}x{geometry.padding[1]}"]
        parts += [] if residual is None else [f"residual {_name(residual.dtype)}"]
        parts += ["zero"] * bool(self.shape.given.zero) + ["limited"] * bool(self.limits[0] == 0)
        parts += [] if self.shape.activation is None else [str(self.shape.activation)]
        parts += ["before"] * self.shape.adds_last
        return " ".join(parts)

    @property
    def _out_dtype(self) -> torch.dtype:
        found: torch.dtype = torch.int8 if self.shape.out is not None else self.marker.dtype
        return found

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if not has_triton():
            return found
        from penstock.kernels import conv, int8_triton

        if max(x.numel(), self._num_out(x)) > MAX_ELEMENTS:
            return found
        out, channels = self.weight.shape[:2]
        if self.is_matmul:
            for tile in int8_triton.row_tiles(len(x), channels, out, self._row_bytes(residual)):
                found[f"triton rows {tile}"] = partial(self._by_rows, tile)
            return found
        geometry = self.shape.geometry
        window = conv.ConvWindow(tuple(self.weight.shape[2:]), geometry.stride, geometry.padding)
        num_rows = self._num_out(x) // out
        if self.is_stem:
            depth = math.prod(self.packed.shape[1:])
            # A block of one pixel is too short for a GEMM by itself.
            has_pairs = self._out_shape(x)[-1] % 2 == 0 and window.stride[0] > 1
            rest = math.prod(self.pairs_rest.shape[1:]) if has_pairs else 0
            for tile in int8_triton.stem_tiles(num_rows, out, depth, rest):
                found[f"triton stem {tile}"] = partial(self._by_stem, tile, window)
            return found
        is_flat = window.size == window.stride == (1, 1) and window.padding == (0, 0)
        if is_flat:
            row_bytes = self._row_bytes(residual)
            for tile in int8_triton.row_tiles(num_rows, channels, out, row_bytes):
                found[f"triton rows {tile}"] = partial(self._by_flat_rows, tile)
        for tile in int8_triton.window_tiles(num_rows, out, channels, math.prod(window.size)):
            num_tiles = -(-num_rows // tile.rows) * -(-out // tile.columns)
            if tile.split == 1 or self.chosen.workspace.has_room(tile, num_tiles):
                found[f"triton {tile}"] = partial(self._by_window, tile, window)
        if residual is None and num_rows >= MIN_CUDNN_ROWS and x.is_cuda and self._fits_cudnn():
            form = cudnn_int8.Int8Form(tuple(x.shape), out, window, self.limits[0] == 0)
            for plan in range(self.chosen.graphs.num_plans(form)):
                found[f"cudnn {plan}"] = partial(self._by_cudnn, form, plan)
        return found

    def _row_bytes(self, residual: torch.Tensor | None) -> list[int]:
        """Return the bytes of a row of the result, and of the residual."""
        dtypes = [self._out_dtype] if residual is None else [self._out_dtype, residual.dtype]
        return [len(self.weight) * dtype.itemsize for dtype in dtypes]

    def _fits_cudnn(self) -> bool:
        out, given = self.shape.out, self.shape.given
        is_plain = out is not None and not (out.zero or given.zero)
        is_plain &= self.shape.activation is None
        has_limits = self.limits in ((LOWEST, HIGHEST), (0, HIGHEST))
        return cudnn_int8.has_cudnn() and is_plain and has_limits

    def _num_out(self, x: torch.Tensor) -> int:
        if self.is_matmul:
            return len(x) * len(self.weight)
        return math.prod(self._out_shape(x))

    def _out_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        stride, padding, *_ = self.shape.geometry
        sizes = zip(x.shape[2:], self.weight.shape[2:], stride, padding, strict=True)
        lengths = ((length + 2 * pad - size) // step + 1 for length, size, step, pad in sizes)
        return x.shape[0], len(self.weight), *lengths

    def _after(self, residual: torch.Tensor | None, is_own: bool = True) -> Int8Epilogue:
        from penstock.kernels import int8_triton

        scale, offset = self.scale_bits, self.offset_bits
        if is_own:
            scale, offset = self.own_scale_bits, self.own_offset_bits
        shape = self.shape
        return int8_triton.Int8Epilogue(
            scale.view(torch.float32),
            offset.view(torch.float32),
            *self.limits,
            out=self._out_dtype,
            residual=residual,
            residual_factor=self.factor,
            activation=shape.activation,
            unit=1.0 if shape.out is None else shape.out.scale,
            zero=self._zero,
            adds_last=shape.adds_last,
            is_short=self.is_short,
        )

    def _by_rows(self, tile: Tile, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        from penstock.kernels import int8_triton

        return int8_triton.multiply(x.contiguous(), self.weight, self._after(residual), tile)

    def _by_flat_rows(
        self, tile: Tile, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from penstock.kernels import int8_triton

        batch, _, high, wide = x.shape
        added = None if residual is None else _rows(residual)
        y = int8_triton.multiply(_rows(x), self.weight.flatten(1), self._after(added), tile)
        return y.view(batch, high, wide, -1).permute(0, 3, 1, 2)

    def _by_window(
        self, tile: Tile, window: ConvWindow, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from penstock.kernels import int8_triton

        after = self._after(None if residual is None else _last(residual))
        filling, workspace = self.shape.given.zero, self.chosen.workspace
        return int8_triton.convolve_int8(
            _last(x), self.weight, window, filling, after, tile, workspace
        )

    def _by_stem(
        self, tile: Tile, window: ConvWindow, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from penstock.kernels import int8_triton

        given = self.shape.given
        levels, after = (given.scale, given.zero), self._after(None)
        if tile.columns > len(self.weight):
            pairs, rest = self.pairs, self.pairs_rest
            return int8_triton.convolve_stem(x, pairs, window, levels, after, tile, rest)
        return int8_triton.convolve_stem(x, self.packed, window, levels, after, tile)

    def _by_cudnn(
        self,
        form: cudnn_int8.Int8Form,
        plan: int,
        x: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        after = self._after(None, is_own=False)
        return self.chosen.graphs.convolve(form, _last(x), self.weight, after, plan)

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Integers of eight bits are exact in all float types; their sums are nearly so."""
        shape = self.shape
        if self.is_stem:
            x = _levelled(x, shape.given)
        # On a GPU, sums in FP16 would overflow.
        wide = torch.float32 if x.is_cuda else torch.float64
        given, weight = x.to(wide) - shape.given.zero, self.weight.to(wide)
        if self.is_matmul:
            total = functional.linear(given, weight)
            by_channel: tuple[int, ...] = (-1,)
        else:
            stride, padding, *_ = shape.geometry
            total = functional.conv2d(given, weight, None, stride, padding)
            by_channel = (-1, 1, 1)
        # The offset has the input's zero in it, which was subtracted above.
        scale, offset = (
            bits[: len(weight)].view(torch.float32).to(wide)
            for bits in (self.scale_bits, self.offset_bits)
        )
        offset = offset + shape.given.zero * scale * weight.flatten(1).sum(1)
        v = total * scale.view(by_channel) + offset.view(by_channel)
        added = None if residual is None else residual.to(wide) * self.factor
        if added is not None and not shape.adds_last:
            v = v + added
        if shape.activation is not None:
            v = shape.activation(v)
            v = (v if shape.out is None else v / shape.out.scale) + self._zero
        if added is not None and shape.adds_last:
            v = v + added
        v = v.clamp(*self.limits)
        if shape.out is None:
            return v.to(self._out_dtype)
        return v.round().to(torch.int8).contiguous(memory_format=_format(v))


class Int8MaxPool(nn.Module):  # type: ignore[misc]
    def __init__(self, size: Pair, stride: Pair, padding: Pair) -> None:
        super().__init__()
        self.size, self.stride, self.padding = size, stride, padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and has_triton() and x.numel() <= MAX_ELEMENTS:
            from penstock.kernels import conv, int8_triton

            return int8_triton.pool_int8(
                _last(x), conv.ConvWindow(self.size, self.stride, self.padding)
            )
        y = functional.max_pool2d(x.float(), self.size, self.stride, self.padding)
        return y.to(torch.int8).contiguous(memory_format=_format(y))


class Int8Add(nn.Module):  # type: ignore[misc]
    """The sum of two INT8 tensors of one shape, limited."""

    def __init__(self, given: tuple[Levels, Levels], out: Levels, lowest: float) -> None:
        super().__init__()
        self.given, self.out, self.lowest = given, out, lowest

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out, (one, other) = self.out, self.given
        factors = one.scale / out.scale, other.scale / out.scale
        offset = out.zero - one.zero * factors[0] - other.zero * factors[1]
        lowest = max(float(LOWEST), self.lowest / out.scale + out.zero)
        is_alike = a.shape == b.shape and not torch.compiler.is_compiling()
        if a.is_cuda and has_triton() and is_alike:
            from penstock.kernels import int8_triton

            a = _dense(a)
            b = b.contiguous(memory_format=_format_of(a))
            return int8_triton.add_int8(a, b, factors, offset, lowest)
        v = a.float() * factors[0] + b.float() * factors[1] + offset
        return v.clamp(lowest, HIGHEST).round().to(torch.int8)


class Quantize(nn.Module):  # type: ignore[misc]
    def __init__(self, levels: Levels) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and has_triton() and not torch.compiler.is_compiling():
            from penstock.kernels import int8_triton

            return int8_triton.quantize_int8(_dense(x), self.levels.scale, self.levels.zero)
        return _levelled(x, self.levels)


class Dequantize(nn.Module):  # type: ignore[misc]
    def __init__(self, levels: Levels, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.levels = levels
        # It gets the float type of the model when the module is cast.
        self.register_buffer("marker", torch.empty(0, dtype=dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and has_triton() and not torch.compiler.is_compiling():
            from penstock.kernels import int8_triton

            levels = self.levels
            return int8_triton.dequantize_int8(
                _dense(x), levels.scale, levels.zero, self.marker.dtype
            )
        return ((x.float() - self.levels.zero) * self.levels.scale).to(self.marker.dtype)


def _levelled(x: torch.Tensor, levels: Levels) -> torch.Tensor:
    found = (x.float() / levels.scale).round() + levels.zero
    return found.clamp(LOWEST, HIGHEST).to(torch.int8)


def _dense(x: torch.Tensor) -> torch.Tensor:
    is_last = x.ndim == IMAGE_RANK and x.is_contiguous(memory_format=torch.channels_last)
    return x if is_last else x.contiguous()


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _format(x: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if x.ndim == IMAGE_RANK else torch.contiguous_format


def _format_of(x: torch.Tensor) -> torch.memory_format:
    """Return the format that a dense tensor has."""
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return channels-last images as rows of channels."""
    return _last(x).permute(0, 2, 3, 1).reshape(-1, x.shape[1]).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
