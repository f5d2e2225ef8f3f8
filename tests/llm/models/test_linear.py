"""Products in FP8 beside those that are not."""

import pytest

torch = pytest.importorskip("torch")

from penstock.llm.models.fp8 import fp8_linear, in_fp8  # noqa: E402
from penstock.llm.models.linear import Linear  # noqa: E402


def relative(found, wanted) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_in_fp8_is_close(has_bias):
    torch.manual_seed(0)
    x = torch.randn(5, 64) * torch.logspace(-2, 2, 5)[:, None]
    weight = torch.randn(48, 64) * torch.logspace(-2, 2, 48)[:, None]
    bias = torch.randn(48) if has_bias else None
    wanted = Linear(weight, bias)(x)
    linear = fp8_linear(weight, bias)
    found = linear(x)
    assert found.dtype == torch.float32 and linear.weight.dtype == torch.float8_e4m3fn
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 0.06
    # What is taken already is not taken again.
    assert torch.equal(linear(in_fp8(x)), found)


def test_rows_and_channels_have_scales_of_their_own():
    x = torch.tensor([[448.0, 1.0], [0.0, 0.0], [-2.0, 1.0]])
    small = in_fp8(x)
    assert small.scales[:, 0].tolist() == pytest.approx([1.0, 1e-6 / 448, 2 / 448])
    assert torch.equal(small.values.float() * small.scales, x)
