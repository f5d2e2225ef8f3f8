"""Decomposed layers become one again, and answers stay those of ONNX Runtime."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.backends import torch_fusion
from penstock.backends.onnx_import.casting import retype
from penstock.backends.onnx_import.folding import fold_shapes
from penstock.backends.onnx_import.importer import ImportedGraph, import_file
from penstock.backends.onnx_import.patterns import fuse_patterns, transpose_heads
from penstock.types import Array

WIDTH, HEADS, LENGTH = 16, 2, 5


class Block(nn.Module):
    """A layer of an encoder, as exporters of older operator sets decompose it."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.activation = nn.GELU()

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], x.shape[1], HEADS, -1).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(each(x)) for each in self.projections[:3])
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        hidden = (1.0 - mask[:, None, None, :]) * torch.finfo(torch.float32).min
        found = torch.softmax(scores + hidden, -1) @ v
        found = found.permute(0, 2, 1, 3).reshape(x.shape)
        return self.activation(self.projections[3](self.norm(found + x)))


def inputs(rows: int) -> dict[str, Array]:
    random = np.random.default_rng(rows)
    mask = np.ones((rows, LENGTH), np.float32)
    mask[-1, 3:] = 0
    return {"x": random.standard_normal((rows, LENGTH, WIDTH), np.float32), "mask": mask}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("block") / "model.onnx"
    example = tuple(map(torch.from_numpy, inputs(2).values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Block().eval(),
            example,
            path,
            input_names=["x", "mask"],
            output_names=["y"],
            opset_version=14,
            dynamo=False,
            dynamic_axes={"x": {0: "n"}, "mask": {0: "n"}},
        )
    return path


def folded(path: Path) -> ImportedGraph:
    imported = import_file(path)
    samples = [
        {name: (torch.float32, each.shape) for name, each in inputs(rows).items()}
        for rows in (2, 3, 5)
    ]
    fold_shapes(imported, samples)
    return imported


def answer(imported: ImportedGraph, rows: int) -> torch.Tensor:
    with torch.no_grad():
        (found,) = imported.module(*(torch.from_numpy(inputs(rows)[n]) for n in imported.inputs))
    return found


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_answers_are_those_of_onnx_runtime(path: Path, rows: int) -> None:
    imported = folded(path)
    fuse_patterns(imported.module)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs(rows))
    torch.testing.assert_close(
        answer(imported, rows), torch.from_numpy(expected), rtol=1e-4, atol=1e-5
    )


def test_every_pattern_is_found(path: Path) -> None:
    found = fuse_patterns(folded(path).module)
    found = {name: count for name, count in found.items() if count}
    assert found.pop("transpose") == 4
    assert found == {"linear_bias": 4, "layer_norm": 1, "gelu": 1, "attention": 1}


def test_no_shape_is_computed_at_run_time(path: Path) -> None:
    names = [getattr(node.target, "__name__", "") for node in folded(path).module.graph.nodes]
    assert "shape" not in names


def test_a_mask_beyond_the_range_of_half_precision_stays_finite(path: Path) -> None:
    imported = folded(path)
    fuse_patterns(imported.module)
    expected = answer(imported, 3)
    retype(imported, torch.bfloat16)
    retyped = imported.module.to(torch.bfloat16)
    given = [torch.from_numpy(inputs(3)[name]).bfloat16() for name in imported.inputs]
    with torch.no_grad():
        (found,) = retyped(*given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.05)


class Activated(nn.Module):
    """A convolution, and an activation as said."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.conv(x))


class Gate(nn.Module):
    """Squeeze-and-excitation, as MobileNetV3 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = functional.adaptive_avg_pool2d(x, 1)
        factor = functional.hardsigmoid(self.excite(functional.relu(self.squeeze(mean))))
        return functional.hardswish(self.last(x * factor))


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


IMAGE = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(3))


