"""A sum and its norm in one pass are what torch gives: on a GPU, or interpreted on a CPU."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
functional = torch.nn.functional
residual_norm = pytest.importorskip("penstock.kernels.residual_norm")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def drawn(*shape: int, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 40), (5, 64), (1, 96)])
def test_sum_and_norm(shape, has_weights, has_residual, dtype):
    x, residual = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype) * 2 + 1
    width = shape[-1]
    weight, bias = (
        (drawn(width, dtype=dtype), drawn(width, dtype=dtype)) if has_weights else ((None, None))
    )
    total, normed = residual_norm.layer_norm(
        x, residual if has_residual else None, weight, bias, 1e-6
    )
    wanted = x.double() + residual.double() * has_residual
    torch.testing.assert_close(total.double(), wanted, atol=2e-3, rtol=1e-3)
    given = (None if each is None else each.double() for each in (weight, bias))
    wanted = functional.layer_norm(wanted, (width,), *given, 1e-6)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(normed.double(), wanted, atol=tolerance, rtol=tolerance)
    assert total.shape == normed.shape == shape and (has_residual or total is x)


def test_rows_in_any_order_of_memory():
    x = drawn(3, 40, 5, dtype=torch.float32).transpose(1, 2)
    _, normed = residual_norm.layer_norm(x, None, None, None, 1e-5)
    torch.testing.assert_close(normed, functional.layer_norm(x, (40,)), atol=1e-5, rtol=1e-5)


def test_large_values_do_not_overflow_in_half_precision():
    x = torch.full((2, 64), 200.0, dtype=torch.float16, device=DEVICE)
    x[:, ::2] = -300.0
    _, normed = residual_norm.layer_norm(x, None, None, None, 1e-5)
    assert normed.isfinite().all() and float(normed.float().std()) == pytest.approx(1, abs=0.02)
