"""Activations are recognised however they are written; what only looks like one is not."""

import pytest

torch = pytest.importorskip("torch")
activations = pytest.importorskip("penstock.backends.torch_activations")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
nn, functional = torch.nn, torch.nn.functional


class Applied(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def found_in(function) -> str:
    traced = tracing.trace(Applied(function))
    node = next(node for node in traced.graph.nodes if node.op.startswith("call"))
    return str(activations.activation_of(traced, node))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.sigmoid(), "sigmoid"),
        (lambda x: x.clamp(max=2, min=-1), "clamp -1 2"),
        (lambda x: x.clamp(min=0), "relu"),
        (lambda x: functional.hardtanh(x, -2.0, 3.0), "clamp -2 3"),
        (lambda x: functional.leaky_relu(x), "leaky_relu 0.01 0"),
        (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh"),
        (lambda x: torch.ops.aten.silu_.default(x), "silu"),
        (lambda x: torch.ops.aten.hardtanh_.default(x, 0.0, 6.0), "clamp 0 6"),
        (lambda x: torch.ops.aten.gelu.default(x), "gelu"),
        (lambda x: x.clamp(max=2), "None"),
        (lambda x: x.clamp(min=x, max=2), "None"),
        (lambda x: torch.relu(input=x), "None"),
        (lambda x: x.exp(), "None"),
    ],
)
def test_functions_and_methods(function, name):
    assert found_in(function) == name


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x * torch.sigmoid(x), 1),
        (lambda x: torch.mul(functional.hardsigmoid(x), x), 1),
        (lambda x: x.mul(x.sigmoid()), 1),
        (lambda x: x * torch.sigmoid(x + 1), 0),
        (lambda x: torch.sigmoid(x) * torch.sigmoid(x), 0),
        (lambda x: (x + 0).mul_(torch.sigmoid(x)), 0),
    ],
)
def test_products_with_a_gate_of_themselves(function, count):
    traced = tracing.trace(Applied(function))
    assert activations.restore(traced) == count
    traced.recompile()
    x = torch.linspace(-4, 4, 9)
    torch.testing.assert_close(traced(x.clone()), function(x.clone()))
