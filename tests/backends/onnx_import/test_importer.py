"""What becomes of an ONNX graph: constants, branches, shapes on the host, and refusals by name."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from penstock.backends.onnx_import.importer import WEIGHT_SCALE, import_file, import_model
from penstock.backends.onnx_import.patterns import fuse_patterns
from penstock.errors import ConfigError
from penstock.types import Array

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    outputs: Sequence[str] = ("y",),
    weights: dict[str, Array] | None = None,
    *,
    opset: int = 18,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "made",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def kinds(model: onnx.ModelProto) -> list[str]:
    """Names of the functions and modules that the graph of a model calls."""
    module = import_model(model).module
    return [
        type(module.get_submodule(str(node.target))).__name__
        if node.op == "call_module"
        else node.target.__name__
        for node in module.graph.nodes
        if node.op in ("call_module", "call_function")
    ]


def test_layers_with_constant_weights_are_modules() -> None:
    model = make(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("MaxPool", ["b"], ["y"], kernel_shape=[2, 2], strides=[2, 2]),
        ],
        {"x": ["n", 3, 8, 8]},
        weights={"w": np.ones((4, 3, 3, 3), np.float32)},
    )
    assert kinds(model) == ["Conv2d", "relu", "MaxPool2d"]


def test_asymmetric_padding_stays_a_function() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[0, 0, 1, 1])
    weights = {"w": np.ones((4, 3, 3, 3), np.float32)}
    assert kinds(make([node], {"x": [1, 3, 8, 8]}, weights=weights)) == ["convolve"]


def test_weights_share_the_memory_of_the_file() -> None:
    weight = np.random.default_rng(0).random((8, 4), dtype=np.float32)
    model = make(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 8]}, weights={"w": weight}
    )
    (linear,) = (
        each for each in import_model(model).module.modules() if isinstance(each, nn.Linear)
    )
    assert linear.weight.untyped_storage().nbytes() == weight.nbytes
    assert not linear.weight.is_contiguous()


def test_external_weights_are_mapped(tmp_path: Path) -> None:
    weight = np.arange(2048, dtype=np.float32).reshape(2, 1024)
    model = make(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2, 1024]}, weights={"w": weight}
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    imported = import_file(path)
    (found,) = imported.module(torch.zeros(2, 1024))
    assert torch.equal(found, torch.from_numpy(weight))


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname"])
def test_external_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    model = make(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        {"x": [4]},
        weights={"w": np.zeros(4, np.float32)},
    )
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ConfigError, match="outside the folder"):
        import_file(folder / "model.onnx")


def test_operators_without_an_implementation_are_all_named() -> None:
    model = make(
        [
            helper.make_node("RandomNormalLike", ["x"], ["a"], name="coin"),
            helper.make_node("GroupQueryAttention", ["a"], ["b"], domain="com.microsoft"),
            helper.make_node("Optional", ["b"], ["y"]),
        ],
        {"x": [1]},
    )
    with pytest.raises(ConfigError) as caught:
        import_model(model)
    text = "\n".join(caught.value.problems)
    assert "operator RandomNormalLike (node 'coin') is not supported" in text
    assert "operator com.microsoft.GroupQueryAttention" in text
    assert "operator Optional" in text


def test_an_attribute_that_is_not_known_is_refused() -> None:
    node = helper.make_node("Relu", ["x"], ["y"], slope=0.5)
    with pytest.raises(ConfigError, match=r"Relu .*attribute slope"):
        import_model(make([node], {"x": [1]}))


def branch(name: str, factor: float) -> onnx.GraphProto:
    value = numpy_helper.from_array(np.array(factor, np.float32))
    nodes = [
        helper.make_node("Constant", [], [f"{name}_factor"], value=value),
        helper.make_node("Mul", ["x", f"{name}_factor"], [f"{name}_y"]),
    ]
    output = helper.make_tensor_value_info(f"{name}_y", FLOAT, None)
    return helper.make_graph(nodes, name, [], [output])


def choosing(condition: onnx.NodeProto, inputs: dict[str, Sequence[int | str]]) -> onnx.ModelProto:
    chosen = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("yes", 2.0), else_branch=branch("no", 3.0)
    )
    return make([condition, chosen], inputs, weights={"one": np.array(1.0, np.float32)})


@pytest.mark.parametrize(("rate", "expected"), [(2.0, 10.0), (0.5, 15.0)])
def test_a_branch_on_a_fixed_input_is_chosen(rate: float, expected: float) -> None:
    model = choosing(helper.make_node("Greater", ["rate", "one"], ["c"]), {"x": [1], "rate": []})
    imported = import_model(model, fixed={"rate": torch.tensor(rate)})
    assert imported.inputs == ("x",)
    (found,) = imported.module(torch.tensor([5.0]))
    assert found.item() == expected


def test_a_branch_on_a_size_that_is_known_is_chosen() -> None:
    model = choosing(helper.make_node("Greater", ["size", "one"], ["c"]), {"x": ["n", "m"]})
    index = numpy_helper.from_array(np.array(1), "index")
    model.graph.initializer.append(index)
    for node in (
        helper.make_node("Cast", ["at"], ["size"], to=FLOAT),
        helper.make_node("Gather", ["shape", "index"], ["at"]),
        helper.make_node("Shape", ["x"], ["shape"]),
    ):
        model.graph.node.insert(0, node)
    with pytest.raises(ConfigError, match="control flow If"):
        import_model(model)
    imported = import_model(model, sizes={"x": [-1, 4]})
    (found,) = imported.module(torch.ones(3, 4))
    assert torch.equal(found, torch.full((3, 4), 2.0))


def test_a_fixed_input_must_exist() -> None:
    model = make([helper.make_node("Relu", ["x"], ["y"])], {"x": [1]})
    with pytest.raises(ConfigError, match="fixed input 'rate': the model has no such input"):
        import_model(model, fixed={"rate": torch.tensor(1)})


def test_shapes_for_a_reshape_stay_on_the_host() -> None:
    """A tensor on the meta device has no data: what depends on it would fail."""
    model = make(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "zero"], ["n"]),
            helper.make_node("Unsqueeze", ["n", "axis"], ["rows"]),
            helper.make_node("Concat", ["rows", "rest"], ["to"], axis=0),
            helper.make_node("Reshape", ["x", "to"], ["y"]),
        ],
        {"x": ["n", 2, 3]},
        weights={"zero": np.array(0), "axis": np.array([0]), "rest": np.array([6])},
    )
    module = import_model(model).module.to("meta")
    (found,) = module(torch.empty(5, 2, 3, device="meta"))
    assert found.shape == (5, 6)


def test_shapes_that_a_file_declares_in_between_are_not_believed() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Shape", ["a"], ["s"]),
        helper.make_node("Reshape", ["a", "s"], ["y"]),
    ]
    model = make(nodes, {"x": ["n", 4]})
    model.graph.value_info.append(helper.make_tensor_value_info("a", FLOAT, [1, 4]))
    (found,) = import_model(model).module(torch.ones(3, 4))
    assert found.shape == (3, 4)


def test_models_of_unknown_operator_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match="operator set 99; expected at most"):
        import_model(make([helper.make_node("Relu", ["x"], ["y"])], {"x": [1]}, opset=99))


OLD_NODES = {
    "Relu": (1, {"consumed_inputs": [0]}, lambda x: np.maximum(x, 0)),
    "Reshape": (4, {"shape": [3, 2]}, lambda x: x.reshape(3, 2)),
    "Concat": (3, {}, lambda x: x),
    "Dropout": (6, {"is_test": 1, "ratio": 0.5}, lambda x: x),
    "Softmax": (1, {}, lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
}


@pytest.mark.parametrize("name", OLD_NODES)
def test_old_operator_sets_are_converted(name: str) -> None:
    opset, attributes, compute = OLD_NODES[name]
    model = make([helper.make_node(name, ["x"], ["y"], **attributes)], {"x": [2, 3]}, opset=opset)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    (found,) = import_model(model).module(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), compute(x), rtol=1e-6)


def test_a_bias_that_is_added_along_an_axis_is_converted() -> None:
    """Gemm's operator set 6 says that the bias is broadcast."""
    weights = {"w": np.ones((3, 2), np.float32), "b": np.array([1, 2], np.float32)}
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], broadcast=1)
    model = make([node], {"x": [2, 3]}, weights=weights, opset=6)
    (found,) = import_model(model).module(torch.ones(2, 3))
    np.testing.assert_array_equal(found.numpy(), [[4, 5], [4, 5]])


