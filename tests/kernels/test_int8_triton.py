"""The INT8 kernels give what integers give: on a GPU, or interpreted on a CPU."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
functional = torch.nn.functional
int8 = pytest.importorskip("penstock.kernels.int8_triton")
conv = pytest.importorskip("penstock.kernels.conv")
from penstock.kernels.activation import (  # noqa: E402
    GELU,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    SIGMOID,
    SILU,
    Activation,
)

Tile, Window = conv.Tile, conv.ConvWindow

IS_CPU = not torch.cuda.is_available()
# Of Triton's interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
DEVICE = "cpu" if IS_CPU else "cuda"
# Any sums of this depth are short.
MAX_SHORT_DEPTH = 255
LIMITS = {"int8": (-128.0, 127.0), "relu": (0.0, 127.0), "all": (-math.inf, math.inf)}


@pytest.fixture(scope="module")
def workspace():
    return conv.Workspace(DEVICE, 1 << 18)


def drawn(*shape: int):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def epilogue(out, depth, *, limits="relu", dtype=torch.int8, residual=None, **options):
    """Return the epilogue, and scale and offset in FP64."""
    generator = torch.Generator().manual_seed(out)
    scale = (torch.rand(out, generator=generator).double() + 0.5) / (100 * depth**0.5)
    offset = 20 * torch.randn(out, generator=generator).double()
    made = int8.Int8Epilogue.of(
        *(functional.pad(each, (0, -out % 256)).to(DEVICE) for each in (scale, offset)),
        *LIMITS.get(limits, limits),
        out=dtype,
        residual=residual,
        residual_factor=0.7,
        is_short=depth <= MAX_SHORT_DEPTH,
        **options,
    )
    return made, scale.to(DEVICE), offset.to(DEVICE)


def finished(total, scale, offset, made):
    """Apply the epilogue to exact sums [..., out]."""
    v, added = total * scale + offset, 0.0
    if made.residual is not None:
        residual = made.residual
        added = 0.7 * (residual.permute(0, 2, 3, 1) if residual.ndim == 4 else residual).double()
    v = v if made.adds_last else v + added
    if made.activation is not None:
        v = made.activation(v) / made.unit + made.zero
    v = v + added if made.adds_last else v
    v = v.clamp(made.lowest, made.highest)
    return v.round() if made.out == torch.int8 else v


def assert_same(found, wanted, dtype=torch.int8) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    off = (found.double() - wanted).abs()
    if dtype == torch.int8:
        # A sum near the middle of two values may be rounded either way.
        assert off.max() <= 1
        assert (off > 0).double().mean() < 2e-3
    else:
        assert (off / wanted.abs().clamp_min(1)).max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    ("depth", "out", "tile"),
    [
        (64, 128, Tile(64, 64, 64, 4, 3, 1)),
        (64, 128, Tile(64, 64, 64, 4, 3, 0)),
        (64, 128, Tile(32, 64, 64, 4, 3, -2)),
        (64, 48, Tile(64, 32, 64, 4, 3, -1)),
        (512, 64, Tile(64, 32, 128, 4, 3, 2)),
        # Neither the depth nor the columns fill their tiles.
        (144, 48, Tile(64, 64, 128, 4, 3, 1)),
    ],
)
def test_rows(depth, out, tile, has_residual, dtype):
    x, weight = drawn(150, depth), drawn(out, depth)
    residual = drawn(150, out) if has_residual else None
    made, scale, offset = epilogue(out, depth, dtype=dtype, residual=residual)
    found = int8.multiply(x, weight, made, tile)
    wanted = finished(x.double() @ weight.double().t(), scale, offset, made)
    assert_same(found, wanted, dtype)


@pytest.mark.parametrize("limits", [(-128, 127), (3.4, 90.6), (-2.5, 6.5), (7, 7), (0.2, 0.4)])
def test_limits_between_levels(limits):
    """Limits are rounded as results are, and may leave one level only."""
    x, weight = drawn(70, 64), drawn(64, 64)
    made, scale, offset = epilogue(64, 64, limits=limits, residual=drawn(70, 64))
    wanted = finished(x.double() @ weight.double().t(), scale, offset, made)
    assert_same(int8.multiply(x, weight, made, Tile(64, 64, 64, 4, 3, 1)), wanted)


def test_sums_are_short_if_no_input_makes_them_long():
    weight = torch.full((2, 2**22 // (128 * 127)), 127, dtype=torch.int8)
    assert int8.is_short(weight)
    assert not int8.is_short(functional.pad(weight, (0, 1), value=-127))


ACTIVATIONS = [
    *(SILU, SIGMOID, HARD_SWISH, HARD_SIGMOID, GELU, GELU_TANH),
    Activation("leaky_relu", 0.1),
]


@pytest.mark.parametrize("adds_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_come_before_the_levels(activation, dtype, adds_last, workspace):
    """In every kernel that has an epilogue. Reals are some steps of the activation wide, and its
    results are spread over the levels."""
    limits = {"limits": "int8"} if dtype == torch.int8 else {"limits": "all"}
    options = {"activation": activation, "unit": 0.05, "zero": -20, **limits, "dtype": dtype}
    if dtype != torch.int8:
        options |= {"unit": 1.0, "zero": 0}
    options["adds_last"] = adds_last

    def after(depth, out, residual=None):
        made, scale, offset = epilogue(out, depth, residual=residual, **options)
        smaller = replace(made, scale=made.scale / 20, offset=made.offset / 20)
        return smaller, scale / 20, offset / 20

    def floats_of(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)

    x, weight, residual = drawn(70, 64), drawn(64, 64), floats_of(70, 64)
    for split in (1, 0, -1):
        tile = Tile(64, 64, 64, 4, 3, split)
        made, scale, offset = after(64, 64, residual)
        wanted = finished(x.double() @ weight.double().t(), scale, offset, made)
        assert_same(int8.multiply(x, weight, made, tile), wanted, dtype)
        assert wanted.unique().numel() > 10
    images, window = drawn(1, 64, 7, 6), WINDOWS["3x3"]
    weight = drawn(32, 64, 3, 3)
    residual = floats_of(1, 32, 7, 6).contiguous(memory_format=torch.channels_last)
    made, scale, offset = after(64 * 9, 32, residual)
    total = functional.conv2d(images.double(), weight.double(), None, 1, 1).permute(0, 2, 3, 1)
    wanted = finished(total, scale, offset, made).permute(0, 3, 1, 2)
    for split in (1, 2):
        tile = Tile(64, 32, 64, 4, 3, split)
        found = int8.convolve_int8(images, weight, window, 0, made, tile, workspace)
        assert_same(found, wanted, dtype)
    floats = torch.randn(1, 3, 9, 9, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = drawn(24, 3, 3, 3)
    packed = int8.pack_stem(weight, 1)
    made, scale, offset = after(packed[0].numel(), 24)
    tile = Tile(64, 32, packed[0].numel(), 4, 3, 2)
    levels = (floats / 0.02).round().clamp(-128, 127).double()
    total = functional.conv2d(levels, weight.double(), None, 1, 1).permute(0, 2, 3, 1)
    wanted = finished(total, scale, offset, made).permute(0, 3, 1, 2)
    found = int8.convolve_stem(floats, packed, window, (0.02, 0), made, tile)
    assert_same(found, wanted, dtype)


WINDOWS = {
    "1x1/2": Window((1, 1), (2, 2), (0, 0)),
    "3x3": Window((3, 3), (1, 1), (1, 1)),
    "3x3/2": Window((3, 3), (2, 2), (1, 1)),
    "1x3": Window((1, 3), (1, 2), (0, 1)),
}


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("filling", [0, -128])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows(window, filling, split, workspace):
    x, weight = drawn(2, 64, 9, 7), drawn(32, 64, *window.size)
    shape = (2, 32, *window.out(9, 7))
    made, scale, offset = epilogue(32, 64 * 9, limits="int8", residual=drawn(*shape))
    if 64 * window.size[0] * window.size[1] <= MAX_SHORT_DEPTH:
        made, scale, offset = epilogue(32, 64, limits="int8", residual=drawn(*shape))
    tile = Tile(64, 32, 64, 4, 3, split)
    found = int8.convolve_int8(x, weight, window, filling, made, tile, workspace)
    pads = window.padding
    around = functional.pad(x.double(), (pads[1], pads[1], pads[0], pads[0]), value=filling)
    total = functional.conv2d(around, weight.double(), None, window.stride)
    wanted = finished(total.permute(0, 2, 3, 1), scale, offset, made).permute(0, 3, 1, 2)
    assert_same(found, wanted)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_channels_that_fill_no_tile(workspace):
    window = WINDOWS["3x3"]
    x, weight = drawn(2, 24, 9, 7), drawn(40, 24, 3, 3)
    made, scale, offset = epilogue(40, 24 * 9, limits="int8", residual=drawn(2, 40, 9, 7))
    tile = Tile(64, 32, 32, 4, 3)
    found = int8.convolve_int8(x, weight, window, -3, made, tile, workspace)
    around = functional.pad(x.double(), (1, 1, 1, 1), value=-3)
    total = functional.conv2d(around, weight.double())
    wanted = finished(total.permute(0, 2, 3, 1), scale, offset, made).permute(0, 3, 1, 2)
    assert_same(found, wanted)


@pytest.mark.parametrize("zero", [0, 5])
@pytest.mark.parametrize(
    ("size", "stride"),
    [((7, 7), (2, 2)), ((3, 3), (2, 2)), ((3, 3), (1, 1)), ((5, 3), (2, 2)), ((4, 4), (4, 4))],
)
@pytest.mark.parametrize("image", [(17, 19), (34, 70)])
def test_a_stem_quantises_floats_itself(size, stride, zero, image):
    window = Window(size, stride, (size[0] // 2, size[1] // 2))
    x = torch.randn(3, 3, *image, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = drawn(24, 3, *size)
    packed = int8.pack_stem(weight, stride[0])
    made, scale, offset = epilogue(24, packed[0].numel())
    level = 0.02
    tile = Tile(64, 32, packed[0].numel(), 4, 3, 2)
    found = int8.convolve_stem(x, packed, window, (level, zero), made, tile)
    values = ((x / level).round() + zero).clamp(-128, 127)
    pads = window.padding
    around = functional.pad(values.double(), (pads[1], pads[1], pads[0], pads[0]), value=zero)
    total = functional.conv2d(around, weight.double(), None, stride)
    wanted = finished(total.permute(0, 2, 3, 1), scale, offset, made).permute(0, 3, 1, 2)
    assert_same(found, wanted)


@pytest.mark.parametrize(("size", "stride", "image"), [(7, 2, 36), (3, 2, 20), (4, 4, 20)])
def test_a_stem_takes_pairs_of_neighbours(size, stride, image):
    window = Window((size, size), (stride, stride), (size // 2, size // 2))
    x = torch.randn(2, 3, image, image, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = drawn(32, 3, size, size)
    packed = int8.pack_stem(weight, stride)
    depth = packed[0].numel()
    made, scale, offset = epilogue(32, depth)
    pairs, rest = int8.pair_stem(packed, stride)
    values = (x / 0.02).round().clamp(-128, 127).double()
    total = functional.conv2d(values, weight.double(), None, stride, size // 2)
    wanted = finished(total.permute(0, 2, 3, 1), scale, offset, made).permute(0, 3, 1, 2)
    given = int8.stem_tiles(10**6, 32, depth, rest[0].numel())
    tiles = [tile for tile in given if tile.columns > 32]
    assert tiles
    for tile in tiles:
        found = int8.convolve_stem(x, pairs, window, (0.02, 0), made, tile, rest)
        assert_same(found, wanted)


@pytest.mark.parametrize("channels", [32, 48])
def test_pooling(channels):
    window = Window((3, 3), (2, 2), (1, 1))
    x = drawn(2, channels, 9, 8)
    wanted = functional.max_pool2d(x.float(), 3, 2, 1)
    assert torch.equal(int8.pool_int8(x, window).float(), wanted)


def test_floats_to_levels_and_back():
    x = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    levels = int8.quantize_int8(x, 0.01, -3)
    wanted = ((x / 0.01).round() - 3).clamp(-128, 127)
    assert_same(levels, wanted.double())
    back = int8.dequantize_int8(levels, 0.01, -3, torch.float32)
    assert torch.allclose(back, (levels.float() + 3) * 0.01)


def test_sums_of_two_tensors():
    a, b = drawn(3, 50), drawn(3, 49 + 1).flip(0)
    found = int8.add_int8(a, b, (0.4173, 0.9117), 2.0, 0.0)
    wanted = (a.double() * 0.4173 + b.double() * 0.9117 + 2).clamp(0, 127).round()
    assert_same(found, wanted)


def test_rows_that_do_not_begin_at_16_bytes_have_no_tiles():
    assert not int8.row_tiles(100_000, 24, 64, [64])
    assert not int8.row_tiles(100_000, 64, 1000, [1000])
    assert not int8.row_tiles(100_000, 64, 1000, [2000, 1000])
    assert int8.row_tiles(100_000, 64, 1000, [2000])
