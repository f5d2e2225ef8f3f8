"""Group norms are fused with what is around them, however they are written; answers stay."""

import warnings

import pytest

torch = pytest.importorskip("torch")
fusion = pytest.importorskip("penstock.backends.torch_fusion")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
image_norm = pytest.importorskip("penstock.kernels.image_norm")
nn, functional = torch.nn, torch.nn.functional
SHAPES = {"x": (8, 6, 5), "time": (4,)}


class NormCase(nn.Module):
    """Parts of a block of a diffusion UNet; `body` says what is done with them."""

    def __init__(self, body) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU(inplace=True)
        self.conv, self.time = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(4, 8)
        generator = torch.Generator().manual_seed(2)
        for each in (self.norm.weight, self.norm.bias):
            each.data.normal_(1, 0.5, generator=generator)
        self.body = body

    def forward(self, x, time):
        return self.body(self, x, time)


def given(batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, *shape, generator=generator) for shape in SHAPES.values()]


def fused(body, sample=None):
    """Compare answers; return the layers and what else is called, in order."""
    module = NormCase(body).eval()
    found = fusion.fuse(module, None, sample, "convolutions")
    check(found, module)
    return norms_and_rest(found)


def check(found, module) -> None:
    with torch.inference_mode():
        wanted, answer = module(*given()), found.module(*given())
    answer = answer[0] if isinstance(answer, tuple) else answer
    torch.testing.assert_close(answer, wanted, atol=2e-6, rtol=1e-5)


def norms_and_rest(found) -> tuple[list[str], list[str]]:
    """Return steps of each norm, and names of everything else."""
    norms, rest = [], []
    for node in found.module.graph.nodes:
        if node.op == "call_module":
            layer = found.module.get_submodule(node.target)
            if isinstance(layer, image_norm.ImageNorm):
                norms.append(" ".join(["added"] * (len(node.args) > 1) + [str(layer.activation)]))
            else:
                rest.append(type(layer).__name__)
        elif node.op.startswith("call"):
            rest.append(getattr(node.target, "__name__", str(node.target)))
    return norms, rest


def norm_of(m, x):
    return functional.group_norm(x, 4, m.norm.weight, m.norm.bias, 1e-3)