def test_what_onnx_cannot_convert_is_refused_by_name() -> None:
    model = make([helper.make_node("Pad", ["x"], ["y"], paddings=[0, 1])], {"x": [2]}, opset=1)
    with pytest.raises(ConfigError) as caught:
        import_model(model)
    assert caught.value.problems == (
        "the model has operator set 1, and onnx cannot convert it: "
        "No Adapter From operator set 1 for Pad",
    )


def test_a_file_that_is_not_onnx(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="cannot be read as ONNX"):
        import_file(path)


def same_as_onnx_runtime(model: onnx.ModelProto, *arrays: Array) -> None:
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    (expected,) = session.run(None, dict(zip(names, arrays, strict=True)))
    imported = import_model(model)
    fuse_patterns(imported.module)
    with torch.no_grad():
        (found,) = imported.module(*map(torch.from_numpy, arrays))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def numbers(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_negative_padding_stays_before_its_convolution() -> None:
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["a"]),
        helper.make_node("Conv", ["a", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    weights = {"pads": np.array([0, 0, -1, -1, 0, 0, -1, -1]), "w": numbers(4, 3, 3, 3)}
    same_as_onnx_runtime(make(nodes, {"x": [2, 3, 8, 8]}, weights=weights), numbers(2, 3, 8, 8))


def test_a_bias_that_raises_the_rank_is_added() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    weights = {"w": numbers(8, 4), "b": numbers(1, 1, 4)}
    same_as_onnx_runtime(make(nodes, {"x": [3, 8]}, weights=weights), numbers(3, 8))


def test_pooling_without_padding_ignores_pads() -> None:
    shape = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    node = helper.make_node("MaxPool", ["x"], ["y"], auto_pad="VALID", **shape)
    same_as_onnx_runtime(make([node], {"x": [2, 3, 8, 8]}), numbers(2, 3, 8, 8))


def test_resizing_by_a_scale_that_fp32_rounds() -> None:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest")
    scales = {"scales": np.array([1, 1, 0.7, 0.9], np.float32)}
    same_as_onnx_runtime(make([node], {"x": [1, 1, 10, 10]}, weights=scales), numbers(1, 1, 10, 10))


NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@pytest.mark.parametrize("coordinates", ["half_pixel", "half_pixel_symmetric", "asymmetric"])
@pytest.mark.parametrize("nearest", NEAREST)
@pytest.mark.parametrize(
    ("length", "scale"),
    [(47, 1.2), (35, 0.3), (28, 57 / 28), (41, 1.5), (44, 1.7), (10, 0.6), (49, 0.5), (2, 1.2)],
)
def test_positions_between_two_pixels(
    length: int, scale: float, nearest: str, coordinates: str
) -> None:
    """Positions that FP32 puts within a rounding error of a tie, or of a pixel."""
    how = {"nearest_mode": nearest, "coordinate_transformation_mode": coordinates}
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest", **how)
    scales = {"scales": np.array([1, 1, scale], np.float32)}
    model = make([node], {"x": [1, 1, length]}, weights=scales, opset=19)
    x = np.arange(length, dtype=np.float32).reshape(1, 1, -1)
    same_as_onnx_runtime(model, x)


@pytest.mark.parametrize("upper", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("stride", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("length", [7, 8, 12, 15])
def test_same_padding_with_strides_beyond_the_window(
    length: int, stride: int, window: int, upper: str
) -> None:
    """ONNX Runtime skips pixels on both sides then."""
    sizes = {"kernel_shape": [window, window], "strides": [stride, stride]}
    node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=upper, **sizes)
    weights = {"w": numbers(2, 3, window, window)}
    x = numbers(1, 3, length, length)
    same_as_onnx_runtime(make([node], {"x": [1, 3, length, length]}, weights=weights), x)


def test_an_operator_of_several_outputs_of_which_one_is_used() -> None:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=2)
    weights = {"w": numbers(1, 8, 3), "r": numbers(1, 8, 2)}
    same_as_onnx_runtime(make([node], {"x": [4, 1, 3]}, weights=weights), numbers(4, 1, 3))


def test_two_branches_may_use_the_same_names() -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True))),
        *(
            helper.make_node(
                "If", ["c"], [name], then_branch=branch("t", n), else_branch=branch("e", 0.0)
            )
            for name, n in (("one", 2.0), ("other", 5.0))
        ),
        helper.make_node("Sub", ["one", "other"], ["y"]),
    ]
    same_as_onnx_runtime(make(nodes, {"x": [3]}), numbers(3))


