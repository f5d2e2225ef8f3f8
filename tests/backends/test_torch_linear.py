"""Linear layers of any model in FP8: which, with what scales, and how inputs are shared. The
layers run in plain torch here; tests/gpu has the kernels."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from suites.backend import model_config

from penstock.backends import backend
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from fake_cublaslt import FakeCublasLt  # noqa: E402
from linear_models import MLP, SHAPE, TRANSFORMER, made, write_module, write_onnx  # noqa: E402

from penstock.backends import torch_linear  # noqa: E402
from penstock.backends.torch_tracing import TraceInputs  # noqa: E402
from penstock.kernels.cublaslt import Products  # noqa: E402
from penstock.kernels.fp8_linear import E4m3Linear, Fp8Input, fits  # noqa: E402
from penstock.kernels.gemm import Multiplier  # noqa: E402

ROWWISE = {"penstock.fp8": "rowwise", "penstock.dtype": "bf16"}


def relative(found, wanted) -> float:
    return float((found.detach().double() - wanted.double()).norm() / wanted.double().norm())


def rows(num: int = 3, seed: int = 1):
    return torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_linear, "has_fp8", lambda device: True)


@pytest.mark.parametrize("source", [TRANSFORMER, TRANSFORMER.replace("IS_SHY = 0", "IS_SHY = 1")])
@pytest.mark.parametrize("has_sample", [False, True])
def test_every_layer_that_fits_is_converted(source, has_sample) -> None:
    module = made(source)
    with torch.no_grad():
        wanted = module(rows())
    names = [name for name, each in torch_linear.find_layers(module).items() if fits(each)]
    assert len(names) == 12 and "head" not in names
    sample = TraceInputs([torch.zeros(2, *SHAPE, dtype=torch.bfloat16)], {}, True)
    model = torch_linear.to_fp8(
        module.bfloat16(), dict.fromkeys(names), sample if has_sample else None
    )
    found = model.module(rows().bfloat16())
    assert 0 < relative(found, wanted) < 0.08
    facts = model.facts()
    assert facts["fp8"] == "12 of 13 linear layers, each row by its own range"
    is_traced = has_sample or "IS_SHY = 0" in source
    # Layer norms before three layers and before one, and GELU, in each of two blocks.
    assert model.num_shared == (6 if is_traced else 0)
    assert facts["fp8_inputs"].startswith("6 shared" if is_traced else "quantised for each layer")
    fused = [each for each in model.module.modules() if isinstance(each, Fp8Input) and each.norm]
    assert len(fused) == (4 if is_traced else 0)
    if is_traced:
        nodes = [each for each in model.module.graph.nodes if each.op == "call_module"]
        with_sum = [each for each in nodes if len(each.args) == 2]
        # The first norm is of the input, all others of a sum with what went around a layer.
        assert [type(model.module.get_submodule(each.target)) for each in with_sum] == 3 * [
            Fp8Input
        ]


def test_sharing_an_input_changes_nothing() -> None:
    one, other = made(TRANSFORMER).bfloat16(), made(TRANSFORMER).bfloat16()
    names = [name for name, each in torch_linear.find_layers(one).items() if fits(each)]
    shared = torch_linear.to_fp8(one, dict.fromkeys(names)).module
    for name in names:
        other.set_submodule(name, E4m3Linear(other.get_submodule(name)))
    x = rows().bfloat16()
    # Norms round to BF16 in between only where they stand alone, which plain torch does for both.
    assert torch.equal(shared(x), other(x))


class Chosen:
    """A timer for which every algorithm of cuBLASLt beats torch."""

    def __init__(self) -> None:
        self.times = iter(range(10_000, 0, -1))

    def seconds(self, call) -> float:
        call()
        return float(next(self.times))

    def done(self) -> None:
        pass


@torch.no_grad()
def test_a_residual_is_added_by_the_gemm(monkeypatch) -> None:
    monkeypatch.setattr("penstock.kernels.cublaslt.ALIGNMENT", 64)
    one, other = made(TRANSFORMER).bfloat16(), made(TRANSFORMER).bfloat16()
    names = [name for name, each in torch_linear.find_layers(one).items() if fits(each)]
    library = FakeCublasLt()
    multiplier = Multiplier(Products(library, "cpu"), Chosen())
    model = torch_linear.to_fp8(one, dict.fromkeys(names), multiplier=multiplier)
    # After the attention and after the MLP, in each of two blocks.
    assert model.num_added == 4 and model.facts()["fp8_residuals"] == "4 added by GEMMs"
    assert model.num_shared == 6
    calls = [each for each in model.module.graph.nodes if each.op == "call_module"]
    modules = [model.module.get_submodule(each.target) for each in calls if len(each.args) == 2]
    assert [type(each) for each in modules] == 4 * [E4m3Linear]
    x = rows().bfloat16()
    model.prepare({"x": x}, lambda: model.module(x))
    assert not multiplier.problems
    num_before = library.num_products
    found = model.module(x)
    assert library.num_products == num_before + 12
    wanted = torch_linear.to_fp8(other, dict.fromkeys(names)).module(x)
    # The sum is rounded once instead of twice.
    assert 0 <= relative(found, wanted) < 0.02


def test_a_residual_of_another_shape_or_type_is_added_by_torch() -> None:
    layer, x = E4m3Linear(torch.nn.Linear(32, 16).bfloat16()), torch.randn(3, 2, 32).bfloat16()
    for residual in (torch.randn(1, 2, 16).bfloat16(), torch.randn(3, 2, 16)):
        found = layer(x, residual)
        assert found.dtype == residual.dtype and torch.equal(found, layer(x) + residual)


def test_a_layer_whose_input_is_written_before_the_sum_adds_nothing() -> None:
    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(32, 32)

        def forward(self, x):
            y = x * 2
            found = self.one(y)
            y.mul_(3)
            return found + y

    torch.manual_seed(0)
    module, x = Writes().eval().bfloat16(), torch.randn(4, 32).bfloat16()
    wanted = module(x).detach()
    multiplier = Multiplier(Products(FakeCublasLt(), "cpu"), Chosen())
    model = torch_linear.to_fp8(module, {"one": None}, multiplier=multiplier)
    assert model.num_added == 0
    assert relative(model.module(x), wanted) < 0.05


def test_a_sum_that_was_written_to_is_not_added_twice() -> None:
    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.norm = torch.nn.LayerNorm(32)

        def forward(self, x):
            y = self.first(x)
            y += x
            return self.one(self.norm(y)) + y

    torch.manual_seed(0)
    module = Adds().eval().bfloat16()
    x = torch.randn(4, 32).bfloat16()
    wanted = module(x).detach()
    model = torch_linear.to_fp8(module, {"one": None})
    assert model.num_shared == 1 and "+=" not in model.module.code
    assert relative(model.module(x), wanted) < 0.05


def test_a_sum_of_other_shapes_is_added_by_torch() -> None:
    norm = torch.nn.LayerNorm(32).bfloat16()
    x, spread = torch.randn(2, 4, 32).bfloat16(), torch.randn(1, 4, 32).bfloat16()
    total, given = Fp8Input(norm)(x, spread)
    assert torch.equal(total, x + spread) and given.sizes == (2, 4)
    wanted = norm(total).detach().flatten(0, 1)
    assert relative(given.values.float() * given.scales, wanted) < 0.05


def test_an_input_that_others_read_is_not_taken_away() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)

        def forward(self, x):
            normed = self.norm(x)
            return self.one(normed) + normed

    torch.manual_seed(0)
    module = Reads().eval().bfloat16()
    x = torch.randn(4, 32).bfloat16()
    wanted = module(x).detach()
    model = torch_linear.to_fp8(module, {"one": None})
    assert model.num_shared == 0
    assert relative(model.module(x), wanted) < 0.05


def test_calibrated_ranges_clip_what_is_beyond_them() -> None:
    linear = torch.nn.Linear(32, 16).bfloat16()
    x = torch.randn(5, 32).bfloat16()
    wanted = linear(x).detach()
    largest = float(x.abs().amax())
    assert relative(E4m3Linear(linear, largest)(x), wanted) < 0.05
    assert relative(E4m3Linear(linear, largest / 8)(x), wanted) > 0.2
    assert relative(E4m3Linear(linear)(1000 * x), linear(1000 * x).detach()) < 0.05


def test_a_layer_without_bias_and_an_empty_batch() -> None:
    linear = torch.nn.Linear(32, 16, bias=False).bfloat16()
    x = torch.randn(2, 3, 32).bfloat16()
    assert relative(E4m3Linear(linear)(x), linear(x).detach()) < 0.05
    assert E4m3Linear(linear)(x[:0]).shape == (0, 3, 16)


def test_layers_whose_weights_are_read_by_others_stay() -> None:
    module = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    assert torch_linear.find_layers(torch.nn.ModuleList([module])) == {}
    assert torch_linear.find_layers(torch.nn.MultiheadAttention(32, 4)) == {}


def test_a_layer_used_twice_stays_one() -> None:
    shared = torch.nn.Linear(32, 32)
    module = torch.nn.Sequential(shared, torch.nn.ReLU(), shared).eval().bfloat16()
    x = torch.randn(3, 32).bfloat16()
    wanted = module(x).detach()
    model = torch_linear.to_fp8(module, dict.fromkeys(torch_linear.find_layers(module)))
    assert relative(model.module(x), wanted) < 0.06


@pytest.fixture(params=["module.py", "model.onnx"])
def config(request, tmp_path: Path) -> ModelConfig:
    write = write_module if request.param == "module.py" else write_onnx
    path = write(tmp_path, TRANSFORMER)
    specs = [TensorSpec("x", "FP32", SHAPE)], [TensorSpec("y", "FP32", (10,))]
    return model_config("pytorch", path, *specs)


def answer(config: ModelConfig, **options: str):
    from penstock.backends import Batch

    runner = backend("pytorch")(replace(config, options=options))
    (found,) = runner.start(Batch({"x": rows().numpy()}, 3)).wait()
    return torch.from_numpy(found["y"].copy()), runner.built()


@pytest.mark.usefixtures("with_fp8")
def test_modules_and_onnx_files_are_served_in_fp8(config: ModelConfig) -> None:
    wanted, _ = answer(config)
    found, built = answer(config, **ROWWISE)
    assert 0 < relative(found, wanted) < 0.08
    assert built["fp8"] == "12 of 13 linear layers, each row by its own range"
    assert built["fp8_inputs"] == "6 shared or fused"
    assert "is no NVIDIA GPU" in built["products"]


FUSIBLE = [ROWWISE, {"penstock.weights": "int8"}]


@pytest.mark.usefixtures("with_fp8")
@pytest.mark.parametrize("options", FUSIBLE)
@pytest.mark.parametrize("what", ["convolutions", "transformer", "on"])
def test_fusion_leaves_linear_layers(config: ModelConfig, options, what) -> None:
    wanted, _ = answer(config, **options)
    found, built = answer(config, **options, **{"penstock.fuse": what})
    assert relative(found, wanted) < 0.01
    facts = built.get("fp8", built.get("weights"))
    assert facts.startswith(("12 of 13", "int8: 4 of 13"))
    # Attention is of neither, and chooses its kernel.
    assert ("2 attentions" in built["fusion"]) == (what != "convolutions")
    assert "linear" not in built["fusion"] and "norms" not in built["fusion"]


def test_layers_that_were_exported_are_found_by_their_weights(with_fp8, tmp_path: Path) -> None:
    path = write_module(tmp_path, TRANSFORMER.replace("IS_SHY = 0", "IS_SHY = 1"))
    specs = [TensorSpec("x", "FP32", SHAPE)], [TensorSpec("y", "FP32", (10,))]
    config = model_config("pytorch", path, *specs)
    kept = "blocks.0.query, blocks.1.outer"
    _, built = answer(config, **ROWWISE, **{"penstock.fp8_keep": kept})
    # The GELU before a layer that is kept stays as it is.
    assert built["fp8"].startswith("10 of 13") and built["fp8_inputs"] == "5 shared or fused"


def test_a_graph_that_lacks_a_layer_is_not_used() -> None:
    """Export follows one branch; the module itself keeps both."""

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.idle = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x):
            return self.one(x) if x.shape[0] > 1 else self.idle(x)

    torch.manual_seed(0)
    module = Reads().eval().bfloat16()
    x = torch.randn(4, 32).bfloat16()
    wanted = module(x).detach()
    sample = TraceInputs([x], {}, True)
    model = torch_linear.to_fp8(module, {"one": None, "idle": None}, sample)
    assert model.not_traced == "the traced module does not call layer 'idle'"
    assert 0 < relative(model.module(x), wanted) < 0.05


@pytest.mark.usefixtures("with_fp8")
def test_ranges_come_from_a_file(config: ModelConfig) -> None:
    from penstock.backends.pytorch import load_module

    loaded = load_module(config)
    with torch_linear.watching(loaded.module) as ranges, torch.no_grad():
        loaded.call({"x": rows()})
    loaded.close()
    assert len(ranges) == 12
    fewer = dict(list(ranges.items())[:5])
    (Path(config.artifact).parent / "fp8.json").write_text(json.dumps(fewer))
    wanted, _ = answer(config)
    found, built = answer(config, **ROWWISE | {"penstock.fp8": "fp8.json"})
    assert built["fp8"] == "5 of 13 linear layers"
    assert 0 < relative(found, wanted) < 0.08


@pytest.mark.usefixtures("with_fp8")
def test_layers_are_kept_by_name(config: ModelConfig) -> None:
    from penstock.backends.pytorch import load_module

    loaded = load_module(config)
    names = list(torch_linear.find_layers(loaded.module))
    loaded.close()
    _, built = answer(config, **ROWWISE, **{"penstock.fp8_keep": ",".join(names[:4])})
    assert built["fp8"].startswith("8 of 13")


@pytest.mark.usefixtures("with_fp8")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"penstock.fp8_keep": "nowhere"}, "no linear layer 'nowhere'"),
        ({"penstock.dtype": "fp32"}, "expected penstock.dtype bf16 or fp16"),
        ({"penstock.fp8": "none.json"}, "none.json: cannot be read"),
        ({"penstock.fp8": "../none.json"}, "not a file of the version's folder"),
        ({"penstock.compile": "default"}, "not together with penstock.compile"),
    ],
)
def test_what_is_wrong_is_said(config: ModelConfig, options, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        answer(config, **ROWWISE | options)


def test_a_device_without_fp8_is_refused(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="'cpu' does not multiply in FP8"):
        answer(config, **ROWWISE)
    with pytest.raises(ConfigError, match="only with penstock.fp8"):
        answer(config, **{"penstock.fp8_keep": "head"})


@pytest.mark.usefixtures("with_fp8")
def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    path = write_module(tmp_path, MLP.replace("WIDTH = 64", "WIDTH = 50"))
    specs = [TensorSpec("x", "FP32", (50,))], [TensorSpec("y", "FP32", (50,))]
    with pytest.raises(ConfigError, match="no linear layer has sizes that are multiples of 16"):
        answer(model_config("pytorch", path, *specs), **ROWWISE)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("int4", 0.25)])
def test_modules_and_onnx_files_are_served_with_integer_weights(
    config: ModelConfig, kind, most
) -> None:
    wanted, _ = answer(config)
    found, built = answer(config, **{"penstock.weights": kind})
    assert 0 < relative(found, wanted) < most
    # Of two blocks the layers with four times the width.
    num_bytes = int(built["weights"].split()[-2])
    assert built["weights"].startswith(f"{kind}: 4 of 13 linear layers, ")
    assert num_bytes < 4 * 64 * 256 * (1.2 if kind == "int8" else 0.7)


def test_layers_in_fp32_keep_their_weights(config: ModelConfig) -> None:
    """`config` is that of a module and of an ONNX file; one of four large layers stays."""
    from penstock.backends.pytorch import load_module

    name = next(
        name
        for name, each in load_module(config).module.named_modules()
        if isinstance(each, torch.nn.Linear) and each.weight.numel() == 64 * 256
    )
    half = {"penstock.dtype": "bf16"}
    wanted, _ = answer(config, **half)
    options = {**half, "penstock.weights": "int8", "penstock.keep_fp32": name}
    found, built = answer(config, **options)
    assert 0 < relative(found, wanted) < 0.04
    assert built["weights"].startswith("int8: 3 of 12 linear layers, ")


def test_float_layers_of_a_graph_in_int8_have_integer_weights(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from suites.int8_networks import IMAGE, ON_GPU, Network, ranges
    from suites.int8_networks import rows as images

    from penstock.backends import Batch
    from penstock.optimizer.passes.int8_static import quantised

    net = Network()
    x = net.add("Flatten", [net.add("GlobalAveragePool", [net.conv("x", 32, 3, 3)])])
    net.weights["last"] = 0.1 * net.random.standard_normal((32, 512), "float32")
    last = net.add("MatMul", [x, "last"])
    model = net.model(last, (512,))
    onnx.save(quantised(model, ranges(model), replace(ON_GPU, keep=(last,))), tmp_path / "m.onnx")
    specs = [TensorSpec("x", "FP32", IMAGE)], [TensorSpec(last, "FP32", (512,))]
    config = model_config("pytorch", tmp_path / "m.onnx", *specs)

    def run(**options: str):
        runner = backend("pytorch")(replace(config, options=options))
        (found,) = runner.start(Batch({"x": images()}, 4)).wait()
        return torch.from_numpy(found[last].copy()), runner.built()

    (wanted, plain), (found, built) = run(), run(**{"penstock.weights": "int8"})
    assert 0 < relative(found, wanted) < 0.02
    assert "1 linear layers" in plain["fusion"] and "1 layers in INT8" in built["fusion"]
    assert built["weights"].startswith("int8: 1 of 1 linear layers")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"penstock.weights": "int2"}, "'int2' is not one of int8, int4"),
        ({"penstock.weights": "int8", "penstock.fp8": "rowwise"}, "not together with penstock.fp8"),
    ],
)
def test_integer_weights_that_cannot_be(config: ModelConfig, options, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        answer(config, **options)


def test_small_layers_keep_their_weights(tmp_path: Path) -> None:
    path = write_module(tmp_path, MLP)
    specs = [TensorSpec("x", "FP32", (64,))], [TensorSpec("y", "FP32", (64,))]
    with pytest.raises(
        ConfigError, match="no linear layer has at least 16384 weights and inputs in"
    ):
        answer(model_config("pytorch", path, *specs), **{"penstock.weights": "int8"})
