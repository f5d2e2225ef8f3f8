"""Convolutions fused with what follows them, run by the fastest implementation for their sizes.

Those are torch's operators one by one, cuDNN's fused ones (ReLU only), cuDNN's convolution followed
by one kernel for all the rest, a cuBLAS GEMM for windows of one pixel, and our own kernels. On a
GPU a `Tuner` times them once for each case (sizes and datatype) and drops those with wrong results.
Choices are kept with the version, so a second start times nothing. On a CPU, and for shapes that
are unknown at load, a layer uses torch's operators.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec
import torch
from torch.nn import functional

from penstock.errors import first_line
from penstock.kernels import CHOICES, KERNELS, cublaslt, has_triton
from penstock.kernels.activation import GELU_TANH, RELU, Activation
from penstock.kernels.cudnn_int8 import Int8Graphs

if TYPE_CHECKING:
    from triton import JITFunction

    from penstock.kernels.conv import Tile, Workspace
    from penstock.kernels.cublaslt import Products
    from penstock.kernels.depthwise import DepthwiseTile
    from penstock.kernels.pointwise import Epilogue

Result: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
# Of x and a residual, which may be None; layers with more inputs take them after these.
Run = Callable[..., Result]
Pair = tuple[int, int]
# Computes a factor for each image and channel.
Scale = Callable[[torch.Tensor], torch.Tensor]
REFERENCE = "torch"
# Limit of elements of a tensor: our kernels count in 32 bits, and to the end of their last block.
MAX_OFFSET = 2**31 - 2**16
# Rank of a batch of images; a single image has one less.
IMAGE_RANK = 4
# Largest relative error against torch (in norm), by datatype.
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 5e-3}
# Largest error of INT8 results: a value halfway between two may be rounded either way.
INT8_TOLERANCE = 1e-2
# Calls in a timed graph, and how often it is replayed.
NUM_CALLS, NUM_RUNS = 8, 5
# Limit of unused reserved memory during timing.
SPARE_BYTES = 4 << 30
# Limit of concurrent compilers.
MAX_COMPILERS = 16
# Families of implementations that include kernels of our own, which are compiled first.
OWN = ("triton", "epilogue", "cublas")


class Layer(Protocol):
    """A layer with several implementations of its tensors: x, a residual or None, and others."""

    def key(self, *tensors: torch.Tensor | None) -> str:
        """Return everything that the choice depends on."""

    def implementations(self, *tensors: torch.Tensor | None) -> dict[str, Run]:
        """Return what can run this case, by name; REFERENCE is right by definition."""


class ConvGeometry(NamedTuple):
    """Geometry of a convolution, in the order of torch's arguments; pairs are (height, width)."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1


