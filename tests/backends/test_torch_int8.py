"""Q/DQ graphs in INT8: the answers of ONNX Runtime, which computes them as the file says, and which
layers stay in bytes."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from suites.int8_networks import (
    IMAGE,
    ON_GPU,
    Network,
    activated,
    bottlenecks,
    ranges,
    residual,
    rows,
)

from penstock.types import Array

torch = pytest.importorskip("torch")
import onnxruntime as ort  # noqa: E402

from penstock.backends.onnx_import.importer import import_model  # noqa: E402
from penstock.backends.onnx_import.patterns import fuse_patterns  # noqa: E402
from penstock.backends.torch_int8 import quantise_graph, quantised_inputs  # noqa: E402
from penstock.optimizer.passes.int8_static import Scheme, quantised  # noqa: E402


def by_onnx_runtime(model: ModelProto, kind: str, *, is_symmetric: bool) -> ModelProto:
    """Quantise as ONNX Runtime's own tool does: every tensor between layers."""
    # Its package adds a folder to sys.path, in which other packages have the names of ours.
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    known = {
        name: TensorData(lowest=np.array(low, np.float32), highest=np.array(high, np.float32))
        for name, (low, high) in ranges(model).items()
    }
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    quantizer = QDQQuantizer(
        copied,
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType[kind],
        tensors_range=TensorsData(CalibrationMethod.MinMax, known),
        nodes_to_quantize=[node.name for node in model.graph.node],
        nodes_to_exclude=[],
        op_types_to_quantize=["Conv", "MatMul", "Add", "MaxPool", "Relu", "GlobalAveragePool"],
        extra_options={"ActivationSymmetric": is_symmetric, "WeightSymmetric": True},
    )
    quantizer.quantize_model()
    quantizer.model.topological_sort()
    made: ModelProto = quantizer.model.model
    return made


