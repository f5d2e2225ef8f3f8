"""Linear layers in e4m3: plain torch, and the same with the kernels that quantise, interpreted."""

import os

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has the real kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from penstock.kernels.fp8_linear import E4m3Linear, Fp8Input, QuantisedRows, fits  # noqa: E402


def relative(found, wanted) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def dequantised(found: QuantisedRows):
    return (found.values.float() * found.scales).reshape(*found.sizes, -1)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("penstock.kernels.fp8_linear.uses_kernels", lambda x: True)


@pytest.mark.parametrize("largest", [None, 12.0])
@pytest.mark.parametrize("activation", ["", "gelu", "gelu_tanh"])
def test_kernels_give_what_plain_torch_gives(interpreted, largest, activation):
    torch.manual_seed(0)
    x = 2 * torch.randn(2, 5, 48)
    quantiser = Fp8Input(activation=activation, largest=largest)
    found = quantiser(x)
    assert found.values.shape == (10, 48) and found.sizes == (2, 5)
    wanted = QuantisedRows(*quantiser.plain(x.reshape(10, 48)), found.sizes)
    assert torch.allclose(found.scales, wanted.scales, rtol=1e-3)
    # The interpreter rounds e4m3 worse than devices do, so there is room.
    assert relative(dequantised(found), dequantised(wanted)) < 0.15


def test_a_norm_and_its_input_in_any_layout(interpreted):
    norm = torch.nn.LayerNorm(48)
    x = torch.randn(48, 5).t()[None]
    quantiser = Fp8Input(norm)
    assert relative(dequantised(quantiser(x)), norm(x)) < 0.15


def test_a_layer_takes_rows_that_are_quantised():
    linear = torch.nn.Linear(32, 16)
    layer, x = E4m3Linear(linear), torch.randn(3, 2, 32)
    assert torch.equal(layer(Fp8Input()(x)), layer(x))
    assert layer(x).shape == (3, 2, 16)
    assert 0 < relative(layer(x), linear(x)) < 0.06


def test_rows_of_zeros_stay_zeros():
    linear = torch.nn.Linear(32, 16)
    assert torch.allclose(E4m3Linear(linear)(torch.zeros(2, 32)), linear.bias.expand(2, 16))


def test_sizes_are_multiples_of_16():
    assert fits(torch.nn.Linear(32, 48))
    assert not fits(torch.nn.Linear(32, 10)) and not fits(torch.nn.Linear(33, 16))