class GpuTimer:
    """Timer of calls in CUDA graphs, as batches run: single launches take longer than the work."""

    def __init__(
        self, device: torch.device, num_calls: int = NUM_CALLS, num_runs: int = NUM_RUNS
    ) -> None:
        self._device = device
        self._num_calls, self._num_runs = num_calls, num_runs
        self._stream = torch.cuda.Stream(device)

    def seconds(self, call: Callable[[], object]) -> float:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(self._num_calls):
                    call()
            finally:
                graph.capture_end()
            graph.replay()
            times = [self._replayed(graph) for _ in range(self._num_runs)]
        del graph
        # Each graph had its own memory, which is returned only on request.
        reserved = torch.cuda.memory_reserved(self._device)
        if reserved - torch.cuda.memory_allocated(self._device) > SPARE_BYTES:
            torch.cuda.empty_cache()
        return statistics.median(times) / self._num_calls

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self._stream)
        graph.replay()
        end.record(self._stream)
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def done(self) -> None:
        """Free memory and reset the peak: timing is not part of what the model needs."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class Case:
    """A layer and the form of its arguments, without values."""

    layer: Layer
    # Shape, strides and datatype.
    forms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]
    device: torch.device

    def randomized(self) -> list[torch.Tensor | None]:
        """Return random arguments: GPUs are faster on zeros, and zeros hide wrong results."""
        return [None if each is None else _filled(each) for each in self.empty()]

    def empty(self) -> list[torch.Tensor | None]:
        empty = partial(torch.empty_strided, device=self.device)
        return [None if form is None else empty(*form[:2], dtype=form[2]) for form in self.forms]


class Remembered(msgspec.Struct):
    """File of choices; valid for the same hardware and libraries."""

    made_for: dict[str, str]
    choices: dict[str, str]


@dataclass
class Tuner:
    """Choice of implementation for each case: `find` returns it, `tune` times unknown cases."""

    timer: GpuTimer
    device: torch.device
    choices: dict[str, str] = field(default_factory=dict)
    # Why implementations were dropped, by case and name.
    problems: dict[str, str] = field(default_factory=dict)
    num_tuned: int = 0
    _used: set[str] = field(default_factory=set)
    _workspace: Workspace | None = None
    _waiting: dict[str, Case] = field(default_factory=dict)

    def find(
        self, layer: Layer, x: torch.Tensor, *others: torch.Tensor | None
    ) -> tuple[str, Run] | None:
        """Return the chosen implementation, or queue the case and return None."""
        key = layer.key(x, *others)
        name = self.choices.get(key)
        if name is not None and (run := layer.implementations(x, *others).get(name)):
            self._used.add(key)
            return name, run
        forms = tuple(None if t is None else (t.shape, t.stride(), t.dtype) for t in (x, *others))
        self._waiting.setdefault(key, Case(layer, forms, x.device))
        return None

    def tune(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        self._compile(waiting.values())
        for key, case in waiting.items():
            self.choices[key] = self._fastest(key, case)
            self.num_tuned += 1
        self.timer.done()

    def used(self) -> dict[str, str]:
        """Return the choices in use; a file may also have some for another datatype."""
        return {key: self.choices[key] for key in sorted(self._used)}

    @property
    def workspace(self) -> Workspace:
        if self._workspace is None:
            from penstock.kernels import conv

            self._workspace = conv.Workspace(self.device)
        return self._workspace

    @functools.cached_property
    def products(self) -> Products | None:
        """Calls to cuBLASLt, with a workspace for one stream; None if it cannot be called."""
        try:
            return cublaslt.open_products(self.device) if self.device.type == "cuda" else None
        except cublaslt.Unavailable:
            return None

    @functools.cached_property
    def graphs(self) -> Int8Graphs:
        """INT8 convolutions of cuDNN."""
        return Int8Graphs(self.device)

    def _compile(self, cases: Iterable[Case]) -> None:
        """Compile the kernels of all cases in several threads: the slowest part of tuning."""
        if not has_triton() or self.device.type != "cuda":
            return
        from penstock.kernels import pointwise

        with pointwise.compiling(min(MAX_COMPILERS, os.cpu_count() or 1)):
            for case in cases:
                tensors = case.empty()
                for name, run in case.layer.implementations(*tensors).items():
                    if name.startswith(OWN):
                        # Errors are reported when it is timed.
                        with contextlib.suppress(Exception):
                            run(*tensors)

    def _fastest(self, key: str, case: Case) -> str:
        times = {}
        try:
            tensors = case.randomized()
            runs = case.layer.implementations(*tensors)
            wanted = runs[REFERENCE](*tensors)
            tolerance = _tolerance(tensors, wanted)
        except torch.OutOfMemoryError as error:
            self.problems[key] = first_line(error)
            return REFERENCE
        for name, run in runs.items():
            try:
                check_close(run(*tensors), wanted, tolerance)
                times[name] = self.timer.seconds(partial(run, *tensors))
            except Exception as error:  # Implementations may not support the case.
                self.problems[f"{key}: {name}"] = first_line(error)
        return min(times, key=lambda name: times[name]) if times else REFERENCE


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor.random_(-128, 128)


def _tolerance(tensors: Iterable[torch.Tensor | None], wanted: Result) -> float:
    """Return the largest of those of x and of the result."""
    x = next(iter(tensors))
    results = wanted if isinstance(wanted, tuple) else (wanted,)
    dtypes = {each.dtype for each in (x, *results) if each is not None}
    return max(TOLERANCE.get(dtype, INT8_TOLERANCE) for dtype in dtypes)


def check_close(found: Result, wanted: Result, tolerance: float) -> None:
    """Raise ArithmeticError if the relative error (in norm) is beyond the tolerance."""
    if isinstance(found, tuple):
        for number, each in enumerate(found):
            check_close(each, wanted[number], tolerance)
        return
    assert isinstance(wanted, torch.Tensor)
    found, wanted = found.float(), wanted.float()
    off = float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))
    if not off <= tolerance:
        raise ArithmeticError(f"its results are off by {off:.2g}")


def _cudnn() -> str:
    """Return cuDNN's version; torch raises for a foreign one, which must not fail other models."""
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:
        return first_line(error)


def made_for(device: torch.device) -> dict[str, str]:
    version = "none"
    if has_triton():
        import triton

        version = triton.__version__
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "cudnn": _cudnn(),
        "triton": version,
    }


