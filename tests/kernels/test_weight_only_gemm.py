"""Products with integer weights, interpreted, against the weights as a matrix."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from penstock.kernels import weight_only_gemm  # noqa: E402
from penstock.kernels.integer_weights import IntegerWeight, quantise_weight  # noqa: E402


def check(x, weight: IntegerWeight, bias) -> None:
    found = weight_only_gemm.multiply(x, weight, bias)
    wanted = torch.nn.functional.linear(
        x.float(), weight.matrix(torch.float32), None if bias is None else bias.float()
    )
    assert found.dtype == x.dtype
    assert float((found.float() - wanted).norm() / wanted.norm()) < 3e-3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 5, 17])
@pytest.mark.parametrize(("depth", "width"), [(128, 32), (320, 50), (64, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(bits, num_rows, depth, width, has_bias):
    """In FP16: the interpreter multiplies matrices of BF16 as if they were integers."""
    torch.manual_seed(1)
    weight = quantise_weight(torch.randn(width, depth), bits)
    bias = torch.randn(width).half() if has_bias else None
    check(torch.randn(num_rows, depth).half(), weight, bias)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_depth_is_split_where_columns_are_few(bits, has_bias, monkeypatch):
    monkeypatch.setattr(weight_only_gemm, "NUM_PROGRAMS", 8)
    torch.manual_seed(2)
    weight = quantise_weight(torch.randn(40, 128 * 13), bits)
    x = torch.randn(3, 128 * 13).half()
    check(x, weight, torch.randn(40).half() if has_bias else None)
    # A row's result does not depend on the others.
    alone = weight_only_gemm.multiply(x[:1].contiguous(), weight)
    assert torch.equal(weight_only_gemm.multiply(x, weight)[:1], alone)


@pytest.mark.parametrize("group", [32, 64, 256])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_groups_of_other_sizes(group, bits, has_zeros):
    torch.manual_seed(3)
    depth, width = 512, 24
    packed = torch.randint(0, 256, (width, depth * bits // 8), dtype=torch.uint8)
    scales = torch.rand(width, depth // group)
    zeros = torch.randint(0, 1 << bits, scales.shape).float() if has_zeros else None
    weight = IntegerWeight(packed, scales, zeros, depth, bits, group)
    check(torch.randn(2, depth).half(), weight, None)
