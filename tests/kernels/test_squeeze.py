"""Squeeze-and-excitation gives what torch gives: on a GPU, or interpreted on a CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
functional = torch.nn.functional
squeeze = pytest.importorskip("penstock.kernels.squeeze")
activation = pytest.importorskip("penstock.kernels.activation")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def drawn(*shape: int, dtype=torch.float16):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def gate(channels: int, hidden: int, *, has_bias: bool = True):
    biases = (drawn(hidden), drawn(channels)) if has_bias else (None, None)
    return squeeze.GateWeights(
        *(drawn(hidden, channels) / 8, biases[0], drawn(channels, hidden) / 8, biases[1]),
        *(activation.SILU, activation.SIGMOID),
    )


def wanted_of(x, given):
    def biased(y, bias):
        return y if bias is None else y + bias.double()

    mean = x.double().mean((2, 3))
    hidden = given.inner(biased(mean @ given.squeeze.double().t(), given.squeeze_bias))
    return given.outer(biased(hidden @ given.excite.double().t(), given.excite_bias))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "hidden"), [(16, 4), (72, 20)])
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (16, 12)])
def test_factors(size, channels, hidden, has_bias):
    """Channels that fill no block, pixels in one part and in several."""
    x, given = drawn(2, channels, *size) + 0.25, gate(channels, hidden, has_bias=has_bias)
    found = squeeze.factors_of(x, given)
    assert found.shape == (2, channels) and found.dtype == torch.float16
    torch.testing.assert_close(found.double(), wanted_of(x, given), atol=2e-3, rtol=2e-3)


def test_images_multiplied():
    x, factors = drawn(3, 20, 4, 7), drawn(3, 20)
    found = squeeze.multiply(x, factors)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, x * factors[:, :, None, None])
