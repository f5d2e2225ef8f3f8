"""Values that 16 bits would spoil: positions, counts, timesteps, angles and sums."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from penstock.backends.onnx_import import elementwise
from penstock.backends.onnx_import.casting import retype
from penstock.backends.onnx_import.folding import fold_shapes
from penstock.backends.onnx_import.importer import import_model
from penstock.backends.onnx_import.patterns import fuse_patterns
from penstock.backends.onnx_import.precision import UNCAST
from penstock.types import Array

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
DATATYPES = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT64, np.dtype(bool): 9}
WIDTH = 32
FREQUENCIES = (1 / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)).astype(np.float32)
# A few roundings: 11 bits of mantissa, and 8.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HALVES = list(TOLERANCES)
node = helper.make_node
random = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Each test draws the same, whichever ran before it in this process."""
    random.bit_generator.state = np.random.default_rng(0).bit_generator.state


def floats(*shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def build(
    nodes: list[onnx.NodeProto], inputs: dict[str, Array], weights: dict[str, Array]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "made",
        [
            helper.make_tensor_value_info(
                name, DATATYPES[each.dtype], [f"{name}{n}" for n in range(each.ndim)]
            )
            for name, each in inputs.items()
        ],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model: onnx.ModelProto, inputs: dict[str, Array], dtype: torch.dtype) -> torch.Tensor:
    """The answer of the graph in 16 bits, as the engine makes it of a file."""
    graph = import_model(model)
    fold_shapes(graph, [])
    fuse_patterns(graph.module)
    retype(graph, dtype)
    placeholders = [each for each in graph.module.graph.nodes if each.op == "placeholder"]
    given = []
    for name, each in zip(graph.inputs, placeholders, strict=True):
        tensor = torch.from_numpy(inputs[name])
        is_cast = tensor.is_floating_point() and not each.meta.get(UNCAST)
        given.append(tensor.to(dtype) if is_cast else tensor)
    with torch.no_grad():
        (found,) = graph.module.to(dtype)(*given)
    return found


def error(model: onnx.ModelProto, inputs: dict[str, Array], dtype: torch.dtype) -> float:
    """The largest difference from ONNX Runtime in FP32, relative to the largest value."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    found = run(model, inputs, dtype).float().numpy()
    assert np.isfinite(found).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


TURN = [
    node("Cos", ["angle"], ["cos"]),
    node("Sin", ["angle"], ["sin"]),
    node("Mul", ["x", "cos"], ["one"]),
    node("Add", ["one", "sin"], ["y"]),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["mul", "matmul", "left", "einsum"])
def test_angles_of_positions(kind: str, dtype: torch.dtype) -> None:
    """Rotary embedding of 4,096 positions, in the ways in which exporters write the product."""
    weights = {"last": np.array([2]), "middle": np.array([1]), "row": FREQUENCIES}
    weights |= {"matrix": FREQUENCIES[None], "column": FREQUENCIES[None, :, None]}
    cast = [
        node("Unsqueeze", ["positions", "last"], ["open"]),
        node("Cast", ["open"], ["float"], to=FLOAT),
    ]
    match kind:
        case "mul":
            made = [*cast, node("Mul", ["float", "row"], ["angle"])]
        case "matmul":
            made = [*cast, node("MatMul", ["float", "matrix"], ["angle"])]
        case "einsum":
            made = [
                node("Cast", ["positions"], ["float"], to=FLOAT),
                node("Einsum", ["float", "row"], ["angle"], equation="ns,f->nsf"),
            ]
        case _:
            made = [
                node("Unsqueeze", ["positions", "middle"], ["open"]),
                node("Cast", ["open"], ["float"], to=FLOAT),
                node("MatMul", ["column", "float"], ["turned"]),
                node("Transpose", ["turned"], ["angle"], perm=[0, 2, 1]),
            ]
    nodes = [*made, *TURN]
    used = {name for each in nodes for name in each.input}
    inputs = {"positions": np.arange(4096)[None].repeat(2, 0), "x": floats(2, 4096, WIDTH // 2)}
    model = build(nodes, inputs, {name: each for name, each in weights.items() if name in used})
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


class Rotary(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.from_numpy(FREQUENCIES))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.source = source

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        match self.source:
            case "range":
                places = torch.arange(x.shape[1])[None]
            case "cumsum":
                places = (mask.long().cumsum(1) - 1).clamp(min=0)
            case _:
                # A sum of floats that were truth values.
                places = mask.float().cumsum(1) - 1
        angle = places[:, :, None].float() * self.frequencies
        angle = torch.cat((angle, angle), -1)
        left, right = x.chunk(2, -1)
        found = x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()
        # Truth values that meet an activation.
        return found * mask[:, :, None].float()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("source", ["range", "cumsum", "truth"])
def test_positions_that_the_graph_makes(source: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = {"x": floats(2, 300, WIDTH), "mask": np.ones((2, 300), bool)}
    inputs["mask"][1, 200:] = False
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Rotary(source).eval(),
            tuple(map(torch.from_numpy, inputs.values())),
            path,
            input_names=["x", "mask"],
            output_names=["y"],
            dynamic_axes={name: {0: "n", 1: "s"} for name in ("x", "mask", "y")},
            opset_version=17,
            dynamo=False,
        )
    assert error(onnx.load(path), inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("datatype", [np.int64, np.float32])
def test_timesteps(datatype: type, dtype: torch.dtype) -> None:
    """Of integers, and of an input of floats, before a layer with weights."""
    inputs = {"t": np.array([[999], [501], [3]], datatype)}
    cast = [node("Cast", ["t"], ["f"], to=FLOAT)] if datatype is np.int64 else []
    nodes = [
        *cast,
        node("Mul", ["f" if cast else "t", "row"], ["angle"]),
        node("Sin", ["angle"], ["sin"]),
        node("Cos", ["angle"], ["cos"]),
        node("Concat", ["sin", "cos"], ["both"], axis=-1),
        node("MatMul", ["both", "w"], ["y"]),
    ]
    model = build(nodes, inputs, {"row": FREQUENCIES, "w": floats(WIDTH, 8)})
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("datatype", [np.int64, bool])
def test_counts_leave_the_graph_exactly(datatype: type, dtype: torch.dtype) -> None:
    inputs = {"i": np.ones((2, 5001), datatype)}
    nodes = [
        node("Cast", ["i"], ["c"], to=FLOAT),
        node("ReduceSum", ["c", "one"], ["y"], keepdims=1),
    ]
    model = build(nodes, inputs, {"one": np.array([1])})
    assert run(model, inputs, dtype).tolist() == [[5001.0]] * 2


@pytest.mark.parametrize("dtype", HALVES)
def test_an_input_that_becomes_integers(dtype: torch.dtype) -> None:
    inputs = {"x": np.array([[2049, 4097, 3, 4999]], np.float32)}
    nodes = [node("Cast", ["x"], ["i"], to=INT64), node("Gather", ["table", "i"], ["y"])]
    model = build(nodes, inputs, {"table": floats(5000, 8)})
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lowest", [-1e4, -1e9, -3.4028235e38])
def test_masks_are_added_to_scores(lowest: float, dtype: torch.dtype) -> None:
    """Also of a row where everything is hidden, which is the average of all."""
    inputs = {"m": np.array([[1] * 5 + [0] * 3, [0] * 8]), "x": floats(2, 8)}
    nodes = [
        node("Cast", ["m"], ["f"], to=FLOAT),
        node("Sub", ["one", "f"], ["hidden"]),
        node("Mul", ["hidden", "lowest"], ["mask"]),
        node("Add", ["x", "mask"], ["s"]),
        node("Softmax", ["s"], ["y"], axis=-1),
    ]
    numbers = {"one": 1, "lowest": lowest}
    weights = {name: np.array(each, np.float32) for name, each in numbers.items()}
    found = run(build(nodes, inputs, weights), inputs, dtype).float().numpy()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[0, 5:], 0, atol=1e-6)
    shares = np.exp(inputs["x"][0, :5])
    np.testing.assert_allclose(found[0, :5], shares / shares.sum(), atol=TOLERANCES[dtype])


SQUARES = {
    "mul": [node("Mul", ["x", "x"], ["square"])],
    "pow": [node("Pow", ["x", "two"], ["square"])],
}
ROOTS = {
    "div": [node("Sqrt", ["v"], ["r"]), node("Div", ["x", "r"], ["n"])],
    "reciprocal": [
        node("Sqrt", ["v"], ["s"]),
        node("Reciprocal", ["s"], ["r"]),
        node("Mul", ["x", "r"], ["n"]),
    ],
    "one": [
        node("Sqrt", ["v"], ["s"]),
        node("Div", ["unit", "s"], ["r"]),
        node("Mul", ["r", "x"], ["n"]),
    ],
    "power": [node("Pow", ["v", "less"], ["r"]), node("Mul", ["x", "r"], ["n"])],
}


def rms_norm(square: str, root: str, *, axis: int = -1) -> list[onnx.NodeProto]:
    return [
        *SQUARES[square],
        node("ReduceMean", ["square"], ["mean"], axes=[axis]),
        node("Add", ["mean", "epsilon"], ["v"]),
        *ROOTS[root],
        node("Mul", ["n", "w"], ["y"]),
    ]


def norm_weights(nodes: list[onnx.NodeProto], epsilon: float) -> dict[str, Array]:
    numbers = {"two": 2, "less": -0.5, "unit": 1, "epsilon": epsilon}
    weights = {name: np.array(each, np.float32) for name, each in numbers.items()}
    weights["w"] = floats(WIDTH)
    used = {name for each in nodes for name in each.input}
    return {name: each for name, each in weights.items() if name in used}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("root", ROOTS)
def test_a_decomposed_rms_norm_is_one(square: str, root: str, dtype: torch.dtype) -> None:
    """Inputs of 300, whose squares FP16 does not hold, and of 1e-3, where epsilon matters."""
    nodes = rms_norm(square, root)
    for size, epsilon in ((300, 1e-6), (1e-3, 1e-6)):
        inputs = {"x": floats(2, WIDTH) * np.float32(size)}
        model = build(nodes, inputs, norm_weights(nodes, epsilon))
        assert error(model, inputs, dtype) < TOLERANCES[dtype]
    graph = import_model(build(nodes, inputs, norm_weights(nodes, 1e-6)))
    assert fuse_patterns(graph.module)["rms_norm"] == 1
    names = [each.target.__name__ for each in graph.module.graph.nodes if callable(each.target)]
    assert names == ["rms_norm"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("root", ROOTS)
def test_a_norm_over_another_axis_sums_in_fp32(root: str, dtype: torch.dtype) -> None:
    nodes = rms_norm("mul", root, axis=1)
    inputs = {"x": floats(2, 7, WIDTH) * 300}
    model = build(nodes, inputs, norm_weights(nodes, 1e-6))
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_mean_pooling_of_many_tokens(dtype: torch.dtype) -> None:
    """The sum of 3,001 values around 30 is beyond FP16; one row has no tokens."""
    inputs = {"x": floats(2, 3001, 8) + 30, "m": np.ones((2, 3001), np.int64)}
    inputs["m"][1] = 0
    nodes = [
        node("Cast", ["m"], ["f"], to=FLOAT),
        node("Unsqueeze", ["f", "last"], ["mask"]),
        node("Mul", ["x", "mask"], ["kept"]),
        node("ReduceSum", ["kept", "one"], ["total"], keepdims=0),
        node("ReduceSum", ["mask", "one"], ["count"], keepdims=0),
        node("Clip", ["count", "least"], ["safe"]),
        node("Div", ["total", "safe"], ["y"]),
    ]
    weights = {"last": np.array([2]), "one": np.array([1]), "least": np.array(1e-9, np.float32)}
    assert error(build(nodes, inputs, weights), inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op_type", ["ReduceL2", "ReduceL1", "ReduceSumSquare"])
def test_lengths_of_large_and_empty_rows(op_type: str, dtype: torch.dtype) -> None:
    inputs = {"x": floats(3, 64) * 3000}
    inputs["x"][1] = 0
    root = op_type == "ReduceSumSquare"
    nodes = [
        node(op_type, ["x"], ["size"], axes=[1], keepdims=1),
        *([node("Sqrt", ["size"], ["length"])] if root else []),
        node("Clip", ["length" if root else "size", "least"], ["safe"]),
        node("Div", ["x", "safe"], ["y"]),
    ]
    model = build(nodes, inputs, {"least": np.array(1e-12, np.float32)})
    if op_type == "ReduceL1" and dtype == torch.float16:
        # Such a length is itself beyond FP16, where the row is divided.
        inputs["x"] /= 10
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


def test_nothing_is_added_to_an_image_network() -> None:
    """Bytes fit 16 bits: they are cast and normalised as before, and so are its means."""
    nodes = [
        node("Cast", ["u"], ["f"], to=FLOAT),
        node("Sub", ["f", "mean"], ["a"]),
        node("Div", ["a", "std"], ["b"]),
        node("Conv", ["b", "w"], ["c"]),
        node("Relu", ["c"], ["d"]),
        node("ReduceMean", ["d"], ["e"], axes=[2, 3], keepdims=0),
        node("MatMul", ["e", "v"], ["y"]),
    ]
    weights = {"mean": np.float32([[[128]]] * 3), "std": np.float32([[[64]]] * 3)}
    weights |= {"w": floats(4, 3, 3, 3), "v": floats(4, 5)}
    graph = build(nodes, {}, weights).graph
    graph.input.append(helper.make_tensor_value_info("u", TensorProto.UINT8, ["n", 3, 8, 8]))
    opsets = [helper.make_opsetid("", 17)]
    imported = import_model(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    fuse_patterns(imported.module)
    before = [each.target for each in imported.module.graph.nodes]
    retype(imported, torch.float16)
    assert [each.target for each in imported.module.graph.nodes] == before
    with torch.no_grad():
        module = imported.module.half()
        (found,) = module(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert found.dtype == torch.float16


SIDE = 224


def grid(kind: str) -> tuple[list[onnx.NodeProto], dict[str, Array], dict[str, Array]]:
    """A grid for GridSample: nodes, inputs, weights."""
    places = (random.random((2, 20, 20, 2)) * 2 - 1).astype(np.float32)
    theta = np.array([[[1, 0.1, 0], [-0.1, 0.9, 0.05]]] * 2, np.float32)
    size = {"size": np.array([2, 3, 20, 20])}
    match kind:
        case "input":
            return [], {"grid": places}, {}
        case "constant":
            return [], {}, {"grid": places}
        case "arithmetic":
            nodes = [
                node("Mul", ["pixels", "two"], ["doubled"]),
                node("Sub", ["doubled", "one"], ["grid"]),
            ]
            numbers = {"two": np.float32(2 / SIDE), "one": np.float32(1)}
            return nodes, {"pixels": (places + 1) * (SIDE / 2)}, numbers
        case "offsets":
            # Offsets of a layer, added to where each pixel is.
            nodes = [
                node("MatMul", ["hidden", "matrix"], ["predicted"]),
                node("Mul", ["predicted", "small"], ["offsets"]),
                node("Add", ["base", "offsets"], ["grid"]),
            ]
            weights = {"matrix": floats(8, 2), "small": np.float32(1e-3), "base": places}
            return nodes, {"hidden": floats(2, 20, 20, 8)}, weights
        case "theta":
            nodes = [node("AffineGrid", ["theta", "size"], ["grid"])]
            return nodes, {"theta": theta}, size
        case _:
            # The matrix is that of a layer, around the identity.
            nodes = [
                node("MatMul", ["hidden", "matrix"], ["flat"]),
                node("Reshape", ["flat", "shape"], ["offset"]),
                node("Add", ["offset", "base"], ["theta"]),
                node("AffineGrid", ["theta", "size"], ["grid"]),
            ]
            weights = {"matrix": floats(8, 6) * 1e-3, "base": theta, "shape": np.array([2, 2, 3])}
            return nodes, {"hidden": floats(2, 8)}, weights | size


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "kind", ["input", "constant", "arithmetic", "offsets", "theta", "predicted"]
)
def test_coordinates_of_grid_sample(kind: str, dtype: torch.dtype) -> None:
    nodes, inputs, weights = grid(kind)
    small = torch.from_numpy(floats(2, 3, 8, 8))
    image = nn.functional.interpolate(small, (SIDE, SIDE), mode="bicubic").numpy()
    inputs = {"x": image, **inputs}
    model = build([*nodes, node("GridSample", ["x", "grid"], ["y"])], inputs, weights)
    model.opset_import[0].version = 20
    model.graph.node[-1].attribute.append(helper.make_attribute("mode", "linear"))
    model.ir_version = 9
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


def some_boxes(count: int) -> Array:
    corner = random.random((count, 2)) * 600
    return np.concatenate([corner, corner + 16 + random.random((count, 2)) * 80], -1).astype(
        np.float32
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_boxes_of_roi_align(is_scaled: bool, dtype: torch.dtype) -> None:
    inputs = {"x": floats(2, 4, 44, 44), "rois": some_boxes(6), "rows": np.array([0, 1] * 3)}
    nodes = [node("Mul", ["rois", "scale"], ["boxes"])] if is_scaled else []
    align = {"output_height": 5, "output_width": 7, "sampling_ratio": 2, "spatial_scale": 1 / 16}
    last = node("RoiAlign", ["x", "boxes" if is_scaled else "rois", "rows"], ["y"], **align)
    weights = {"scale": np.array([0.97, 1.01, 0.97, 1.01], np.float32)} if is_scaled else {}
    model = build([*nodes, last], inputs, weights)
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_boxes_and_scores_of_suppression(is_scaled: bool, dtype: torch.dtype) -> None:
    """The chosen boxes are those of FP32."""
    logits = random.standard_normal((1, 3, 200)).astype(np.float32)
    inputs = {"boxes": some_boxes(200)[None], "logits": logits}
    weights = {"most": np.array([50]), "overlap": np.float32(0.3), "least": np.float32(0.5)}
    nodes = [node("Sigmoid", ["logits"], ["scores"])]
    if is_scaled:
        nodes.append(node("Mul", ["boxes", "scale"], ["scaled"]))
        weights["scale"] = np.array([0.97, 1.01, 0.97, 1.01], np.float32)
    names = ["scaled" if is_scaled else "boxes", "scores", "most", "overlap", "least"]
    nodes += [
        node("NonMaxSuppression", names, ["chosen"]),
        node("Cast", ["chosen"], ["y"], to=FLOAT),
    ]
    model = build(nodes, inputs, weights)
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_input_beside_coordinates(dtype: torch.dtype) -> None:
    """Other users of an input that holds coordinates take 16 bits."""
    nodes, inputs, weights = grid("input")
    inputs |= {"x": floats(2, 3, 16, 16)}
    nodes += [
        node("GridSample", ["x", "grid"], ["sampled"]),
        node("MatMul", ["grid", "matrix"], ["more"]),
        node("Transpose", ["more"], ["turned"], perm=[0, 3, 1, 2]),
        node("Add", ["sampled", "turned"], ["y"]),
    ]
    model = build(nodes, inputs, weights | {"matrix": floats(2, 3)})
    assert error(model, inputs, dtype) < TOLERANCES[dtype]
    assert run(model, inputs, dtype).dtype == dtype


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["matmul", "gemm", "layers"])
def test_sines_of_small_products_of_an_input(kind: str, dtype: torch.dtype) -> None:
    """Fourier features, and a network whose activations are sines."""
    inputs = {"x": floats(16, 3)}
    weights = {"matrix": floats(3, 64) * 10, "bias": floats(64), "more": floats(64, 64)}
    nodes = {
        "matmul": [node("MatMul", ["x", "matrix"], ["angle"])],
        "gemm": [node("Gemm", ["x", "matrix", "bias"], ["angle"])],
        "layers": [
            node("Gemm", ["x", "matrix", "bias"], ["first"]),
            node("Sin", ["first"], ["turned"]),
            node("MatMul", ["turned", "more"], ["angle"]),
        ],
    }[kind]
    nodes.append(node("Sin", ["angle"], ["y"]))
    used = {name for each in nodes for name in each.input}
    model = build(nodes, inputs, {name: each for name, each in weights.items() if name in used})
    assert error(model, inputs, dtype) < TOLERANCES[dtype]


def test_large_products_are_cast() -> None:
    inputs = {"x": floats(2, 512)}
    nodes = [node("MatMul", ["x", "matrix"], ["angle"]), node("Sin", ["angle"], ["y"])]
    graph = import_model(build(nodes, inputs, {"matrix": floats(512, 512)}))
    retype(graph, torch.float16)
    assert not any(each.meta.get(UNCAST) for each in graph.module.graph.nodes)
    assert isinstance(graph.module.get_submodule("layer_0"), nn.Linear)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("Equal", np.arange(4000, dtype=np.float32)),
        ("Less", np.arange(4000, dtype=np.float32) + 0.5),
        ("Equal", np.float32(3000)),
    ],
)
def test_comparisons_of_inputs(name: str, limits: Array, dtype: torch.dtype) -> None:
    inputs = {"x": np.array([[[257], [1025]], [[3001], [3000]]], np.float32)}
    nodes = [
        node(name, ["x", "limits"], ["found"]),
        node("Cast", ["found"], ["y"], to=FLOAT),
    ]
    model = build(nodes, inputs, {"limits": limits})
    assert error(model, inputs, dtype) == 0
    assert run(model, inputs, dtype).dtype == dtype


def test_comparisons_of_activations_are_cast() -> None:
    """A layer before a comparison stays a layer."""
    nodes = [
        node("MatMul", ["x", "matrix"], ["hidden"]),
        node("Greater", ["hidden", "zero"], ["found"]),
        node("Where", ["found", "hidden", "zero"], ["y"]),
    ]
    inputs = {"x": floats(4, 8)}
    weights = {"matrix": floats(8, 8), "zero": np.float32(0)}
    graph = import_model(build(nodes, inputs, weights))
    retype(graph, torch.float16)
    assert not any(each.meta.get(UNCAST) for each in graph.module.graph.nodes)
    assert isinstance(graph.module.get_submodule("layer_0"), nn.Linear)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["add", "clip", "max", "root"])
def test_tiny_limits_before_logarithms_and_roots(kind: str, dtype: torch.dtype) -> None:
    """FP16 has no 1e-8."""
    inputs = {"x": floats(4, 600)}
    weights = {"matrix": floats(600, 128) / 4, "least": np.float32(1e-8)}
    names = ["likely", "least"]
    limit = {"clip": node("Clip", names, ["kept"]), "max": node("Max", names, ["kept"])}
    nodes = [
        node("MatMul", ["x", "matrix"], ["logits"]),
        node("Softmax", ["logits"], ["likely"]),
        limit.get(kind, node("Add", names, ["kept"])),
        node("Sqrt" if kind == "root" else "Log", ["kept"], ["y"]),
    ]
    model = build(nodes, inputs, weights)
    assert error(model, inputs, dtype) < TOLERANCES[dtype]
    assert run(model, inputs, dtype).dtype == (dtype if dtype == torch.bfloat16 else torch.float32)


QUOTIENTS = {
    "sum": ["Abs a size", "Add size least safe", "Div a safe y"],
    "clip": ["Abs a size", "Clip size least safe", "Div a safe y"],
    "inverse": ["Abs a size", "Max size least safe", "Reciprocal safe r", "Mul a r y"],
    "power": ["Abs a size", "Add size least safe", "Pow safe minus r", "Mul r a y"],
    "one": ["Abs a size", "Add size least safe", "Div one safe r", "Mul a r y"],
    "root": ["Mul a a size", "Add size least2 safe", "Sqrt safe s", "Div a s y"],
    "inverse root": ["Mul a a size", "Add size least2 safe", "Pow safe half r", "Mul a r y"],
    "moved": ["Abs a size", "Add size least safe", "Reshape safe s t", "Div a t y"],
}


def quotient(kind: str, *, of_layer: bool) -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    first = ["MatMul x w a"] if of_layer else ["Identity x a"]
    texts = [each.split() for each in [*first, *QUOTIENTS[kind]]]
    numbers = {"least": 1e-8, "least2": 1e-16, "minus": -1, "one": 1, "half": -0.5}
    weights = {name: np.array(each, np.float32) for name, each in numbers.items()}
    weights |= {"w": np.eye(64, dtype=np.float32), "s": np.array([-1, 64])}
    nodes = [node(words[0], words[1:-1], words[-1:]) for words in texts]
    used = {name for each in nodes for name in each.input}
    made = {name for each in nodes for name in each.output}
    return nodes, {name: each for name, each in weights.items() if name in used - made}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("of_layer", [True, False])
@pytest.mark.parametrize("kind", QUOTIENTS)
def test_tiny_limits_before_divisions(kind: str, of_layer: bool, dtype: torch.dtype) -> None:
    """Numbers from 1e-5 to 1, of which FP16 holds the smallest with fewer digits: the quotient is
    a sign."""
    sizes = 10.0 ** random.uniform(-5, 0, (4, 64)) * np.sign(random.standard_normal((4, 64)))
    inputs = {"x": sizes.astype(np.float16).astype(np.float32)}
    inputs["x"][0, 0] = 0
    nodes, weights = quotient(kind, of_layer=of_layer)
    assert error(build(nodes, inputs, weights), inputs, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("least", [1e-5, 1e-12])
@pytest.mark.parametrize("kind", ["layer norm", "rms norm", "l2", "clipped l2"])
def test_norms_divide_in_sixteen_bits(kind: str, least: float) -> None:
    """Also those that are not one layer, because they are over another axis."""
    axes: dict[str, object] = {"axes": [1], "keepdims": 1}
    square = [node("Mul", ["d", "d"], ["q"]), node("ReduceMean", ["q"], ["v"], **axes)]
    root = [node("Add", ["v", "least"], ["w"]), node("Sqrt", ["w"], ["s"])]
    nodes = {
        "layer norm": [
            node("ReduceMean", ["x"], ["m"], **axes),
            node("Sub", ["x", "m"], ["d"]),
            *square,
            *root,
        ],
        "rms norm": [node("Identity", ["x"], ["d"]), *square, *root],
        "l2": [
            node("Identity", ["x"], ["d"]),
            node("ReduceL2", ["x"], ["v"], **axes),
            node("Add", ["v", "least"], ["s"]),
        ],
        "clipped l2": [
            node("Identity", ["x"], ["d"]),
            node("ReduceL2", ["x"], ["v"], **axes),
            node("Clip", ["v", "least"], ["t"]),
            node("Shape", ["x"], ["shape"]),
            node("Expand", ["t", "shape"], ["s"]),
        ],
    }[kind]
    nodes += [node("Div", ["d", "s"], ["n"]), node("Relu", ["n"], ["y"])]
    inputs = {"x": floats(2, 16, 6, 6)}
    model = build(nodes, inputs, {"least": np.array(least, np.float32)})
    assert run(model, inputs, torch.float16).dtype == torch.float16
    graph = import_model(model)
    fuse_patterns(graph.module)
    retype(graph, torch.float16)
    assert elementwise.widen not in [each.target for each in graph.module.graph.nodes]
    assert not any(each.meta.get(UNCAST) for each in graph.module.graph.nodes)
