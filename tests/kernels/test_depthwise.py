"""Depthwise convolutions give what torch gives: on a GPU, or interpreted on a CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
functional = torch.nn.functional
depthwise = pytest.importorskip("penstock.kernels.depthwise")
pointwise = pytest.importorskip("penstock.kernels.pointwise")
activation = pytest.importorskip("penstock.kernels.activation")
conv = pytest.importorskip("penstock.kernels.conv")
Tile = depthwise.DepthwiseTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def drawn(*shape: int):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(DEVICE, torch.float16)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_windows_and_strides(size, stride, rows):
    """Channels, rows and columns that fill no tile."""
    window = conv.ConvWindow((size, size), (stride, stride), (size // 2, size // 2))
    x, weight = drawn(2, 20, 5, 6), drawn(20, 1, size, size)
    residual = drawn(2, 20, *window.out(5, 6))
    after = pointwise.Epilogue(drawn(20), residual, activation.HARD_SWISH)
    packed = depthwise.pack_weight(weight)
    found = depthwise.convolve(x, packed, window, after, Tile(rows, 4, 32))
    wanted = functional.conv2d(
        x.double(), weight.double(), after.bias.double(), stride, size // 2, groups=20
    )
    wanted = functional.hardswish(wanted + residual.double())
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=5e-3)


@pytest.mark.parametrize("size", [(1, 3), (3, 2)])
def test_oblong_windows_without_padding(size):
    window = conv.ConvWindow(size, (1, 2), (0, 0))
    x, weight = drawn(1, 16, 6, 7), drawn(16, 1, *size)
    found = depthwise.convolve(
        x, depthwise.pack_weight(weight), window, pointwise.Epilogue(), Tile(2, 8, 16)
    )
    wanted = functional.conv2d(x.double(), weight.double(), None, (1, 2), groups=16)
    torch.testing.assert_close(found.double(), wanted, atol=1e-2, rtol=5e-3)


def test_tiles_have_few_empty_columns_and_names_of_their_own():
    for out_h, out_w, channels in ((112, 112, 32), (7, 7, 1152), (1, 1, 16), (14, 14, 40)):
        tiles = depthwise.tiles_of(out_h, out_w, channels, 3)
        assert len(depthwise.tiles_of(out_h, out_w, channels, 7)) <= len(tiles)
        assert len({str(tile) for tile in tiles}) == len(tiles) > 0
        for tile in tiles:
            assert tile.rows in (1, 2, 4) and tile.rows < 2 * out_h + 1
            assert -(-out_w // tile.columns) * tile.columns < out_w + max(4, out_w)
