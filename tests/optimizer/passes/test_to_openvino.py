"""The same file on OpenVINO: the same answers, read back as asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from penstock.backends import Batch, backend
from penstock.config import PadAxis, Padding, Postprocess
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext, PassContext, find
from penstock.optimizer.plan import Plan
from penstock.types import TensorSpec

PLAN = Plan("model", "model", "out")
PASS = find("openvino")
MACHINE = Machine("cpu", 2, 1 << 30, ("avx2",), versions={"openvino": "2026.1"})


def build_of(root: Path, kind: int = TensorProto.INT64) -> Build:
    """y = x + x, of any length."""
    (root / "original" / "1").mkdir(parents=True)
    values = [helper.make_tensor_value_info(name, kind, ["n", "s"]) for name in ("x", "y")]
    operator = "Identity" if kind == TensorProto.STRING else "Add"
    inputs = ["x"] if operator == "Identity" else ["x", "x"]
    node = helper.make_node(operator, inputs, ["y"])
    graph = helper.make_graph([node], "graph", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, root / "original" / "1" / "model.onnx")
    config = folders.read_config(root / "original")
    return Build(Candidate(), root / "original", config)


def situation(build: Build, machine: Machine = MACHINE) -> PassContext:
    return PassContext(PLAN, machine, build, Facts(build.config.backend), None, {})


def test_same_file_same_answers_with_padding_and_threads(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    build = build_of(tmp_path)
    padding = Padding((PadAxis("x", 0),), (4, 8))
    options = {"intra_op_thread_count": "1", "graph_level": "all"}
    config = replace(build.config, padding=padding, options=options)
    build = Build(Candidate(), build.folder, folders.write_config(build.folder, config))
    (step,) = PASS.propose(situation(build))
    assert step == Step("openvino", {"hint": "LATENCY"})
    target = tmp_path / "target"
    PASS.build(build, step, target, BuildContext(PLAN, MACHINE, None, tmp_path))
    config = folders.read_config(target)
    assert (config.backend, config.padding) == ("openvino", padding)
    assert config.options == {"inference_num_threads": "1", "performance_hint": "LATENCY"}
    assert Path(config.artifact).read_bytes() == build.artifact.read_bytes()
    runner = backend("openvino")(config)
    (answer,) = runner.start(Batch({"x": np.ones((2, 5), np.int64)}, 2)).wait()
    assert answer["y"].tolist() == [[2] * 5] * 2
    facts = Facts("openvino", built=dict(runner.built()))
    assert PASS.check(step, Facts("onnxruntime"), facts) == []
    runner.close()


def test_what_was_built_is_compared_with_what_was_asked() -> None:
    step, before = Step("openvino", {"hint": "LATENCY"}), Facts("onnxruntime")
    assert PASS.check(step, before, Facts("onnxruntime")) == [
        "runs on 'onnxruntime', expected openvino"
    ]
    built = {"openvino": "1", "performance_hint": "LATENCY", "inference_precision_hint": "bf16"}
    assert PASS.check(step, before, Facts("openvino", built=built)) == [
        "inference_precision_hint is bf16, expected f32"
    ]


def test_what_it_is_not_for_is_skipped_with_the_reason(tmp_path: Path) -> None:
    build = build_of(tmp_path)
    bare = Machine("cpu", 2, 1 << 30, ())
    (skip,) = PASS.propose(situation(build, bare))
    assert isinstance(skip, Skip)
    assert skip.reason.startswith("not installed; pip install")
    torch_build = replace(build, config=replace(build.config, backend="pytorch"))
    assert PASS.propose(situation(torch_build)) == [Skip("openvino", "not an ONNX model")]
    text = build_of(tmp_path / "text", TensorProto.STRING)
    assert PASS.propose(situation(text)) == [
        Skip("openvino", "'x' is BYTES, which it does not take")
    ]


def test_texts_that_a_function_makes_are_not_its_business(tmp_path: Path) -> None:
    build = build_of(tmp_path)
    text = TensorSpec("name", "BYTES", (1,))
    postprocess = Postprocess("code.py:name", build.config.outputs)
    config = replace(build.config, outputs=(text,), postprocess=postprocess)
    (step,) = PASS.propose(situation(replace(build, config=config)))
    assert isinstance(step, Step)
