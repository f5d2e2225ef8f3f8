"""The layer of a group norm: every implementation agrees, and torch runs what kernels cannot."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
convolution = pytest.importorskip("penstock.kernels.convolution")
image_norm = pytest.importorskip("penstock.kernels.image_norm")
activation = pytest.importorskip("penstock.kernels.activation")
functional = torch.nn.functional
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
HAS_TRITON = importlib.util.find_spec("triton") is not None


class LevelTimer:
    def seconds(self, call) -> float:
        call()
        return 1.0

    def done(self) -> None:
        pass


def a_layer(act=activation.SILU, num_groups: int = 4):
    tuner = convolution.Tuner(LevelTimer(), torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    weight, bias = (
        torch.nn.Parameter(torch.randn(24, generator=generator), requires_grad=False)
        for _ in range(2)
    )
    return image_norm.ImageNorm(num_groups, weight, bias, 1e-5, act, tuner), tuner


def drawn(*shape: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 2 + 0.5


@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("has_added", [False, True])
@torch.inference_mode()
def test_every_implementation_agrees(has_added, is_last):
    layer, tuner = a_layer()
    x, added = drawn(2, 24, 5, 4), drawn(2, 24, 1, 1) if has_added else None
    x = x.contiguous(memory_format=torch.channels_last) if is_last else x
    total = x if added is None else x + added
    wanted = functional.silu(functional.group_norm(total, 4, layer.weight, layer.bias, 1e-5))
    torch.testing.assert_close(layer(x, added), wanted)
    runs = layer.implementations(x, added)
    own = {"triton in parts", "triton whole"} if HAS_TRITON else set()
    assert set(runs) == {"torch"} | own
    for run in runs.values():
        torch.testing.assert_close(run(x, added), wanted, atol=1e-5, rtol=1e-5)
    tuner.tune()
    assert tuner.num_tuned == 1 and not tuner.problems
    steps = "channels_last " * is_last + "added " * has_added
    expected = f"group_norm 2x24x5x4 float32 groups 4 {steps}weight bias silu"
    assert layer.key(x, added) == expected and list(tuner.choices) == [expected]


OTHERS = {
    "three dimensions": (drawn(2, 24, 7), None),
    "five": (drawn(1, 24, 2, 3, 2), None),
    "one row for all": (drawn(2, 24, 3, 3), drawn(1, 24, 1, 1)),
    "a whole image": (drawn(2, 24, 3, 3), drawn(2, 24, 3, 3)),
    "one number": (drawn(2, 24, 3, 3), drawn(1)),
    "another datatype": (drawn(2, 24, 3, 3), drawn(2, 24, 1, 1).double()),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.inference_mode()
def test_torch_runs_other_shapes(name):
    layer, tuner = a_layer(None)
    layer = layer.double() if name == "another datatype" else layer
    x, added = OTHERS[name]
    total = x if added is None else x + added
    wanted = functional.group_norm(total, 4, layer.weight, layer.bias, 1e-5)
    torch.testing.assert_close(layer(x, added), wanted)
    tuner.tune()
    assert tuner.num_tuned == 0


@torch.inference_mode()
def test_weights_of_groups_are_spread_over_their_channels():
    weight, bias = (torch.nn.Parameter(drawn(4) + n, requires_grad=False) for n in range(2))
    layer = image_norm.ImageNorm(4, weight, bias, 1e-5, None, None, is_by_group=True)
    x = drawn(2, 12, 5, 4)
    wanted = functional.group_norm(x, 4, weight.repeat_interleave(3), bias.repeat_interleave(3))
    for run in layer.implementations(x, None).values():
        torch.testing.assert_close(run(x, None), wanted, atol=1e-5, rtol=1e-5)
    assert layer.key(x, None).endswith("weight bias by_group")
    narrow = drawn(2, 4, 5, 4)
    torch.testing.assert_close(layer(narrow), functional.group_norm(narrow, 4, weight, bias))


@torch.inference_mode()
def test_kernels_are_left_out_where_they_cannot_run():
    layer, _ = a_layer()
    assert set(layer.implementations(drawn(0, 24, 3, 3), None)) == {"torch"}
    assert set(layer.implementations(drawn(1, 24, 3, 3).double(), None)) == {"torch"}
    large = torch.empty(1, 24, 1000, 1000, device="meta")
    own = {"triton in parts"} if HAS_TRITON else set()
    assert set(layer.implementations(large, None)) == {"torch"} | own
    wide = image_norm.ImageNorm(1, None, None, 1e-5, None, None)
    assert set(wide.implementations(torch.empty(1, 5000, 2, 2), None)) == {"torch"}


@torch.inference_mode()
def test_channels_that_do_not_divide_are_torchs_error():
    layer, _ = a_layer(num_groups=5)
    with pytest.raises(RuntimeError, match="divisible"):
        layer(drawn(1, 24, 3, 3))
