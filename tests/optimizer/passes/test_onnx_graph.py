"""The graph made better with the same answers, and batches opened only where rows stay apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from suites.onnx_models import Graph, answers, build_of, built, cnn, situation, workshop

from penstock.config import Postprocess, Preprocess
from penstock.errors import BackendFailed
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.passes.onnx_graph import OnnxGraph
from penstock.types import TensorSpec

PASS = OnnxGraph()


def old_digits() -> onnx.ModelProto:
    """As models were written in 2018: one row, weights among the inputs, operator set 8."""
    graph = Graph()
    first = graph.add("Conv", "x", graph.drawn("w", 8, 1, 3, 3), name="conv", pads=[1] * 4)
    shape = graph.weight("shape", np.array([1, 8 * 16]))
    flat = graph.add("Reshape", graph.add("Relu", first), shape)
    tall = graph.drawn("tall", 2, 64, 10)
    wide = graph.add("Reshape", tall, graph.weight("wide", np.array([128, 10])))
    last = graph.add("MatMul", flat, wide)
    model = graph.model({"x": (TensorProto.FLOAT, [1, 1, 4, 4])}, last, [1, 10])
    model.opset_import[0].version = 8
    model.ir_version = 3
    for tensor in model.graph.initializer:
        value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(value)
    return model


def mixing(kind: str) -> onnx.ModelProto:
    """One row at a time; its answer would depend on the other rows of a batch."""
    graph = Graph()
    if kind == "mean":
        mean = graph.add("ReduceMean", "x", axes=[0], keepdims=1)
        last = graph.add("Sub", "x", graph.add("Mul", mean, graph.weight("h", np.float32([0.5]))))
    else:
        last = graph.add("Reshape", "x", graph.weight("s", np.array([2, 2])))
        last = graph.add("Reshape", last, graph.weight("t", np.array([1, 4])))
    return graph.model({"x": (TensorProto.FLOAT, [1, 4])}, last, [1, 4])


def test_behind_preprocessing_the_one_row_stays(tmp_path: Path) -> None:
    """The function gives it with its 1."""
    parent = build_of(old_digits(), tmp_path / "digits")
    inner = Preprocess("code.py:decode", parent.config.inputs)
    image = TensorSpec("file", "BYTES", (1,))
    config = replace(parent.config, inputs=(image,), preprocess=inner)
    (step,) = PASS.propose(situation(replace(parent, config=config)))
    assert isinstance(step, Step) and "batch" not in step.settings


def test_before_postprocessing_it_stays_too(tmp_path: Path) -> None:
    parent = build_of(old_digits(), tmp_path / "digits")
    inner = Postprocess("code.py:name", parent.config.outputs)
    config = replace(parent.config, outputs=(TensorSpec("name", "BYTES", ()),), postprocess=inner)
    (step,) = PASS.propose(situation(replace(parent, config=config)))
    assert isinstance(step, Step) and "batch" not in step.settings


def test_an_old_file_becomes_one_that_can_be_batched(tmp_path: Path) -> None:
    parent = build_of(old_digits(), tmp_path / "digits")
    assert parent.config.max_batch_size == 0
    step, _ = PASS.propose(situation(parent))
    assert isinstance(step, Step)
    assert step.settings == {"opset": "17", "weights": "constant", "batch": "dynamic"}
    made, facts = built(PASS, parent, step, tmp_path)
    assert made.config.max_batch_size > 1 and made.config.batching.is_dynamic
    assert made.config.inputs[0].shape == (1, 4, 4) and made.config.outputs[0].shape == (10,)
    # The product can be quantised now: what its weights were computed from is folded.
    assert facts.operators["Reshape"] == 1
    rows = np.random.default_rng(0).normal(size=(5, 1, 4, 4)).astype(np.float32)
    wanted = [answers(parent.artifact, {"x": row[None]}) for row in rows]
    assert np.allclose(answers(made.artifact, {"x": rows}), np.concatenate(wanted), atol=1e-5)
    assert isinstance(PASS.propose(situation(made))[0], Skip)


@pytest.mark.parametrize("kind", ["mean", "reshape"])
def test_rows_that_influence_each_other_are_not_batched(kind: str, tmp_path: Path) -> None:
    parent = build_of(mixing(kind), tmp_path / "mixing")
    (step,) = PASS.propose(situation(parent))
    assert isinstance(step, Step) and step.settings["batch"] == "dynamic"
    with pytest.raises(BackendFailed, match="batched|cannot run"):
        PASS.build(parent, step, tmp_path / "t" / "mixing", workshop(tmp_path))


def test_what_else_an_old_file_needs_is_also_tried_without_the_batch(tmp_path: Path) -> None:
    """INT8 needs the newer operator set, also of a model that must not be batched."""
    model = mixing("mean")
    model.opset_import[0].version = 11
    parent = build_of(model, tmp_path / "mixing")
    _, step = PASS.propose(situation(parent))
    assert isinstance(step, Step) and step.settings == {"opset": "17"}
    made, _ = built(PASS, parent, step, tmp_path)
    assert made.config.max_batch_size == 0


def test_a_good_file_stays_as_it_is(tmp_path: Path) -> None:
    (skip,) = PASS.propose(situation(build_of(cnn(), tmp_path / "m")))
    assert isinstance(skip, Skip) and "nothing to change" in skip.reason


def test_weights_that_are_almost_zero_are_taken_for_zero(tmp_path: Path) -> None:
    graph = Graph()
    weight = graph.weight("w", np.full((16, 16), 1e-40, np.float32))
    last = graph.add("MatMul", "x", weight)
    model = graph.model({"x": (TensorProto.FLOAT, ["b", 16])}, last, ["b", 16])
    parent = build_of(model, tmp_path / "m")
    (step,) = PASS.propose(situation(parent))
    assert isinstance(step, Step) and step.settings == {"denormals": "zero"}
    made, _ = built(PASS, parent, step, tmp_path)
    assert made.config.options["session.set_denormal_as_zero"] == "1"


def test_what_is_no_onnx_file_is_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("")
    config = 'backend: "python" max_batch_size: 4 '
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 3 } '
    tensors += 'output { name: "y" data_type: TYPE_FP32 dims: 3 }'
    (folder / "config.pbtxt").write_text(config + tensors)
    from suites.onnx_models import opened

    (skip,) = PASS.propose(situation(opened(folder)))
    assert isinstance(skip, Skip) and "not an ONNX file" in skip.reason
