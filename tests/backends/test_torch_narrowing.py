"""Which layers compute one token only, and that answers stay the same."""

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
from suites.backend import model_config

from penstock.backends import Batch, backend
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.backends.torch_narrowing import narrow  # noqa: E402
from penstock.backends.torch_tracing import TraceInputs, trace  # noqa: E402

SHAPE = (7, 16)
SAMPLE = TraceInputs([torch.zeros(2, *SHAPE)], {}, has_batch=True)


class Block(nn.Module):
    """A pre-norm block, and what a test reads of its result."""

    def __init__(self, read, extra=None):
        super().__init__()
        self.first, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.inner, self.outer, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)
        self.extra = None if extra is None else nn.Parameter(torch.randn(extra))
        self.read = read

    def forward(self, x):
        normed = self.first(x)
        x = x + self.mix(normed, normed, normed, need_weights=False)[0]
        if self.extra is not None:
            x = x * self.extra
        return self.read(self, x + self.outer(F.gelu(self.inner(self.last(x)))))


READS = {
    "index": lambda self, x: self.head(x[:, 0]),
    "index with all channels": lambda self, x: self.head(x[:, 0, :]),
    "method": lambda self, x: self.head(x.select(1, 0)),
    "function": lambda self, x: self.head(torch.select(x, 1, 0)),
    "after a layer": lambda self, x: self.head(x)[:, 0],
}
OTHERS = {
    "mean": lambda self, x: self.head(x.mean(1)),
    "another token": lambda self, x: self.head(x[:, 1]),
    "a channel": lambda self, x: self.head(x.mean(1))[:, 0],
    "a channel of all tokens": lambda self, x: self.head(x)[:, :, 0],
    "both": lambda self, x: self.head(x[:, 0]) + self.head(x).sum(1),
    "a range": lambda self, x: self.head(x[:, 0:2]),
    "bool": lambda self, x: self.head(x[:, False]),
}


def rows():
    return torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1))


def seen_by(traced, x):
    """Run it; return the shapes of the inputs of its linear layers as well, by name."""
    found = {}

    def note(name):
        def hook(_, given) -> None:
            found[name] = tuple(given[0].shape)

        return hook

    for name in ("inner", "outer"):
        traced.get_submodule(name).register_forward_pre_hook(note(name))
    return traced(x), found


@torch.no_grad()
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("extra", [None, (16,), (1, 7, 16), (7, 16), (7, 1), (1, 1, 16)])
def test_only_the_first_token_is_computed(name, extra):
    torch.manual_seed(0)
    module = Block(READS[name], extra).eval()
    wanted = module(rows())
    traced = trace(copy.deepcopy(module))
    assert narrow(traced, SAMPLE) == 1
    traced.graph.lint()
    traced.recompile()
    found, shapes = seen_by(traced, rows())
    assert shapes["inner"] == (3, 1, 16) and shapes["outer"] == (3, 1, 32)
    assert torch.allclose(found, wanted, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_where_others_are_read_all_are_computed(name):
    torch.manual_seed(0)
    module = Block(OTHERS[name]).eval()
    wanted = module(rows())
    traced = trace(copy.deepcopy(module))
    assert narrow(traced, SAMPLE) == 0
    traced.recompile()
    assert torch.equal(traced(rows()), wanted)


def test_without_shapes_nothing_is_changed():
    traced = trace(Block(READS["index"]).eval())
    before = traced.code
    assert narrow(traced, None) == 0
    traced.recompile()
    assert traced.code == before


@torch.no_grad()
def test_what_is_written_to_meanwhile_is_not_read_early():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(16, 16)

        def forward(self, x):
            y = torch.cumsum(x, 1)
            z = self.one(y)
            y.mul_(3)
            return (z + y)[:, 0]

    torch.manual_seed(0)
    module = Writes().eval()
    wanted = module(rows())
    traced = trace(copy.deepcopy(module))
    narrow(traced, SAMPLE)
    traced.recompile()
    assert torch.allclose(traced(rows()), wanted)


@torch.no_grad()
def test_an_activation_in_place_stays():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.act = nn.Linear(16, 16), nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.one(torch.cumsum(x, 1))
            self.act(y)
            return y[:, 0]

    torch.manual_seed(0)
    module = InPlace().eval()
    wanted = module(rows())
    traced = trace(copy.deepcopy(module))
    narrow(traced, SAMPLE)
    traced.recompile()
    assert torch.allclose(traced(rows()), wanted)


@torch.no_grad()
def test_images_keep_all_rows():
    """The second axis of an image is not that of tokens, but it is kept apart as well."""

    class Image(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.one = nn.Conv2d(3, 8, 3), nn.Linear(6, 4)

        def forward(self, x):
            return self.one(self.conv(x))[:, 0]

    module = Image().eval()
    x = torch.randn(2, 3, 8, 8)
    wanted = module(x)
    traced = trace(copy.deepcopy(module))
    assert narrow(traced, TraceInputs([torch.zeros(2, 3, 8, 8)], {}, True)) == 1
    traced.recompile()
    assert torch.allclose(traced(x), wanted, atol=1e-6)


def test_an_onnx_file_as_well(tmp_path):
    path = tmp_path / "model.onnx"
    torch.manual_seed(0)
    module = Block(READS["index"]).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.zeros(2, *SHAPE),), str(path), dynamo=False, opset_version=17,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )  # fmt: skip
    specs = [TensorSpec("x", "FP32", SHAPE)], [TensorSpec("y", "FP32", (3,))]
    config = model_config("pytorch", path, *specs)
    runner = backend("pytorch")(replace(config, options={"penstock.fuse": "on"}))
    (found,) = runner.start(Batch({"x": rows().numpy()}, 3)).wait()
    assert "first_token" in runner.built()
    with torch.no_grad():
        wanted = module(rows()).numpy()
    np.testing.assert_allclose(found["y"], wanted, atol=1e-5)


@torch.no_grad()
def test_a_layer_that_others_read_computes_all_tokens():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            hidden = self.inner(torch.cumsum(x, 1))
            return self.outer(F.gelu(hidden))[:, 0].sum(1) + hidden.sum((1, 2))

    torch.manual_seed(0)
    module = Shared().eval()
    wanted = module(rows())
    traced = trace(copy.deepcopy(module))
    assert narrow(traced, SAMPLE) == 1
    traced.recompile()
    found, shapes = seen_by(traced, rows())
    assert shapes == {"inner": (3, 7, 16), "outer": (3, 1, 32)}
    assert torch.allclose(found, wanted, atol=1e-4)
