"""Squeeze-and-excitation, alone and in the convolution after it: every implementation agrees."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
convolution = pytest.importorskip("penstock.kernels.convolution")
gated = pytest.importorskip("penstock.kernels.gated")
activation = pytest.importorskip("penstock.kernels.activation")
nn = torch.nn
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
HAS_TRITON = importlib.util.find_spec("triton") is not None


class EqualTimer:
    def seconds(self, call) -> float:
        call()
        return 1.0

    def done(self) -> None:
        pass


def a_tuner():
    return convolution.Tuner(EqualTimer(), torch.device("cpu"))


def a_gate(tuner, has_bias: bool = True):
    torch.manual_seed(0)
    squeeze, excite = nn.Linear(24, 6, bias=has_bias), nn.Linear(6, 24, bias=has_bias)
    return gated.SqueezeExcite(squeeze, activation.SILU, excite, activation.SIGMOID, tuner).eval()


def images():
    x = torch.randn(2, 24, 5, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("has_bias", [False, True])
@torch.inference_mode()
def test_a_gate_alone(has_bias):
    tuner = a_tuner()
    gate, x = a_gate(tuner, has_bias), images()
    wanted = gate(x)
    assert torch.allclose(wanted, gate.plain(x)) and not torch.allclose(wanted, x)
    runs = gate.implementations(x, None)
    assert set(runs) == {"torch"} | ({"triton"} if HAS_TRITON else set())
    for run in runs.values():
        assert torch.allclose(run(x, None), wanted, atol=1e-5)
    tuner.tune()
    assert tuner.num_tuned == 1 and not tuner.problems


@pytest.mark.parametrize("has_residual", [False, True])
@torch.inference_mode()
def test_a_gate_in_the_convolution_after_it(has_residual):
    tuner = a_tuner()
    weight = nn.Parameter(torch.randn(16, 24, 1, 1) / 4, requires_grad=False)
    bias = nn.Parameter(torch.randn(16), requires_grad=False)
    conv = convolution.Convolution(weight, bias, convolution.ConvGeometry(), None, None)
    layer = gated.GatedConvolution(conv, a_gate(tuner), tuner)
    x, residual = images(), torch.randn(2, 16, 5, 4) if has_residual else None
    wanted = conv(layer.gate.plain(x), residual)
    assert torch.allclose(layer(x, residual), wanted, atol=1e-5)
    runs = layer.implementations(x, residual)
    for name, run in runs.items():
        assert torch.allclose(run(x, residual), wanted, atol=2e-2, rtol=1e-3), name
    families = {name.partition(" ")[0] for name in runs}
    assert families == ({"torch", "cublas", "epilogue", "triton"} if HAS_TRITON else {"torch"})
    tuner.tune()
    assert tuner.num_tuned == 1 and not tuner.problems
    assert layer.key(x, residual).startswith("gate 24 6 silu sigmoid conv 2x24x5x4")