BODIES = {
    "module": (lambda m, x, t: m.norm(x), "None"),
    "module and module": (lambda m, x, t: m.act(m.norm(x)), "silu"),
    "function": (lambda m, x, t: functional.silu(m.norm(x)), "silu"),
    "functions": (lambda m, x, t: functional.relu(norm_of(m, x)), "relu"),
    "keywords": (
        lambda m, x, t: torch.sigmoid(functional.group_norm(x, num_groups=2, eps=0.1)),
        "sigmoid",
    ),
    "torch's own": (
        lambda m, x, t: functional.gelu(torch.group_norm(x, 4, m.norm.weight, m.norm.bias)),
        "gelu",
    ),
    "written out": (lambda m, x, t: (lambda y: y * torch.sigmoid(y))(m.norm(x)), "silu"),
    "without weights": (lambda m, x, t: functional.group_norm(x, 8), "None"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_norm_and_its_activation_are_one_layer(name):
    body, steps = BODIES[name]
    assert fused(body) == ([steps], [])


TIMES = {
    "an index": lambda m, x, t: x + m.time(t)[:, :, None, None],
    "dots": lambda m, x, t: m.time(t)[..., None, None] + x,
    "unsqueezed": lambda m, x, t: torch.add(x, m.time(t).unsqueeze(-1).unsqueeze(-1)),
    "by axis": lambda m, x, t: x.add(m.time(t).unsqueeze(2).unsqueeze(dim=3)),
    "viewed": lambda m, x, t: x + m.time(t).view(-1, 8, 1, 1),
    "reshaped": lambda m, x, t: x + torch.reshape(m.time(t), (-1, 8, 1, 1)),
}


@pytest.mark.parametrize("name", TIMES)
def test_an_addition_by_channel_is_part_of_the_norm(name):
    body = TIMES[name]
    norms, rest = fused(lambda m, x, t: functional.silu(m.norm(body(m, m.conv(x), t))))
    assert norms == ["added silu"]
    assert not {"add", "silu", "iadd"} & set(rest) and rest.count("Convolution") == 1


def test_an_addition_in_place_is_part_of_it_if_nothing_else_reads_it():
    def alone(m, x, t):
        y = m.conv(x)
        y += m.time(t)[:, :, None, None]
        return m.norm(y)

    def shared(m, x, t):
        y = m.conv(x)
        z = y[:, :4]
        y += m.time(t)[:, :, None, None]
        return m.norm(y) + z.sum()

    assert fused(alone)[0] == ["added None"]
    norms, rest = fused(shared)
    assert norms == ["None"] and "iadd" in rest


def test_convolutions_leave_additions_by_channel_to_others():
    norms, rest = fused(lambda m, x, t: functional.relu(m.conv(x) + m.time(t)[:, :, None, None]))
    assert not norms and sorted(rest) == ["Convolution", "Linear", "add", "getitem", "relu"]


def several(m, x, t):
    y = m.norm(x)
    return functional.silu(y) + y


def sum_twice(m, x, t):
    total = x + m.time(t)[:, :, None, None]
    return m.norm(total) + total


def test_what_has_other_users_stays():
    assert fused(several)[0] == ["None"]
    norms, rest = fused(sum_twice)
    assert norms == ["None"] and "add" in rest


def test_whole_images_are_left_to_convolutions():
    norms, rest = fused(lambda m, x, t: functional.silu(m.norm(x + m.conv(x))))
    assert norms == ["silu"] and rest == ["Convolution"]


def written_between(m, x, t):
    x = x * 2
    y = m.norm(x)
    x += 1
    return functional.silu(y) + x


def read_before_it_is_written(m, x, t):
    x = x * 2
    total = x + m.time(t)[:, :, None, None]
    x -= 3
    return m.norm(total) + x


def test_a_layer_does_not_move_past_what_writes_to_its_input():
    assert fused(written_between)[0] == ["None"]
    norms, rest = fused(read_before_it_is_written)
    assert norms == ["None"] and "add" in rest


def test_weights_that_are_computed_are_left():
    norms, rest = fused(lambda m, x, t: functional.group_norm(x, 4, m.norm.weight * 2, None))
    assert not norms and "group_norm" in rest


def test_hooks_are_run():
    module = NormCase(lambda m, x, t: functional.silu(m.norm(x))).eval()
    module.norm.register_forward_hook(lambda layer, args, answer: answer * 2)
    found = fusion.fuse(module, None, None, "on")
    check(found, module)
    assert norms_and_rest(found) == ([], ["GroupNorm", "silu"])


def test_a_norm_that_is_called_twice_shares_its_weights():
    module = NormCase(lambda m, x, t: functional.silu(m.norm(m.conv(m.norm(x))))).eval()
    found = fusion.fuse(module)
    check(found, module)
    first, _, second = found.layers
    assert first.weight is second.weight and first.bias is second.bias


def test_transformers_only_leave_norms_of_images():
    found = fusion.fuse(NormCase(BODIES["function"][0]).eval(), None, None, "transformer")
    assert norms_and_rest(found)[0] == []


def test_facts_count_norms():
    found = fusion.fuse(NormCase(BODIES["function"][0]).eval())
    assert found.facts() == {"fusion": "0 convolutions, 1 norms: 1 torch"}


def of_a_block(m, x, t):
    y = m.conv(functional.silu(m.norm(x)))
    y = y + m.time(functional.silu(t))[:, :, None, None]
    return x + m.conv(functional.silu(m.norm(y)))


def test_exported_modules():
    def body(m, x, t):
        return of_a_block(m, x, t) if x.shape[1] > 4 else x

    sample = tracing.TraceInputs(given(), {}, has_batch=True)
    assert fused(body, sample)[0] == ["silu", "added silu"]


# Opset, whether by torch.export, dynamic axes of x.
EXPORTS = [
    (17, False, ()), (17, False, (0,)), (17, False, (0, 2, 3)), (18, True, (0,)), (21, True, (0,)),
]  # fmt: skip


@pytest.mark.parametrize("export", EXPORTS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_onnx_files(export, tmp_path):
    pytest.importorskip("onnxscript")
    folding = pytest.importorskip("penstock.backends.onnx_import.folding")
    importer = pytest.importorskip("penstock.backends.onnx_import.importer")
    patterns = pytest.importorskip("penstock.backends.onnx_import.patterns")
    opset, is_new, dynamic = export
    module, path = NormCase(of_a_block).eval(), tmp_path / "model.onnx"
    axes = {"x": {axis: f"axis{axis}" for axis in dynamic}, "time": {0: "axis0"} if dynamic else {}}
    if is_new:
        rows = torch.export.Dim("rows")
        options = {"dynamic_shapes": [{0: rows}, {0: rows}], "dynamo": True, "verbose": False}
    else:
        options = {"dynamic_axes": axes, "dynamo": False}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            module, tuple(given()), path, opset_version=opset, input_names=list(SHAPES), **options
        )
    shapes = {name: (2, *shape) for name, shape in SHAPES.items()}
    sizes = {
        name: tuple(-1 if axis in axes[name] else n for axis, n in enumerate(shape))
        for name, shape in shapes.items()
    }
    graph = importer.import_file(path, {}, sizes)
    drawn = [(rows, *more) for rows in (3, 1, 7) for more in ((6, 5), (9, 11))]
    samples = [
        {
            "x": (
                torch.float32,
                [n if 0 in dynamic else 2, 8, *(rest if 2 in dynamic else (6, 5))],
            ),
            "time": (torch.float32, [n if 0 in dynamic else 2, 4]),
        }
        for n, *rest in drawn
    ]
    folding.fold_shapes(graph, samples)
    patterns.fuse_patterns(graph.module)
    found = fusion.fuse(graph.module, None, None, "convolutions")
    check(found, module)
    norms, rest = norms_and_rest(found)
    # With a Shape of the sum, its size is read too.
    assert norms == ["silu", "silu" if 2 in dynamic else "added silu"]
    assert not {"instance_norm", "group_norm", "shape", "mul"} & set(rest)


def by_instances(grouped, back, scale=1.0, shift=0.0, weight=(8, 1, 1)):
    """Return a graph of what exporters write for a group norm, with these sizes and constants."""
    layers = pytest.importorskip("penstock.backends.onnx_import.layers")
    shapes = pytest.importorskip("penstock.backends.onnx_import.shapes")
    root, graph = nn.Module(), torch.fx.Graph()
    root.scale, root.shift = torch.full((4,), scale), torch.full((4,), shift)
    root.weight = torch.rand(weight, generator=torch.Generator().manual_seed(3))
    x = graph.placeholder("x")
    flat = graph.call_function(shapes.reshape, (x, grouped))
    constants = graph.get_attr("scale"), graph.get_attr("shift")
    normed = graph.call_function(layers.instance_norm, (flat, *constants))
    image = graph.call_function(shapes.reshape, (normed, back))
    graph.output(graph.call_function(torch.mul, (image, graph.get_attr("weight"))))
    return torch.fx.GraphModule(root, graph)


# Sizes of both Reshapes and other arguments; x is [2, 8, 6, 5].
SAME = {
    "as exported": ([0, 4, -1], [0, 8, 6, 5]),
    "a fixed batch": ([2, 4, 60], [2, 8, 6, 5]),
    "one in the file": ([0, 4, -1], [2, 8, 6, 5]),
    "batch left out": ([-1, 4, 60], [-1, 8, 6, 5]),
    "height left out": ([0, 4, -1], [0, 8, -1, 5]),
    "another height": ([0, 4, -1], [0, 8, 3, 10]),
    "four dimensions": ([0, 4, -1], [0, 8, 6, 5], 1.0, 0.0, (1, 8, 1, 1)),
}
OTHERS = {
    "a scale by group": ([0, 4, -1], [0, 8, 6, 5], 2.0),
    "a shift by group": ([0, 4, -1], [0, 8, 6, 5], 1.0, 1.0),
    "rows become channels": ([-1, 4, 30], [2, 8, 6, 5]),
    "channels become rows": ([0, 4, -1], [-1, 4, 6, 5], 1.0, 0.0, (4, 1, 1)),
    "weights of pixels": ([0, 4, -1], [0, 8, 6, 5], 1.0, 0.0, (8, 6, 1)),
    "one weight for all": ([0, 4, -1], [0, 8, 6, 5], 1.0, 0.0, (1, 1, 1)),
    "no image": ([0, 4, -1], [0, 8, 30], 1.0, 0.0, (8, 1)),
}


@pytest.mark.parametrize("name", [*SAME, *OTHERS])
def test_what_exporters_write_is_recognised_only_where_it_is_a_group_norm(name):
    case, x = (SAME | OTHERS)[name], given()[0]
    wanted = by_instances(*case)(x)
    found = fusion.fuse(by_instances(*case), None, None, "on")
    torch.testing.assert_close(found.module(x), wanted, atol=1e-6, rtol=1e-5)
    norms, rest = norms_and_rest(found)
    if name in SAME:
        assert norms == ["None"] and rest == ["reshape"]
    else:
        assert "instance_norm" in rest or "mul" in rest


@pytest.mark.parametrize("num_groups", [4, 8], ids=["of two channels", "of one"])
def test_scales_by_group_of_opset_18(num_groups):
    layers = pytest.importorskip("penstock.backends.onnx_import.layers")
    root, graph = nn.Module(), torch.fx.Graph()
    root.scale, root.bias = torch.rand(num_groups), torch.rand(num_groups)
    tensors = graph.placeholder("x"), graph.get_attr("scale"), graph.get_attr("bias")
    normed = graph.call_function(layers.group_norm, tensors, {"num_groups": num_groups})
    graph.output(graph.call_function(functional.silu, (normed,)))
    module, x = torch.fx.GraphModule(root, graph), given()[0]
    wanted = module(x)
    found = fusion.fuse(module, None, None, "on")
    assert norms_and_rest(found) == (["silu"], [])
    torch.testing.assert_close(found.module(x), wanted)