def remembered(content: bytes, device: torch.device) -> dict[str, str]:
    """Return the choices of a file; none if it is invalid or for other hardware or libraries."""
    try:
        found = msgspec.json.decode(content, type=Remembered)
    except msgspec.DecodeError:
        return {}
    return found.choices if found.made_for == made_for(device) else {}


def choices_file(choices: dict[str, str], device: torch.device) -> dict[str, bytes]:
    """Return the file of choices for the version's folder, by name."""
    found = Remembered(made_for(device), choices)
    return {CHOICES: msgspec.json.format(msgspec.json.encode(found), indent=1)}


def load_kernels(content: bytes) -> None:
    """Load kernels compiled before; invalid files are ignored and kernels compiled again."""
    if has_triton():
        from penstock.kernels import stored

        with contextlib.suppress(msgspec.DecodeError, ValueError, OSError):
            stored.unpack(content)


def to_remember(tuner: Tuner) -> dict[str, bytes]:
    files = choices_file(tuner.used(), tuner.device)
    if has_triton() and tuner.device.type == "cuda":
        from penstock.kernels import stored

        files[KERNELS] = stored.pack(_own_kernels())
    return files


def _own_kernels() -> list[JITFunction]:
    from penstock.kernels import (
        conv,
        depthwise,
        group_norm,
        int8_triton,
        pointwise,
        residual_norm,
        squeeze,
    )

    files = conv, depthwise, group_norm, int8_triton, pointwise, residual_norm, squeeze
    return [function for file in files for function in file.FUNCTIONS]


class Chosen:
    """Chosen implementations of one layer, by shape and datatype."""

    def __init__(self, layer: Layer, tuner: Tuner | None) -> None:
        self._layer = layer
        self._tuner = tuner
        self._runs: dict[object, tuple[str, int, Run]] = {}

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        default: Run,
        *others: torch.Tensor,
    ) -> Result:
        tuner = self._tuner
        if tuner is None:
            return default(x, residual, *others)
        shapes = tuple(each.shape for each in others)
        key = x.shape, x.dtype, None if residual is None else residual.shape, *shapes
        known = self._runs.get(key)
        if known is not None:
            return known[2](x, residual, *others)
        found = tuner.find(self._layer, x, residual, *others)
        if found is None:
            return default(x, residual, *others)
        name, run = found
        self._runs[key] = name, x.shape[0], run
        return run(x, residual, *others)

    def names(self) -> list[tuple[int, str]]:
        return [(batch, name) for name, batch, _ in self._runs.values()]

    @property
    def workspace(self) -> Workspace:
        assert self._tuner is not None
        return self._tuner.workspace

    @property
    def graphs(self) -> Int8Graphs:
        assert self._tuner is not None
        return self._tuner.graphs

    @property
    def products(self) -> Products | None:
        return None if self._tuner is None else self._tuner.products


class TunedLayer(torch.nn.Module):  # type: ignore[misc]
    """A layer that returns new memory, by the implementation chosen for its sizes."""

    def __init__(self, tuner: Tuner | None) -> None:
        super().__init__()
        self.chosen = Chosen(self, tuner)


