"""Attention found by what is computed; what is not attention is left alone."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from suites.onnx_models import transformer

from penstock.optimizer import attention, onnx_model

FORMS: tuple[attention.Form, ...] = ("packed", "heads")


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return onnx_model.made_up(model.graph, 2, 5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_mask", [True, False])
def test_fused_and_plain_give_the_same(form: attention.Form, with_mask: bool) -> None:
    model = transformer(seed=3, with_mask=with_mask)
    given = feeds(model)
    wanted = onnx_model.run(onnx_model.session(model), given)["y"]
    fused = onnx.ModelProto.FromString(model.SerializeToString())
    assert attention.fuse(fused, form) == 2
    kinds = [node.op_type for node in fused.graph.node]
    assert "Softmax" not in kinds and "Transpose" not in kinds
    assert np.allclose(onnx_model.run(onnx_model.session(fused), given)["y"], wanted, atol=1e-4)


def test_a_guard_against_rows_without_keys_stays_without_nan() -> None:
    model = transformer(num_blocks=1)
    (softmax,) = [node for node in model.graph.node if node.op_type == "Softmax"]
    (after,) = [node for node in model.graph.node if softmax.output[0] in node.input]
    after.input[0] = "guarded"
    low = next(each for each in model.graph.initializer if each.name == "low")
    low.CopyFrom(numpy_helper.from_array(np.array(-3e38, np.float32), "low"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.0, np.float32), "zero"))
    place = list(model.graph.node).index(softmax) + 1
    name = softmax.output[0]
    guard = onnx.helper.make_node("IsNaN", [name], ["is_nan"])
    where = onnx.helper.make_node("Where", ["is_nan", "zero", name], ["guarded"])
    for node in (where, guard):
        model.graph.node.insert(place, node)
    given = feeds(model)
    given["mask"] = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.float32)
    wanted = onnx_model.run(onnx_model.session(model), given)["y"]
    assert attention.fuse(model, "heads") == 1
    assert np.allclose(onnx_model.run(onnx_model.session(model), given)["y"], wanted, atol=1e-4)


@pytest.mark.parametrize("change", ["perm", "second use", "other source"])
def test_what_is_computed_otherwise_is_left_alone(change: str, tmp_path: Path) -> None:
    model = transformer(num_blocks=1)
    nodes = list(model.graph.node)
    if change == "perm":
        node = [each for each in nodes if each.op_type == "Transpose"][-1]
        node.attribute[0].ints[:] = [0, 1, 2, 3]
    elif change == "second use":
        (softmax,) = [each for each in nodes if each.op_type == "Softmax"]
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(softmax.output[0], onnx.TensorProto.FLOAT, None)
        )
    else:
        (key,) = [each for each in nodes if each.name == "block.0/k/MatMul"]
        model.graph.node.insert(0, onnx.helper.make_node("Tanh", ["x"], ["other"]))
        key.input[0] = "other"
    before = model.SerializeToString()
    assert attention.fuse(model, "packed") == 0
    assert model.SerializeToString() == before
