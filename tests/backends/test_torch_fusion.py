"""Fused modules answer as they did, whatever they are made of; what may not be fused is not."""

import operator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_gpu import FakeGpu

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.kernels import CHOICES
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
fusion = pytest.importorskip("penstock.backends.torch_fusion")
convolution = pytest.importorskip("penstock.kernels.convolution")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
nn, functional = torch.nn, torch.nn.functional


def trained(module: nn.Module) -> nn.Module:
    """With statistics as after training, for evaluation."""
    generator = torch.Generator().manual_seed(5)
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d) and each.running_mean is not None:
            each.running_mean.normal_(0, 0.5, generator=generator)
            each.running_var.uniform_(0.5, 2.0, generator=generator)
            if each.affine:
                each.weight.data.uniform_(0.5, 1.5, generator=generator)
                each.bias.data.normal_(0, 0.5, generator=generator)
    return module.eval()


def images(batch: int = 2, channels: int = 8, size: int = 9) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def layers_of(found) -> list:
    """Fused convolutions as (has a residual, has an activation), in the order they run."""
    graph = found.module.graph
    return [
        (len(node.args) == 2, found.module.get_submodule(node.target).activation is not None)
        for node in graph.nodes
        if node.op == "call_module"
        and isinstance(found.module.get_submodule(node.target), convolution.Convolution)
    ]


def left_over(found) -> list[str]:
    """What else is in the graph."""
    nodes = [node for node in found.module.graph.nodes if node.op.startswith("call")]
    modules = [
        type(found.module.get_submodule(node.target)).__name__
        if node.op == "call_module"
        else getattr(node.target, "__name__", str(node.target))
        for node in nodes
    ]
    return [name for name in modules if name != "Convolution"]


def assert_same_answers(module: nn.Module, found, x: torch.Tensor | None = None) -> None:
    x = images() if x is None else x
    with torch.inference_mode():
        wanted, answer = module(x.clone()), found.module(x.clone())
    scale = float(wanted.abs().max())
    assert torch.allclose(answer, wanted, atol=2e-6 * max(1.0, scale), rtol=1e-5)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, middle: int, stride: int = 1, is_first: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, 2 * middle, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * middle)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if is_first:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 2 * middle, 1, stride, bias=False), nn.BatchNorm2d(2 * middle)
            )

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class TinyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(
            Bottleneck(8, 8, is_first=True), Bottleneck(16, 8), Bottleneck(16, 16, 2, True)
        )
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.blocks(self.pool(self.stem(x)))
        x = torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1)
        return self.head(self.dropout(x))


def test_residual_network_is_convolutions_pool_and_head():
    module = trained(TinyResNet())
    found = fusion.fuse(module)
    assert_same_answers(module, found, images(channels=3, size=32))
    assert left_over(found) == ["MaxPool", "adaptive_avg_pool2d", "flatten", "Linear"]
    block, first = [(False, True), (False, True), (True, True)], [(False, False)]
    expected = [(False, True), *block[:2], *first, block[2], *block, *block[:2], *first, block[2]]
    assert layers_of(found) == expected
    assert found.facts() == {"fusion": "12 convolutions: 12 torch"}
    assert found.files() == {}


def test_the_bias_of_a_convolution_that_is_only_added_goes_to_the_other():
    module = trained(TinyResNet())
    found = fusion.fuse(module)
    assert [layer.bias is None for layer in found.layers].count(True) == 2


def test_the_original_is_left_as_it_was():
    module = trained(TinyResNet())
    x = images(channels=3, size=32)
    before = module(x)
    fusion.fuse(module)
    assert torch.equal(module(x), before)


class Said(nn.Module):
    """A convolution and a normalisation, and the rest as said."""

    def __init__(self, forward, *, act: nn.Module | None = None, conv: nn.Module | None = None):
        super().__init__()
        self.conv = conv or nn.Conv2d(8, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 8, 1)
        self.bn = nn.BatchNorm2d(8)
        self.act = act or nn.ReLU()
        self._said = forward

    def forward(self, x):
        return self._said(self, x)


def sub_in_place(x):
    x -= 1
    return x


