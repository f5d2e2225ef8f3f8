"""INT8 layers: every implementation gives the same, and a layer is what its levels say."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
functional = torch.nn.functional

from penstock.kernels import has_triton  # noqa: E402
from penstock.kernels.activation import GELU, RELU, SILU, Activation  # noqa: E402
from penstock.kernels.convolution import ConvGeometry, GpuTimer, Tuner  # noqa: E402
from penstock.kernels.int8_layers import (  # noqa: E402
    Dequantize,
    Int8Add,
    Int8Layer,
    Int8MaxPool,
    Int8Shape,
    Levels,
    Quantize,
)

# Of Triton's interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class NoTimer(GpuTimer):
    def __init__(self) -> None: ...

    def seconds(self, call) -> float:
        call()
        return 1.0

    def done(self) -> None: ...


def drawn(*shape: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def layer(weight, shape: Int8Shape, tuner: Tuner | None = None, **options: object) -> Int8Layer:
    tuner = tuner or Tuner(NoTimer(), torch.device(DEVICE))
    generator = torch.Generator().manual_seed(1)
    scale = 0.01 * (torch.rand(len(weight), generator=generator) + 0.5)
    bias = torch.randn(len(weight), generator=generator)
    return Int8Layer(weight, scale, bias, shape, tuner, **options).to(DEVICE)


def in_reals(made: Int8Layer, x, residual=None):
    """What the levels mean, in FP64."""
    shape, weight = made.shape, made.weight.double()
    generator = torch.Generator().manual_seed(1)
    scale = 0.01 * (torch.rand(len(weight), generator=generator).double() + 0.5)
    bias = torch.randn(len(weight), generator=generator).double()
    real = (x.double() - shape.given.zero) * shape.given.scale
    if made.is_matmul:
        y = functional.linear(real, weight * scale[:, None], bias)
    else:
        stride, padding, *_ = shape.geometry
        y = functional.conv2d(real, weight * scale.view(-1, 1, 1, 1), bias, stride, padding)
    if residual is not None:
        levels = shape.added or Levels(1.0)
        added = (residual.double() - levels.zero) * levels.scale
        y = y if shape.adds_last else y + added
    y = y.clamp(shape.lowest, shape.highest)
    if shape.activation is not None:
        y = shape.activation(y)
    if residual is not None and shape.adds_last:
        y = y + added
    if shape.out is None:
        return y
    return ((y / shape.out.scale).round() + shape.out.zero).clamp(-128, 127)


GIVEN, ADDED, OUT = Levels(0.02, -5), Levels(0.03, 7), Levels(0.15, -128)
SHAPES = {
    "plain": Int8Shape(Levels(0.02), Levels(0.15), 0.0),
    "zeros": Int8Shape(GIVEN, OUT, added=ADDED),
    "limits": Int8Shape(GIVEN, Levels(0.15, 3), -1.5, 6.0, ADDED),
    "to floats": Int8Shape(GIVEN, None, 0.0, math.inf, ADDED),
    "silu": Int8Shape(GIVEN, Levels(0.07, -100), added=ADDED, activation=SILU),
    "leaky": Int8Shape(GIVEN, Levels(0.1), activation=Activation("leaky_relu", 0.1)),
    "silu before": Int8Shape(
        GIVEN, Levels(0.07, -10), added=ADDED, activation=SILU, adds_last=True
    ),
    "relu before, to floats": Int8Shape(GIVEN, None, added=ADDED, activation=RELU, adds_last=True),
    "gelu to floats": Int8Shape(GIVEN, None, added=ADDED, activation=GELU),
}
WINDOWS = {
    "1x1": (ConvGeometry(), 1),
    "1x1/2": (ConvGeometry((2, 2)), 1),
    "3x3": (ConvGeometry((1, 1), (1, 1)), 3),
}


def assert_same(found, wanted) -> None:
    off = (found.double().cpu() - wanted).abs()
    if found.dtype == torch.int8:
        assert off.max() <= 1
        assert (off > 0).double().mean() < 5e-3
    else:
        assert off.max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_implementation_gives_what_the_levels_mean(shape, window):
    geometry, size = window
    shape = replace(shape, geometry=geometry)
    made = layer(drawn(32, 64, size, size, seed=2), shape)
    x = drawn(2, 64, 6, 5)
    residual = None
    if shape.added is not None:
        residual = drawn(*in_reals(made.cpu(), x).shape, seed=4)
    wanted = in_reals(made.cpu(), x, residual)
    made = made.to(DEVICE)
    given = x.to(DEVICE), None if residual is None else residual.to(DEVICE)
    runs = made.implementations(*given)
    assert len(runs) > 1 or not has_triton()
    for run in runs.values():
        assert_same(run(*given), wanted)
    assert_same(made(*given), wanted)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_matmuls_of_any_rank(shape):
    made = layer(drawn(48, 64, seed=2), shape)
    x = drawn(2, 3, 64)
    residual = None if shape.added is None else drawn(2, 3, 48, seed=4)
    wanted = in_reals(made.cpu(), x, residual)
    made = made.to(DEVICE)
    given = x.to(DEVICE), None if residual is None else residual.to(DEVICE)
    found = made(*given)
    assert found.shape == (2, 3, 48)
    assert_same(found, wanted)
    flat = [None if each is None else each.flatten(0, 1) for each in given]
    for run in made.implementations(*flat).values():
        assert_same(run(*flat), wanted.flatten(0, 1))


def test_a_stem_takes_floats():
    shape = Int8Shape(Levels(0.02, 3), Levels(0.1), 0.0, geometry=ConvGeometry((2, 2), (3, 3)))
    made = layer(drawn(32, 3, 7, 7), shape, is_stem=True)
    x = torch.randn(2, 3, 20, 18, generator=torch.Generator().manual_seed(0))
    levels = ((x / 0.02).round() + 3).clamp(-128, 127)
    # The padding is zero in reals.
    wanted = in_reals(made.cpu(), levels)
    made, x = made.to(DEVICE), x.to(DEVICE)
    for run in made.implementations(x, None).values():
        assert_same(run(x, None), wanted)


def test_cases_are_told_apart_by_all_that_a_choice_depends_on():
    one = layer(drawn(32, 64, 1, 1), SHAPES["plain"])
    other = layer(drawn(32, 64, 1, 1), SHAPES["to floats"])
    x = drawn(2, 64, 6, 5)
    keys = {
        one.key(x, None),
        one.key(x, drawn(2, 32, 6, 5)),
        one.key(drawn(3, 64, 6, 5), None),
        other.key(x, None),
        other.half().key(x, None),
        layer(drawn(32, 64, 1, 1), SHAPES["silu"]).key(x, None),
        layer(drawn(32, 64, 1, 1), SHAPES["leaky"]).key(x, None),
        layer(drawn(32, 64, 1, 1), SHAPES["silu before"]).key(x, None),
    }
    assert len(keys) == 8


def test_the_tuner_times_random_bytes_and_checks_results():
    tuner = Tuner(NoTimer(), torch.device(DEVICE))
    made = layer(drawn(32, 64, 1, 1), SHAPES["plain"], tuner)
    x = drawn(2, 64, 6, 5).to(DEVICE)
    wanted = made(x)
    tuner.tune()
    assert tuner.num_tuned == 1
    assert not tuner.problems
    assert_same(made(x), wanted.double().cpu())


def test_pooling_and_sums_and_both_ways():
    x = drawn(2, 32, 7, 7).to(DEVICE)
    pooled = Int8MaxPool((3, 3), (2, 2), (1, 1))(x)
    assert torch.equal(pooled.float(), functional.max_pool2d(x.float(), 3, 2, 1))
    back = Dequantize(Levels(0.05, -3)).to(DEVICE)(x)
    assert torch.allclose(back, (x.float() + 3) * 0.05)
    assert torch.equal(Quantize(Levels(0.05, -3))(back), x)
    added = Int8Add((Levels(0.0513, -3), Levels(0.0217)), Levels(0.0671, 4), 0.0)(x, x)
    real = (x.double() + 3) * 0.0513 + x.double() * 0.0217
    wanted = ((real.clamp_min(0) / 0.0671).round() + 4).clamp(-128, 127)
    assert_same(added, wanted.cpu())
