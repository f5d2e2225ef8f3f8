"""Common forms of nodes in every operator set from 7 to 24, compared with ONNX Runtime.

ONNX's own cases have only the newest form of each operator; here attributes become inputs, and
defaults change, as they did from one operator set to the next.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from penstock.backends.onnx_import.importer import OLDEST, import_model
from penstock.types import Array

NEWEST = 24
RANDOM = np.random.default_rng(3)
INPUTS: dict[str, Array] = {
    "x": RANDOM.standard_normal((2, 4, 6, 6)).astype(np.float32),
    "m": RANDOM.standard_normal((3, 4, 5)).astype(np.float32),
    "n": RANDOM.standard_normal((3, 5, 4)).astype(np.float32),
    "p": (RANDOM.random((3, 4, 5)) + 0.1).astype(np.float32),
    "i": RANDOM.integers(0, 3, (2, 3)).astype(np.int64),
    "one": RANDOM.standard_normal((3, 1, 5)).astype(np.float32),
    "flat": RANDOM.standard_normal((2, 3)).astype(np.float32),
    "turned": RANDOM.standard_normal((3, 2)).astype(np.float32),
    "sequence": RANDOM.standard_normal((5, 2, 4)).astype(np.float32),
}
UNARY = (
    *("Abs", "Ceil", "Cos", "Elu", "Exp", "Floor", "HardSigmoid", "Identity", "LeakyRelu", "Neg"),
    *("Relu", "Selu", "Sigmoid", "Sin", "Softplus", "Softsign", "Tanh", "Softmax", "LogSoftmax"),
)
REDUCTIONS = ("ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceLogSumExp")


class Sweep:
    """A model of independent nodes in one operator set."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self.outputs: list[str] = []

    def add(
        self, op_type: str, *inputs: str | Array, num_outputs: int = 1, **attributes: object
    ) -> None:
        """Add a node: texts are inputs of the model, arrays are constants."""
        names = []
        for each in inputs:
            if isinstance(each, str):
                names.append(each)
                continue
            names.append(f"w{len(self.weights)}")
            self.weights[names[-1]] = each
        made = [f"{op_type}_{len(self.nodes)}_{number}" for number in range(num_outputs)]
        self.nodes.append(helper.make_node(op_type, names, made, **attributes))
        self.outputs += made

    def with_axes(self, op_type: str, since: int, x: str, axes: Sequence[int], **more: int) -> None:
        """Axes were an attribute before they were an input."""
        if self.opset < since:
            self.add(op_type, x, axes=list(axes), **more)
        else:
            self.add(op_type, x, np.array(axes), **more)

    def model(self) -> onnx.ModelProto:
        used = {name for node in self.nodes for name in node.input}
        kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
        graph = helper.make_graph(
            self.nodes,
            "sweep",
            [
                helper.make_tensor_value_info(name, kinds[array.dtype.name], array.shape)
                for name, array in INPUTS.items()
                if name in used
            ],
            [helper.make_empty_tensor_value_info(name) for name in self.outputs],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def weight(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def add_layers(sweep: Sweep) -> None:
    channels = [np.abs(weight(4)) + 0.1 for _ in range(4)]
    sweep.add("BatchNormalization", "x", *channels)
    sweep.add("InstanceNormalization", "x", *channels[:2])
    sweep.add("LRN", "x", size=3)
    sweep.add("Conv", "x", weight(8, 2, 3, 3), weight(8), group=2, pads=[1, 0, 1, 2])
    sweep.add("ConvTranspose", "x", weight(4, 3, 3, 3), strides=[2, 2], output_padding=[1, 0])
    sweep.add("MaxPool", "x", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
    sweep.add("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    sweep.add("AveragePool", "x", kernel_shape=[2, 2], auto_pad="SAME_UPPER")
    sweep.add("GlobalAveragePool", "x")
    if sweep.opset >= 10:
        sweep.add("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
    # In two dimensions the bias is added to rows, in both forms.
    for form in ({}, {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}):
        a, b = ("turned", weight(4, 3)) if form else ("flat", weight(3, 4))
        sweep.add("Gemm", a, b, weight(4), **form)
    sweep.add("MatMul", "m", "n")
    for direction in ("forward", "bidirectional"):
        ways = 1 + (direction == "bidirectional")
        for op_type, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
            w, r = weight(ways, gates * 5, 4), weight(ways, gates * 5, 5)
            how = {"hidden_size": 5, "direction": direction}
            sweep.add(op_type, "sequence", w, r, num_outputs=2, **how)
    if sweep.opset >= 17:
        sweep.add("LayerNormalization", "m", weight(5), weight(5))


def add_shapes(sweep: Sweep) -> None:
    opset = sweep.opset
    sweep.add("Transpose", "m", perm=[2, 0, 1])
    sweep.add("Flatten", "x", axis=2)
    sweep.add("Concat", "m", "p", axis=1)
    sweep.add("Shape", "x")
    sweep.add("Reshape", "x", np.array([0, -1, 3]))
    sweep.add("Tile", "m", np.array([1, 2, 1]))
    sweep.add("Gather", "m", np.array([[1, 0]]), axis=1)
    sweep.add("Cast", "m", to=TensorProto.INT32)
    sweep.with_axes("Unsqueeze", 13, "m", [0, 2])
    sweep.with_axes("Squeeze", 13, "one", [1])
    if opset >= 8:
        sweep.add("Expand", "m", np.array([2, 1, 1, 5]))
    if opset >= 9:
        sweep.add("Where", np.array([[True], [False], [True], [True]]), "m", "p")
        sweep.add("ConstantOfShape", np.array([2, 3]))
        sweep.add("OneHot", "i", np.array(3), np.array([0, 1], np.float32))
    if opset < 10:
        sweep.add("Slice", "x", axes=[1, 3], starts=[1, -4], ends=[3, 100])
        sweep.add("TopK", "m", k=2, axis=1, num_outputs=2)
    else:
        steps = [np.array(each) for each in ([1, -1], [4, 0], [1, 3], [2, -2])]
        sweep.add("Slice", "x", *steps)
        sweep.add("TopK", "m", np.array([2]), axis=1, num_outputs=2)
    if opset < 11:
        sweep.add("Pad", "x", pads=[0, 0, 1, 2, 0, 0, 0, 1], value=0.5)
    else:
        sweep.add("Pad", "x", np.array([0, 0, 1, 2, 0, 0, 0, 1]), np.array(0.5, np.float32))
    sizes = [1, 3]
    if opset < 13:
        sweep.add("Split", "x", split=sizes, axis=1, num_outputs=2)
    else:
        sweep.add("Split", "x", np.array(sizes), axis=1, num_outputs=2)


def add_arithmetic(sweep: Sweep) -> None:
    opset = sweep.opset
    for op_type in UNARY:
        sweep.add(op_type, "m")
    for op_type in ("Log", "Sqrt", "Reciprocal"):
        sweep.add(op_type, "p")
    for op_type in ("Add", "Sub", "Mul", "Div"):
        sweep.add(op_type, "m", "p")
        sweep.add(op_type, "m", weight(4, 1))
    sweep.add("Pow", "p", np.array(1.5, np.float32))
    for op_type in ("Max", "Min", "Sum", "Mean"):
        sweep.add(op_type, "m", "p", *(["m"] if opset < 8 else [weight(4, 1)]))
    for op_type in ("Greater", "Less"):
        sweep.add(op_type, "m", "p")
    sweep.add("PRelu", "x", weight(4, 1, 1))
    if opset < 11:
        sweep.add("Clip", "m", min=-0.5, max=0.25)
    else:
        sweep.add("Clip", "m", np.array(-0.5, np.float32), np.array(0.25, np.float32))
        sweep.add("Clip", "m", "", np.array(0.25, np.float32))
    sweep.add("Softmax", "m", axis=1)
    sweep.add("Dropout", "m")
    for op_type in REDUCTIONS:
        sweep.with_axes(op_type, 13 if op_type == "ReduceSum" else 18, "m", [1], keepdims=0)
        sweep.add(op_type, "m")
    sweep.add("ArgMax", "m", axis=1)
    if opset >= 9:
        sweep.add("Erf", "m")
    if opset >= 11:
        sweep.add("CumSum", "m", np.array(1))
    if opset >= 14:
        sweep.add("HardSwish", "m")


def add_resizing(sweep: Sweep) -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    if sweep.opset < 9:
        sweep.add("Upsample", "x", mode="nearest", scales=scales.tolist())
    elif sweep.opset == 9:
        sweep.add("Upsample", "x", scales, mode="nearest")
    elif sweep.opset == 10:
        sweep.add("Resize", "x", scales, mode="nearest")
    else:
        empty = np.array([], np.float32)
        sweep.add("Resize", "x", empty, scales, mode="nearest")
        sweep.add("Resize", "x", empty, empty, np.array([2, 4, 9, 4]), mode="linear")


@pytest.mark.parametrize("opset", range(OLDEST, NEWEST + 1))
@pytest.mark.parametrize("add", [add_layers, add_shapes, add_arithmetic, add_resizing])
def test_nodes_are_those_of_onnx_runtime(add: Callable[[Sweep], None], opset: int) -> None:
    sweep = Sweep(opset)
    add(sweep)
    model = sweep.model()
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = {each.name: INPUTS[each.name] for each in session.get_inputs()}
    expected = session.run(sweep.outputs, given)
    imported = import_model(model)
    with torch.no_grad():
        found = imported.module(*(torch.from_numpy(given[name]) for name in imported.inputs))
    wrong = {}
    for name, ours, theirs in zip(sweep.outputs, found, expected, strict=True):
        try:
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-4, atol=1e-5)
            assert ours.numpy().dtype == theirs.dtype
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}