ALL, RELU, ADD, NONE = (True, True), (False, True), (True, False), (False, False)
FORMS = {
    "conv alone": (lambda m, x: m.conv(x), [NONE], []),
    "conv and relu": (lambda m, x: m.act(m.conv(x)), [RELU], []),
    "functional relu": (lambda m, x: functional.relu(m.bn(m.conv(x))), [RELU], []),
    "relu by position in place": (lambda m, x: functional.relu(m.conv(x), True), [RELU], []),
    "torch relu": (lambda m, x: torch.relu(m.conv(x)), [RELU], []),
    "method relu": (lambda m, x: m.conv(x).relu_(), [RELU], []),
    "add": (lambda m, x: m.conv(x) + x, [ADD], []),
    "add on the left": (lambda m, x: functional.relu(x + m.bn(m.conv(x))), [ALL], []),
    "torch add": (lambda m, x: torch.add(x, m.conv(x)).relu(), [ALL], []),
    "method add": (lambda m, x: m.conv(x).add_(x).relu(), [ALL], []),
    "two convolutions added": (lambda m, x: m.conv(x) + m.other(x), [NONE, ADD], []),
    "shared modules": (
        lambda m, x: m.act(m.bn(m.conv(m.act(m.bn(m.conv(x)))))),
        [RELU, RELU],
        [],
    ),
    "a batch norm of two": (lambda m, x: m.bn(m.conv(x)) + m.bn(m.other(x)), [NONE, ADD], []),
    "relu before the add": (lambda m, x: m.act(m.conv(x)) + x, [ALL], []),
    "one before and one after": (
        lambda m, x: torch.sigmoid(m.act(m.conv(x)) + x),
        [ALL],
        ["sigmoid"],
    ),
    "two activations": (lambda m, x: torch.sigmoid(m.act(m.conv(x))), [RELU], ["sigmoid"]),
    "two additions": (lambda m, x: m.conv(x) + x + x, [ADD], ["add"]),
    "silu written out": (lambda m, x: (lambda y: y * torch.sigmoid(y))(m.conv(x)), [RELU], []),
    "hard-swish written out": (
        lambda m, x: (lambda y: functional.hardsigmoid(y) * y)(m.bn(m.conv(x))) + x,
        [ALL],
        [],
    ),
    "relu6": (lambda m, x: functional.relu6(m.bn(m.conv(x))), [RELU], []),
    "clamp": (lambda m, x: m.conv(x).clamp(-0.5, 0.5), [RELU], []),
    "clamp by name": (lambda m, x: torch.clamp(m.conv(x), max=0.5, min=0.0), [RELU], []),
    "gelu": (lambda m, x: functional.gelu(m.conv(x)), [RELU], []),
    "gelu by tanh": (lambda m, x: functional.gelu(m.conv(x), approximate="tanh") + x, [ALL], []),
    "leaky": (lambda m, x: functional.leaky_relu(m.conv(x), 0.2, True), [RELU], []),
    # What must stay.
    "a gate in place of its input": (
        lambda m, x: (lambda y: functional.hardsigmoid(y, inplace=True) * y)(m.conv(x)),
        [NONE],
        ["hardsigmoid", "mul"],
    ),
    "sigmoid of another": (
        lambda m, x: (lambda y: y * torch.sigmoid(x))(m.conv(x)),
        [NONE],
        ["sigmoid", "mul"],
    ),
    "clamp on one side": (lambda m, x: m.conv(x).clamp(max=0.5), [NONE], ["clamp"]),
    "clamp by a tensor": (lambda m, x: torch.clamp(m.conv(x), x, x), [NONE], ["clamp"]),
    "conv with two users": (lambda m, x: (lambda y: m.act(y) + y)(m.conv(x)), [NONE], None),
    "norm with two users": (
        lambda m, x: (lambda y: functional.relu(y) * y)(m.bn(m.conv(x))),
        [NONE],
        ["relu", "mul"],
    ),
    "added to itself": (lambda m, x: (lambda y: y + y)(m.conv(x)), [NONE], ["add"]),
    "a number added": (lambda m, x: torch.relu(m.conv(x) + 1.0), [NONE], ["add", "relu"]),
    "add with alpha": (lambda m, x: torch.add(m.conv(x), x, alpha=2.0), [NONE], ["add"]),
    "written to the other": (
        lambda m, x: (lambda y: y.add_(m.conv(y)) + y)(x * 1.0),
        [NONE],
        ["mul", "add_", "add"],
    ),
    "norm before": (lambda m, x: m.conv(m.bn(x)), [NONE], ["BatchNorm2d"]),
    "elu": (lambda m, x: functional.elu(m.conv(x)), [NONE], ["elu"]),
    "written to what somebody holds": (
        lambda m, x: (lambda y: sub_in_place(y) * y)(m.conv(x)),
        [NONE],
        ["isub", "mul"],
    ),
    # The convolution reads before something writes there.
    "input written to in between": (
        lambda m, x: (lambda y: m.conv(y) + sub_in_place(y))(x * 1.0),
        [NONE],
        ["mul", "isub", "add"],
    ),
    "a view of it written to in between": (
        lambda m, x: (lambda y: m.conv(y) + y[:, :].mul_(3.0))(x * 1.0),
        [NONE],
        ["mul", "getitem", "mul_", "add"],
    ),
    "something else written to in between": (
        lambda m, x: (lambda y: m.conv(x) + sub_in_place(y))(x * 1.0),
        [ADD],
        ["mul", "isub"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    forward, layers, rest = FORMS[name]
    torch.manual_seed(0)
    module = trained(Said(forward))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert layers_of(found) == layers
    if rest is not None:
        assert left_over(found) == rest


ACTIVATIONS = {
    "clamp 0 6": nn.ReLU6(inplace=True),
    "clamp -0.5 2": nn.Hardtanh(-0.5, 2.0),
    "leaky_relu 0.3 0": nn.LeakyReLU(0.3),
    "silu": nn.SiLU(inplace=True),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "sigmoid": nn.Sigmoid(),
    "hard_sigmoid 0.166667 0.5": nn.Hardsigmoid(),
    "hard_swish": nn.Hardswish(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("order", ["alone", "then added", "of the sum"])
def test_activations_in_every_place(name, order):
    forward = {
        "alone": lambda m, x: m.act(m.bn(m.conv(x))),
        "then added": lambda m, x: m.act(m.bn(m.conv(x))) + x,
        "of the sum": lambda m, x: m.act(m.bn(m.conv(x)) + x),
    }[order]
    module = trained(Said(forward, act=ACTIVATIONS[name]))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    (layer,) = found.layers
    assert str(layer.activation) == name and left_over(found) == []
    assert layer.adds_last == (order == "then added")


def test_activations_that_kernels_do_not_have_stay():
    module = trained(Said(lambda m, x: m.act(m.bn(m.conv(x))), act=nn.Mish()))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert layers_of(found) == [NONE] and left_over(found) == ["Mish"]


class Gated(nn.Module):
    """Squeeze-and-excitation between two convolutions, the mean and the product as said."""

    def __init__(self, mean, product, *, size: int = 1, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 8, size)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.inner, self.outer = nn.SiLU(inplace=True), gate or nn.Sigmoid()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self._mean, self._product = mean, product

    def forward(self, x):
        y = functional.silu(self.first(x))
        factor = self.outer(self.excite(self.inner(self.squeeze(self._mean(self, y)))))
        return self.last(self._product(y, factor))


MEANS = {
    "pool": lambda m, y: m.pool(y),
    "function": lambda m, y: functional.adaptive_avg_pool2d(y, (1, 1)),
    "mean": lambda m, y: y.mean((2, 3), keepdim=True),
    "torch mean": lambda m, y: torch.mean(y, [-2, -1], True),
}


@pytest.mark.parametrize("gate", [nn.Sigmoid(), nn.Hardsigmoid()], ids=["sigmoid", "hard"])
@pytest.mark.parametrize("name", MEANS)
def test_squeeze_and_excitation_goes_into_the_convolution_after_it(name, gate):
    module = trained(Gated(MEANS[name], lambda y, factor: factor * y, gate=gate))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert left_over(found) == ["GatedConvolution"] and len(found.layers) == 2


def test_squeeze_and_excitation_before_anything_else_is_one_layer():
    module = trained(Gated(MEANS["pool"], lambda y, factor: y * factor, size=3))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert left_over(found) == ["SqueezeExcite"]
    assert found.facts() == {"fusion": "2 convolutions, 1 gates: 3 torch"}
    assert_same_answers(module, found, images()[0])


@pytest.mark.parametrize(
    ("mean", "product"),
    [
        (lambda m, y: functional.adaptive_avg_pool2d(y, 2).mean((2, 3), True), operator.mul),
        (lambda m, y: y.amax((2, 3), keepdim=True), operator.mul),
        (lambda m, y: y.mean((1, 2), keepdim=True).transpose(1, 3), operator.mul),
        (MEANS["mean"], lambda y, factor: factor * (y + 1)),
        (MEANS["mean"], lambda y, factor: y * factor + factor),
    ],
    ids=["two pools", "maximum", "other axes", "of another", "used again"],
)
def test_gates_of_another_kind_stay(mean, product):
    class Odd(Gated):
        def forward(self, x):
            y = functional.silu(self.first(x))
            pooled = self._mean(self, y)[:, :12]
            pooled = functional.pad(pooled, (0, 0, 0, 0, 0, 12 - pooled.shape[1]))
            factor = self.outer(self.excite(self.inner(self.squeeze(pooled))))
            return self.last(self._product(y, factor))

    module = trained((Odd if mean is not MEANS["mean"] else Gated)(mean, product))
    found = fusion.fuse(module, None, tracing.TraceInputs([images()], {}, has_batch=True))
    assert_same_answers(module, found)
    assert not {"SqueezeExcite", "GatedConvolution"} & set(left_over(found))


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 16, 3, groups=4),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8, bias=False),
        nn.Conv2d(8, 8, (1, 3), stride=(2, 1), padding=(0, 1)),
    ],
    ids=["grouped", "dilated", "oblong"],
)
def test_convolutions_of_all_kinds(conv):
    norm = nn.BatchNorm2d(conv.out_channels)
    module = trained(nn.Sequential(conv, norm, nn.ReLU()))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert layers_of(found) == [RELU] and left_over(found) == []


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 8, 3, padding="same"),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)),
        nn.ConvTranspose2d(8, 8, 3),
    ],
    ids=["by name", "reflected", "parametrised", "transposed"],
)
def test_convolutions_that_are_more_stay(conv):
    module = trained(nn.Sequential(conv, nn.ReLU()))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert layers_of(found) == [] and found.facts() == {"fusion": "0 convolutions: none"}


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False)],
    ids=["without weights", "of the batch"],
)
def test_norms_of_all_kinds(norm):
    module = trained(nn.Sequential(nn.Conv2d(8, 8, 3), norm, nn.ReLU()))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    is_folded = norm.running_mean is not None
    assert left_over(found) == ([] if is_folded else ["BatchNorm2d", "ReLU"])


