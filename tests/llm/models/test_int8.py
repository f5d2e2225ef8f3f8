"""Products in INT8 beside those that are not."""

import pytest

torch = pytest.importorskip("torch")

from penstock.errors import ConfigError  # noqa: E402
from penstock.llm.models.int8 import check_int8, int8_linear  # noqa: E402

# Rows, channels, width: as models have them, and as none has.
SIZES = [(1, 96, 64), (8, 192, 576), (1, 1, 1), (3, 7, 5), (5, 13, 33), (2, 50, 24), (130, 31, 100)]


def relative(found, wanted) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def rounded(weight):
    """As eight bits for each channel have it."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round() * scales


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_that_of_rounded_weights(size, has_bias):
    """Tokens and channels of very different sizes have scales of their own."""
    torch.manual_seed(0)
    num, channels, width = size
    x = torch.randn(num, width) * torch.logspace(-3, 3, num)[:, None]
    weight = torch.randn(channels, width) * torch.logspace(-3, 3, channels)[:, None]
    bias = torch.randn(channels) if has_bias else None
    found = int8_linear(weight, bias)(x)
    wanted = x.double() @ rounded(weight).double().t()
    wanted = wanted if bias is None else wanted + bias
    assert found.dtype == torch.float32 and found.shape == (num, channels)
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 2e-3


@pytest.mark.parametrize("factor", [10, 100, 1000])
def test_values_that_are_much_larger_than_the_others_leave_them_as_they_are(factor):
    """As some of every token are in trained models. One term would lose the rest of the token."""
    torch.manual_seed(1)
    x, weight = torch.randn(4, 256), torch.randn(64, 256)
    x[:, 17] *= factor
    # Of channels that do not look at the large value, nothing covers what the others lose.
    weight[:, 17] = 0
    found = int8_linear(weight, None)(x)
    wanted = x.double() @ rounded(weight).double().t()
    assert relative(found, wanted) < 1e-4 * factor
    scales = x.abs().amax(1, keepdim=True) / 63
    one_term = (x / scales).round() * scales
    assert relative(one_term @ rounded(weight).t(), wanted) > 20 * relative(found, wanted)


def test_the_largest_sums_do_not_saturate():
    """Where two products are added in 16 bits, more bits of inputs would."""
    x, weight = torch.ones(2, 64), torch.ones(3, 64)
    x[1] = -1
    assert int8_linear(weight, None)(x).tolist() == [[64.0] * 3, [-64.0] * 3]


def test_nothing_in_is_nothing_out():
    linear = int8_linear(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), None)
    assert linear(torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert linear(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))[0].tolist() == [0.0, 0.0]


def test_who_else_is_in_the_batch_changes_nothing():
    torch.manual_seed(2)
    x, linear = torch.randn(9, 64), int8_linear(torch.randn(48, 64), None)
    x[4] *= 1e6
    alone = torch.cat([linear(x[place : place + 1]) for place in range(9)])
    assert torch.equal(linear(x), alone)


def test_a_gpu_is_told_to_take_another():
    with pytest.raises(ConfigError, match="runs on CPUs only; on cuda:0 use"):
        check_int8("cuda:0")
    check_int8("cpu")
