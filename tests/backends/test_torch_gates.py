"""Gated linear units become one layer, however their halves are made; answers stay."""

import warnings

import pytest

torch = pytest.importorskip("torch")
fusion = pytest.importorskip("penstock.backends.torch_fusion")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
fused_linear = pytest.importorskip("penstock.kernels.fused_linear")
nn, functional = torch.nn, torch.nn.functional


class GatedCase(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(16, 8)
        self.act = nn.SiLU(inplace=True)
        self.body = body

    def forward(self, x):
        return self.body(self, self.inner(x))


def given():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def check(module, found) -> list:
    """Compare answers; return the gated products."""
    with torch.inference_mode():
        wanted, answer = module(given()), found.module(given())
    answer = answer[0] if isinstance(answer, tuple) else answer
    torch.testing.assert_close(answer, wanted, atol=1e-6, rtol=1e-5)
    return [each for each in found.layers if isinstance(each, fused_linear.GatedProduct)]


def fused(body, sample=None) -> list:
    module = GatedCase(body).eval()
    return check(module, fusion.fuse(module, None, sample, "transformer"))


def geglu(m, x):
    value, gate = x.chunk(2, dim=-1)
    return m.outer(value * functional.gelu(gate))


def swiglu(m, x):
    gate, value = torch.chunk(x, 2, 2)
    return m.outer(functional.silu(gate) * value)


def by_split(m, x):
    value, gate = torch.split(x, [16, 16], dim=-1)
    return m.outer(torch.sigmoid(gate) * value)


def in_place(m, x):
    gate, value = x.chunk(2, -1)
    return m.outer(m.act(gate) * value)


FOUND = {geglu: (-1, "gelu", False), swiglu: (2, "silu", True), by_split: (-1, "sigmoid", False)}
FOUND[in_place] = -1, "silu", True


@pytest.mark.parametrize("body", FOUND)
def test_halves_become_one_layer(body):
    (layer,) = fused(body)
    assert (layer.axis, str(layer.activation), layer.is_first) == FOUND[body]


def test_facts_count_gates():
    found = fusion.fuse(GatedCase(geglu).eval(), None, None, "transformer")
    assert found.facts() == {"fusion": "0 convolutions, 2 linear layers, 1 gates: 3 torch"}


def uneven(m, x):
    value, gate = torch.split(x, [1, 31], dim=-1)
    return value * functional.gelu(gate)


def three(m, x):
    parts = x.chunk(4, -1)
    return parts[0] * functional.gelu(parts[1])


def same_half(m, x):
    value, gate = x.chunk(2, -1)
    return value * functional.gelu(value) + gate


def read_twice(m, x):
    value, gate = x.chunk(2, -1)
    return value * functional.gelu(gate) + gate


def written(m, x):
    value, gate = x.chunk(2, -1)
    active = functional.gelu(gate)
    x += 1
    return value * active + x.sum()


def multiplied_in_place(m, x):
    value, gate = x.chunk(2, -1)
    value *= functional.gelu(gate)
    return value + x.sum()


def by_slices(m, x):
    return x[..., :16] * functional.gelu(x[..., 16:])


def of_a_view(m, x):
    return x.view([10, 32]) * functional.gelu(x.reshape((10, 32)))


OTHERS = [uneven, three, same_half, read_twice, written, multiplied_in_place, by_slices, of_a_view]


@pytest.mark.parametrize("body", OTHERS)
def test_what_is_something_else_stays(body):
    assert fused(body) == []


def test_another_axis_is_left_to_torch():
    def rows(m, x):
        value, gate = x.flatten(0, 1).chunk(2, 0)
        return value * functional.gelu(gate)

    (layer,) = fused(rows)
    assert layer.axis == 0


def test_exported_modules():
    def body(m, x):
        return geglu(m, x) if x.shape[2] > 1 else x

    sample = tracing.TraceInputs([given()], {}, has_batch=True)
    assert len(fused(body, sample)) == 1


@pytest.mark.parametrize(("opset", "is_new"), [(17, False), (18, True)])
@pytest.mark.filterwarnings("ignore")
def test_onnx_files(opset, is_new, tmp_path):
    pytest.importorskip("onnxscript")
    folding = pytest.importorskip("penstock.backends.onnx_import.folding")
    importer = pytest.importorskip("penstock.backends.onnx_import.importer")
    patterns = pytest.importorskip("penstock.backends.onnx_import.patterns")
    module, path = GatedCase(geglu).eval(), tmp_path / "model.onnx"
    options = {"dynamic_axes": {"x": {0: "rows"}}, "dynamo": False}
    if is_new:
        shapes = [{0: torch.export.Dim("rows")}]
        options = {"dynamic_shapes": shapes, "dynamo": True, "verbose": False}
    x = (given(),)
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(module, x, path, opset_version=opset, input_names=["x"], **options)
    graph = importer.import_file(path, {}, {"x": (-1, 5, 8)})
    folding.fold_shapes(graph, [{"x": (torch.float32, [n, 5, 8])} for n in (3, 1, 2, 5, 8)])
    patterns.fuse_patterns(graph.module)
    (layer,) = check(module, fusion.fuse(graph.module, None, None, "transformer"))
    assert str(layer.activation) == "gelu" and not layer.is_first
