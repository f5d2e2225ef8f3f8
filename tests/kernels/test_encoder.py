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
