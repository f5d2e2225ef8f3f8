"""Constant folding by known dimensions: the same answers with fewer nodes, for any batch."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from suites.onnx_models import Graph, same_padded

from penstock.optimizer import onnx_model
from penstock.optimizer.onnx_folding import fold
from penstock.optimizer.passes.shape_folding import num_shape_nodes


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def rows(count: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).normal(size=(count, *shape)).astype(np.float32)


def answers(model: onnx.ModelProto, feeds: dict[str, Any]) -> np.ndarray[Any, Any]:
    return onnx_model.run(onnx_model.session(model), feeds)["y"]


def assert_same(model: onnx.ModelProto, other: onnx.ModelProto, *shape: int) -> None:
    """For one row and for several: the batch is still open."""
    for count in (1, 3):
        sent = {"x": rows(count, *shape)}
        np.testing.assert_allclose(answers(other, sent), answers(model, sent), rtol=1e-5, atol=1e-5)


def test_padding_that_the_model_computes_becomes_part_of_its_convolutions() -> None:
    model = same_padded([9, 8])
    folded = onnx_model.optimised(fold(model))
    assert num_shape_nodes(operators(onnx_model.optimised(model))) > 20
    assert operators(folded) == {
        "Conv": 3,
        "Relu": 3,
        "Add": 1,
        "GlobalAveragePool": 1,
        "Flatten": 1,
        "Gemm": 1,
    }
    assert_same(model, folded, 3, 9, 8)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(3, 12),
    st.integers(3, 12),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_answers_stay_whatever_the_sizes(
    height: int, width: int, strides: list[int], kernel: int
) -> None:
    model = same_padded([height, width], tuple(strides), kernel)
    folded = onnx_model.optimised(fold(model))
    assert "Shape" not in operators(folded)
    assert_same(model, folded, 3, height, width)


def test_open_sizes_stay_open_until_they_are_given() -> None:
    model = same_padded(["h", "w"])
    assert operators(fold(model))["Shape"] > 0
    assert_same(model, fold(model), 3, 7, 10)
    fixed = fold(model, {"x": (-1, -1, 7, 10)})
    assert operators(fixed)["Shape"] == 0
    assert [dim.dim_value for dim in fixed.graph.input[0].type.tensor_type.shape.dim] == [
        0,
        3,
        7,
        10,
    ]
    assert_same(model, fixed, 3, 7, 10)


def test_a_size_of_minus_one_is_not_known() -> None:
    model = same_padded(["h", "w"])
    for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.dim_value = -1
    assert operators(fold(model))["Shape"] > 0
    assert_same(model, fold(model), 3, 7, 10)
    assert operators(fold(model, {"x": (-1, -1, 7, 10)}))["Shape"] == 0


def test_dimensions_that_depend_on_values_are_not_taken_for_each_other() -> None:
    """Both have a number of rows that nobody knows, and not the same one."""
    graph = Graph()
    zero = graph.weight("zero", np.array(0, np.float32))
    above, below = (
        graph.add("NonZero", graph.add("Cast", graph.add(kind, "x", zero), to=TensorProto.INT64))
        for kind in ("Greater", "Less")
    )
    sizes = graph.add("Concat", *(graph.add("Shape", each) for each in (above, below)), axis=0)
    last = graph.add("Add", graph.add("Cast", sizes, to=TensorProto.FLOAT), zero)
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 4])}, last, [4])
    assert operators(fold(model))["Shape"] == 2
    assert_same(model, fold(model), 4)


def test_constants_that_are_written_as_numbers_count_too() -> None:
    """As newer exporters of PyTorch write them."""
    graph = Graph()
    axis = graph.add("Constant", value_ints=[1])
    size = graph.add("Cast", graph.add("Gather", graph.add("Shape", "x"), axis), to=1)
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 4])}, graph.add("Mul", "x", size), ["b", 4])
    assert operators(fold(model)) == {"Mul": 1, "Identity": 1}
    assert_same(model, fold(model), 4)


def with_shape(use: Any, dims: list[Any], output: list[Any]) -> onnx.ModelProto:
    graph = Graph()
    shape = graph.add("Shape", "x")
    return graph.model({"x": (TensorProto.FLOAT, dims)}, use(graph, shape), output)


def picked(graph: Graph, shape: str, axis: int) -> str:
    index = graph.weight(f"axis{len(graph.weights)}", np.array([axis]))
    return graph.add("Gather", shape, index)


def test_what_depends_on_the_batch_stays() -> None:
    """The mean over rows and channels: 1 / (batch x 4)."""

    def use(graph: Graph, shape: str) -> str:
        count = graph.add("Mul", picked(graph, shape, 0), picked(graph, shape, 1))
        total = graph.add("ReduceSum", "x", graph.weight("axes", np.array([0, 1])), keepdims=0)
        return graph.add("Div", total, graph.add("Cast", count, to=TensorProto.FLOAT))

    model = with_shape(use, ["b", 4], [1])
    folded = fold(model)
    # The number of channels is folded, the number of rows is not.
    assert operators(folded) == operators(model) - Counter({"Gather": 1})
    assert_same(model, folded, 4)


@pytest.mark.parametrize(
    ("parts", "output"),
    [
        # x.view(x.size(0), -1): the batch, at the place where the input has it.
        (["batch", -1], ["b", 24]),
        # x.view(x.size(0), 2, 12): known but for the batch.
        (["batch", 2, 12], ["b", 2, 12]),
        # x.view(6, x.size(0), 4): the one that is left over.
        ([6, "batch", 4], [6, "b", 4]),
    ],
)
def test_a_reshape_that_repeats_the_batch_gets_a_constant_shape(
    parts: list[Any], output: list[Any]
) -> None:
    def use(graph: Graph, shape: str) -> str:
        names = [
            picked(graph, shape, 0) if each == "batch" else graph.weight(f"p{n}", np.array([each]))
            for n, each in enumerate(parts)
        ]
        return graph.add("Reshape", "x", graph.add("Concat", *names, axis=0))

    model = with_shape(use, ["b", 2, 3, 4], output)
    folded = fold(model)
    assert operators(folded) == {"Reshape": 1, "Identity": 1}
    assert_same(model, folded, 2, 3, 4)


def test_a_reshape_that_moves_the_batch_into_another_place_stays() -> None:
    """Neither 0 nor -1 would say it: -1 stands elsewhere already."""

    def use(graph: Graph, shape: str) -> str:
        rest = graph.weight("rest", np.array([-1]))
        sizes = graph.add("Concat", rest, picked(graph, shape, 0), axis=0)
        return graph.add("Reshape", "x", sizes)

    model = with_shape(use, ["b", 2, 4], [8, "b"])
    assert operators(fold(model))["Shape"] == 1
    assert_same(model, fold(model), 2, 4)


def padded(
    kind: str,
    value: float | None,
    *,
    has_relu: bool = False,
    is_shared: bool = False,
    sizes: tuple[int, ...] = (0, 0, 1, 0, 0, 0, 1, 2),
    **more: Any,
) -> Any:
    graph = Graph()
    source = graph.add("Relu", "x") if has_relu else "x"
    pads = graph.weight("pads", np.array(sizes))
    # As PyTorch writes it: an input that is left out has an empty name.
    names = [source, pads, *([""] if value is None else [])]
    if value is not None:
        names.append(graph.weight("value", np.array(value, np.float32)))
    inner = graph.add("Pad", *names)
    if kind == "Conv":
        last = graph.add("Conv", inner, graph.drawn("w", 4, 3, 3, 3), **more)
    else:
        last = graph.add(kind, inner, **({"kernel_shape": [3, 3], "strides": [2, 2]} | more))
    if is_shared:
        last = graph.add("Add", last, graph.add("ReduceMean", graph.add("Tanh", inner)))
    return graph.model({"x": (TensorProto.FLOAT, ["b", 3, 8, 8])}, last, ["b", "c", "h", "w"])


@pytest.mark.parametrize(
    ("model", "num_pads"),
    [
        (padded("Conv", None), 0),
        (padded("Conv", 0.0, pads=[1, 1, 1, 1]), 0),
        (padded("Conv", 0.0, auto_pad="VALID"), 0),
        (padded("Conv", 0.5), 1),
        (padded("Conv", 0.0, sizes=(0, 0, -1, 0, 0, 0, 1, 2)), 1),
        (padded("Conv", 0.0, has_relu=True, is_shared=True), 1),
        (padded("Conv", 0.0, auto_pad="SAME_UPPER"), 1),
        (padded("MaxPool", -np.inf), 0),
        (padded("MaxPool", -np.inf, pads=[0, 1, 0, 0], dilations=[1, 1]), 0),
        (padded("MaxPool", 0.0, has_relu=True), 0),
        # Zero may be the largest value of a window.
        (padded("MaxPool", 0.0), 1),
        (padded("MaxPool", -np.inf, ceil_mode=1), 1),
        (padded("MaxPool", -np.inf, kernel_shape=[2, 2], strides=[1, 1]), 1),
        (padded("AveragePool", None), 0),
        (padded("AveragePool", 0.0), 0),
        (padded("AveragePool", 0.0, count_include_pad=1), 0),
        (padded("AveragePool", 0.0, pads=[1, 1, 1, 1]), 1),
    ],
)
def test_constant_padding_is_fused_where_that_is_exact(
    model: onnx.ModelProto, num_pads: int
) -> None:
    folded = onnx_model.optimised(fold(model))
    assert operators(folded)["Pad"] == num_pads
    sent = {"x": rows(2, 3, 8, 8)}
    exact = onnx_model.run(_plain_session(model), sent)["y"]
    np.testing.assert_allclose(answers(folded, sent), exact, rtol=1e-5, atol=1e-5)


def _plain_session(model: onnx.ModelProto) -> Any:
    """ONNX Runtime's own fusion of Pad and MaxPool is wrong for some of these."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options)


