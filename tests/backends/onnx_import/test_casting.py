"""Graphs in 16 bits: what stays exact, and operators that make floats by themselves."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from penstock.backends.onnx_import.casting import retype
from penstock.backends.onnx_import.elementwise import cast_within
from penstock.backends.onnx_import.importer import import_model
from penstock.types import Array

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
TYPES = {"float32": FLOAT, "int64": INT64}
HALVES = [torch.float16, torch.bfloat16]


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Array],
    outputs: dict[str, int],
    weights: dict[str, Array],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "made",
        [
            helper.make_tensor_value_info(
                name, TYPES[array.dtype.name], [f"{name}{n}" for n in range(array.ndim)]
            )
            for name, array in inputs.items()
        ],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def compare(
    model: onnx.ModelProto, inputs: dict[str, Array], dtype: torch.dtype
) -> list[tuple[Array, Array]]:
    """Each output in 16 bits, and that of ONNX Runtime in FP32."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, inputs)
    graph = import_model(model)
    retype(graph, dtype)
    module = graph.module.to(dtype)
    given = [torch.from_numpy(inputs[name]) for name in graph.inputs]
    given = [each.to(dtype) if each.is_floating_point() else each for each in given]
    with torch.no_grad():
        found = module(*given)
    for each, theirs in zip(found, expected, strict=True):
        assert each.is_floating_point() == (theirs.dtype.kind == "f")
        assert not each.is_floating_point() or each.dtype == dtype
    return [
        (each.float().numpy() if each.is_floating_point() else each.numpy(), theirs)
        for each, theirs in zip(found, expected, strict=True)
    ]


POSITIONS = np.array([1, 2049, 4097, 70001, 1234567], np.int64)


@pytest.mark.parametrize("dtype", HALVES)
def test_integers_that_become_integers_again_are_exact(dtype: torch.dtype) -> None:
    """Positions are halved in float, as exporters write integer division."""
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=FLOAT),
        helper.make_node("Div", ["f", "two"], ["half"]),
        helper.make_node("Floor", ["half"], ["down"]),
        helper.make_node("Cast", ["down"], ["y"], to=INT64),
    ]
    weights = {"two": np.array([2.0], np.float32)}
    model = make(nodes, {"x": POSITIONS}, {"y": INT64}, weights)
    [(found, expected)] = compare(model, {"x": POSITIONS}, dtype)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found, POSITIONS // 2)


