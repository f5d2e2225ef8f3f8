"""ONNX Runtime on the GPU pipeline: its code, with the CPU provider and a GPU that is none; on a
real one: tests/gpu/test_onnxruntime_gpu_cuda.py."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from fake_gpu import FakeGpu
from onnx import TensorProto, helper
from suites.backend import (
    MAX_BATCH,
    BackendContract,
    assert_same,
    echo_specs,
    model_config,
    run,
    values,
)

from penstock.backends import Batch, Runner, backend
from penstock.backends.onnxruntime import open_session, session_options
from penstock.backends.onnxruntime_nodes import RECORD, read_placement
from penstock.config import BatchPolicy, ModelConfig, ladder
from penstock.errors import BackendFailed, ConfigError
from penstock.serving.proof import prove
from penstock.serving.warmups import warm_up_all
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
runners = pytest.importorskip("penstock.backends.onnxruntime_cuda")
WriteOnnx = Callable[..., Path]


def open_bound(config: ModelConfig, is_captured: bool = False) -> "runners.BoundSession":
    options = session_options(config, [])
    options.add_session_config_entry(RECORD, "1")
    session = open_session(config, options, [("CPUExecutionProvider", {})])
    is_batched = config.max_batch_size > 0
    return runners.BoundSession(
        session, ("cpu", 0), config.inputs, config.outputs, is_batched, is_captured
    )


def open_on_cpu(
    config: ModelConfig, gpu: FakeGpu | None = None, is_captured: bool = False
) -> "runners.OnnxCudaRunner":
    """The runner, with the CPU in the place of the GPU."""
    bound = open_bound(config, is_captured)
    placement = read_placement(bound.session, Path(config.artifact))
    return runners.OnnxCudaRunner(config, bound, gpu or FakeGpu(), placement)


class TestOnnxCudaRunner(BackendContract):
    backend_name = "onnxruntime"

    @pytest.fixture(autouse=True)
    def writers(self, write_onnx: WriteOnnx, write_identity: WriteOnnx) -> None:
        self.write_onnx, self.write_identity = write_onnx, write_identity

    def load(self, config: ModelConfig) -> Runner:
        # Answers are views of an instance's memory until that runs its next batch.
        return open_on_cpu(replace(config, num_instances=2))

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        if datatype == "BYTES":
            pytest.skip("BYTES are refused: see test_onnxruntime_providers")
        if datatype == "BF16":
            pytest.skip("ONNX Runtime has no BF16 Identity on the CPU")
        sizes = [f"size{i}" if size < 0 else size for i, size in enumerate(row_shape)]
        shape = ["batch", *sizes] if max_batch_size else sizes
        artifact = self.write_identity(folder / "model.onnx", datatype, shape, num_tensors)
        specs = echo_specs(datatype, row_shape, num_tensors)
        return model_config("onnxruntime", artifact, *specs, max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        table = helper.make_tensor("table", TensorProto.FLOAT, [4], [0, 1, 2, 3])
        artifact = self.write_onnx(
            folder / "model.onnx",
            [helper.make_node("Gather", ["table", "index"], ["value"])],
            {"index": ("INT64", ["batch", 1])},
            {"value": ("FP32", ["batch", 1])},
            [table],
        )
        index, value = TensorSpec("index", "INT64", (1,)), TensorSpec("value", "FP32", (1,))
        bad, good = (
            Batch({"index": np.array([[0], [last]], np.int64)}, 2) for last in (4_000_000, 3)
        )
        return model_config("onnxruntime", artifact, [index], [value]), bad, good


@pytest.fixture
def scaled(tmp_path: Path, write_onnx: WriteOnnx) -> ModelConfig:
    """y = 2x; the rows of z are those of the batch as it ran."""
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2])
    first = helper.make_tensor("first", TensorProto.INT64, [1], [0])
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [
            helper.make_node("Mul", ["x", "two"], ["y"], name="scale"),
            helper.make_node("Shape", ["x"], ["shape"], name="shape"),
            helper.make_node("Gather", ["shape", "first"], ["rows"], name="rows"),
            helper.make_node("Concat", ["rows", "one"], ["target"], name="target", axis=0),
            helper.make_node("Expand", ["rows", "target"], ["z"], name="count"),
        ],
        {"x": ("FP32", ["batch", 3])},
        {"y": ("FP32", ["batch", 3]), "z": ("INT64", [None, 1])},
        [two, first, one],
    )
    inputs = [TensorSpec("x", "FP32", (3,))]
    outputs = [TensorSpec("y", "FP32", (3,)), TensorSpec("z", "INT64", (1,))]
    config = model_config("onnxruntime", artifact, inputs, outputs)
    return replace(config, batching=BatchPolicy(MAX_BATCH, is_dynamic=True))


def images(rows: int) -> np.ndarray:
    return values("FP32", (rows, 3), rows)


def test_batches_are_padded_to_the_next_rung(scaled: ModelConfig) -> None:
    runner = open_on_cpu(scaled)
    outputs = run(runner, {"x": images(3)}, 3)
    assert_same(outputs["y"], images(3) * 2, "FP32")
    # Rungs: 1, 2, 4, 5.
    assert outputs["z"].tolist() == [[4]] * 3
    runner.stop_filling()
    assert run(runner, {"x": images(3)}, 3)["z"].tolist() == [[3]] * 3


def test_batches_of_several_instances_are_in_flight_at_once(scaled: ModelConfig) -> None:
    gpu = FakeGpu()
    runner = open_on_cpu(replace(scaled, num_instances=2), gpu)
    assert runner.runs_ahead
    begun = [runner.start(Batch({"x": images(rows)}, rows)) for rows in (2, 5)]
    assert gpu.waited == []
    for rows, execution in zip((2, 5), begun, strict=True):
        (outputs,) = execution.wait()
        assert_same(outputs["y"], images(rows) * 2, "FP32")


def test_shared_memory_is_pinned(scaled: ModelConfig) -> None:
    gpu = FakeGpu()
    runner = open_on_cpu(scaled, gpu)
    runner.pin(memoryview(bytearray(4096)))
    assert gpu.pinned_bytes == [4096]
    assert runner.built()["copies"] == "from shared memory"


class TestGraphs:
    def test_each_shape_keeps_its_addresses(self, scaled: ModelConfig) -> None:
        runner = open_on_cpu(scaled, is_captured=True)
        for seed, rows in enumerate((1, 2, 5, 1, 2, 5)):
            array = values("FP32", (rows, 3), seed)
            assert_same(run(runner, {"x": array}, rows)["y"], array * 2, "FP32")
        assert runner.built()["cuda_graphs"] == "3"
        assert "without_cuda_graph" not in runner.built()

    def test_the_warm_up_of_a_worker_captures_one_for_each_rung(self, scaled: ModelConfig) -> None:
        config = replace(scaled, outputs=scaled.outputs[:1])
        runner = open_on_cpu(config, is_captured=True)
        proof = prove(config, runner)
        assert (proof.unbatched, proof.notes) == ("", ())
        warm_up_all(config, runner, proof)
        runner.settle()
        assert runner.built()["cuda_graphs"] == str(len(ladder(MAX_BATCH)))

    def test_none_is_captured_after_the_warm_up(self, scaled: ModelConfig) -> None:
        runner = open_on_cpu(scaled, is_captured=True)
        run(runner, {"x": images(1)}, 1)
        runner.settle()
        assert_same(run(runner, {"x": images(5)}, 5)["y"], images(5) * 2, "FP32")
        assert_same(run(runner, {"x": images(1)}, 1)["y"], images(1) * 2, "FP32")
        assert runner.built()["cuda_graphs"] == "1"

    def test_numbers_are_not_shared(self, scaled: ModelConfig) -> None:
        bound = open_bound(scaled, is_captured=True)
        for rows in (1, 2, 4):
            bound.run({"x": torch.ones(rows, 3)})
        options = [graph.run_options for graph in bound.graphs.values()]
        found = [each.get_run_config_entry(runners.GRAPH_ID) for each in options]
        assert found == ["1", "2", "3"]
        plain = runners.run_options(runners.NO_GRAPH)
        assert plain.get_run_config_entry(runners.GRAPH_ID) == "-1"

    def test_an_output_of_unknown_shape_runs_without_and_is_told(
        self, tmp_path: Path, write_onnx: WriteOnnx
    ) -> None:
        artifact = write_onnx(
            tmp_path / "model.onnx",
            [helper.make_node("NonZero", ["x"], ["where"])],
            {"x": ("FP32", ["rows", "columns"])},
            {"where": ("INT64", [2, "found"])},
        )
        config = model_config(
            "onnxruntime",
            artifact,
            [TensorSpec("x", "FP32", (-1, -1))],
            [TensorSpec("where", "INT64", (2, -1))],
            max_batch_size=0,
        )
        runner = open_on_cpu(config, is_captured=True)
        for array in (np.eye(3), np.zeros((2, 2)), np.ones((1, 5))):
            array = array.astype(np.float32)
            expected = np.array(np.nonzero(array), np.int64)
            assert_same(run(runner, {"x": array}, 1)["where"], expected, "INT64")
        built = runner.built()
        assert (
            built["without_cuda_graph"] == "3 shapes: the shape of output 'where' depends on data"
        )
        assert built["cuda_graphs"] == "0"


def test_flags_of_unknown_number_are_flags(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("Compress", ["flags", "flags"], ["kept"])],
        {"flags": ("BOOL", ["n"])},
        {"kept": ("BOOL", ["found"])},
    )
    specs = [TensorSpec("flags", "BOOL", (-1,))], [TensorSpec("kept", "BOOL", (-1,))]
    runner = open_on_cpu(model_config("onnxruntime", artifact, *specs, 0))
    flags = np.array([True, False, True])
    assert_same(run(runner, {"flags": flags}, 1)["kept"], flags[flags], "BOOL")


def test_outputs_of_known_shape_are_written_to_our_memory(scaled: ModelConfig) -> None:
    bound = open_bound(scaled, is_captured=True)
    outputs = bound.run({"x": torch.ones(2, 3)})
    (graph,) = bound.graphs.values()
    names = [spec.name for spec in scaled.outputs]
    pointers = [value.data_ptr() for value in graph.binding.get_outputs()]
    assert dict(zip(names, pointers, strict=True)) == {
        name: each.data_ptr() for name, each in outputs.items()
    }


def test_nodes_are_counted_by_provider(scaled: ModelConfig) -> None:
    built = open_on_cpu(scaled).built()
    # On this stand-in every layer is on the CPU: those that compute with x, and shapes.
    num_nodes = int(built["nodes.CPUExecutionProvider"])
    num_back = int(built["nodes_fallen_back_to_cpu"].partition(":")[0])
    assert built["nodes_fallen_back_to_cpu"].endswith("1 Mul")
    assert num_nodes == num_back + int(built["shape_nodes_on_cpu"])


def test_memory_that_ran_out_is_given_back_and_the_batch_tried_again(
    scaled: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    runner = open_on_cpu(scaled, gpu)
    real, failures = runners.BoundSession.run, ["Failed to allocate memory for requested buffer"]

    def fail_first(self, inputs):
        if failures:
            raise Exception(failures.pop())
        return real(self, inputs)

    monkeypatch.setattr(runners.BoundSession, "run", fail_first)
    assert_same(run(runner, {"x": images(2)}, 2)["y"], images(2) * 2, "FP32")
    assert gpu.num_shrinks == 1


def test_errors_are_one_line_without_paths(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    config, bad, _ = TestOnnxCudaRunner.failing_model(_Writers(write_onnx), tmp_path)
    with pytest.raises(BackendFailed) as caught:
        list(open_on_cpu(config).start(bad).wait())
    assert "Gather" in str(caught.value) and ".cc" not in str(caught.value)
    assert "\n" not in str(caught.value)


class _Writers:
    def __init__(self, write_onnx: WriteOnnx) -> None:
        self.write_onnx = write_onnx


def test_without_torch_the_error_says_what_to_install(scaled: ModelConfig) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from penstock.backends import backend\n"
        "from penstock.config import BatchPolicy, ModelConfig\n"
        "options = {'penstock.gpu_engine': 'onnxruntime'}\n"
        "config = ModelConfig('m', '1', 'onnxruntime', sys.argv[1], (), (), 0, BatchPolicy(1),\n"
        "    device='cuda:0', options=options)\n"
        "try: backend('onnxruntime')(config)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", code, scaled.artifact]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert found.startswith("ConfigError device: ONNX Runtime's GPU providers need the package")
    assert "'torch'" in found and 'pip install "penstock[onnxruntime-gpu]"' in found


@pytest.mark.skipif(
    "CUDAExecutionProvider" in ort.get_available_providers(), reason="the GPU build is installed"
)
def test_without_the_gpu_build_the_error_says_what_to_install(scaled: ModelConfig) -> None:
    config = replace(scaled, device="cuda:0", options={"penstock.gpu_engine": "onnxruntime"})
    with pytest.raises(ConfigError) as caught:
        backend("onnxruntime")(config)
    (problem,) = caught.value.problems
    assert problem.startswith("device: 'cuda:0': needs onnxruntime-gpu, which is not installed; ")
    assert "pip install --no-deps onnxruntime-gpu" in problem
