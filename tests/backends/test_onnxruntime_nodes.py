"""Which provider runs a node, and whether it is a layer or computes a shape."""

from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from penstock.backends import onnxruntime_nodes
from penstock.backends.onnxruntime_nodes import (
    RECORD,
    AssignedNode,
    judge,
    num_fallen_back,
    read_placement,
    shape_nodes,
)

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def graph_of(*nodes, inputs=("x",), initializers=()):
    floats = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs]
    weights = [helper.make_tensor(name, TensorProto.FLOAT, [1], [1]) for name in initializers]
    return helper.make_graph(list(nodes), "g", floats, [], weights)


def test_a_node_is_of_shapes_if_no_data_reaches_it_but_by_its_shape() -> None:
    graph = graph_of(
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        helper.make_node("Shape", ["c"], ["s"], name="shape"),
        helper.make_node("Gather", ["s", "w"], ["r"], name="gather"),
        helper.make_node("Concat", ["r", "w"], ["t"], name="concat", axis=0),
        helper.make_node("Reshape", ["c", "t"], ["y"], name="reshape"),
        helper.make_node("Add", ["w", "w"], ["v"], name="constant"),
        helper.make_node("Add", ["y", "v"], ["z"], name="add"),
        helper.make_node("Relu", ["z"], ["last"]),
        # An initializer may be listed among the inputs.
        inputs=("x", "w"),
        initializers=("w",),
    )
    found = shape_nodes(graph)
    assert found == {
        "conv": False,
        "shape": True,
        "gather": True,
        "concat": True,
        "reshape": False,
        "constant": True,
        "add": False,
    }


def test_data_that_a_subgraph_takes_from_outside_counts() -> None:
    def branch(name: str):
        node = helper.make_node("Neg", [name], ["out"])
        return helper.make_graph([node], "b", [], [helper.make_empty_tensor_value_info("out")])

    for source, is_shape in (("x", False), ("s", True)):
        chosen = {"then_branch": branch(source), "else_branch": branch("s")}
        graph = graph_of(
            helper.make_node("Size", ["x"], ["s"], name="size"),
            helper.make_node("If", ["s"], ["y"], name="if", **chosen),
        )
        assert shape_nodes(graph) == {"size": True, "if": is_shape}


def test_layers_on_the_cpu_fell_back_and_shapes_are_there_by_design() -> None:
    nodes = [
        AssignedNode(CUDA, "conv", "Conv"),
        AssignedNode(CUDA, "shape", "Shape"),
        AssignedNode(CPU, "gather", "Gather"),
        AssignedNode(CPU, "lookup", "Gather"),
        AssignedNode(CPU, "made_by_the_library", "Unsqueeze"),
        AssignedNode(CPU, "fused_by_the_library", "FusedMatMul"),
    ]
    placement = judge(nodes, {"gather": True, "lookup": False})
    assert placement.facts() == {
        "nodes.CPUExecutionProvider": "4",
        "nodes.CUDAExecutionProvider": "2",
        "shape_nodes_on_cpu": "2",
        "nodes_fallen_back_to_cpu": "2: 1 FusedMatMul, 1 Gather",
    }
    assert num_fallen_back(placement.facts()) == 2


def test_nothing_on_the_cpu_is_zero() -> None:
    facts = judge([AssignedNode(CUDA, "conv", "Conv")], {}).facts()
    assert facts["nodes_fallen_back_to_cpu"] == facts["shape_nodes_on_cpu"] == "0"
    assert num_fallen_back(facts) == num_fallen_back({}) == 0


def test_a_session_tells_of_its_nodes(tmp_path: Path, write_onnx: Callable[..., Path]) -> None:
    last = helper.make_tensor("last", TensorProto.INT64, [1], [-1])
    first = helper.make_tensor("first", TensorProto.INT64, [1], [0])
    path = write_onnx(
        tmp_path / "model.onnx",
        [
            helper.make_node("Relu", ["x"], ["r"], name="relu"),
            helper.make_node("Shape", ["x"], ["s"], name="shape"),
            helper.make_node("Gather", ["s", "first"], ["rows"], name="gather"),
            helper.make_node("Concat", ["rows", "last"], ["t"], name="concat", axis=0),
            helper.make_node("Reshape", ["r", "t"], ["y"], name="reshape"),
        ],
        {"x": ("FP32", ["batch", 2, 3])},
        {"y": ("FP32", ["batch", 6])},
        [first, last],
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(RECORD, "1")
    session = ort.InferenceSession(path, options, providers=[CPU])
    placement = read_placement(session, path)
    assert placement is not None
    assert placement.counts == {CPU: 5}
    assert placement.fallen_back == {"Relu": 1, "Reshape": 1}
    assert placement.num_shape_nodes == 3


def test_an_older_library_does_not_tell() -> None:
    class OldSession:
        pass

    assert read_placement(OldSession(), Path("model.onnx")) is None


@pytest.mark.parametrize("name", onnxruntime_nodes.SHAPES)
def test_shapes_are_among_the_operators_of_shapes(name: str) -> None:
    assert name in onnxruntime_nodes.SHAPE_OPERATORS
