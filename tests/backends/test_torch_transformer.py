"""Transformers answer as they did after fusion, and their layers are found."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
fusion = pytest.importorskip("penstock.backends.torch_fusion")
convolution = pytest.importorskip("penstock.kernels.convolution")
tracing = pytest.importorskip("penstock.backends.torch_tracing")
nn, functional = torch.nn, torch.nn.functional
WIDTH, HEADS, LENGTH = 16, 2, 5


def tokens(rows: int = 2):
    return torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def layers_of(found) -> Counter:
    """Calls of the graph but those that only change shapes."""
    names = []
    for node in found.module.graph.nodes:
        if node.op == "call_module":
            names.append(type(found.module.get_submodule(node.target)).__name__)
        elif node.op.startswith("call"):
            names.append(getattr(node.target, "__name__", str(node.target)))
    shapes = ("getitem", "reshape", "view", "transpose", "flatten", "unflatten", "permute")
    return Counter(name for name in names if name not in (*shapes, "unbind", "split"))


def fused(module: nn.Module, x=None, what: str = "on"):
    """The fused module, after its answers were compared."""
    x = tokens() if x is None else x
    module = module.eval()
    with torch.inference_mode():
        wanted = module(x.clone())
        found = fusion.fuse(module, None, None, what)
        torch.testing.assert_close(found.module(x.clone()), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(module(x.clone()), wanted)
    return found


class Block(nn.Module):
    """A pre-norm layer; attention as said."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)
        self._attend = attend

    def forward(self, x):
        x = x + self.drop(self._attend(self, self.norms[0](x)))
        return x + self.drop(self.outer(self.drop(self.act(self.inner(self.norms[1](x))))))


def packed(m, x):
    heads = m.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    query, key, value = heads.unbind(0)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return m.parts[3](mixed.transpose(1, 2).flatten(2))


def separate(m, x):
    def heads(layer):
        return layer(x).view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)

    query, key, value = map(heads, m.parts[:3])
    mixed = functional.scaled_dot_product_attention(query, key, value, scale=0.2)
    return m.parts[3](mixed.transpose(1, 2).reshape(-1, LENGTH, WIDTH))


def whole(m, x):
    return m.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("attend", [packed, separate, whole])
def test_two_layers_of_an_encoder(attend):
    torch.manual_seed(0)
    found = fused(nn.Sequential(Block(attend), Block(attend), nn.LayerNorm(WIDTH)))
    counts = layers_of(found)
    assert counts.pop("split_heads", 0) == counts.pop("merge_heads", 0) == 2 * (attend is whole)
    # Four sums, all with a norm after them; the first norm is of the input itself.
    assert counts == {"FusedLinear": 8, "ResidualNorm": 5, "Attention": 2}
    text = "0 convolutions, 8 linear layers, 5 norms, 2 attentions: 15 torch"
    assert found.facts() == {"fusion": text}
    acts = [str(layer.activation) for layer in found.layers if hasattr(layer, "activation")]
    assert acts.count("gelu") == 2


@pytest.mark.parametrize("attend", [packed, separate, whole])
def test_code_that_looks_at_shapes_is_exported_and_fused_too(attend):
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(attend), Block(attend))

        def forward(self, x):
            return self.blocks(x if x.shape[1] > 1 else x[:, :1])

    torch.manual_seed(0)
    module = Looks().eval()
    sample = tracing.TraceInputs([tokens()], {}, has_batch=True)
    found = fusion.fuse(module, None, sample, "on")
    five = tokens(5)
    with torch.inference_mode():
        torch.testing.assert_close(found.module(five), module(five), atol=1e-5, rtol=1e-5)
    counts = layers_of(found)
    assert counts["Attention"] == 2 and counts["FusedLinear"] == 8
    assert counts["ResidualNorm"] == 4 and not {"Linear", "LayerNorm", "gelu"} & set(counts)


def test_results_of_attention_that_somebody_reads_are_computed_as_before():
    def weighted(m, x):
        mixed, weights = m.attention(x, x, x)
        return mixed + weights.sum()

    found = fused(Block(weighted))
    assert layers_of(found)["MultiheadAttention"] == 1


