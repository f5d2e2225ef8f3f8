"""Small ONNX models, made for the tests of the optimiser, and what its passes are called with."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.examples import Examples, Split
from penstock.optimizer.facts import Facts, file_facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext, Pass, PassContext
from penstock.optimizer.plan import Plan
from penstock.repository import layout
from penstock.types import Array

VNNI = Machine("a processor", 2, 1 << 34, ("avx2", "avx512_vnni", "avx512_bf16"))
AVX2 = Machine("an old processor", 2, 1 << 34, ("avx2",))
OPSET = 17


class Graph:
    """Nodes and weights, one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def weight(self, name: str, array: Array) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def drawn(self, name: str, *shape: int) -> str:
        scale = np.sqrt(1 / np.prod(shape[1:] if len(shape) == 4 else shape[:1]))
        return self.weight(name, (self.random.normal(size=shape) * scale).astype(np.float32))

    def add(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        output = f"{name or kind}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, inputs, [output], name=name or output, **attributes)
        )
        return output

    def model(
        self, inputs: dict[str, tuple[int, list[Any]]], output: str, shape: list[Any]
    ) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["y"], name="last"))
        graph = helper.make_graph(
            self.nodes,
            "small",
            [helper.make_tensor_value_info(name, *each) for name, each in inputs.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            self.weights,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def cnn(seed: int = 0) -> onnx.ModelProto:
    """Two convolutions and a classifier: x [b, 3, 8, 8] to y [b, 16]."""
    graph = Graph(seed)
    first = graph.add("Conv", "x", graph.drawn("w1", 16, 3, 3, 3), name="first", pads=[1] * 4)
    one = graph.add("Relu", first)
    second = graph.add("Conv", one, graph.drawn("w2", 32, 16, 3, 3), name="second", pads=[1] * 4)
    flat = graph.add("Flatten", graph.add("GlobalAveragePool", graph.add("Relu", second)))
    last = graph.add("Gemm", flat, graph.drawn("w3", 32, 16), name="classifier")
    return graph.model({"x": (TensorProto.FLOAT, ["b", 3, 8, 8])}, last, ["b", 16])


def same_padded(
    size: list[Any], strides: tuple[int, ...] = (1, 2, 1), kernel: int = 3, seed: int = 0
) -> onnx.ModelProto:
    """A residual network whose padding is computed from the shape of each input, as exporters that
    trace "same" padding leave it: x [b, 3, *size] to y [b, 16]."""
    graph = Graph(seed)
    value, channels = "x", 3
    for index, stride in enumerate(strides):
        weight = graph.drawn(f"w{index}", 16, channels, kernel, kernel)
        padded = _padded_same(graph, value, kernel, stride)
        moved = graph.add("Conv", padded, weight, name=f"conv{index}", strides=[stride, stride])
        moved = graph.add("Relu", moved)
        value = graph.add("Add", value, moved) if stride == 1 and channels == 16 else moved
        channels = 16
    flat = graph.add("Flatten", graph.add("GlobalAveragePool", value))
    last = graph.add("Gemm", flat, graph.drawn("head", 16, 16), name="classifier")
    return graph.model({"x": (TensorProto.FLOAT, ["b", 3, *size])}, last, ["b", 16])


def _padded_same(graph: Graph, value: str, kernel: int, stride: int) -> str:
    """(ceil(n / stride) - 1) * stride + kernel - n more rows and columns, the odd one behind."""

    def number(each: int) -> str:
        return graph.weight(f"n{len(graph.weights)}", np.array(each))

    def total(axis: int) -> str:
        found = graph.add("Gather", graph.add("Shape", value), number(axis))
        steps = graph.add("Div", graph.add("Add", found, number(stride - 1)), number(stride))
        reach = graph.add("Mul", graph.add("Sub", steps, number(1)), number(stride))
        more = graph.add("Sub", graph.add("Add", reach, number(kernel)), found)
        return graph.add("Max", more, number(0))

    totals = [total(2), total(3)]
    before = [graph.add("Div", each, number(2)) for each in totals]
    behind = [graph.add("Sub", each, half) for each, half in zip(totals, before, strict=True)]
    axis, none = (graph.weight(f"z{len(graph.weights)}", np.array([0])) for _ in range(2))
    around = [[graph.add("Unsqueeze", one, axis) for one in each] for each in (before, behind)]
    pads = graph.add("Concat", none, none, *around[0], none, none, *around[1], axis=0)
    return graph.add("Pad", value, pads)


def stack(
    num_layers: int = 4, seed: int = 0, size: int = 32, residual: bool = True
) -> onnx.ModelProto:
    """MatMul and Tanh, several times: x [b, size] to y [b, size]."""
    graph = Graph(seed)
    value = "x"
    for index in range(num_layers):
        name = f"layer.{index}/dense/MatMul"
        product = graph.add("MatMul", value, graph.drawn(f"w{index}", size, size), name=name)
        moved = graph.add("Tanh", product)
        value = graph.add("Add", value, moved) if residual else moved
    return graph.model({"x": (TensorProto.FLOAT, ["b", size])}, value, ["b", size])


def transformer(seed: int = 0, num_blocks: int = 2, with_mask: bool = True) -> onnx.ModelProto:
    """Attention, a residual and a feed-forward part: x [b, s, 32], mask [b, s] to y [b, s, 32]."""
    graph = Graph(seed)
    size, heads = 32, 4
    bias = ""
    if with_mask:
        low = graph.weight("low", np.array(-10000.0, np.float32))
        one = graph.weight("one", np.array(1.0, np.float32))
        wide = graph.add("Unsqueeze", "mask", graph.weight("axes", np.array([1, 2])))
        bias = graph.add("Mul", graph.add("Sub", one, wide), low)
    value = "x"
    graph.weight("split", np.array([0, 0, heads, size // heads]))
    graph.weight("merge", np.array([0, 0, size]))
    graph.weight("root", np.array((size / heads) ** 0.5, np.float32))
    for index in range(num_blocks):
        value = _block(graph, f"block.{index}", value, bias)
    inputs = {"x": (TensorProto.FLOAT, ["b", "s", size])}
    if with_mask:
        inputs["mask"] = (TensorProto.FLOAT, ["b", "s"])
    return graph.model(inputs, value, ["b", "s", size])


def _block(graph: Graph, block: str, value: str, bias: str) -> str:
    size = 32
    sides = []
    for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        weight = graph.drawn(f"{block}/{part}", size, size)
        product = graph.add("MatMul", value, weight, name=f"{block}/{part}/MatMul")
        moved = graph.add("Add", product, graph.drawn(f"{block}/{part}/bias", size))
        sides.append(graph.add("Transpose", graph.add("Reshape", moved, "split"), perm=order))
    scores = graph.add("Div", graph.add("MatMul", sides[0], sides[1]), "root")
    if bias:
        scores = graph.add("Add", scores, bias)
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), sides[2])
    merged = graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), "merge")
    name = f"{block}/out/MatMul"
    output = graph.add("MatMul", merged, graph.drawn(f"{block}/o", size, size), name=name)
    value = graph.add("Add", value, output)
    wide = graph.drawn(f"{block}/up", size, 64)
    hidden = graph.add("Relu", graph.add("MatMul", value, wide, name=f"{block}/up/MatMul"))
    narrow = graph.drawn(f"{block}/down", 64, size)
    return graph.add("Add", value, graph.add("MatMul", hidden, narrow, name=f"{block}/down/MatMul"))


def build_of(model: onnx.ModelProto, folder: Path, config: str = "") -> Build:
    """The model as a folder of a repository."""
    (folder / "1").mkdir(parents=True)
    onnx.save_model(model, str(folder / "1" / "model.onnx"))
    if config:
        (folder / "config.pbtxt").write_text(config)
    return opened(folder)


def opened(folder: Path) -> Build:
    found = layout.read(folder)
    assert found.problems == {}
    return Build(Candidate(), folder, found.configs[0])


def drawn_rows(build: Build, count: int, seed: int = 1, size: int = 6) -> list[dict[str, Array]]:
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        row = {}
        for spec in build.config.inputs:
            shape = [size if each < 0 else each for each in spec.shape]
            drawn = random.normal(size=shape) if spec.name != "mask" else np.ones(shape)
            row[spec.name] = drawn.astype(np.float32)
        rows.append(row)
    return rows


def examples_of(build: Build, count: int = 24) -> Examples:
    rows = drawn_rows(build, count)
    third = count // 3
    parts = [tuple(range(start, start + third)) for start in (0, third, 2 * third)]
    return Examples(rows, None, Split(*parts), "digest", "made for the test")


def plan(**changes: Any) -> Plan:
    return Plan(model="model.onnx", name="m", out="models", **changes)


def situation(
    build: Build,
    machine: Machine = VNNI,
    examples: Examples | None = None,
    **changes: Any,
) -> PassContext:
    return PassContext(plan(**changes), machine, build, file_facts(build), examples, {})


def workshop(
    tmp_path: Path, examples: Examples | None = None, machine: Machine = VNNI
) -> BuildContext:
    return BuildContext(plan(), machine, examples, tmp_path / "cache")


def built(
    each: Pass, parent: Build, step: Step, tmp_path: Path, examples: Examples | None = None
) -> tuple[Build, Facts]:
    """What a pass made, and its facts after all checks."""
    target = tmp_path / f"{each.name}-{Candidate((step,)).key}" / parent.config.name
    each.build(parent, step, target, workshop(tmp_path, examples))
    made = opened(target)
    facts = file_facts(made)
    assert each.check(step, file_facts(parent), facts) == []
    return made, facts


def answers(path: Path, feeds: dict[str, Array]) -> Array:
    """Of ONNX Runtime alone."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    output: Array = session.run(None, feeds)[0]
    return output


def batch(rows: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def cosine(one: Array, other: Array) -> float:
    one, other = one.ravel().astype(np.float64), other.ravel().astype(np.float64)
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other) + 1e-12))
