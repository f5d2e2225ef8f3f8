"""Linear layers with weights of four bits beside those that are not."""

import pytest

torch = pytest.importorskip("torch")

from penstock.llm.models.int4 import (  # noqa: E402
    GROUP,
    FixedRowsLinear,
    Int4Linear,
    in_int4,
    int4_linear,
)


def relative(found, wanted) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def dense(numbers, scales, zeros):
    groups = numbers.float().unflatten(1, (-1, GROUP)) - 8
    return (groups * scales[:, :, None] + zeros[:, :, None]).flatten(1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "width"), [(16, 32), (48, 64), (960, 576), (80, 160)])
@pytest.mark.parametrize("num", [1, 5, 8, 130])
def test_a_product_is_that_of_rounded_weights(num, channels, width, has_bias):
    """Groups of very different sizes have scales of their own, and so have tokens."""
    torch.manual_seed(0)
    x = torch.randn(num, width) * torch.logspace(-3, 3, num)[:, None]
    x[:, 3] *= 100
    weight = torch.randn(channels, width) * torch.logspace(-3, 3, channels)[:, None]
    bias = torch.randn(channels) if has_bias else None
    linear = int4_linear(weight, bias)
    found = linear(x)
    wanted = x.double() @ dense(*in_int4(weight)).double().t()
    wanted = wanted if bias is None else wanted + bias
    assert isinstance(linear, Int4Linear) and found.dtype == torch.float32
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 3e-2
    assert relative(dense(*in_int4(weight)), weight.double()) < 0.1


@pytest.mark.parametrize("fewest", [8, 12, 15], ids="{} steps".format)
def test_weights_that_were_in_four_bits_are_found_again(fewest):
    """Also of groups that do not use their grid up to its end, as those of Q4_0 do not."""
    torch.manual_seed(1)
    numbers = torch.randint(0, fewest + 1, (32, 96))
    numbers[:, ::GROUP], numbers[:, 1::GROUP] = 0, fewest
    # As GGUF files have them: halves.
    scales, least = torch.rand(32, 3).half().float() + 0.5, torch.randn(32, 3).half().float()
    weight = numbers.unflatten(1, (-1, GROUP)) * scales[:, :, None] + least[:, :, None]
    found = in_int4(weight.flatten(1))
    assert torch.equal(found[0], numbers)
    torch.testing.assert_close(dense(*found), weight.flatten(1), rtol=1e-5, atol=1e-5)


def test_groups_of_one_value_are_that_value():
    weight = torch.full((16, 64), 0.75)
    weight[:, :32] = 0
    torch.testing.assert_close(dense(*in_int4(weight)), weight)
    x = torch.ones(1, 64)
    assert int4_linear(weight, None)(x)[0].tolist() == pytest.approx([24.0] * 16)


@pytest.mark.parametrize("size", [(16, 48), (24, 32), (7, 5)], ids=str)
def test_sizes_that_torch_does_not_take_are_multiplied_as_they_are(size):
    weight, x = torch.randn(size), torch.randn(3, size[1])
    linear = int4_linear(weight, None)
    assert isinstance(linear, FixedRowsLinear)
    assert torch.allclose(linear(x), x @ weight.t(), atol=1e-5)
