"""The pass after a library's product gives what torch gives: on a GPU, or interpreted on a CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pointwise = pytest.importorskip("penstock.kernels.pointwise")
activation = pytest.importorskip("penstock.kernels.activation")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
ACTIVATIONS = [
    activation.Activation("clamp", -0.5, 2.0),
    activation.Activation("leaky_relu", 0.1),
    activation.Activation("hard_sigmoid", 0.2, 0.5),
    *(activation.RELU, activation.RELU6, activation.SIGMOID, activation.SILU, activation.GELU),
    *(activation.GELU_TANH, activation.HARD_SIGMOID, activation.HARD_SWISH),
]


def drawn(*shape: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return (3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_every_activation(act):
    x = drawn(5, 24)
    found = pointwise.finish(x.clone(), pointwise.Epilogue(activation=act))
    torch.testing.assert_close(found, act(x), atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_what_is_no_number_stays_so_and_large_ones_do_not_become_it(act):
    x = torch.tensor([float("nan"), 1e5, -1e5, 0.0], device=DEVICE).reshape(1, 4)
    found, wanted = pointwise.finish(x.clone(), pointwise.Epilogue(activation=act)), act(x)
    assert torch.equal(found.isnan(), wanted.isnan())
    torch.testing.assert_close(found.nan_to_num(), wanted.nan_to_num(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("adds_last", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_images_with_bias_and_residual_in_both_orders(dtype, adds_last, has_bias, has_residual):
    x = drawn(2, 21, 9, 8, dtype=dtype).contiguous(memory_format=torch.channels_last)
    residual = drawn(2, 21, 9, 8, dtype=dtype).contiguous(memory_format=torch.channels_last) + 1
    bias, act = drawn(21, dtype=dtype), activation.SILU
    wanted = x.double() + (bias.double()[:, None, None] if has_bias else 0)
    if has_residual and not adds_last:
        wanted = wanted + residual.double()
    wanted = act(wanted) + (residual.double() if has_residual and adds_last else 0)
    after = pointwise.Epilogue(
        bias if has_bias else None, residual if has_residual else None, act, adds_last
    )
    found = pointwise.finish(x, after)
    assert found.dtype == dtype and found.data_ptr() == x.data_ptr()
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 10), (5, 2), (2, 300, 26), (1, 4096)])
def test_halves_are_multiplied(shape, is_first, dtype):
    x, act = drawn(*shape, dtype=dtype), activation.GELU
    one, other = x.double().chunk(2, -1)
    wanted = act(one) * other if is_first else one * act(other)
    found = pointwise.multiply_halves(x, act, is_first)
    assert found.dtype == dtype and found.shape == wanted.shape
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def test_halves_in_any_order_of_memory():
    x = drawn(6, 4, 3).transpose(1, 2)
    one, other = x.chunk(2, -1)
    found = pointwise.multiply_halves(x, activation.SILU, False)
    torch.testing.assert_close(found, one * activation.SILU(other), atol=1e-5, rtol=1e-5)