def test_a_mask_is_left_to_torch():
    def masked(m, x):
        query = x.unflatten(2, (HEADS, -1)).transpose(1, 2)
        mask = torch.ones(LENGTH, LENGTH).tril().log()
        mixed = functional.scaled_dot_product_attention(query, query, query, mask)
        return mixed.transpose(1, 2).flatten(2)

    assert "Attention" not in layers_of(fused(Block(masked)))


def test_layers_of_one_input_that_are_two_or_changed_are_not_merged():
    def two(m, x):
        return m.parts[0](x) + m.parts[1](x)

    def changed(m, x):
        x = x * 1.0
        one = m.parts[0](x)
        x += 1
        return one + m.parts[1](x) * m.parts[2](x)

    for attend, num in ((two, 4), (changed, 5)):
        assert layers_of(fused(Block(attend)))["FusedLinear"] == num


class Image(nn.Module):
    """A block of ConvNeXt, as torchvision writes it."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.inner, self.outer = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), scale) * torch.arange(1, 9)[:, None, None])

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = torch.permute(self.outer(functional.gelu(self.inner(y))), [0, 3, 1, 2])
        y = self.scale * y
        y += x
        return y


@pytest.mark.parametrize("scale", [0.5, 1e-6])
def test_a_layer_scale_and_the_sum_go_into_the_linear_layer(scale):
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(2))
    found = fused(nn.Sequential(Image(scale), Image(scale)), x)
    counts = layers_of(found)
    # Weights that would be lost in FP16 are not multiplied.
    rest = {} if scale == 0.5 else {"mul": 2, "iadd": 2}
    assert counts == {"Convolution": 2, "ResidualNorm": 2, "FusedLinear": 4, **rest}
    residuals = [layer for layer in found.layers if getattr(layer, "geometry", None)]
    assert len(residuals) == 6


def test_a_layer_that_is_called_twice_keeps_one_weight():
    linear = nn.Linear(WIDTH, WIDTH)
    found = fused(nn.Sequential(linear, nn.GELU(), linear))
    first, second = found.layers
    assert first.weight is second.weight


def test_only_what_is_asked_for_is_fused():
    module = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(2), nn.Linear(81, 4))
    x = torch.randn(2, 8, 9, 9)
    counts = {what: layers_of(fused(module, x, what)) for what in fusion.WHAT}
    assert counts["convolutions"] == {"Convolution": 1, "Flatten": 1, "Linear": 1}
    assert counts["transformer"] == {"Conv2d": 1, "ReLU": 1, "Flatten": 1, "FusedLinear": 1}
    assert counts["on"] == {"Convolution": 1, "Flatten": 1, "FusedLinear": 1}


def test_hooks_and_other_norms_stay():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm((LENGTH, WIDTH))
            self.linear.register_forward_hook(lambda module, given, answer: answer * 2)

        def forward(self, x):
            return self.norm(self.linear(x) + x)

    assert layers_of(fused(Odd())) == {"Linear": 1, "LayerNorm": 1, "add": 1}


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_a_fused_module_is_tuned_and_can_be_exported():
    class Timer:
        num = 0

        def seconds(self, call) -> float:
            call()
            self.num += 1
            return 1.0 / self.num

        def done(self) -> None:
            pass

    tuner = convolution.Tuner(Timer(), torch.device("cpu"))
    torch.manual_seed(0)
    module = Block(separate).eval()
    found = fusion.fuse(module, tuner, None, "on")
    with torch.inference_mode():
        found.prepare({"x": tokens()}, lambda: found.module(tokens()))
        torch.testing.assert_close(found.module(tokens()), module(tokens()), atol=5e-2, rtol=1e-2)
        assert tuner.num_tuned >= 5 and not tuner.problems
        program = torch.export.export(
            found.module, (tokens(),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
        )
        five = tokens(5)
        torch.testing.assert_close(program.module()(five), module(five), atol=1e-5, rtol=1e-5)
