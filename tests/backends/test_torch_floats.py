"""Layers that stay in FP32 in a model of 16-bit floats, and how those that must are found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from suites.backend import model_config

from penstock.backends import Batch, backend
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from linear_models import MLP, write_module, write_onnx  # noqa: E402

from penstock.backends.torch_floats import LayerWatch, cast_others, overflowing, watched  # noqa: E402

LARGE = MLP.replace("FACTOR = 1", "FACTOR = 1e7")
ROWS = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
HALF = {"penstock.dtype": "fp16"}


@pytest.fixture(params=["module.py", "model.onnx"])
def config(request, tmp_path: Path) -> ModelConfig:
    if request.param == "module.py":
        path = write_module(tmp_path, LARGE)
    else:
        path = write_onnx(tmp_path, LARGE, (64,))
    specs = [TensorSpec("x", "FP32", (64,))], [TensorSpec("y", "FP32", (64,))]
    return model_config("pytorch", path, *specs)


def answer(config: ModelConfig, **options: str):
    runner = backend("pytorch")(replace(config, options=options))
    (found,) = runner.start(Batch({"x": ROWS}, len(ROWS))).wait()
    return found["y"].copy(), runner.built()


def names(config: ModelConfig) -> list[str]:
    """Of the middle layer and the one behind it."""
    is_code = config.artifact.endswith(".py")
    return ["middle", "back"] if is_code else ["layer_1", "layer_2"]


def test_kept_layers_hold_what_fp16_does_not(config: ModelConfig) -> None:
    wanted, _ = answer(config)
    assert np.abs(wanted).max() < 100
    broken, _ = answer(config, **HALF)
    assert not np.isfinite(broken).all()
    one, _ = answer(config, **HALF, **{"penstock.keep_fp32": names(config)[0]})
    assert not np.isfinite(one).all()
    found, built = answer(config, **HALF, **{"penstock.keep_fp32": ", ".join(names(config))})
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert built["dtype"] == "float16,float32" and built["keep_fp32"] == "2 layers"


def test_bf16_may_keep_layers_too(config: ModelConfig) -> None:
    wanted, _ = answer(config)
    options = {"penstock.dtype": "bf16"}
    plain, _ = answer(config, **options)
    kept, _ = answer(config, **options, **{"penstock.keep_fp32": ",".join(names(config))})
    assert 0 < np.abs(kept - wanted).max() < np.abs(plain - wanted).max()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({**HALF, "penstock.keep_fp32": "nowhere"}, "there is no layer 'nowhere'"),
        ({"penstock.keep_fp32": "middle"}, "only with penstock.dtype fp16 or bf16"),
        (
            {"penstock.dtype": "fp32", "penstock.keep_fp32": "middle"},
            "only with penstock.dtype fp16 or bf16",
        ),
        (
            {**HALF, "penstock.keep_fp32": "middle", "penstock.fuse": "convolutions"},
            "not together with penstock.fuse",
        ),
    ],
)
def test_what_is_wrong_is_said(config: ModelConfig, options, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        answer(config, **options)


def test_the_nearest_names_are_listed(config: ModelConfig) -> None:
    """Of a file also those of its nodes."""
    near, wrong = "middle", "midle"
    if config.artifact.endswith(".onnx"):
        near, wrong = "/middle/Gemm", "/midle/Gem"
    with pytest.raises(ConfigError, match=f"the nearest are .*'{near}'"):
        answer(config, **HALF, **{"penstock.keep_fp32": wrong})


def test_nodes_of_a_file_are_kept_by_their_names(tmp_path: Path) -> None:
    path = write_onnx(tmp_path, LARGE, (64,))
    specs = [TensorSpec("x", "FP32", (64,))], [TensorSpec("y", "FP32", (64,))]
    config = model_config("pytorch", path, *specs)
    wanted, _ = answer(config)
    found, _ = answer(config, **HALF, **{"penstock.keep_fp32": "/middle/Gemm, /back/Gemm"})
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    one, _ = answer(config, **HALF, **{"penstock.keep_fp32": "/first/Gemm"})
    assert not np.isfinite(one).all()


@pytest.mark.parametrize("name", ["square", "mean", "last"])
def test_a_node_that_became_part_of_a_layer_keeps_it(tmp_path: Path, name: str) -> None:
    """A decomposed norm is one function, whichever of its nodes is named."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["p"], "square"),
        helper.make_node("ReduceMean", ["p"], ["m"], "mean", axes=[-1]),
        helper.make_node("Add", ["m", "epsilon"], ["v"], "add"),
        helper.make_node("Sqrt", ["v"], ["r"], "root"),
        helper.make_node("Div", ["x", "r"], ["n"], "divide"),
        helper.make_node("Mul", ["n", "w"], ["y"], "last"),
    ]
    value = helper.make_tensor_value_info
    weights = {"epsilon": np.array(1e-6, np.float32), "w": np.arange(64, dtype=np.float32) / 7}
    graph = helper.make_graph(
        nodes,
        "made",
        [value("x", TensorProto.FLOAT, ["n", 64])],
        [value("y", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(each, key) for key, each in weights.items()],
    )
    path = tmp_path / "1" / "model.onnx"
    path.parent.mkdir()
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    specs = [TensorSpec("x", "FP32", (64,))], [TensorSpec("y", "FP32", (64,))]
    config = model_config("pytorch", path, *specs)
    wanted, _ = answer(config)
    plain, _ = answer(config, **HALF)
    found, built = answer(config, **HALF, **{"penstock.keep_fp32": name})
    # The weight and the result are in FP32; the input is not.
    assert np.abs(found - wanted).max() < np.abs(plain - wanted).max()
    assert built["dtype"] == "float16,float32" and built["keep_fp32"] == "1 layers"


def test_constants_of_a_kept_function_keep_their_size(tmp_path: Path) -> None:
    """A product by 1e6 and one by 1e-6, as functions of a graph."""
    source = """
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return (x * 1e6 + 1e6) * 1e-6

def factory():
    return Model()
"""
    path = write_onnx(tmp_path, source, (64,))
    specs = [TensorSpec("x", "FP32", (64,))], [TensorSpec("y", "FP32", (64,))]
    config = model_config("pytorch", path, *specs)
    wanted, _ = answer(config)
    from penstock.backends.pytorch import load_module

    loaded = load_module(config)
    nodes = [node.name for node in loaded.module.graph.nodes if node.op == "call_function"]
    assert len(nodes) == 3
    found, _ = answer(config, **HALF, **{"penstock.keep_fp32": ",".join(nodes)})
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    broken, _ = answer(config, **HALF)
    assert not np.allclose(broken, wanted, atol=0.1)


def test_a_container_is_kept_with_all_that_is_in_it() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, torch.nn.Linear(4, 4))
    cast_others(module, torch.bfloat16, {"1"})
    types = {name: each.dtype for name, each in module.named_parameters()}
    assert types["1.0.weight"] == types["1.1.bias"] == torch.float32
    assert types["0.weight"] == types["2.weight"] == torch.bfloat16
    assert module(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16


def test_the_first_that_overflows_is_named() -> None:
    class Squares(torch.nn.Module):
        def forward(self, x):
            return x * x * x

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), Squares(), torch.nn.Linear(4, 4))
    with torch.no_grad():
        module[0].weight.fill_(25.0)
    x = torch.ones(1, 4)
    exact = watched(module, {}, lambda: module(x))
    assert not exact.gave and not exact.took
    module.half()
    rounded = watched(module, {}, lambda: module(x.half()))
    assert list(rounded.gave) == ["1", "2"] and list(rounded.took) == ["2"]
    assert overflowing(exact, rounded) == ["1"]
    # Once the function is kept, what reads it comes next.
    assert overflowing(LayerWatch(), LayerWatch(took={"2": None}, gave={"2": None})) == ["2"]


def test_masks_of_infinity_are_no_overflow() -> None:
    mask = {"mask": None}
    assert overflowing(LayerWatch(gave=mask), LayerWatch(gave=mask)) == []
