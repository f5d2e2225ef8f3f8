"""Layers choose what is fastest and right; told what was chosen, they time nothing. The kernels
among the implementations are interpreted where there is no GPU, and absent without Triton."""

import importlib.util

import msgspec
import pytest

from penstock.kernels import CHOICES

torch = pytest.importorskip("torch")
convolution = pytest.importorskip("penstock.kernels.convolution")
fusion = pytest.importorskip("penstock.backends.torch_fusion")
activation = pytest.importorskip("penstock.kernels.activation")
RELU, SILU = activation.RELU, activation.SILU
Geometry, nn = convolution.ConvGeometry, torch.nn
# Of Triton's interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
HAS_TRITON = importlib.util.find_spec("triton") is not None
CPU = torch.device("cpu")


class FakeTimer:
    """Says of one call after the other that it took so long; a second where nothing is said."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.num_done = 0

    def seconds(self, call) -> float:
        call()
        return self._seconds.pop(0) if self._seconds else 1.0

    def done(self) -> None:
        self.num_done += 1


def a_layer(tuner, channels=32, out=32, size=1, act=RELU, bias=True, last=False, **geometry):
    generator = torch.Generator().manual_seed(2)
    each = channels // geometry.get("groups", 1)
    weight = torch.randn(out, each, size, size, generator=generator)
    given = torch.randn(out, generator=generator)
    parameter = nn.Parameter(weight.contiguous(memory_format=torch.channels_last), False)
    bias = nn.Parameter(given, False) if bias else None
    return convolution.Convolution(parameter, bias, Geometry(**geometry), act, tuner, last)


def images(batch=2, channels=32, size=6):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch, channels, size, size, generator=generator)
    return x.contiguous(memory_format=torch.channels_last)


def a_tuner(timer=None, **choices):
    return convolution.Tuner(timer or FakeTimer(), CPU, dict(choices))


LAYERS = {
    "1x1": {},
    "1x1 without bias": {"bias": False},
    "1x1 without relu": {"act": None},
    "1x1 with silu": {"act": SILU},
    "1x1 with relu before the sum": {"last": True},
    "patches": {"channels": 3, "size": 4, "stride": (4, 4), "act": None},
    "patches that leave a border": {"size": 3, "stride": (3, 3), "last": True},
    "3x3": {"size": 3, "padding": (1, 1)},
    "3x3 by two": {"size": 3, "padding": (1, 1), "stride": (2, 2)},
    "few channels": {"channels": 3, "size": 7, "padding": (3, 3), "stride": (2, 2)},
    "3x3 of odd channels": {"channels": 24, "out": 40, "size": 3, "act": SILU},
    "groups": {"groups": 2, "size": 3},
    "depthwise": {"groups": 32, "size": 3, "padding": (1, 1), "act": SILU},
    "depthwise by two": {"groups": 32, "size": 5, "stride": (2, 2), "act": SILU, "last": True},
    "dilated": {"size": 3, "dilation": (2, 2)},
}
# Those that our kernels do not compute themselves.
OTHERS = ("groups", "dilated")


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_all_implementations_agree(name, has_residual):
    layer, plain = a_layer(a_tuner(), **LAYERS[name]), a_layer(None, **LAYERS[name])
    x = images(channels=LAYERS[name].get("channels", 32), size=8)
    residual = torch.randn(plain(x).shape) if has_residual else None
    wanted = plain(x, residual)
    runs = layer.implementations(x, residual)
    for run in runs.values():
        assert torch.allclose(run(x, residual), wanted, atol=2e-2, rtol=1e-3)
    expected = {"torch"} | ({"cublas"} if name.startswith(("1x1", "patches")) else set())
    if HAS_TRITON:
        steps = layer.bias is not None or layer.activation is not None or has_residual
        expected |= ({"triton"} - ({"triton"} if name in OTHERS else set())) | (
            {"epilogue"} if steps else set()
        )
    assert {each.partition(" ")[0] for each in runs} == expected


@torch.inference_mode()
def test_what_is_fastest_is_chosen_and_run():
    tuner = a_tuner(FakeTimer(3.0, 1.0, 2.0, 2.0, 2.0))
    layer, x = a_layer(tuner), images()
    before = layer(x)
    assert layer.chosen.names() == [] and tuner.choices == {}
    tuner.tune()
    assert list(tuner.choices.values()) == ["cublas"] and tuner.num_tuned == 1
    assert torch.allclose(layer(x), before, atol=1e-5)
    assert layer.chosen.names() == [(2, "cublas")]
    assert convolution.counted([layer]) == {2: {"cublas": 1}}


@torch.inference_mode()
def test_cases_are_timed_once_for_all_layers_that_are_alike():
    tuner = a_tuner()
    first, second, other = a_layer(tuner), a_layer(tuner), a_layer(tuner, out=64)
    for layer in (first, second, other):
        layer(images())
        layer(images(batch=3))
    tuner.tune()
    assert tuner.num_tuned == 4 and tuner.timer.num_done == 1
    for layer in (first, second, other):
        layer(images())
    tuner.tune()
    assert tuner.num_tuned == 4 and tuner.timer.num_done == 1


class Broken(convolution.Convolution):
    """Another implementation, which looks fast."""

    def __init__(self, like, how: str, tuner) -> None:
        super().__init__(like.weight, like.bias, like.geometry, like.activation, tuner)
        self._how = how

    def implementations(self, x, residual):
        right = super().implementations(x, residual)["torch"]

        def run(x, residual):
            if self._how == "raises":
                raise RuntimeError("no such kernel\nand a long story")
            return right(x, residual) * (1.1 if self._how == "wrong" else float("nan"))

        return {"torch": right, "broken": run}


@pytest.mark.parametrize("how", ["wrong", "nan", "raises"])
@torch.inference_mode()
def test_what_is_wrong_or_fails_is_not_chosen_and_said(how):
    tuner = a_tuner(FakeTimer(5.0))
    layer = Broken(a_layer(tuner), how, tuner)
    layer(images())
    tuner.tune()
    assert list(tuner.choices.values()) == ["torch"]
    ((case, problem),) = tuner.problems.items()
    assert case.endswith(": broken")
    assert problem == "no such kernel" if how == "raises" else "off by" in problem


@torch.inference_mode()
def test_without_room_to_try_it_out_it_is_as_torch_does_it():
    class Large(convolution.Convolution):
        def implementations(self, x, residual):
            def run(x, residual):
                raise torch.OutOfMemoryError("CUDA out of memory\nTried to allocate much")

            return {"torch": run}

    tuner = a_tuner()
    like = a_layer(tuner)
    Large(like.weight, like.bias, like.geometry, RELU, tuner)(images())
    tuner.tune()
    assert list(tuner.choices.values()) == ["torch"]
    assert list(tuner.problems.values()) == ["CUDA out of memory"]


@torch.inference_mode()
def test_what_was_chosen_is_remembered_for_the_same_machine_only():
    tuner = a_tuner(FakeTimer(3.0, 1.0, 2.0, 2.0, 2.0))
    layer = a_layer(tuner)
    layer(images())
    tuner.tune()
    layer(images())
    tuner.choices["conv of another datatype"] = "torch"
    kept = convolution.to_remember(tuner)[CHOICES]
    choices = convolution.remembered(kept, CPU)
    assert choices == {layer.key(images(), None): "cublas"}
    again = convolution.Tuner(FakeTimer(), CPU, choices)
    layer = a_layer(again)
    layer(images())
    again.tune()
    assert again.num_tuned == 0 and layer.chosen.names() == [(2, "cublas")]
    changed = msgspec.json.decode(kept)
    changed["made_for"]["torch"] = "1.0"
    assert convolution.remembered(msgspec.json.encode(changed), CPU) == {}
    assert convolution.remembered(kept[:-9], CPU) == {}


@torch.inference_mode()
def test_a_choice_that_is_not_there_is_made_again():
    tuner = a_tuner()
    layer = a_layer(tuner)
    tuner.choices[layer.key(images(), None)] = "triton 1x2x3"
    layer(images())
    tuner.tune()
    assert tuner.num_tuned == 1 and layer.key(images(), None) in tuner.choices


@torch.inference_mode()
def test_a_residual_that_is_spread_is_not_timed():
    tuner = a_tuner()
    layer, x = a_layer(tuner), images()
    found = layer(x, torch.ones(2, 32, 1, 1))
    assert torch.equal(found, a_layer(None)(x, torch.ones(2, 32, 1, 1)))
    tuner.tune()
    assert tuner.num_tuned == 0


def test_keys_tell_all_cases_apart():
    tuner, x = a_tuner(), images(channels=32)
    layers = [a_layer(tuner, **each) for each in LAYERS.values()]
    keys = {layer.key(x, residual) for layer in layers for residual in (None, x)}
    # Without a residual it does not matter when it is added.
    keys.add("the order of nothing")
    keys |= {layers[0].key(images(batch=4), None), layers[0].key(x.half(), None)}
    keys |= {layers[0].key(x.contiguous(), None)}
    assert len(keys) == 2 * len(layers) + 3


@torch.inference_mode()
def test_pools_choose_too():
    tuner = a_tuner(FakeTimer(2.0, 1.0))
    pool = convolution.MaxPool((3, 3), (2, 2), (1, 1), tuner)
    x = images(size=9)
    before = pool(x)
    tuner.tune()
    assert list(tuner.choices.values()) == ["triton" if HAS_TRITON else "torch"]
    assert torch.equal(pool(x), before)


@torch.inference_mode()
def test_a_whole_network_is_prepared_once_for_each_shape():
    tuner = a_tuner()
    module = nn.Sequential(nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU()).eval()
    found = fusion.fuse(module, tuner)
    calls = []

    def run(batch: int) -> None:
        x = images(batch=batch)
        found.prepare({"x": x}, lambda: calls.append(found.module(x)))

    for batch in (1, 4, 1, 4):
        run(batch)
    assert len(calls) == 2 and tuner.num_tuned == 2
    found.module(images(batch=1)), found.module(images(batch=4))
    text = found.facts()["fusion"]
    assert text.startswith("1 convolutions; batch 1: 1 ") and "; batch 4: 1 " in text
    assert found.facts()["fusion_timed"] == "2 cases"
    assert set(found.files()) == {"fusion.json"}
