"""Integer weights: what rounding costs, in plain torch."""

import pytest

torch = pytest.importorskip("torch")

from penstock.kernels.integer_weights import (  # noqa: E402
    IntegerWeight,
    WeightOnlyLinear,
    multiply,
    quantise_weight,
    unpacked,
)


def relative(found, wanted) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.16)])
@pytest.mark.parametrize("depth", [64, 128, 320])
def test_weights_are_rounded_to_their_bits(bits, most, depth):
    torch.manual_seed(0)
    weight = torch.randn(24, depth) * torch.logspace(-2, 2, 24)[:, None]
    made = quantise_weight(weight, bits)
    assert made.packed.shape == (24, depth * bits // 8) and made.packed.dtype == torch.uint8
    gaps = (made.matrix(torch.float32) - weight).norm(dim=1) / weight.norm(dim=1)
    assert 0 < float(gaps.max()) < most
    assert made.num_bytes < weight.nbytes / (32 / bits) * 1.6


def test_zeros_and_constants_stay_what_they_are():
    for bits in (4, 8):
        for value in (0.0, 3.0, -2.0):
            made = quantise_weight(torch.full((2, 128), value), bits)
            assert torch.allclose(made.matrix(torch.float32), torch.full((2, 128), value))


def test_the_first_of_two_is_in_the_low_half():
    assert unpacked(torch.tensor([[0x21, 0x43]], dtype=torch.uint8), 4).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_layer_is_that_of_its_rounded_weights(bits):
    linear = torch.nn.Linear(256, 40)
    layer = WeightOnlyLinear(linear, bits)
    x = torch.randn(2, 3, 256)
    weight = layer.weights.matrix(torch.float32)
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, weight, linear.bias))
    assert relative(layer(x), linear(x)) < 0.15


def test_groups_that_tiles_would_cross_are_not_for_the_kernel():
    def made(group: int, groups: int) -> IntegerWeight:
        packed = torch.zeros(2, 96, dtype=torch.uint8)
        return IntegerWeight(packed, torch.ones(2, groups), None, 96, 8, group)

    assert made(32, 3).is_regular and made(96, 1).is_regular
    assert not made(48, 2).is_regular and not made(16, 6).is_regular
    assert multiply(torch.ones(1, 96), made(48, 2)).shape == (1, 2)