def wanted(model: ModelProto) -> Array:
    """The file's own values: ONNX Runtime without its optimisations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (found,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": rows()})
    return np.asarray(found)


def found(model: ModelProto) -> tuple[Array, Counter[str], torch.fx.GraphModule]:
    module = import_model(model).module
    fuse_patterns(module)
    counts = quantise_graph(module, None)
    with torch.no_grad():
        (answer,) = module(torch.from_numpy(rows()))
    return answer.numpy(), counts, module


def kinds(module: torch.fx.GraphModule) -> Counter[str]:
    called = (node for node in module.graph.nodes if node.op == "call_module")
    return Counter(type(module.get_submodule(node.target)).__name__ for node in called)


def assert_near(answer: Array, expected: Array) -> None:
    """Values halfway between two levels may be rounded either way."""
    assert np.abs(answer - expected).max() < 0.02 * np.abs(expected).max()
    assert np.linalg.norm(answer - expected) < 5e-3 * np.linalg.norm(expected)


def test_unsigned_levels_with_a_zero_stay_in_bytes_between_all_layers() -> None:
    model = by_onnx_runtime(residual(), "QUInt8", is_symmetric=False)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    # The sums are rounded on both sides in this file, so they are layers of their own.
    assert counts == {"convolution": 7, "linear": 1, "pooling": 1, "sum": 2}
    # Of the average, and of the result.
    assert kinds(module)["Quantize"] == 2


def test_signed_levels_give_the_answers_of_the_file() -> None:
    model = by_onnx_runtime(residual(), "QInt8", is_symmetric=True)
    answer, counts, _ = found(model)
    assert_near(answer, wanted(model))
    assert counts["convolution"] == 7


def test_as_the_pass_places_them_layers_add_the_residual_themselves() -> None:
    float_model = residual()
    model = quantised(float_model, ranges(float_model), ON_GPU)
    onnx.checker.check_model(model)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    assert counts == {"convolution": 7, "linear": 1, "pooling": 1}
    layers = [each for each in module.modules() if type(each).__name__ == "Int8Layer"]
    assert sum(each.shape.added is not None for each in layers) == 2
    # All but the last convolution and the linear layer pass bytes on.
    assert sum(each.shape.out is None for each in layers) == 2
    assert [each.is_stem for each in layers] == [True, *[False] * 7]
    # Nothing but the average is left in float between them.
    assert kinds(module)["Dequantize"] == 0


def test_int8_is_close_to_float() -> None:
    float_model = residual()
    answer, _, _ = found(quantised(float_model, ranges(float_model), ON_GPU))
    expected = wanted(float_model)
    assert np.linalg.norm(answer - expected) < 0.03 * np.linalg.norm(expected)


def test_a_layer_kept_in_float_is_float_and_its_neighbours_are_not() -> None:
    float_model = residual()
    names = [node.name for node in float_model.graph.node if node.op_type == "Conv"]
    scheme = Scheme("minmax", True, False, False, keep=(names[2],), is_gpu=True)
    model = quantised(float_model, ranges(float_model), scheme)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    assert counts["convolution"] == 6
    assert kinds(module)["Conv2d"] == 1


def test_depthwise_layers_stay_in_float() -> None:
    net = Network(1)
    x = net.add("Relu", [net.conv("x", 32, 3, 3)])
    net.weights["deep"] = net.random.standard_normal((32, 1, 3, 3), np.float32)
    x = net.add("Conv", [x, "deep"], group=32, pads=[1, 1, 1, 1])
    float_model = net.model(net.conv(net.add("Relu", [x]), 32, 32), (32, 12, 12))
    model = quantised(float_model, ranges(float_model), ON_GPU)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    assert counts["convolution"] == 2
    assert kinds(module)["Conv2d"] == 1


def test_a_sum_that_broadcasts_keeps_its_shape() -> None:
    net = Network(2)
    x = net.add("Relu", [net.conv("x", 32, 3, 3)])
    one = net.conv(net.add("GlobalAveragePool", [x]), 32, 32)
    float_model = net.model(net.add("Add", [one, net.conv(x, 32, 32)]), (32, 12, 12))
    model = quantised(float_model, ranges(float_model), ON_GPU)
    answer, _, _ = found(model)
    assert answer.shape == (4, 32, 12, 12)
    assert_near(answer, wanted(model))


@pytest.mark.parametrize("lowest", [-1.0, 0.0])
def test_limits_of_a_clip_are_those_of_the_layer(lowest: float) -> None:
    net = Network(3)
    net.weights["low"], net.weights["high"] = np.float32(lowest), np.float32(2.0)
    x = net.add("Clip", [net.conv("x", 32, 3, 3), "low", "high"])
    float_model = net.model(net.conv(x, 32, 32), (32, 12, 12))
    model = quantised(float_model, ranges(float_model), ON_GPU)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    assert counts["convolution"] == 2
    stem = next(each for each in module.modules() if type(each).__name__ == "Int8Layer")
    assert (stem.shape.lowest, stem.shape.highest) == (lowest, 2.0)


ACTIVATIONS = {
    "silu": "silu",
    "Sigmoid": "sigmoid",
    "HardSwish": "hard_swish",
    "hard_swish written out": "hard_swish",
    "LeakyRelu": "leaky_relu",
    "Gelu": "gelu",
}


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_computed_by_the_layer(kind: str, has_residual: bool) -> None:
    """In bytes from one layer to the next, and to floats before the average."""
    net = Network(5)
    first = activated(net, kind, net.conv("x", 32, 3, 3))
    x = net.conv(first, 32, 32, 3)
    x = activated(net, kind, net.add("Add", [x, first]) if has_residual else x)
    x = activated(net, kind, net.conv(x, 48, 32))
    flat = net.add("Flatten", [net.add("GlobalAveragePool", [x])])
    net.weights["last"] = 0.2 * net.random.standard_normal((48, 32), np.float32)
    net.weights["bias"] = 0.1 * net.random.standard_normal(32, np.float32)
    x = activated(net, kind, net.add("Gemm", [flat, "last", "bias"]))
    float_model = net.model(x, (32,))
    model = quantised(float_model, ranges(float_model), ON_GPU)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    assert counts == {"convolution": 3, "linear": 1}
    layers = [each for each in module.modules() if type(each).__name__ == "Int8Layer"]
    assert {each.shape.activation.kind for each in layers} == {ACTIVATIONS[kind]}
    assert [each.shape.out is None for each in layers] == [False, False, True, True]
    # The gated ones have no other node that computes either.
    targets = {getattr(node.target, "__name__", "") for node in module.graph.nodes}
    assert not targets & {*ACTIVATIONS.values(), "mul", "add", "erf", "clamp"}
    expected = wanted(float_model)
    assert np.linalg.norm(answer - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", ["silu", "Relu", "LeakyRelu", "HardSwish"])
def test_a_residual_may_follow_the_activation(kind: str) -> None:
    """As in the bottlenecks of YOLO: x + silu(conv(silu(conv(x)))), all of it in bytes."""
    float_model = bottlenecks(kind)
    model = quantised(float_model, ranges(float_model), ON_GPU)
    onnx.checker.check_model(model)
    answer, counts, module = found(model)
    assert_near(answer, wanted(model))
    assert counts == {"convolution": 6, "linear": 1}
    layers = [each for each in module.modules() if type(each).__name__ == "Int8Layer"]
    assert [n for n, each in enumerate(layers) if each.shape.adds_last] == [2, 4]
    assert [each.shape.added is not None for each in layers if each.shape.adds_last] == [True] * 2
    assert [each.shape.out is None for each in layers] == [*[False] * 5, True, True]
    # All but the average is in bytes.
    assert kinds(module)["Quantize"] == 1 and kinds(module)["Dequantize"] == 0
    expected = wanted(float_model)
    assert np.linalg.norm(answer - expected) < 0.05 * np.linalg.norm(expected)


def test_what_other_operators_read_as_bytes_is_left_as_it_is() -> None:
    """An output of the graph in bytes: its values must not be shifted."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    weights = {"scale": np.float32(0.05), "zero": np.uint8(7)}
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *IMAGE])],
        [
            helper.make_tensor_value_info("q", TensorProto.UINT8, ["n", *IMAGE]),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *IMAGE]),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, {"x": rows()})
    module = import_model(model).module
    quantise_graph(module, None)
    levels, answer = module(torch.from_numpy(rows()))
    assert np.array_equal(levels.numpy(), expected[0])
    assert np.allclose(answer.numpy(), expected[1])


