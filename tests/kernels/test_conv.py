"""The kernels give what torch gives: on a GPU, or interpreted on a CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
functional = torch.nn.functional
conv = pytest.importorskip("penstock.kernels.conv")
pointwise = pytest.importorskip("penstock.kernels.pointwise")
activation = pytest.importorskip("penstock.kernels.activation")
Epilogue, Tile, Window = pointwise.Epilogue, conv.Tile, conv.ConvWindow
RELU = activation.RELU

IS_CPU = not torch.cuda.is_available()
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cpu" if IS_CPU else "cuda"
TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# The interpreter multiplies the bits of BF16.
TYPES = [torch.float16, torch.float32] + [torch.bfloat16] * (not IS_CPU)


@pytest.fixture(scope="module")
def workspace():
    return conv.Workspace(DEVICE, 1 << 18)


def drawn(*shape: int, dtype=torch.float16):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def expected(x, weight, window, epilogue):
    y = functional.conv2d(
        x.double(),
        weight.double(),
        None if epilogue.bias is None else epilogue.bias.double(),
        window.stride,
        window.padding,
    )
    if epilogue.residual is not None and not epilogue.adds_last:
        y = y + epilogue.residual.double()
    y = y if epilogue.activation is None else epilogue.activation(y)
    return y + epilogue.residual.double() if epilogue.adds_last else y


def assert_near(found, wanted) -> None:
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[found.dtype]


WINDOWS = {
    "1x1": Window((1, 1), (1, 1), (0, 0)),
    "1x1/2": Window((1, 1), (2, 2), (0, 0)),
    "3x3": Window((3, 3), (1, 1), (1, 1)),
    "3x3/2": Window((3, 3), (2, 2), (1, 1)),
    "1x3": Window((1, 3), (1, 2), (0, 1)),
}


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("name", WINDOWS)
def test_convolutions(workspace, name, split):
    """Rows that fill no tile, several tiles a column, sums shared by programs."""
    window = WINDOWS[name]
    x, weight = drawn(2, 32, 7, 6), drawn(64, 32, *window.size)
    out = (2, 64, *window.out(7, 6))
    epilogue = Epilogue(drawn(64), drawn(*out), RELU)
    tile = Tile(16, 32, 16, 4, 2, split)
    found = conv.convolve(x, weight, window, epilogue, tile, workspace)
    assert_near(found, expected(x, weight, window, epilogue))
    assert not workspace.arrived.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_relu", [False, True])
def test_epilogues(workspace, dtype, has_bias, has_residual, has_relu):
    window = WINDOWS["3x3"]
    x, weight = drawn(1, 16, 5, 5, dtype=dtype), drawn(32, 16, 3, 3, dtype=dtype)
    bias = drawn(32, dtype=dtype) if has_bias else None
    residual = drawn(1, 32, 5, 5, dtype=dtype) if has_residual else None
    epilogue = Epilogue(bias, residual, RELU if has_relu else None)
    tile = Tile(32, 32, 16, 4, 2)
    found = conv.convolve(x, weight, window, epilogue, tile, workspace)
    assert found.dtype == dtype
    assert_near(found, expected(x, weight, window, epilogue))


@pytest.mark.parametrize(
    ("size", "stride", "padding", "channels"),
    [(7, 2, 3, 3), (3, 2, 1, 3), (3, 1, 1, 1), (8, 4, 0, 4)],
)
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_images_with_few_channels(workspace, size, stride, padding, channels, is_channels_last):
    window = Window((size, size), (stride, stride), (padding, padding))
    x = drawn(2, channels, 19, 18)
    x = x if is_channels_last else x.contiguous()
    weight = drawn(32, channels, size, size)
    epilogue = Epilogue(drawn(32), activation=RELU)
    tile = conv.packed_tile(1, 32, size)
    packed = conv.pack_weight(weight)
    found = conv.convolve_packed(x, packed, window, epilogue, tile, workspace)
    assert_near(found, expected(x, weight, window, epilogue))


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
def test_pooling_is_exact_and_keeps_what_is_no_number(size, stride, padding):
    x = drawn(2, 24, 9, 7)
    x[1, 3, 4, 4] = float("nan")
    x[0, 2] = -5.0
    window = Window((size, size), (stride, stride), (padding, padding))
    found = conv.max_pool(x, window)
    wanted = functional.max_pool2d(x.float(), size, stride, padding).half()
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().any()
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("name", ["1x1", "3x3"])
@pytest.mark.parametrize(("channels", "out"), [(24, 40), (40, 24), (48, 8), (8, 33)])
def test_channels_that_fill_no_tile(workspace, name, channels, out):
    window = WINDOWS[name]
    x, weight = drawn(2, channels, 5, 6), drawn(out, channels, *window.size)
    epilogue = Epilogue(drawn(out), drawn(2, out, *window.out(5, 6)), activation.SILU, True)
    wanted = expected(x, weight, window, epilogue)
    for tile in (Tile(16, 32, 16, 4, 2), Tile(32, 32, 32, 4, 2, 2)):
        assert_near(conv.convolve(x, weight, window, epilogue, tile, workspace), wanted)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("channels", [32, 24])
def test_images_that_are_multiplied_first(workspace, channels):
    x, weight, scale = drawn(3, channels, 4, 5), drawn(32, channels, 1, 1), drawn(3, channels)
    tile, after = Tile(16, 32, 16, 4, 2), Epilogue(drawn(32))
    found = conv.convolve(x, weight, WINDOWS["1x1"], after, tile, workspace, scale)
    # As the kernel rounds it.
    scaled = (x.float() * scale.float()[:, :, None, None]).half()
    assert_near(found, expected(scaled, weight, WINDOWS["1x1"], after))


def test_tiles_fit_the_channels_and_the_rows():
    assert conv.tiles_of(49, 512, 27, 9) == []
    few = conv.tiles_of(49, 512, 512, 9)
    assert few and all(tile.split > 1 for tile in few)
    many = conv.tiles_of(256 * 56 * 56, 256, 64, 1)
    assert many and all(tile.split == 1 and tile.rows == 128 for tile in many)
    assert conv.tiles_of(256 * 56 * 56, 256, 64, 9) == []
    for out_channels in (8, 24, 40, 112, 144, 192, 320, 1000):
        for num_rows in (1, 49, 10**6):
            tiles = conv.tiles_of(num_rows, out_channels, 48, 1)
            assert tiles
            for tile in tiles:
                empty = tile.count(1, out_channels) * tile.columns - out_channels
                assert empty < max(32, out_channels), (tile, out_channels)


def test_whole_tiles_are_as_before():
    """Sizes of ResNet-50 keep the tiles that were measured for it."""
    names = {
        (out, channels): [str(tile) for tile in conv.tiles_of(10**6, out, channels, 1)]
        for out, channels in ((64, 256), (128, 512), (256, 64), (2048, 512))
    }
    assert names == {
        (64, 256): ["128x64x64x4x4x1"],
        (128, 512): ["128x128x64x8x3x1"],
        (256, 64): ["128x128x64x8x3x1", "128x256x64x8x3x1"],
        (2048, 512): ["128x128x64x8x3x1", "128x256x64x8x3x1"],
    }


def test_wider_values_are_read_in_shorter_pieces():
    for num_rows in (49, 10**6):
        depths = {
            size: {tile.depth for tile in conv.tiles_of(num_rows, 256, 256, 1, size)}
            for size in (2, 4)
        }
        assert depths == {2: {64}, 4: {32}}


def test_names_of_tiles_tell_them_apart():
    tiles = conv.tiles_of(49, 512, 512, 9) + conv.tiles_of(10**6, 512, 512, 1)
    assert len({str(tile) for tile in tiles}) == len(tiles)


def test_room_for_shared_sums(workspace):
    assert workspace.has_room(Tile(64, 32, 16, 4, 4, 2), 16)
    assert not workspace.has_room(Tile(64, 64, 16, 4, 4, 16), 16)


@pytest.mark.skipif(IS_CPU, reason="nothing is compiled on a CPU")
def test_compiled_ahead_nothing_is_run(workspace):
    window = WINDOWS["1x1"]
    x, weight, tile = drawn(1, 32, 5, 5), drawn(32, 32, 1, 1), Tile(32, 32, 32, 4, 2)
    with pointwise.compiling(2):
        conv.convolve(x, weight, window, Epilogue(), tile, workspace)
    found = conv.convolve(x, weight, window, Epilogue(), tile, workspace)
    assert_near(found, expected(x, weight, window, Epilogue()))
