"""Small networks as ONNX files, and ranges to quantise them with."""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper, numpy_helper

from penstock.optimizer import onnx_model
from penstock.optimizer.passes.int8_static import Scheme
from penstock.types import Array

IMAGE = (3, 12, 12)
ON_GPU = Scheme("minmax", per_channel=True, reduce_range=False, is_transformer=False, is_gpu=True)


class Network:
    """A small residual network as ONNX nodes, with random weights."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}

    def add(self, op_type: str, inputs: list[str], **attributes: object) -> str:
        name = f"{op_type.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    def conv(self, x: str, out: int, channels: int, size: int = 1, **attributes: object) -> str:
        name = f"w{len(self.weights)}"
        shape = (out, channels, size, size)
        spread = (2 / (channels * size * size)) ** 0.5
        self.weights[name] = spread * self.random.standard_normal(shape, np.float32)
        self.weights[f"{name}_bias"] = 0.1 * self.random.standard_normal(out, np.float32)
        pads = [size // 2] * 4
        return self.add("Conv", [x, name, f"{name}_bias"], pads=pads, **attributes)

    def block(self, x: str, channels: int, middle: int) -> str:
        y = self.add("Relu", [self.conv(x, middle, channels)])
        y = self.add("Relu", [self.conv(y, middle, middle, 3)])
        return self.add("Relu", [self.add("Add", [self.conv(y, channels, middle), x])])

    def model(self, last: str, shape: tuple[int, ...]) -> ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "made",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *IMAGE])],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["n", *shape])],
            [numpy_helper.from_array(array, name) for name, array in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", 17)]
        return onnx_model.prepared(helper.make_model(graph, opset_imports=opsets, ir_version=8))


def residual() -> ModelProto:
    net = Network()
    x = net.add("Relu", [net.conv("x", 32, 3, 3, strides=[2, 2])])
    x = net.add("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    x = net.block(net.block(x, 32, 16), 32, 16)
    x = net.add("Flatten", [net.add("GlobalAveragePool", [x])])
    net.weights["last"] = 0.1 * net.random.standard_normal((32, 32), np.float32)
    return net.model(net.add("MatMul", [x, "last"]), (32,))


def activated(net: Network, kind: str, x: str) -> str:
    """An activation as exporters write it: an operator, or several."""
    match kind:
        case "silu":
            return net.add("Mul", [x, net.add("Sigmoid", [x])])
        case "hard_swish written out":
            net.weights |= {"three": np.float32(3), "six": np.float32(6), "none": np.float32(0)}
            gate = net.add("Clip", [net.add("Add", [x, "three"]), "none", "six"])
            return net.add("Div", [net.add("Mul", [x, gate]), "six"])
        case "Gelu":
            net.weights |= {"root": np.float32(2**0.5), "one": np.float32(1)}
            net.weights["half"] = np.float32(0.5)
            erf = net.add("Erf", [net.add("Div", [x, "root"])])
            both = net.add("Mul", [x, net.add("Add", [erf, "one"])])
            return net.add("Mul", [both, "half"])
        case "LeakyRelu":
            return net.add("LeakyRelu", [x], alpha=0.2)
    return net.add(kind, [x])


def bottlenecks(kind: str) -> ModelProto:
    """As in YOLO: x + silu(conv(silu(conv(x)))), and a classifier."""
    net = Network(6)
    x = activated(net, kind, net.conv("x", 32, 3, 3, strides=[2, 2]))
    for _ in range(2):
        y = activated(net, kind, net.conv(x, 32, 32, 3))
        x = net.add("Add", [x, activated(net, kind, net.conv(y, 32, 32, 3))])
    x = activated(net, kind, net.conv(x, 48, 32))
    x = net.add("Flatten", [net.add("GlobalAveragePool", [x])])
    net.weights["last"] = 0.2 * net.random.standard_normal((48, 32), np.float32)
    net.weights["bias"] = 0.1 * net.random.standard_normal(32, np.float32)
    return net.model(activated(net, kind, net.add("Gemm", [x, "last", "bias"])), (32,))


def rows(seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal((4, *IMAGE), np.float32)


def ranges(model: ModelProto) -> dict[str, tuple[float, float]]:
    """Of all tensors of floats, for some rows."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    made = [name for node in model.graph.node for name in node.output]
    known = {each.name for each in model.graph.output}
    watched.graph.output.extend(
        helper.make_empty_tensor_value_info(name) for name in made if name not in known
    )
    session = ort.InferenceSession(watched.SerializeToString())
    names = [each.name for each in session.get_outputs()]
    values = dict(zip(names, session.run(None, {"x": rows(1)}), strict=True))
    values["x"] = rows(1)
    return {name: (float(each.min()), float(each.max())) for name, each in values.items()}
