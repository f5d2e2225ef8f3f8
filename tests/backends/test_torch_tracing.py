"""Both ways to a graph give the same kind of graph, and the module's answers."""

import pytest

from penstock.errors import ConfigError

torch = pytest.importorskip("torch")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
fusion = pytest.importorskip("penstock.backends.torch_fusion")
Sample, nn = tracing.TraceInputs, torch.nn


class Net(nn.Module):
    """Looks at shapes where it is told to."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        self.looks = looks
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.other = nn.Conv2d(8, 8, 1)
        self.drop = nn.Dropout()
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        if self.looks and image.shape[-1] % 2:
            raise ValueError("an odd width")
        x = self.pool(self.relu(self.bn(self.conv(image))))
        y = self.other(x)
        y += x
        return {"scores": self.head(self.drop(self.relu(y).mean((2, 3))))}


def a_net(looks: bool) -> nn.Module:
    torch.manual_seed(0)
    net = Net(looks=looks)
    net.bn.running_mean.normal_()
    net.bn.running_var.uniform_(0.5, 2)
    return net.eval()


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


SAMPLES = {
    "by name": Sample([], {"image": images(2)}, True),
    "by position": Sample([images(2)], {}, True),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("looks", [False, True])
def test_a_module_of_either_kind_is_fused_for_any_batch(looks, name):
    net, sample = a_net(looks), SAMPLES[name]
    found = fusion.fuse(net, None, sample)
    for batch in (1, 2, 5):
        x = images(batch)
        answer = found.module(image=x) if sample.keywords else found.module(x)
        with torch.inference_mode():
            wanted = net(x)["scores"]
        assert torch.allclose(answer["scores"], wanted, atol=1e-5)
    assert found.facts() == {"fusion": "2 convolutions: 2 torch"}
    assert [layer.has_relu for layer in found.layers] == [True, True]
    kinds = {type(each).__name__ for each in found.module.modules()}
    assert not kinds & {"BatchNorm2d", "ReLU", "Dropout", "MaxPool2d"}


def test_an_exported_module_is_cast_like_any_other():
    found = fusion.fuse(a_net(looks=True), None, SAMPLES["by name"]).module.to(torch.bfloat16)
    answer = found(image=images(3).bfloat16())["scores"]
    assert answer.dtype == torch.bfloat16 and answer.shape == (3, 4)


def test_without_a_sample_it_is_not_exported():
    with pytest.raises(ConfigError, match=r"cannot be traced: [^;]+$"):
        tracing.trace(a_net(looks=True))


class Peeks(nn.Module):
    def forward(self, image):
        return image if float(image.sum()) > 0 else -image


class MakesItsOwn(nn.Module):
    def forward(self, image):
        scale = torch.ones(8, device=image.device) if image.shape[0] else None
        return image * (scale if len(image.shape) > 1 else 1)


@pytest.mark.parametrize(
    ("module", "reason"), [(Peeks(), ".+"), (MakesItsOwn(), ".+ a device of its own")]
)
def test_what_cannot_be_exported_either_says_both(module, reason):
    with pytest.raises(ConfigError, match=f"cannot be traced: .+; nor exported: {reason}"):
        tracing.trace(module.eval(), SAMPLES["by name"])


def test_writing_to_a_tensor_stays_that():
    class Writes(nn.Module):
        def forward(self, image):
            y = image * 1.0
            held = y
            y -= 1
            return held * y

    x = images(2)
    assert torch.equal(tracing.trace(Writes())(x), Writes()(x))
