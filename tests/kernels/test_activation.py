"""Activations as torch computes them, and as our kernels do."""

import pytest

torch = pytest.importorskip("torch")
activation = pytest.importorskip("penstock.kernels.activation")
nn = torch.nn

KNOWN = {
    activation.RELU: nn.ReLU(),
    activation.RELU6: nn.ReLU6(),
    activation.Activation("clamp", -0.5, 2.0): nn.Hardtanh(-0.5, 2.0),
    activation.Activation("leaky_relu", 0.1): nn.LeakyReLU(0.1),
    activation.SIGMOID: nn.Sigmoid(),
    activation.SILU: nn.SiLU(),
    activation.GELU: nn.GELU(),
    activation.GELU_TANH: nn.GELU("tanh"),
    activation.HARD_SIGMOID: nn.Hardsigmoid(),
    activation.HARD_SWISH: nn.Hardswish(),
}


@pytest.mark.parametrize("act", KNOWN, ids=str)
def test_each_is_what_torch_has_under_this_name(act):
    x = torch.linspace(-7, 7, 141)
    torch.testing.assert_close(act(x), KNOWN[act](x))


def test_every_kind_is_tested_and_names_differ():
    assert {act.kind for act in KNOWN} == set(activation.TORCH)
    assert len({str(act) for act in KNOWN}) == len(KNOWN)
    assert str(activation.RELU6) == "clamp 0 6" and str(activation.SILU) == "silu"