def test_hooks_are_code_that_is_run():
    conv = nn.Conv2d(8, 8, 3)
    conv.register_forward_hook(lambda module, given, answer: answer * 2)
    module = trained(nn.Sequential(conv, nn.ReLU()))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert layers_of(found) == []


def test_a_residual_of_another_shape_is_spread_as_torch_does():
    module = trained(
        Said(lambda m, x: torch.relu(m.conv(x) + functional.adaptive_avg_pool2d(x, 1)))
    )
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert layers_of(found) == [ALL]


def test_modules_that_are_shared_keep_one_set_of_weights():
    module = trained(Said(lambda m, x: m.act(m.bn(m.conv(m.act(m.bn(m.conv(x))))))))
    first, second = fusion.fuse(module).layers
    assert first.weight is second.weight and first.bias is second.bias


def test_pools_that_do_more_stay():
    module = trained(nn.Sequential(nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(2)))
    found = fusion.fuse(module)
    assert_same_answers(module, found)
    assert left_over(found) == ["MaxPool2d", "MaxPool"]


def test_an_image_without_a_batch():
    module = trained(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)))
    assert_same_answers(module, fusion.fuse(module), images()[0])


def test_a_fused_module_can_be_exported():
    module = trained(TinyResNet())
    tuner = convolution.Tuner(CountingTimer(), torch.device("cpu"))
    found = fusion.fuse(module, tuner).module
    x = images(channels=3, size=32)
    program = torch.export.export(
        found, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
    )
    five = images(5, 3, 32)
    with torch.inference_mode():
        assert torch.allclose(program.module()(five), module(five), atol=1e-5)


