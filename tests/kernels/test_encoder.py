"""What lies between products, interpreted, against plain torch."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from torch.nn import functional as F  # noqa: E402

from penstock.kernels import encoder  # noqa: E402


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("num_rows", [1, 37])
def test_add_norm(width, num_rows):
    torch.manual_seed(3)
    norm = torch.nn.LayerNorm(width, 1e-12)
    norm.weight.data += 0.2 * torch.randn(width)
    norm.bias.data += 0.2 * torch.randn(width)
    added, residual = torch.randn(num_rows, width), 3 + torch.randn(num_rows, width)
    found, small = encoder.add_norm(added, residual, norm)
    assert small is None
    assert torch.allclose(found, norm(added + residual), atol=1e-5)


def test_add_norm_in_e4m3():
    """The interpreter rounds e4m3 worse than devices do, so there is room."""
    norm = torch.nn.LayerNorm(64)
    x = torch.randn(5, 64)
    found, small = encoder.add_norm(x, x, norm, torch.tensor([100.0]))
    assert small.dtype == torch.float8_e4m3fn
    gap = (small.float() / 100 - found).norm() / found.norm()
    assert float(gap) < 0.15


@pytest.mark.parametrize("shape", [(1, 8), (40, 130)])
def test_gelu(shape):
    x = 3 * torch.randn(shape)
    assert torch.allclose(encoder.gelu(x), F.gelu(x), atol=1e-5)
    small = encoder.gelu(x, torch.tensor([20.0]))
    assert float((small.float() / 20 - F.gelu(x)).norm() / F.gelu(x).norm()) < 0.15


def test_fast_gelu_is_the_form_with_tanh():
    x = 3 * torch.randn(7, 130)
    found = encoder.gelu(x, is_fast=True)
    assert torch.allclose(found, F.gelu(x, approximate="tanh"), atol=1e-5)


def of_rows(x):
    return x.abs().amax(1, keepdim=True) / 448


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("num_rows", [1, 37])
def test_add_norm_in_e4m3_by_row(width, num_rows):
    norm = torch.nn.LayerNorm(width)
    # Columns behind the width of a row would be the largest of it.
    norm.weight.data[:] = torch.linspace(0.5, 3.0, width)
    x = torch.randn(num_rows, width)
    scales = torch.full((num_rows, 1), float("nan"))
    found, small = encoder.add_norm(x, x, norm, scales=scales)
    assert torch.allclose(found, norm(x + x), atol=1e-5)
    assert torch.allclose(scales, of_rows(found), rtol=1e-5)
    assert float((small.float() * scales - found).norm() / found.norm()) < 0.15


@pytest.mark.parametrize("shape", [(1, 8), (40, 130)])
@pytest.mark.parametrize("has_gelu", [False, True])
def test_rows_in_e4m3_have_scales_of_their_own(shape, has_gelu):
    x = 3 * torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    scales = torch.full((shape[0], 1), float("nan"))
    small = encoder.quantise_rows(x, scales, has_gelu=has_gelu)
    wanted = F.gelu(x) if has_gelu else x
    assert torch.allclose(scales, of_rows(wanted), rtol=1e-4)
    gaps = (small.float() * scales - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(gaps.max()) < 0.15


def test_a_row_of_zeros_stays_zeros():
    scales = torch.full((2, 1), float("nan"))
    small = encoder.quantise_rows(torch.zeros(2, 16), scales)
    assert not small.float().any() and bool((scales > 0).all())


def test_many_rows_go_together():
    x = torch.randn(encoder.MANY_ROWS + 3, 48)
    scales = torch.full((len(x), 1), float("nan"))
    small = encoder.quantise_rows(x, scales)
    assert torch.allclose(scales, of_rows(x), rtol=1e-5)
    assert float((small.float() * scales - x).norm() / x.norm()) < 0.15


def test_rows_may_share_a_calibrated_scale():
    x = torch.randn(7, 96) * torch.logspace(-2, 0, 7)[:, None]
    scales = torch.full((7, 1), float("nan"))
    small = encoder.quantise_rows(x, scales, inverse=torch.tensor([100.0]))
    assert torch.allclose(scales, torch.full((7, 1), 0.01))
    assert float((small.float() * scales - x).norm() / x.norm()) < 0.15


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("inverse", [None, 50.0])
def test_norm_in_e4m3_alone(width, has_bias, inverse):
    norm = torch.nn.LayerNorm(width, 1e-6, bias=has_bias)
    norm.weight.data += 0.3 * torch.randn(width)
    x = 5 + 3 * torch.randn(37, width)
    scales = torch.full((37, 1), float("nan"))
    factor = None if inverse is None else torch.tensor([inverse])
    same, small = encoder.norm_rows(x, norm, scales, factor)
    assert same is x
    wanted = norm(x).detach()
    assert small.dtype == torch.float8_e4m3fn
    assert torch.allclose(scales, of_rows(wanted) if inverse is None else scales * 0 + 1 / inverse)
    assert float((small.float() * scales - wanted).norm() / wanted.norm()) < 0.15


def test_norm_of_a_sum_in_e4m3():
    norm = torch.nn.LayerNorm(96, 1e-6)
    x, residual = 5 + 3 * torch.randn(37, 96), torch.randn(37, 96)
    scales = torch.full((37, 1), float("nan"))
    total, small = encoder.norm_rows(x, norm, scales, residual=residual)
    assert torch.equal(total, x + residual)
    wanted = norm(total).detach()
    assert torch.allclose(scales, of_rows(wanted))
    assert float((small.float() * scales - wanted).norm() / wanted.norm()) < 0.15