@pytest.mark.parametrize("dtype", HALVES)
def test_constants_beside_them_are_exact_and_others_use_the_result(dtype: torch.dtype) -> None:
    """2049 is none of 16 bits' numbers. The same float is compared, and added to a tensor."""
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=FLOAT),
        helper.make_node("Sub", ["f", "limits"], ["d"]),
        helper.make_node("Greater", ["d", "zero"], ["is_more"]),
        helper.make_node("Add", ["d", "other"], ["y"]),
    ]
    limits = np.array([1, 2048, 4096, 70001, 1234566], np.float32)
    weights = {"limits": limits, "zero": np.zeros(1, np.float32)}
    other = np.arange(5, dtype=np.float32)
    inputs = {"x": POSITIONS, "other": other}
    model = make(nodes, inputs, {"is_more": BOOL, "y": FLOAT}, weights)
    (mask, more), (found, expected) = compare(model, inputs, dtype)
    np.testing.assert_array_equal(mask, more)
    assert mask.tolist() == [False, True, True, False, True]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_masks_are_still_floats_of_sixteen_bits(dtype: torch.dtype) -> None:
    """Nothing makes integers of it: the usual cast, with what masks limited to the range."""
    nodes = [
        helper.make_node("Cast", ["m"], ["f"], to=FLOAT),
        helper.make_node("Mul", ["f", "lowest"], ["a"]),
        helper.make_node("Add", ["a", "x"], ["s"]),
        helper.make_node("Softmax", ["s"], ["y"], axis=-1),
    ]
    weights = {"lowest": np.array([-3e38], np.float32)}
    inputs = {"m": np.array([[0, 1, 0]], np.int64), "x": np.ones((1, 3), np.float32)}
    model = make(nodes, inputs, {"y": FLOAT}, weights)
    [(found, expected)] = compare(model, inputs, dtype)
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_by_channel", [False, True])
def test_scales_that_sixteen_bits_do_not_hold(dtype: torch.dtype, is_by_channel: bool) -> None:
    """A quantised tensor that leaves the graph, and one that is scaled back: both run as they are
    written, with scales far below 6e-5, the least normal number of FP16."""
    scale = np.array([3e-6, 7e-7, 2e-8, 5e-5] if is_by_channel else 3e-6, np.float32)
    weights = {"scale": scale, "zero": np.zeros(scale.shape, np.int8)}
    weights["one"] = np.array(1024.0, np.float32)
    x = np.random.default_rng(0).standard_normal((2, 4), np.float32) * 2e-4
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("Mul", ["d", "one"], ["y"]),
    ]
    # Numbers that 16 bits hold exactly.
    x = torch.from_numpy(x).to(dtype).float().numpy()
    model = make(nodes, {"x": x}, {"q": TensorProto.INT8, "y": FLOAT}, weights)
    (integers, wanted), (found, expected) = compare(model, {"x": x}, dtype)
    np.testing.assert_array_equal(integers, wanted)
    # The result itself may be too small for FP16, in steps of 6e-8.
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1024 * 6e-8)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op_type", ["DFT", "EyeLike", "Range", "HannWindow"])
def test_operators_that_make_floats(op_type: str, dtype: torch.dtype) -> None:
    x = np.random.default_rng(0).random((1, 8, 1), np.float32)
    match op_type:
        case "DFT":
            nodes, inputs = [helper.make_node("DFT", ["x"], ["y"], axis=1)], {"x": x}
        case "EyeLike":
            nodes = [
                helper.make_node("EyeLike", ["i"], ["e"], dtype=FLOAT),
                helper.make_node("MatMul", ["e", "x"], ["y"]),
            ]
            inputs = {"i": np.ones((8, 8), np.int64), "x": x}
        case "Range":
            nodes = [
                helper.make_node("Shape", ["x"], ["shape"]),
                helper.make_node("Gather", ["shape", "one"], ["n"]),
                helper.make_node("Cast", ["n"], ["f"], to=FLOAT),
                helper.make_node("Range", ["zero", "f", "step"], ["r"]),
                helper.make_node("MatMul", ["r", "x"], ["y"]),
            ]
            inputs = {"x": x}
        case _:
            nodes = [
                helper.make_node("Shape", ["x"], ["shape"]),
                helper.make_node("Gather", ["shape", "one"], ["n"]),
                helper.make_node("HannWindow", ["n"], ["r"]),
                helper.make_node("MatMul", ["r", "x"], ["y"]),
            ]
            inputs = {"x": x}
    weights = {"one": np.array(1, np.int64), "zero": np.array(0, np.float32)}
    weights["step"] = np.array(1, np.float32)
    used = {name for node in nodes for name in node.input}
    weights = {name: array for name, array in weights.items() if name in used}
    model = make(nodes, inputs, {"y": FLOAT}, weights)
    [(found, expected)] = compare(model, inputs, dtype)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=2e-2)


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_beyond_the_range_are_limited_without_looking_at_them(dtype: torch.dtype) -> None:
    """CUDA graphs capture it: a tensor on the meta device has no data to wait for."""
    assert cast_within(torch.empty(4, device="meta"), to=dtype).dtype == dtype
    most, limits = torch.finfo(torch.float32).max, torch.finfo(dtype)
    given = torch.tensor([-most, most, -torch.inf, torch.inf, torch.nan, limits.max, 1.5, 0])
    expected = [-limits.max / 2, limits.max / 2, -torch.inf, torch.inf, torch.nan, limits.max]
    found = cast_within(given, to=dtype).double()
    torch.testing.assert_close(found, torch.tensor([*expected, 1.5, 0]).double(), equal_nan=True)
