"""Operators of `com.microsoft`, compared with ONNX Runtime, whose own they are."""

from collections.abc import Mapping

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from penstock.backends.onnx_import.importer import import_model
from penstock.types import Array

WIDTH, HEADS, ROWS, LENGTH = 16, 4, 2, 5
RANDOM = np.random.default_rng(5)
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "uint8": TensorProto.UINT8}
TYPES |= {"int8": TensorProto.INT8, "bool": TensorProto.BOOL}


def numbers(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def whole(dtype: type, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max, shape).astype(dtype)


SCALE, ZERO = np.array(0.02, np.float32), np.array(3, np.uint8)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
X, SKIP = numbers(ROWS, LENGTH, WIDTH), numbers(ROWS, LENGTH, WIDTH)
QKV, QKV_BIAS = numbers(WIDTH, 3 * WIDTH), numbers(3 * WIDTH)
SMALL = whole(np.uint8, 2, 3, 4, 4)
SIGNED, MINUS = whole(np.int8, 2, 3, 4, 4), np.array(-5, np.int8)
FINE = np.array(0.01, np.float32)
PACKED = whole(np.uint8, 8, 1, 8)
CASES: dict[str, tuple[str, dict[str, Array], Mapping[str, object]]] = {
    "bias gelu": ("BiasGelu", {"x": X, "b": numbers(WIDTH)}, {}),
    "fast gelu": ("FastGelu", {"x": X, "b": numbers(WIDTH)}, {}),
    "quick gelu": ("QuickGelu", {"x": X}, {"alpha": 1.702}),
    "gelu": ("Gelu", {"x": X}, {}),
    "skip layer norm": (
        "SkipLayerNormalization",
        {"x": X, "s": SKIP, "g": numbers(WIDTH), "b": numbers(WIDTH), "c": numbers(WIDTH)},
        {"epsilon": 1e-6},
    ),
    "skip rms norm": (
        "SkipSimplifiedLayerNormalization",
        {"x": X, "s": SKIP, "g": numbers(WIDTH)},
        {"epsilon": 1e-6},
    ),
    "attention": ("Attention", {"x": X, "w": QKV, "b": QKV_BIAS}, {"num_heads": HEADS}),
    "attention with a mask": (
        "Attention",
        {"x": X, "w": QKV, "b": QKV_BIAS, "m": MASK},
        {"num_heads": HEADS},
    ),
    "attention with lengths": (
        "Attention",
        {"x": X, "w": QKV, "b": QKV_BIAS, "m": np.array([5, 3], np.int32)},
        {"num_heads": HEADS},
    ),
    "multi-head attention": (
        "MultiHeadAttention",
        {"q": X, "k": SKIP, "v": SKIP, "b": QKV_BIAS, "m": MASK},
        {"num_heads": HEADS},
    ),
    "fused matmul": ("FusedMatMul", {"a": X, "b": SKIP}, {"alpha": 0.5, "transB": 1}),
    "fused gemm": (
        "FusedGemm",
        {"a": numbers(3, 4), "b": numbers(4, 5), "c": numbers(5)},
        {"activation": "Relu"},
    ),
    "fused convolution": (
        "FusedConv",
        {"x": numbers(2, 3, 6, 6), "w": numbers(4, 3, 3, 3), "b": numbers(4)},
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
    ),
    "quantised sum": (
        "QLinearAdd",
        {"a": SMALL, "as": SCALE, "az": ZERO, "b": SMALL, "bs": SCALE, "bz": ZERO}
        | {"ys": np.array(0.05, np.float32), "yz": ZERO},
        {},
    ),
    "quantised product": (
        "QLinearMul",
        {"a": SMALL, "as": SCALE, "az": ZERO, "b": SMALL, "bs": SCALE, "bz": ZERO}
        | {"ys": np.array(0.2, np.float32), "yz": ZERO},
        {},
    ),
    "quantised sigmoid": (
        "QLinearSigmoid",
        {"x": SMALL, "xs": SCALE, "xz": ZERO, "ys": np.array(1 / 256, np.float32), "yz": ZERO},
        {},
    ),
    "quantised average": (
        "QLinearGlobalAveragePool",
        {"x": SMALL, "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO},
        {},
    ),
    "quantised concatenation": (
        "QLinearConcat",
        {"ys": SCALE, "yz": ZERO, "a": SMALL, "as": SCALE, "az": ZERO}
        | {"b": SMALL, "bs": np.array(0.03, np.float32), "bz": ZERO},
        {"axis": 1},
    ),
    "integer matmul to float": (
        "MatMulIntegerToFloat",
        {"a": whole(np.uint8, 3, 4), "b": whole(np.int8, 4, 5), "as": SCALE, "bs": SCALE}
        | {"az": ZERO, "bz": np.array(1, np.int8), "c": numbers(5)},
        {},
    ),
    "quantised convolution, channels last": (
        "QLinearConv",
        {"x": whole(np.uint8, 2, 6, 6, 3), "xs": SCALE, "xz": ZERO, "w": whole(np.int8, 4, 3, 3, 3)}
        | {"ws": np.array([0.1, 0.02, 0.3, 0.01], np.float32), "wz": np.zeros(4, np.int8)}
        | {"ys": np.array(20, np.float32), "yz": ZERO, "b": np.array([5, -7, 900, 0], np.int32)},
        {"channels_last": 1, "pads": [1, 1, 1, 1]},
    ),
    "quantised pool, channels last": (
        "QLinearGlobalAveragePool",
        {"x": whole(np.uint8, 2, 6, 6, 3), "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO},
        {"channels_last": 1},
    ),
    "quantised gemm": (
        "QGemm",
        {"a": whole(np.uint8, 3, 4), "as": SCALE, "az": ZERO, "b": whole(np.int8, 5, 4)}
        | {"bs": np.array([0.1, 0.2, 0.03, 0.01, 0.3], np.float32), "bz": np.zeros(5, np.int8)}
        | {"c": np.array([100, -50, 7, 0, 3], np.int32), "ys": SCALE, "yz": ZERO},
        {"transB": 1},
    ),
    "quantised gemm to float": (
        "QGemm",
        {"a": whole(np.uint8, 4, 3), "as": SCALE, "az": ZERO, "b": whole(np.int8, 4, 5)}
        | {"bs": SCALE, "bz": np.array(1, np.int8)},
        {"transA": 1, "alpha": 0.5},
    ),
    "dynamic quantisation": (
        "DynamicQuantizeMatMul",
        {"a": numbers(3, 8), "b": whole(np.uint8, 8, 5), "bs": SCALE, "bz": ZERO},
        {},
    ),
    "quantised window average": (
        "QLinearAveragePool",
        {"x": SMALL, "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO},
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]},
    ),
    "quantised window average with padding, of signed integers": (
        "QLinearAveragePool",
        {"x": SIGNED, "xs": SCALE, "xz": MINUS, "ys": np.array(0.013, np.float32), "yz": MINUS},
        {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "count_include_pad": 1},
    ),
    "quantised window average, channels last": (
        "QLinearAveragePool",
        {"x": whole(np.uint8, 2, 7, 6, 3), "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO},
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "channels_last": 1},
    ),
    "quantised window average of the same size": (
        "QLinearAveragePool",
        {"x": SMALL, "xs": SCALE, "xz": ZERO, "ys": SCALE, "yz": ZERO},
        {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER"},
    ),
    "quantised choice": (
        "QLinearWhere",
        {"c": RANDOM.random((2, 1, 4, 4)) < 0.5, "x": SMALL, "xs": SCALE, "xz": ZERO}
        | {"o": whole(np.uint8, 3, 1, 1), "os": np.array(0.03, np.float32)}
        | {"oz": np.array(9, np.uint8), "zs": np.array(0.05, np.float32), "zz": ZERO},
        {},
    ),
    "quantised choice of signed integers": (
        "QLinearWhere",
        {"c": RANDOM.random((2, 3, 4, 4)) < 0.5, "x": SIGNED, "xs": SCALE, "xz": MINUS}
        | {"o": np.array([-128], np.int8), "os": np.array(0.03, np.float32)}
        | {"oz": np.array(9, np.int8), "zs": np.array(0.05, np.float32), "zz": MINUS},
        {},
    ),
    "quantised attention": (
        "QAttention",
        {"x": whole(np.uint8, ROWS, LENGTH, WIDTH), "w": whole(np.int8, WIDTH, 3 * WIDTH)}
        | {"b": QKV_BIAS, "xs": SCALE, "ws": FINE, "m": MASK}
        | {"xz": np.array(120, np.uint8), "wz": np.array(2, np.int8)},
        {"num_heads": HEADS},
    ),
    "quantised attention with scales of columns": (
        "QAttention",
        {"x": whole(np.uint8, ROWS, LENGTH, WIDTH), "w": whole(np.uint8, WIDTH, 3 * WIDTH)}
        | {"b": QKV_BIAS, "xs": SCALE, "ws": numbers(3 * WIDTH) ** 2 / 99}
        | {"m": np.array([5, 3], np.int32), "xz": np.array(120, np.uint8)}
        | {"wz": whole(np.uint8, 3 * WIDTH)},
        {"num_heads": HEADS},
    ),
    "weights of four bits": (
        "MatMulNBits",
        {"a": numbers(3, 16), "b": PACKED, "s": numbers(8)},
        {"K": 16, "N": 8, "bits": 4, "block_size": 16},
    ),
}


def scales(names: str) -> dict[str, Array]:
    return {f"{name}_scale": np.array(RANDOM.random() / 50, np.float32) for name in names}


def zeros(names: str, dtype: type = np.uint8) -> dict[str, Array]:
    return {f"{name}_zero": whole(dtype)[()].reshape(()) for name in names}


IDS = RANDOM.integers(0, 20, (ROWS, LENGTH)).astype(np.int32)
PAST = numbers(2, ROWS, HEADS, 3, WIDTH // HEADS)
PAST_MASK = np.array([[1] * 8, [1, 1, 0, 1, 1, 1, 0, 1]], np.int32)
LSTM_WEIGHTS = {
    "w": whole(np.int8, 2, 6, 32),
    "r": whole(np.int8, 2, 8, 32),
    "b": numbers(2, 64),
}
# Outputs beside the first one, in addition to `CASES`.
SEVERAL: dict[str, tuple[str, dict[str, Array], Mapping[str, object], int]] = {
    "attention with a past": (
        "Attention",
        {"x": X, "w": QKV, "b": QKV_BIAS, "": np.empty(0), "p": PAST},
        {"num_heads": HEADS},
        2,
    ),
    "causal attention with a past and a mask": (
        "Attention",
        {"x": X, "w": QKV, "b": QKV_BIAS, "m": PAST_MASK, "p": PAST},
        {"num_heads": HEADS, "unidirectional": 1},
        2,
    ),
    "causal attention": (
        "Attention",
        {"x": X, "w": QKV, "b": QKV_BIAS},
        {"num_heads": HEADS, "unidirectional": 1},
        1,
    ),
    "multi-head attention with a past": (
        "MultiHeadAttention",
        {"q": X, "k": SKIP, "v": SKIP, "": np.empty(0), " ": np.empty(0), "  ": np.empty(0)}
        | {"pk": PAST[0], "pv": PAST[1]},
        {"num_heads": HEADS, "unidirectional": 1},
        3,
    ),
    "quantised attention with a past": (
        "QAttention",
        {"x": whole(np.uint8, ROWS, LENGTH, WIDTH), "w": whole(np.int8, WIDTH, 3 * WIDTH)}
        | {"b": QKV_BIAS, "xs": SCALE, "ws": FINE, "": np.empty(0)}
        | {"xz": np.array(120, np.uint8), "wz": np.array(0, np.int8), "p": PAST},
        {"num_heads": HEADS, "unidirectional": 1},
        2,
    ),
    "quantised embedding": (
        "QEmbedLayerNormalization",
        {"i": IDS, "s": IDS % 2, "wt": whole(np.uint8, 20, WIDTH), "pt": whole(np.uint8, 8, WIDTH)}
        | {"st": whole(np.uint8, 2, WIDTH), "g": whole(np.uint8, WIDTH)}
        | {"b": whole(np.uint8, WIDTH), "m": MASK, **scales("wpsgb"), **zeros("wpsgb")},
        {"epsilon": 1e-6},
        2,
    ),
    "quantised embedding without segments": (
        "QEmbedLayerNormalization",
        {"i": IDS, "": np.empty(0), "wt": whole(np.int8, 20, WIDTH), "pt": whole(np.int8, 8, WIDTH)}
        | {" ": np.empty(0), "g": whole(np.int8, WIDTH), "b": whole(np.int8, WIDTH)}
        | {"  ": np.empty(0), **scales("wp"), "   ": np.empty(0), **scales("gb")}
        | {**zeros("wp", np.int8), "    ": np.empty(0), **zeros("gb", np.int8)},
        {},
        2,
    ),
    "quantised LSTM": (
        "DynamicQuantizeLSTM",
        {"x": numbers(5, 1, 6), **LSTM_WEIGHTS}
        | {key: np.empty(0) for key in ("", " ", "  ", "   ")}
        | {"ws": numbers(2) ** 2 / 50, "wz": whole(np.int8, 2) // 8}
        | {"rs": numbers(2) ** 2 / 50, "rz": whole(np.int8, 2) // 8},
        {"hidden_size": 8, "direction": "bidirectional"},
        3,
    ),
    "quantised LSTM with scales of columns": (
        "DynamicQuantizeLSTM",
        {"x": numbers(5, 1, 6), **LSTM_WEIGHTS}
        | {key: np.empty(0) for key in ("", " ", "  ", "   ")}
        | {"ws": numbers(2, 32) ** 2 / 50, "wz": np.zeros((2, 32), np.int8)}
        | {"rs": numbers(2, 32) ** 2 / 50, "rz": np.zeros((2, 32), np.int8)},
        {"hidden_size": 8, "direction": "bidirectional"},
        3,
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_all_outputs_are_those_of_onnx_runtime(name: str) -> None:
    op_type, inputs, attributes, num_outputs = SEVERAL[name]
    names = [f"y{number}" for number in range(num_outputs)]
    # Blank names are absent inputs.
    given = [key.strip() for key in inputs]
    node = helper.make_node(op_type, given, names, domain="com.microsoft", **attributes)
    first = given[0]
    kind = TYPES[inputs[first].dtype.name]
    value = helper.make_tensor_value_info(first, kind, inputs[first].shape)
    weights = {key: array for key, array in inputs.items() if key.strip() and key != first}
    graph = helper.make_graph(
        [node],
        "made",
        [value],
        [helper.make_empty_tensor_value_info(each) for each in names],
        [numpy_helper.from_array(array, key) for key, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(names, {first: inputs[first]})
    with torch.no_grad():
        found = import_model(model).module(torch.from_numpy(inputs[first]))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-4 * max(1, np.abs(theirs).max()))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_onnx_runtime(name: str) -> None:
    op_type, inputs, attributes = CASES[name]
    node = helper.make_node(op_type, list(inputs), ["y"], domain="com.microsoft", **attributes)
    # The first tensor of numbers is the input; the rest are weights, as in files.
    first = next(key for key, array in inputs.items() if array.ndim)
    graph = helper.make_graph(
        [node],
        "made",
        [
            helper.make_tensor_value_info(
                first, TYPES[inputs[first].dtype.name], inputs[first].shape
            )
        ],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(array, key) for key, array in inputs.items() if key != first],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(["y"], {first: inputs[first]})
    with torch.no_grad():
        (found,) = import_model(model).module(torch.from_numpy(inputs[first]))
    assert (found.numpy().dtype, found.shape) == (expected.dtype, expected.shape)
    difference = np.abs(found.numpy().astype(np.float64) - expected.astype(np.float64)).max()
    # Quantised values may round to the next step.
    largest = 1 if expected.dtype.itemsize == 1 else 2e-4 * max(1, np.abs(expected).max())
    assert difference <= largest