class Convolution(TunedLayer):
    """conv2d, optionally with a tensor added to it and an activation; `adds_last`: the activation
    comes first."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        geometry: ConvGeometry,
        activation: Activation | None,
        tuner: Tuner | None,
        adds_last: bool = False,
    ) -> None:
        super().__init__(tuner)
        self.weight = weight
        self.bias = bias
        self.geometry = geometry
        self.activation = activation
        self.adds_last = adds_last
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        # Compilers and exporters get plain operators.
        is_other = x.ndim != IMAGE_RANK or torch.compiler.is_compiling()
        if is_other or (residual is not None and residual.shape != self._out_shape(x)):
            return self._plain(x, residual)
        default = self._cudnn if self.default == "cudnn" else self._plain
        return self.chosen.run(x, residual, default)

    @property
    def has_relu(self) -> bool:
        return self.activation == RELU

    @property
    def default(self) -> str:
        """Implementation to use before one is chosen."""
        is_fused = self.weight.is_cuda and self.has_relu and self.bias is not None
        return "cudnn" if is_fused else REFERENCE

    @property
    def is_depthwise(self) -> bool:
        groups = self.geometry.groups
        return bool(groups > 1 and self.weight.shape[:2] == (groups, 1))

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        out, _, *window = self.weight.shape
        geometry = self.geometry
        is_last = x.is_contiguous(memory_format=torch.channels_last)
        parts = [
            f"conv {_x(x.shape)} {'nhwc' if is_last else 'nchw'} {_name(x.dtype)}",
            f"to {out} window {_x(window)} stride {_x(geometry.stride)}",
            f"padding {_x(geometry.padding)} dilation {_x(geometry.dilation)}",
            f"groups {geometry.groups}",
        ]
        return " ".join((*parts, *self._steps(residual)))

    def _steps(self, residual: torch.Tensor | None) -> list[str]:
        """Return what follows the product, in order."""
        steps = ["bias"] * (self.bias is not None)
        rest = ["residual"] * (residual is not None)
        rest += [] if self.activation is None else [str(self.activation)]
        return steps + (rest[::-1] if self.adds_last else rest)

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        is_whole = self.default == "cudnn" and (residual is None or not self.adds_last)
        if self.default == "cudnn":
            found["cudnn"] = self._cudnn
        # Windows side by side, of one pixel or a patch, are rows of a matrix.
        if self.geometry == ConvGeometry(stride=tuple(self.weight.shape[2:])):
            found["cublas"] = self._cublas
        if not has_triton() or x.dtype not in TOLERANCE or not self._is_addressable(x):
            return found
        if self._steps(residual) and not is_whole:
            found["epilogue"] = self._by_epilogue
        if self.geometry.dilation == (1, 1):
            if self.geometry.groups == 1:
                found |= self._own(x)
            elif self.is_depthwise:
                found |= self._depthwise(x)
        return found

    def _is_addressable(self, x: torch.Tensor) -> bool:
        """Return whether our kernels can address the tensors."""
        return bool(max(x.numel(), math.prod(self._out_shape(x))) <= MAX_OFFSET)

    def _out_shape(self, x: torch.Tensor) -> tuple[int, ...]:
        stride, padding, dilation, _ = self.geometry
        sizes = zip(x.shape[2:], self.weight.shape[2:], stride, padding, dilation, strict=True)
        lengths = (
            (length + 2 * pad - dilation * (size - 1) - 1) // stride + 1
            for length, size, stride, pad, dilation in sizes
        )
        return x.shape[0], self.weight.shape[0], *lengths

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._rest(functional.conv2d(x, self.weight, self.bias, *self.geometry), residual)

    def _rest(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Apply what follows product and bias, by torch's operators."""
        if residual is not None and not self.adds_last:
            y = y + residual
        y = y if self.activation is None else self.activation(y)
        return y + residual if residual is not None and self.adds_last else y

    def _cudnn(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is None or self.adds_last:
            y = torch.cudnn_convolution_relu(x, self.weight, self.bias, *self.geometry)
            return y if residual is None else y.add_(residual)
        return torch.cudnn_convolution_add_relu(
            x, self.weight, residual, 1.0, self.bias, *self.geometry
        )

    def _epilogue(self, residual: torch.Tensor | None) -> Epilogue:
        from penstock.kernels.pointwise import Epilogue

        return Epilogue(self.bias, last(residual), self.activation, self.adds_last)

    def _by_epilogue(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Run the library's convolution, and one kernel of ours for all that follows."""
        from penstock.kernels import pointwise

        y = functional.conv2d(x, self.weight, None, *self.geometry)
        return pointwise.finish(last(y), self._epilogue(residual))

    def _cublas(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        batch, _, high, wide = self._out_shape(x)
        size_h, size_w = self.weight.shape[2:]
        pixels = x[:, :, : high * size_h, : wide * size_w].permute(0, 2, 3, 1)
        patches = pixels.unflatten(2, (wide, size_w)).unflatten(1, (high, size_h)).transpose(2, 3)
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        added = None
        if residual is not None:
            added = residual.permute(0, 2, 3, 1).reshape(-1, len(self.weight))
        y = self._product(patches.reshape(batch * high * wide, -1), weight.t(), added)
        return y.view(batch, high, wide, -1).permute(0, 3, 1, 2)

    def _product(
        self, rows: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Run as a GEMM, with bias and ReLU or GELU (tanh) as its epilogue where they come next;
        the rest is one more kernel."""
        is_next = residual is None or self.adds_last
        is_gelu = self.activation == GELU_TANH and rows.is_cuda
        if self.bias is None:
            y = torch.mm(rows, weight)
        elif is_next and (self.has_relu or is_gelu):
            y = torch._addmm_activation(self.bias, rows, weight, use_gelu=is_gelu)
            return y if residual is None else y.add_(residual)
        else:
            y = torch.addmm(self.bias, rows, weight)
        return self._rest_in_place(y, residual)

    def _rest_in_place(self, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Apply what follows product and bias to a matrix, in one kernel on a GPU."""
        if not y.is_cuda or not has_triton() or y.numel() > MAX_OFFSET:
            return self._rest(y, residual)
        if residual is None and self.activation is None:
            return y
        from penstock.kernels import pointwise

        residual = None if residual is None else residual.contiguous()
        after = pointwise.Epilogue(None, residual, self.activation, self.adds_last)
        return pointwise.finish(y, after)

    def _own(self, x: torch.Tensor, scale: Scale | None = None) -> dict[str, Run]:
        """Return our own kernels; `scale` computes a factor for each image and channel of x."""
        from penstock.kernels import conv

        out, channels, *size = self.weight.shape
        window = conv.ConvWindow(tuple(size), self.geometry.stride, self.geometry.padding)

        def by_kernel(tile: Tile, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            factors = None if scale is None else scale(x)
            after, weight = self._epilogue(residual), last(self.weight)
            return conv.convolve(
                last(x), weight, window, after, tile, self.chosen.workspace, factors
            )

        def by_packing(tile: Tile, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            if self._packed is None:
                self._packed = conv.pack_weight(self.weight)
            after = self._epilogue(residual)
            return conv.convolve_packed(x, self._packed, window, after, tile, self.chosen.workspace)

        num_rows = math.prod(self._out_shape(x)) // out
        found: dict[str, Run] = {}
        for tile in conv.tiles_of(num_rows, out, channels, math.prod(size), x.dtype.itemsize):
            num_tiles = tile.count(num_rows, out)
            if tile.split == 1 or self.chosen.workspace.has_room(tile, num_tiles):
                found[f"triton {tile}"] = partial(by_kernel, tile)
        if channels <= conv.PIXEL and size[1] <= 2 * conv.PIXEL and scale is None:
            tile = conv.packed_tile(num_rows, out, size[1])
            found[f"triton packed {tile}"] = partial(by_packing, tile)
        return found

    def _depthwise(self, x: torch.Tensor) -> dict[str, Run]:
        from penstock.kernels import conv, depthwise

        size = self.weight.shape[2:]
        if max(size) > depthwise.MAX_SIZE:
            return {}
        window = conv.ConvWindow(tuple(size), self.geometry.stride, self.geometry.padding)

        def run(
            tile: DepthwiseTile, x: torch.Tensor, residual: torch.Tensor | None
        ) -> torch.Tensor:
            if self._packed is None:
                self._packed = depthwise.pack_weight(self.weight)
            after = self._epilogue(residual)
            return depthwise.convolve(last(x), self._packed, window, after, tile)

        _, _, high, wide = self._out_shape(x)
        tiles = depthwise.tiles_of(high, wide, len(self.weight), max(size))
        return {f"triton depthwise {tile}": partial(run, tile) for tile in tiles}


class MaxPool(TunedLayer):
    """max_pool2d without indices, which torch's operator also writes."""

    def __init__(self, size: Pair, stride: Pair, padding: Pair, tuner: Tuner | None) -> None:
        super().__init__(tuner)
        self.size, self.stride, self.padding = size, stride, padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != IMAGE_RANK or torch.compiler.is_compiling():
            return self._plain(x, None)
        return self.chosen.run(x, None, self._plain)

    def key(self, x: torch.Tensor, residual: torch.Tensor | None) -> str:
        window = f"{_x(self.size)} stride {_x(self.stride)} padding {_x(self.padding)}"
        return f"max_pool {_x(x.shape)} {_name(x.dtype)} window {window}"

    def implementations(self, x: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Run]:
        found: dict[str, Run] = {REFERENCE: self._plain}
        if has_triton() and x.dtype in TOLERANCE:
            from penstock.kernels import conv

            if x.numel() <= MAX_OFFSET:
                window = conv.ConvWindow(self.size, self.stride, self.padding)
                found["triton"] = lambda x, _: conv.max_pool(last(x), window)
        return found

    def _plain(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return functional.max_pool2d(x, self.size, self.stride, self.padding)


def counted(layers: Iterable[TunedLayer]) -> dict[int, Counter[str]]:
    """Count the layers of each implementation, by batch size."""
    found: dict[int, Counter[str]] = {}
    for layer in layers:
        for batch, name in layer.chosen.names():
            found.setdefault(batch, Counter())[name.partition(" ")[0]] += 1
    return found


def last(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous(memory_format=torch.channels_last)


def _x(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