def test_an_image_that_a_layer_quantises_is_not_cast() -> None:
    float_model = residual()
    module = import_model(quantised(float_model, ranges(float_model), ON_GPU)).module
    assert not quantised_inputs(module, ["x"])
    quantise_graph(module, None)
    assert quantised_inputs(module, ["x"]) == {"x"}


def test_a_cast_to_16_bits_leaves_scales_alone() -> None:
    float_model = residual()
    answer, _, module = found(quantised(float_model, ranges(float_model), ON_GPU))
    module.half()
    with torch.no_grad():
        (again,) = module(torch.from_numpy(rows()))
    assert again.dtype == torch.float16
    assert np.linalg.norm(again.float().numpy() - answer) < 5e-3 * np.linalg.norm(answer)


def test_a_float_graph_is_unchanged(tmp_path: Path) -> None:
    module = import_model(residual()).module
    before = [str(node.target) for node in module.graph.nodes]
    assert not quantise_graph(module, None)
    assert [str(node.target) for node in module.graph.nodes] == before


def by_hand(
    weight: Array, scale: Array, axis: int, *, last: str = "", dtype: type = np.float32
) -> ModelProto:
    """Rows of 16 numbers, quantised, times INT8 weights with scales along an axis."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], saturate=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "ws"], ["v"], axis=axis),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    name, kind = "y", helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights: dict[str, Array] = {"w": weight, "ws": scale.astype(dtype)}
    weights |= {"s": np.asarray(0.05, dtype), "z": np.asarray(0, np.int8)}
    if last == "clip":
        # All of it is below the lowest level of the result.
        weights |= {"low": np.asarray(-50, dtype), "high": np.asarray(-30, dtype)}
        nodes += [
            helper.make_node("Clip", ["y", "low", "high"], ["c"]),
            helper.make_node("QuantizeLinear", ["c", "s", "z"], ["r"]),
            helper.make_node("DequantizeLinear", ["r", "s", "z"], ["u"]),
        ]
        name = "u"
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", kind, ["n", 16])],
        [helper.make_tensor_value_info(name, kind, ["n", 16])],
        [numpy_helper.from_array(array, key) for key, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def run_both(model: ModelProto, dtype: type = np.float32) -> tuple[Array, Array, Counter[str]]:
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(dtype)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})
    module = import_model(model).module
    counts = quantise_graph(module, None)
    (answer,) = module(torch.from_numpy(x))
    assert answer.numpy().dtype == expected.dtype
    return answer.numpy(), np.asarray(expected), counts


def square(seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    levels = random.integers(-127, 128, (16, 16)).astype(np.int8)
    return levels, random.uniform(0.001, 0.01, 16)


@pytest.mark.parametrize(("axis", "num_layers"), [(1, 1), (0, 0)])
def test_scales_of_square_weights_are_told_apart_by_their_axis(axis: int, num_layers: int) -> None:
    answer, expected, counts = run_both(by_hand(*square(), axis))
    assert counts.total() == num_layers
    assert_near(answer, expected)


def test_limits_below_the_lowest_level_do_not_wrap_around() -> None:
    answer, expected, counts = run_both(by_hand(*square(), 1, last="clip"))
    assert counts["linear"] == 1
    assert np.array_equal(answer, expected)


def test_a_file_of_16_bits_keeps_its_datatype() -> None:
    model = by_hand(*square(), 1, dtype=np.float16)
    answer, expected, counts = run_both(model, np.float16)
    assert counts["linear"] == 1
    assert np.allclose(answer, expected, rtol=2e-2, atol=2e-2)


def test_a_result_that_is_an_output_too_is_still_one_after_the_pass() -> None:
    net = Network(4)
    first = net.add("Relu", [net.conv("x", 32, 3, 3)])
    one = net.conv(first, 32, 32)
    last = net.conv(net.add("Add", [one, first]), 32, 32)
    model = net.model(last, (32, 12, 12))
    model.graph.output.append(
        helper.make_tensor_value_info(one, TensorProto.FLOAT, ["n", 32, 12, 12])
    )
    made = quantised(model, ranges(model), ON_GPU)
    onnx.checker.check_model(made)
    assert {each.name for each in made.graph.output} == {last, one}
    ort.InferenceSession(made.SerializeToString()).run(None, {"x": rows()})