def by_onnx_runtime(model: onnx.ModelProto, x: Array) -> Array:
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    return found


EMPTY = np.zeros((0, 3), np.float32)
RARE: dict[str, tuple[onnx.NodeProto, Array, dict[str, Array]]] = {
    "mean of nothing": (
        helper.make_node("ReduceMean", ["x", "w"], ["y"]),
        EMPTY,
        {"w": np.array([0], np.int64)},
    ),
    "exclusive sum of nothing": (
        helper.make_node("CumSum", ["x", "w"], ["y"], exclusive=1),
        EMPTY,
        {"w": np.array(0, np.int64)},
    ),
    "a repeated number": (
        helper.make_node("Tile", ["x", "w"], ["y"]),
        np.array(2, np.float32),
        {"w": np.zeros(0, np.int64)},
    ),
    "a small kernel": (
        helper.make_node("ConvTranspose", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[3]),
        np.ones((1, 2, 4), np.float32),
        {"w": np.ones((2, 1, 2), np.float32)},
    ),
    "a position between two": (
        helper.make_node(
            "Resize",
            ["x", "", "w"],
            ["y"],
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="half_pixel_symmetric",
        ),
        np.arange(3, dtype=np.float32).reshape(1, 1, 3),
        {"w": np.array([1, 1, 1.5], np.float32)},
    ),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_cases_are_those_of_onnx_runtime(name: str) -> None:
    node, x, weights = RARE[name]
    sizes = [f"n{axis}" for axis in range(x.ndim)]
    model = make([node], {"x": sizes}, weights=weights, opset=19)
    (found,) = import_model(model).module(torch.from_numpy(x))
    expected = by_onnx_runtime(model, x)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found.numpy(), expected)


