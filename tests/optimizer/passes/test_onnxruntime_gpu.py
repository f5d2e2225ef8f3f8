"""The same file on ONNX Runtime's CUDA provider: where it is tried, what is built, what fails."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from served_builds import IMAGE, TEXT, a_config, a_situation
from suites.onnx_models import opened, workshop

from penstock.config import PadAxis, Padding
from penstock.optimizer.candidates import Build, Skip, Step
from penstock.optimizer.facts import Facts, fallback_problem
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes.onnxruntime_gpu import OnnxRuntimeGpu
from penstock.repository import pbtxt
from penstock.types import TensorSpec

PASS = OnnxRuntimeGpu()
ON, OFF = (Step("onnxruntime-gpu", {"graphs": text}) for text in ("on", "off"))
MACHINE = Machine("a processor", 2, 1 << 33, (), versions={"onnxruntime-gpu": "1.31.1"})
CUDA = "CUDAExecutionProvider"
BUILT = {
    "providers": f"{CUDA},CPUExecutionProvider",
    "nodes_fallen_back_to_cpu": "0",
    "cuda_graphs": "4",
}


def proposed(config, machine: Machine = MACHINE) -> list[Step | Skip]:
    return list(PASS.propose(replace(a_situation(config), machine=machine)))


def on_gpu(spec: TensorSpec = IMAGE, **options: str):
    return a_config(spec, device="cuda", options=options)


def reason(config, machine: Machine = MACHINE) -> str:
    (skip,) = proposed(config, machine)
    assert isinstance(skip, Skip)
    return skip.reason


def test_tried_with_graphs_where_shapes_come_again() -> None:
    assert proposed(on_gpu()) == [ON, OFF]
    assert proposed(on_gpu(TEXT)) == [OFF]
    padded = replace(on_gpu(TEXT), padding=Padding((PadAxis("tokens", 0),), (16, 64)))
    assert proposed(padded) == [ON, OFF]


def test_skipped_with_the_reason() -> None:
    assert reason(a_config()) == "not on a GPU"
    without = Machine("a processor", 2, 1 << 33, (), versions={"onnxruntime": "1.31.1"})
    assert "onnxruntime-gpu is not installed" in reason(on_gpu(), without)
    assert "not an ONNX file" in reason(replace(on_gpu(), backend="pytorch"))
    assert "already" in reason(on_gpu(providers=CUDA))
    assert "BF16" in reason(on_gpu(**{"penstock.dtype": "bf16"}))
    assert "BYTES" in reason(on_gpu(TensorSpec("words", "BYTES", (1,))))


def test_options_of_our_own_engine_are_left_behind() -> None:
    parent = on_gpu(
        TensorSpec("image", "FP32", (3, 8, 8)),
        **{
            "penstock.fuse": "convolutions",
            "penstock.cuda_graphs": "on",
            "penstock.dtype": "tf32",
            "intra_op_thread_count": "2",
        },
    )
    made = PASS.configured(parent, OFF, a_situation(parent).plan)
    assert made.engine == "onnxruntime"
    assert made.options == {
        "penstock.gpu_engine": "onnxruntime",
        "providers": CUDA,
        "penstock.cuda_graphs": "off",
        "penstock.memory_format": "channels_last",
        "penstock.dtype": "tf32",
        "intra_op_thread_count": "2",
    }
    text = PASS.configured(on_gpu(TEXT), OFF, a_situation(parent).plan)
    assert "penstock.memory_format" not in text.options


def network(folder: Path, **options: str) -> Build:
    """A model folder with one linear layer, for a GPU."""
    weight = helper.make_tensor(
        "w", TensorProto.FLOAT, [16, 4], np.linspace(-1, 1, 64, dtype=np.float32)
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [weight],
    )
    (folder / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "1" / "model.onnx")
    config = a_config(TensorSpec("x", "FP32", (16,)), device="cuda", options=options)
    outputs = (TensorSpec("y", "FP32", (4,)),)
    config = replace(config, name=folder.name, outputs=outputs)
    (folder / "config.pbtxt").write_text(pbtxt.write(config))
    return opened(folder)


def test_the_file_stays_as_it_is_in_fp32(tmp_path: Path) -> None:
    parent = network(tmp_path / "m")
    PASS.build(parent, ON, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m")
    assert made.config.engine == "onnxruntime"
    assert made.config.options["penstock.cuda_graphs"] == "on"
    assert made.artifact.read_bytes() == parent.artifact.read_bytes()


def test_fp16_of_an_earlier_step_is_written_to_the_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime.transformers.float16")
    parent = network(tmp_path / "m", **{"penstock.dtype": "fp16"})
    PASS.build(parent, OFF, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m")
    (weight,) = onnx.load(made.artifact).graph.initializer
    assert weight.data_type == TensorProto.FLOAT16
    # Clients send and get what they did.
    assert [spec.datatype for spec in (*made.config.inputs, *made.config.outputs)] == ["FP32"] * 2
    assert "penstock.dtype" not in made.config.options
    assert made.config.engine == "onnxruntime"


def test_what_was_built_is_read_back() -> None:
    before = Facts("pytorch")
    assert PASS.check(ON, before, Facts("onnxruntime", built=BUILT)) == []
    on_cpu = Facts("onnxruntime", built={**BUILT, "providers": "CPUExecutionProvider"})
    assert PASS.check(ON, before, on_cpu) == [f"runs on 'CPUExecutionProvider', expected {CUDA}"]
    old = Facts("onnxruntime", built={"providers": CUDA, "onnxruntime": "1.20"})
    assert "1.20 does not tell which provider" in PASS.check(OFF, before, old)[0]
    without = Facts("onnxruntime", built={**BUILT, "cuda_graphs": "off"})
    assert PASS.check(ON, before, without) == ["no graph was captured"]
    assert PASS.check(OFF, before, without) == []


def test_layers_that_fall_back_to_the_cpu_fail_the_gate() -> None:
    before = Facts("pytorch")
    assert fallback_problem(before, Facts("onnxruntime", built=BUILT)) == ""
    fallen = {**BUILT, "nodes_fallen_back_to_cpu": "2: 2 NonMaxSuppression"}
    worse = Facts("onnxruntime", built=fallen)
    found = fallback_problem(before, worse)
    assert found == "nodes fell back to the CPU: 2: 2 NonMaxSuppression"
    # A later step is not to blame for what its parent has.
    assert fallback_problem(worse, worse) == ""