def exported(module: nn.Module, tmp_path: Path, opset: int) -> tuple[ImportedGraph, Array]:
    """The imported file, and what ONNX Runtime answers."""
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            (IMAGE,),
            path,
            input_names=["x"],
            output_names=["y"],
            opset_version=opset,
            dynamo=False,
            dynamic_axes={"x": {0: "n"}},
        )
    imported = import_file(path)
    shapes = [(rows, *IMAGE.shape[1:]) for rows in (2, 3, 5)]
    fold_shapes(imported, [{"x": (torch.float32, shape)} for shape in shapes])
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return imported, session.run(None, {"x": IMAGE.numpy()})[0]


ACTIVATIONS = {
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
    "hard_sigmoid 0.166667 0.5": functional.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "clamp 0 6": functional.relu6,
    "leaky_relu 0.2 0": functools.partial(functional.leaky_relu, negative_slope=0.2),
    "gelu": functional.gelu,
    "gelu_tanh": tanh_gelu,
    "relu": torch.relu,
}


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_restored_and_fused(name: str, opset: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    imported, expected = exported(Activated(ACTIVATIONS[name]), tmp_path, opset)
    fuse_patterns(imported.module)
    found = torch_fusion.fuse(imported.module)
    (layer,) = found.layers
    assert str(layer.activation) == name
    with torch.no_grad():
        (answer,) = found.module(IMAGE)
    torch.testing.assert_close(answer, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [11, 17])
def test_gates_are_restored_and_fused(opset: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(Activated(functional.hardswish), Gate())
    imported, expected = exported(network, tmp_path, opset)
    counts = fuse_patterns(imported.module)
    assert counts["global_pool"] == 1
    found = torch_fusion.fuse(imported.module)
    assert [type(layer).__name__ for layer in found.layers] == ["Convolution", "GatedConvolution"]
    with torch.no_grad():
        (answer,) = found.module(IMAGE)
    torch.testing.assert_close(answer, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_a_factor_that_is_none_of_an_activation_stays(tmp_path: Path) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x * functional.relu6(x + 3) / 5

    imported, expected = exported(Activated(other), tmp_path, 13)
    assert fuse_patterns(imported.module)["hard_swish"] == 0
    with torch.no_grad():
        (answer,) = imported.module(IMAGE)
    torch.testing.assert_close(answer, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


class Heads(nn.Module):
    """Attention without a mask as torch has it, its queries, keys and values in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2)
        heads = self.qkv(tokens).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0))
        return self.norm(tokens + mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_new", [False, True], ids=["by tracing", "by export"])
def test_attention_by_both_exporters_has_no_other_products(is_new: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, x, path = Heads().eval(), torch.randn(2, 5, 2, 4), tmp_path / "model.onnx"
    if is_new:
        pytest.importorskip("onnxscript")
        how: dict[str, object] = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)}
    else:
        how = {"dynamic_axes": {"x": {0: "n"}}, "opset_version": 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (x,), path, input_names=["x"], dynamo=is_new, verbose=False, **how
        )
    imported = import_file(path)
    shapes = [(rows, *x.shape[1:]) for rows in (2, 3, 5)]
    fold_shapes(imported, [{"x": (torch.float32, shape)} for shape in shapes])
    assert fuse_patterns(imported.module)["attention"] == 1
    found = torch_fusion.fuse(imported.module, None, None, "on")
    kinds = [type(layer).__name__ for layer in found.layers]
    assert kinds == ["FusedLinear", "Attention", "ResidualNorm"]
    names = {getattr(node.target, "__name__", "") for node in found.module.graph.nodes}
    assert not names & {"matmul", "mul", "sqrt", "softmax", "cast"}
    with torch.no_grad():
        five = torch.randn(5, 5, 2, 4)
        (answer,) = found.module(five)
        torch.testing.assert_close(answer, module(five), rtol=1e-4, atol=1e-5)


def test_keys_of_other_sizes_are_transposed_as_they_were() -> None:
    x = torch.randn(2, 6, 5, 4)
    wanted = x.transpose(-1, -2)
    assert torch.equal(transpose_heads(x, [-1, 5, 4], [-1, 6, 4, 5]), wanted)
    apart = transpose_heads(x, [-1, 5, 4], [-1, 3, 4, 5])
    assert torch.equal(apart, wanted.reshape(4, 3, 4, 5))