def test_no_rows_keep_the_other_sizes() -> None:
    """Folding writes a shape of the batch size as [0, -1]: copied, and worked out."""
    node = helper.make_node("Reshape", ["x", "w"], ["y"])
    model = make([node], {"x": ["n", 2, 3]}, weights={"w": np.array([0, -1], np.int64)})
    for rows in (0, 4):
        (found,) = import_model(model).module(torch.ones(rows, 2, 3))
        assert found.shape == (rows, 6)


def test_nodes_in_any_order() -> None:
    """As some converters write them: a cast of the input is the last node."""
    branch = helper.make_graph(
        [helper.make_node("Neg", ["less"], ["out"]), helper.make_node("Sub", ["b", "b"], ["less"])],
        "then",
        [],
        [helper.make_tensor_value_info("out", FLOAT, None)],
    )
    nodes = [
        helper.make_node("Add", ["b", "chosen"], ["y"]),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=branch, else_branch=branch),
        helper.make_node("Mul", ["a", "a"], ["b"]),
        helper.make_node("Relu", ["x"], ["a"]),
    ]
    model = make(nodes, {"x": ["n", 2]}, weights={"yes": np.array(True)})
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    (found,) = import_model(model).module(x)
    assert found.tolist() == [[1, 0], [9, 16]]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (
            [
                helper.make_node("Add", ["x", "b"], ["a"], name="first"),
                helper.make_node("Relu", ["a"], ["b"], name="second"),
                helper.make_node("Neg", ["b"], ["y"]),
            ],
            "takes its own result",
        ),
        ([helper.make_node("Add", ["x", "gone"], ["y"], name="sum")], "takes the tensor 'gone'"),
        ([helper.make_node("Relu", ["x"], ["z"])], "no node makes the output 'y'"),
    ],
)
def test_broken_graphs(nodes: list[onnx.NodeProto], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        import_model(make(nodes, {"x": ["n", 2]}))


@pytest.mark.parametrize("factors", [{"alpha": 0.5}, {"beta": 2.0}, {"alpha": -3.0, "beta": 0.0}])
@pytest.mark.parametrize("is_turned", [0, 1])
def test_factors_of_gemm_are_part_of_the_layer(factors: dict[str, float], is_turned: int) -> None:
    random = np.random.default_rng(0)
    weights = {"w": random.random((8, 8), np.float32), "c": random.random(8, np.float32)}
    node = helper.make_node("Gemm", ["x", "w", "c"], ["y"], transB=is_turned, **factors)
    model = make([node], {"x": ["n", 8]}, weights=weights)
    model.ir_version = 8
    assert kinds(model) == ["Linear"]
    x = random.random((3, 8), np.float32)
    (found,) = import_model(model).module(torch.from_numpy(x))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(found.numpy(), session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_scale_of_int8_weights_has_the_factor_of_gemm() -> None:
    values = np.arange(-32, 32, dtype=np.int8).reshape(8, 8)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1, alpha=0.5),
    ]
    weights = {"q": values, "scale": np.array(0.25, np.float32)}
    module = import_model(make(nodes, {"x": ["n", 8]}, weights=weights)).module
    layer = module.get_submodule("layer_0")
    assert (layer.weight / getattr(layer, WEIGHT_SCALE)).tolist() == values.tolist()