def test_what_cannot_be_traced_says_why():
    module = Said(lambda m, x: m.conv(x) if float(x.sum()) > 0 else x)
    with pytest.raises(ConfigError, match="penstock.fuse: the module cannot be traced: .+"):
        fusion.fuse(module.eval())


MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        x = torch.relu(self.bn(self.conv(image)))
        return {"scores": self.head(x.mean((2, 3)))}

def factory():
    return Net()
"""


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    save_file(trained(space["factory"]()).state_dict(), tmp_path / "model.safetensors")
    return ModelConfig(
        name="net",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("image", "FP32", (3, 12, 12)),),
        outputs=(TensorSpec("scores", "FP32", (4,)),),
        max_batch_size=4,
        batching=BatchPolicy(4, is_dynamic=True),
    )


def answer(config: ModelConfig) -> tuple[np.ndarray, dict[str, str]]:
    runner = backend("pytorch")(config)
    rows = images(3, 3, 12).numpy()
    (outputs,) = runner.start(Batch({"image": rows}, 3)).wait()
    return outputs["scores"], dict(runner.built())


@pytest.mark.parametrize(("dtype", "tolerance"), [("", 1e-5), ("fp32", 1e-5), ("bf16", 0.05)])
def test_the_backend_serves_it(config, dtype, tolerance):
    options = {"penstock.fuse": "convolutions"} | ({"penstock.dtype": dtype} if dtype else {})
    plain, _ = answer(config)
    fused, built = answer(replace(config, options=options))
    np.testing.assert_allclose(fused, plain, atol=tolerance)
    assert built["fusion"] == "1 convolutions: 1 torch"


class CountingTimer:
    """As slow as it was timed before: the last implementation is the fastest."""

    def __init__(self) -> None:
        self.num_timed = 0

    def seconds(self, call) -> float:
        call()
        self.num_timed += 1
        return 1.0 / self.num_timed

    def done(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_the_backend_times_each_size_once_and_a_second_start_nothing(config, monkeypatch):
    """On a GPU that is none: tests/gpu has a real one."""
    timers = [CountingTimer(), CountingTimer()]
    cpu, folder = torch.device("cpu"), Path(config.artifact).parent

    def open_tuner(config):
        path = folder / CHOICES
        known = convolution.remembered(path.read_bytes(), cpu) if path.is_file() else {}
        return convolution.Tuner(timers.pop(0), cpu, known)

    monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: FakeGpu())
    monkeypatch.setattr("penstock.backends.pytorch.open_tuner", open_tuner)
    plain, _ = answer(replace(config, options={}))
    fused = replace(config, options={"penstock.fuse": "convolutions"})
    first = backend("pytorch")(fused)
    rows = images(3, 3, 12).numpy()
    for count in (3, 3, 1, 3):
        (outputs,) = first.start(Batch({"image": rows[:count]}, count)).wait()
        np.testing.assert_allclose(outputs["scores"], plain[:count], atol=1e-3)
    # A batch of three runs as four.
    assert first.built()["fusion_timed"] == "2 cases"
    (name,) = first.compiled()
    (folder / name).write_bytes(first.compiled()[name])
    second = backend("pytorch")(fused)
    (outputs,) = second.start(Batch({"image": rows}, 3)).wait()
    np.testing.assert_allclose(outputs["scores"], plain, atol=1e-3)
    assert second.built()["fusion_timed"] == "0 cases" and timers == []


def test_nobody_who_waits_for_an_answer_waits_for_the_timing(config, monkeypatch):
    """Requests with as many rows as they like, of which some come that were not warmed up."""
    timer, cpu = CountingTimer(), torch.device("cpu")
    monkeypatch.setattr("penstock.backends.pytorch.open_device", lambda name: FakeGpu())
    monkeypatch.setattr(
        "penstock.backends.pytorch.open_tuner", lambda config: convolution.Tuner(timer, cpu)
    )
    config = replace(config, batching=BatchPolicy(4, is_dynamic=False))
    plain, _ = answer(replace(config, options={}))
    runner = backend("pytorch")(replace(config, options={"penstock.fuse": "convolutions"}))
    rows = images(3, 3, 12).numpy()
    runner.start(Batch({"image": rows[:2]}, 2)).wait()
    runner.settle()
    before = timer.num_timed
    assert before > 0
    (outputs,) = runner.start(Batch({"image": rows}, 3)).wait()
    np.testing.assert_allclose(outputs["scores"], plain, atol=1e-3)
    assert timer.num_timed == before


def test_options_that_do_not_go_together(config, tmp_path):
    options = {"penstock.fuse": "convolutions", "penstock.compile": "default"}
    with pytest.raises(ConfigError, match="penstock.fuse: not together with penstock.compile"):
        backend("pytorch")(replace(config, options=options))
    with pytest.raises(
        ConfigError, match="penstock.fuse: 'all' is not one of convolutions, transformer, on"
    ):
        backend("pytorch")(replace(config, options={"penstock.fuse": "all"}))
    other = replace(config, artifact=str(tmp_path / "model.pt2"))
    with pytest.raises(ConfigError, match="penstock.fuse: only for module.py"):
        backend("pytorch")(replace(other, options={"penstock.fuse": "convolutions"}))
