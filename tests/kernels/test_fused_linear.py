"""Layers of transformers: every implementation gives what torch gives. Kernels are interpreted
where there is no GPU, and absent without Triton."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
convolution = pytest.importorskip("penstock.kernels.convolution")
fused_linear = pytest.importorskip("penstock.kernels.fused_linear")
activation = pytest.importorskip("penstock.kernels.activation")
nn, functional = torch.nn, torch.nn.functional
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU = torch.device("cpu")


class LastTimer:
    """Says of every call that it was faster than those before."""

    def __init__(self) -> None:
        self.num_timed = 0

    def seconds(self, call) -> float:
        call()
        self.num_timed += 1
        return 1.0 / self.num_timed

    def done(self) -> None:
        pass


def a_tuner():
    return convolution.Tuner(LastTimer(), CPU)


def drawn(*shape: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def a_linear(tuner, act, has_bias=True, adds_last=False):
    weight = nn.Parameter(fused_linear.as_window(drawn(40, 24) / 4), requires_grad=False)
    bias = nn.Parameter(drawn(40), requires_grad=False) if has_bias else None
    return fused_linear.FusedLinear(weight, bias, act, tuner, adds_last)


@pytest.mark.parametrize("act", [None, activation.GELU, activation.GELU_TANH, activation.RELU])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("order", ["", "before", "after"])
@torch.inference_mode()
def test_all_implementations_of_a_linear_layer_agree(act, has_bias, order):
    layer = a_linear(a_tuner(), act, has_bias, order == "after")
    x, residual = drawn(2, 5, 24), drawn(2, 5, 40) if order else None
    wanted = functional.linear(x, layer.matrix, layer.bias)
    wanted = wanted + residual if order == "before" else wanted
    wanted = wanted if act is None else act(wanted)
    wanted = wanted + residual if order == "after" else wanted
    runs = layer.implementations(x, residual)
    for name, run in runs.items():
        found = run(x, residual)
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-3, msg=name)
    families = {name.partition(" ")[0] for name in runs}
    assert families == {"torch", "cublas"} | ({"triton"} if HAS_TRITON else set())


@torch.inference_mode()
def test_a_linear_layer_is_timed_once_for_a_shape():
    tuner = a_tuner()
    layer, x = a_linear(tuner, activation.GELU), drawn(2, 5, 24)
    before = layer(x)
    tuner.tune()
    assert tuner.num_tuned == 1 and not tuner.problems
    torch.testing.assert_close(layer(x), before, atol=2e-2, rtol=2e-3)
    ((batch, name),) = layer.chosen.names()
    assert batch == 2 and name.partition(" ")[0] == ("triton" if HAS_TRITON else "cublas")
    # A row for all, as torch spreads it.
    row = drawn(40)
    wanted = activation.GELU(functional.linear(x, layer.matrix, layer.bias) + row)
    torch.testing.assert_close(layer(x, row), wanted)
    tuner.tune()
    assert tuner.num_tuned == 1


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@torch.inference_mode()
def test_norms(has_residual, has_weights):
    tuner = a_tuner()
    norm = nn.LayerNorm(24, 1e-6, elementwise_affine=has_weights)
    layer = fused_linear.ResidualNorm(norm, tuner)
    x, residual = drawn(2, 5, 24), drawn(2, 5, 24) + 1
    given = (x, residual) if has_residual else (x,)
    before = layer(*given)
    tuner.tune()
    found = layer(*given)
    names = [name for _, name in layer.chosen.names()]
    assert names == ["triton" if HAS_TRITON else "torch"] and not tuner.problems
    torch.testing.assert_close(found, before, atol=1e-5, rtol=1e-5)
    wanted = norm(x + residual if has_residual else x)
    torch.testing.assert_close(found[1] if has_residual else found, wanted, atol=1e-5, rtol=1e-5)
    if has_residual:
        torch.testing.assert_close(found[0], x + residual)
        spread = layer(x, residual[:1])
        torch.testing.assert_close(spread[0], x + residual[:1])


@torch.inference_mode()
def test_a_sum_that_is_wrong_is_not_chosen():
    """Both results are compared."""

    class Wrong(fused_linear.ResidualNorm):
        def implementations(self, x, residual):
            right = super().implementations(x, residual)["torch"]
            return {
                "torch": right,
                "wrong sum": lambda x, r: (right(x, r)[0] * 1.1, right(x, r)[1]),
                "wrong norm": lambda x, r: (right(x, r)[0], right(x, r)[1] * 1.1),
            }

    tuner = a_tuner()
    Wrong(nn.LayerNorm(24), tuner)(drawn(2, 24), drawn(2, 24) + 1)
    tuner.tune()
    assert list(tuner.choices.values()) == ["torch"] and len(tuner.problems) == 2


@pytest.mark.parametrize("is_first", [False, True])
@torch.inference_mode()
def test_gated_products(is_first):
    tuner = a_tuner()
    layer = fused_linear.GatedProduct(-1, activation.GELU, is_first, tuner)
    x = drawn(2, 5, 24)
    one, other = x.chunk(2, -1)
    wanted = functional.gelu(one) * other if is_first else one * functional.gelu(other)
    torch.testing.assert_close(layer(x), wanted)
    tuner.tune()
    torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-5)
    names = [name for _, name in layer.chosen.names()]
    assert names == ["triton" if HAS_TRITON else "torch"] and not tuner.problems
    assert list(tuner.choices) == [
        f"halves 2x5x24 float32 {'first' if is_first else 'second'} gelu"
    ]
    # Halves along another axis are torch's.
    rows = fused_linear.GatedProduct(0, activation.SILU, False, tuner)
    one, other = x.chunk(2, 0)
    torch.testing.assert_close(rows(x), one * functional.silu(other))
    tuner.tune()
    assert tuner.num_tuned == 1


@pytest.mark.parametrize("is_causal", [False, True])
@torch.inference_mode()
def test_attention_of_three_tensors_is_chosen_too(is_causal):
    tuner = a_tuner()
    layer = fused_linear.Attention(0.3, is_causal, tuner)
    heads = fused_linear.split_heads(drawn(2, 5, 3 * 16), 2)
    before = layer(*heads)
    tuner.tune()
    assert torch.equal(layer(*heads), before) and tuner.num_tuned == 1
    query, key, value = heads
    scores = query @ key.transpose(-1, -2) * 0.3
    if is_causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(before, scores.softmax(-1) @ value)
    assert fused_linear.merge_heads(before).shape == (2, 5, 16)
    assert layer.key(*heads) != layer.key(*(each.contiguous() for each in heads))