def test_empty_padding_is_dropped() -> None:
    graph = Graph()
    inner = graph.add("Pad", "x", graph.weight("pads", np.zeros(4, np.int64)))
    last = graph.add("Tanh", inner)
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 4])}, last, ["b", 4])
    assert operators(fold(model)) == {"Tanh": 1, "Identity": 1}
    assert_same(model, fold(model), 4)


def test_random_numbers_are_no_constants() -> None:
    graph = Graph()
    noise = graph.add("RandomNormal", shape=[4], seed=1.0)
    last = graph.add("Add", "x", noise)
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 4])}, last, ["b", 4])
    assert operators(fold(model))["RandomNormal"] == 1


def test_large_constants_are_computed_when_they_are_needed() -> None:
    graph = Graph()
    wide = graph.add("ConstantOfShape", graph.weight("size", np.array([1 << 20])))
    last = graph.add("Add", "x", graph.add("ReduceSum", wide, keepdims=1))
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 1])}, last, ["b", 1])
    assert operators(fold(model))["ConstantOfShape"] == 1


def test_weights_that_a_caller_may_give_are_no_constants() -> None:
    model = same_padded([8, 8])
    for tensor in model.graph.initializer:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(value)
    assert operators(fold(model)) == operators(model)


def test_nodes_before_what_they_need_are_left_alone() -> None:
    """ONNX Runtime takes such files, and so they must stay whole."""
    model = same_padded([8, 8])
    first = model.graph.node[0]
    model.graph.node.append(first)
    del model.graph.node[0]
    assert operators(fold(model)) == operators(model)


def test_branches_keep_what_they_use_from_outside() -> None:
    graph = Graph()
    size = graph.add("Size", "x")
    flag = graph.add("Less", size, graph.weight("limit", np.array(100)))
    inner = graph.add("Cast", picked(graph, graph.add("Shape", "x"), 1), to=TensorProto.FLOAT)
    body = [
        onnx.helper.make_graph(
            [onnx.helper.make_node(kind, ["x", inner], [f"{kind}_y"])],
            kind,
            [],
            [onnx.helper.make_tensor_value_info(f"{kind}_y", TensorProto.FLOAT, None)],
        )
        for kind in ("Add", "Mul")
    ]
    last = graph.add("If", flag, then_branch=body[0], else_branch=body[1])
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 4])}, last, ["b", 4])
    assert "Cast" not in operators(fold(model))
    assert_same(model, fold(model), 4)
