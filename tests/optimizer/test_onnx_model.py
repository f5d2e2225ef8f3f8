"""ONNX graphs: what is looked at, prepared and run."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from suites.onnx_models import Graph, cnn, stack, transformer

from penstock.errors import BackendFailed
from penstock.optimizer import onnx_model


def test_a_broken_file_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(BackendFailed, match="model.onnx: cannot be read as ONNX") as caught:
        onnx_model.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "shape", "attributes", "sides"),
    [
        ("MatMul", (32, 16), {}, (32, 16)),
        ("Gemm", (32, 16), {}, (32, 16)),
        ("Gemm", (16, 32), {"transB": 1}, (32, 16)),
        ("Conv", (16, 3, 5, 5), {}, (75, 16)),
    ],
)
def test_sides_of_a_product(
    kind: str, shape: tuple[int, ...], attributes: dict[str, int], sides: tuple[int, int]
) -> None:
    node = helper.make_node(kind, ["x", "w"], ["y"], **attributes)
    assert onnx_model.product_sides(node, shape) == sides


@pytest.mark.parametrize(
    ("kind", "shape", "group", "expected"),
    [
        ("MatMul", (16, 16), 1, True),
        ("MatMul", (16, 15), 1, False),
        ("Conv", (8, 16, 3, 3), 1, False),
        ("Conv", (32, 1, 3, 3), 32, True),
        ("Tanh", (16, 16), 1, False),
    ],
)
def test_only_products_of_some_size_can_gain(
    kind: str, shape: tuple[int, ...], group: int, expected: bool
) -> None:
    attributes = {"group": group} if kind == "Conv" else {}
    node = helper.make_node(kind, ["x", "w"], ["y"], **attributes)
    weight = onnx.numpy_helper.from_array(np.zeros(shape, np.float32), "w")
    assert onnx_model.can_gain(node, {"w": weight}) is expected
    assert not onnx_model.can_gain(node, {})


def test_prepared_nodes_have_names_of_their_own_without_commas() -> None:
    model = stack(3)
    for node in model.graph.node:
        node.name = "" if node.op_type == "Tanh" else f"{node.name},x"
    ready = onnx_model.prepared(model)
    names = [node.name for node in ready.graph.node]
    assert len(names) == len(set(names)) and all(names)
    assert not any("," in name for name in names)
    feeds = onnx_model.made_up(model.graph, 3, 4)
    both = [onnx_model.run(onnx_model.session(each), feeds)["y"] for each in (model, ready)]
    assert np.allclose(*both, atol=1e-5)


def test_preparing_twice_gives_the_same_names() -> None:
    names = [[node.name for node in onnx_model.prepared(cnn()).graph.node] for _ in range(2)]
    assert names[0] == names[1]


def test_nodes_that_nobody_needs_are_removed() -> None:
    graph = Graph()
    used = graph.add("MatMul", "x", graph.drawn("w", 4, 4))
    graph.add("MatMul", used, graph.drawn("idle", 4, 4))
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 4])}, used, ["b", 4])
    onnx_model.remove_dead(model.graph)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Identity"]
    assert [tensor.name for tensor in model.graph.initializer] == ["w"]


def test_tensors_that_calibration_watches_are_activations() -> None:
    ready = onnx_model.prepared(transformer(num_blocks=1))
    names = onnx_model.float_tensors(ready.graph, ("MatMul",))
    assert "x" in names and not any(name in names for name in onnx_model.constants(ready.graph))
    watched = onnx_model.with_outputs(ready, names)
    feeds = onnx_model.made_up(ready.graph, 2, 3)
    seen = onnx_model.run(onnx_model.session(watched), feeds)
    assert set(names) <= set(seen) | set(feeds)


def test_made_up_inputs_fit_the_signature() -> None:
    feeds = onnx_model.made_up(transformer().graph, 2, 7)
    assert feeds["x"].shape == (2, 7, 32) and feeds["mask"].shape == (2, 7)
    assert feeds["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        (TensorProto.FLOAT, 40),
        (TensorProto.FLOAT16, 20),
        (TensorProto.BFLOAT16, 20),
        (TensorProto.INT8, 10),
        (TensorProto.INT4, 5),
        (TensorProto.FLOAT8E4M3FN, 10),
        (TensorProto.DOUBLE, 80),
        (TensorProto.BOOL, 10),
    ],
)
def test_bytes_of_weights(data_type: int, expected: int) -> None:
    tensor = TensorProto(data_type=data_type, dims=[2, 5])
    assert onnx_model.weight_bytes(tensor) == expected


def test_a_model_that_does_not_load_says_why() -> None:
    model = stack()
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(BackendFailed, match="ONNX Runtime cannot load it"):
        onnx_model.session(model)


def test_nodes_are_read_in_order(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    nodes = [helper.make_node("Neg", ["a"], ["y"]), helper.make_node("Relu", ["x"], ["a"])]
    path = tmp_path / "model.onnx"
    model = helper.make_model(helper.make_graph(nodes, "made", values[:1], values[1:]))
    path.write_bytes(model.SerializeToString())
    assert [node.op_type for node in onnx_model.read(path).graph.node] == ["Relu", "Neg"]
    model.graph.node[1].input[0] = "y"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BackendFailed, match="takes its own result"):
        onnx_model.read(path)
