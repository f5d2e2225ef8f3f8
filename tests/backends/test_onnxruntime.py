"""The ONNX Runtime backend: files made here, options read back, mismatches told in full."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from suites.backend import (
    MAX_BATCH,
    ArtifactContract,
    BackendContract,
    assert_same,
    echo_specs,
    model_config,
    run,
    values,
)

from penstock.backends import Batch, backend
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError, PenstockError
from penstock.types import TensorSpec

WriteOnnx = Callable[..., Path]


def onnx_config(
    artifact: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int = MAX_BATCH,
    **options: str,
) -> ModelConfig:
    return model_config("onnxruntime", artifact, inputs, outputs, max_batch_size, options)


def problems_of(config: ModelConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        backend("onnxruntime")(config)
    return caught.value.problems


def can_run_bf16_identity(artifact: Path) -> str:
    """Why ONNX Runtime itself cannot; empty if it can."""
    try:
        session = onnxruntime.InferenceSession(artifact, providers=["CPUExecutionProvider"])
        bits = np.zeros((1, 3), np.uint16)
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
        session.run_with_ort_values(None, {"x0": value})
    except Exception as error:
        return str(error)
    return ""


@pytest.fixture
def identity(tmp_path: Path, write_identity: WriteOnnx) -> Path:
    return write_identity(tmp_path / "model.onnx", "FP32", ("batch", 3))


class TestOnnxRuntimeBackend(BackendContract, ArtifactContract):
    backend_name = "onnxruntime"

    @pytest.fixture(autouse=True)
    def writers(self, write_onnx: WriteOnnx, write_identity: WriteOnnx) -> None:
        self.write_onnx, self.write_identity = write_onnx, write_identity

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        sizes = [f"size{i}" if size < 0 else size for i, size in enumerate(row_shape)]
        shape = ["batch", *sizes] if max_batch_size else sizes
        artifact = self.write_identity(folder / "model.onnx", datatype, shape, num_tensors)
        if datatype == "BF16" and (reason := can_run_bf16_identity(artifact)):
            pytest.skip(f"this ONNX Runtime has no BF16 Identity on the CPU: {reason}")
        specs = echo_specs(datatype, row_shape, num_tensors)
        return onnx_config(artifact, *specs, max_batch_size)

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
        return onnx_config(artifact, [index], [value]), bad, good

    def good_artifact(self, folder: Path) -> Path:
        return self.write_identity(folder / "good.onnx", "FP32", ("batch", 3))

    def artifact_config(self, artifact: Path) -> ModelConfig:
        return onnx_config(artifact, *echo_specs("FP32", (3,)))


def test_two_inputs_of_different_kinds_are_added(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [
            helper.make_node("Cast", ["count"], ["counted"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["image", "counted"], ["sum"]),
        ],
        {"image": ("FP32", ["batch", 2, 2]), "count": ("INT32", ["batch", 1, 1])},
        {"sum": ("FP32", ["batch", 2, 2])},
    )
    inputs = [TensorSpec("image", "FP32", (2, 2)), TensorSpec("count", "INT32", (1, 1))]
    outputs = [TensorSpec("sum", "FP32", (2, 2))]
    runner = backend("onnxruntime")(onnx_config(artifact, inputs, outputs))
    image = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    count = np.array([10, 20, 30], np.int32).reshape(3, 1, 1)
    total = run(runner, {"count": count, "image": image}, 3)["sum"]
    assert_same(total, (image + count).astype(np.float32), "FP32")


def test_output_shape_may_depend_on_the_data(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("NonZero", ["x"], ["where"])],
        {"x": ("FP32", ["rows", "columns"])},
        {"where": ("INT64", [2, "found"])},
    )
    config = onnx_config(
        artifact,
        [TensorSpec("x", "FP32", (-1, -1))],
        [TensorSpec("where", "INT64", (2, -1))],
        max_batch_size=0,
    )
    runner = backend("onnxruntime")(config)
    for array in (np.eye(3), np.zeros((2, 2)), np.ones((1, 5))):
        array = array.astype(np.float32)
        expected = np.array(np.nonzero(array), np.int64)
        assert_same(run(runner, {"x": array}, 1)["where"], expected, "INT64")


def test_only_the_configured_outputs_are_computed(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", ("batch", 3), num_tensors=2)
    inputs, outputs = echo_specs("FP32", (3,), num_tensors=2)
    runner = backend("onnxruntime")(onnx_config(artifact, inputs, outputs[1:]))
    arrays = {spec.name: values("FP32", (1, 3), seed) for seed, spec in enumerate(inputs)}
    assert set(run(runner, arrays, 1)) == {"y1"}


def test_text_that_is_not_utf8_raises_and_the_next_batch_runs(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "BYTES", ("batch", 1))
    runner = backend("onnxruntime")(onnx_config(artifact, *echo_specs("BYTES", (1,))))
    with pytest.raises(Exception, match="utf-8"):
        run(runner, {"x0": np.array([[b"\xff\xfe"]], object)}, 1)
    fine = np.array([["naïve".encode()]], object)
    assert_same(run(runner, {"x0": fine}, 1)["y0"], fine, "BYTES")


def test_text_keeps_its_zero_bytes(tmp_path: Path, write_identity: WriteOnnx) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "BYTES", ("batch", 1))
    runner = backend("onnxruntime")(onnx_config(artifact, *echo_specs("BYTES", (1,))))
    array = np.array([[b"a\0b"], [b"\0"], [b"end\0"]], object)
    assert_same(run(runner, {"x0": array}, 3)["y0"], array, "BYTES")


def test_threads_are_set_and_read_back(identity: Path) -> None:
    config = onnx_config(
        identity,
        *echo_specs("FP32", (3,)),
        intra_op_thread_count="1",
        inter_op_thread_count="3",
        execution_mode="1",
    )
    built = backend("onnxruntime")(config).built()
    assert built["intra_op_thread_count"] == "1"
    assert built["inter_op_thread_count"] == "3"
    assert "PARALLEL" in built["execution_mode"]


def test_without_options_threads_are_the_cores_shared_by_the_instances(identity: Path) -> None:
    built = backend("onnxruntime")(onnx_config(identity, *echo_specs("FP32", (3,)))).built()
    assert built["intra_op_thread_count"] == str(len(os.sched_getaffinity(0)))
    assert "SEQUENTIAL" in built["execution_mode"]


def test_instances_share_the_cores_that_another_program_has_assigned(identity: Path) -> None:
    config = onnx_config(identity, *echo_specs("FP32", (3,)))
    config = replace(config, num_cores=6, num_instances=2)
    assert backend("onnxruntime")(config).built()["intra_op_thread_count"] == "3"


@pytest.mark.parametrize(
    ("level", "is_built"),
    [
        ("disabled", "ORT_DISABLE_ALL"),
        ("basic", "ORT_ENABLE_BASIC"),
        ("extended", "ORT_ENABLE_EXTENDED"),
        ("all", "ORT_ENABLE_ALL"),
    ],
)
def test_graph_level_is_set_and_read_back(identity: Path, level: str, is_built: str) -> None:
    config = onnx_config(identity, *echo_specs("FP32", (3,)), graph_level=level)
    assert backend("onnxruntime")(config).built()["graph_level"] == is_built


@pytest.mark.parametrize("option", ["enable_mem_arena", "enable_mem_pattern"])
def test_memory_is_kept_unless_it_is_switched_off(identity: Path, option: str) -> None:
    specs = echo_specs("FP32", (3,))
    assert backend("onnxruntime")(onnx_config(identity, *specs)).built()[option] == "1"
    config = onnx_config(identity, *specs, **{option: "0"})
    assert backend("onnxruntime")(config).built()[option] == "0"


def test_provider_is_read_back(identity: Path) -> None:
    specs = echo_specs("FP32", (3,))
    config = onnx_config(identity, *specs, providers="CPUExecutionProvider")
    assert backend("onnxruntime")(config).built()["providers"] == "CPUExecutionProvider"


def test_unknown_provider_is_refused_with_what_there_is(identity: Path) -> None:
    specs = echo_specs("FP32", (3,))
    [problem] = problems_of(
        onnx_config(identity, *specs, providers="FastExecutionProvider,CPUExecutionProvider")
    )
    assert problem.startswith("parameters.providers: FastExecutionProvider")
    for available in onnxruntime.get_available_providers():
        assert available in problem


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("graph_level", "99"),
        ("intra_op_thread_count", "many"),
        ("intra_op_thread_count", "-1"),
        pytest.param("intra_op_thread_count", "²"),
        pytest.param("intra_op_thread_count", "99999999999"),
        ("inter_op_thread_count", "1.5"),
        pytest.param("execution_mode", "2"),
        ("enable_mem_arena", "yes"),
        ("enable_mem_pattern", "2"),
    ],
)
def test_option_that_makes_no_sense_is_refused_by_name(
    identity: Path, option: str, text: str
) -> None:
    [problem] = problems_of(onnx_config(identity, *echo_specs("FP32", (3,)), **{option: text}))
    assert problem.startswith(f"parameters.{option}: ")
    assert text in problem


def test_every_wrong_option_is_reported_at_once(identity: Path) -> None:
    problems = problems_of(
        onnx_config(
            identity,
            *echo_specs("FP32", (3,)),
            graph_level="best",
            intra_op_thread_count="many",
            providers="FastExecutionProvider",
        )
    )
    assert len(problems) == 3


def test_every_mismatch_is_reported_at_once_with_both_sides(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", ("batch", 3), num_tensors=3)
    problems = problems_of(
        onnx_config(
            artifact,
            [TensorSpec("x0", "INT64", (3,)), TensorSpec("x1", "FP32", (4,))],
            [TensorSpec("nowhere", "FP32", (3,)), TensorSpec("y1", "FP16", (3, 1))],
        )
    )
    by_tensor: dict[str, str] = {}
    for problem in problems:
        where = problem.split(":")[0]
        by_tensor[where] = by_tensor.get(where, "") + problem
    assert "INT64" in by_tensor["input 'x0'"] and "FP32" in by_tensor["input 'x0'"]
    assert "[-1, 4]" in by_tensor["input 'x1'"] and "[-1, 3]" in by_tensor["input 'x1'"]
    assert "y0, y1, y2" in by_tensor["output 'nowhere'"]
    assert "FP16" in by_tensor["output 'y1'"] and "FP32" in by_tensor["output 'y1'"]
    assert any("x2" in problem for problem in problems), "an input of the file is not configured"


def test_wrong_datatype_does_not_hide_the_wrong_shape(identity: Path) -> None:
    inputs, outputs = [TensorSpec("x0", "INT8", (9,))], [TensorSpec("y0", "FP32", (3,))]
    text = "; ".join(problems_of(onnx_config(identity, inputs, outputs)))
    for side in ("INT8", "FP32", "[-1, 9]", "[-1, 3]"):
        assert side in text


def test_variable_input_where_the_file_has_a_fixed_size_is_refused(identity: Path) -> None:
    """Or a client's wrong shape would become an error of the model."""
    inputs, outputs = [TensorSpec("x0", "FP32", (-1,))], [TensorSpec("y0", "FP32", (3,))]
    [problem] = problems_of(onnx_config(identity, inputs, outputs))
    assert "[-1, -1]" in problem and "[-1, 3]" in problem


def test_fixed_size_where_the_file_has_a_variable_one_is_fine(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", ("batch", "size"))
    runner = backend("onnxruntime")(onnx_config(artifact, *echo_specs("FP32", (3,))))
    array = values("FP32", (2, 3))
    assert_same(run(runner, {"x0": array}, 2)["y0"], array, "FP32")


@pytest.mark.parametrize("size", [1, MAX_BATCH])
def test_fixed_batch_dimension_is_refused_when_batches_are_wanted(
    tmp_path: Path, write_identity: WriteOnnx, size: int
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", (size, 3))
    problems = problems_of(onnx_config(artifact, *echo_specs("FP32", (3,))))
    assert [problem.split(":")[0] for problem in problems] == ["input 'x0'", "output 'y0'"]
    assert all("max_batch_size" in problem for problem in problems)
    assert all(f"{size}" in problem for problem in problems)


def test_fixed_batch_dimension_is_part_of_the_shape_without_batching(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", (1, 3))
    runner = backend("onnxruntime")(onnx_config(artifact, *echo_specs("FP32", (1, 3)), 0))
    array = values("FP32", (1, 3))
    assert_same(run(runner, {"x0": array}, 1)["y0"], array, "FP32")


def external_weights(location: str, offset: int = 0) -> onnx.TensorProto:
    """Three floats that the file says lie elsewhere."""
    tensor = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[3])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": str(offset), "length": "12"}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.fixture
def load_with_weights(tmp_path: Path, write_onnx: WriteOnnx) -> Callable[..., object]:
    """Load `1/model.onnx` whose weights are at a location; `secret.bin` lies outside its folder."""
    weights = np.array([1, 2, 3], np.float32)
    (tmp_path / "1").mkdir()
    for file in ("secret.bin", "1/weights.bin"):
        weights.tofile(tmp_path / file)
    (tmp_path / "1" / "link.bin").symlink_to(tmp_path / "secret.bin")

    def load(location: str, offset: int = 0) -> object:
        artifact = write_onnx(
            tmp_path / "1" / "model.onnx",
            [helper.make_node("Add", ["x0", "weights"], ["y0"])],
            {"x0": ("FP32", ["batch", 3])},
            {"y0": ("FP32", ["batch", 3])},
            [external_weights(location, offset)],
        )
        runner = backend("onnxruntime")(onnx_config(artifact, *echo_specs("FP32", (3,))))
        return run(runner, {"x0": np.zeros((1, 3), np.float32)}, 1)["y0"].tolist()

    return load


def test_weights_beside_the_model_are_read(load_with_weights: Callable[..., object]) -> None:
    assert load_with_weights("weights.bin") == [[1, 2, 3]]


@pytest.mark.parametrize("location", ["../secret.bin", "{absolute}", "link.bin", "missing.bin"])
def test_weights_that_leave_the_version_folder_are_not_read(
    tmp_path: Path, load_with_weights: Callable[..., object], location: str
) -> None:
    with pytest.raises(PenstockError):
        load_with_weights(location.format(absolute=tmp_path / "secret.bin"))


@pytest.mark.parametrize("offset", [4, 1 << 40])
def test_weights_that_lie_past_the_end_of_their_file_are_refused(
    load_with_weights: Callable[..., object], offset: int
) -> None:
    with pytest.raises(BackendFailed):
        load_with_weights("weights.bin", offset)


@pytest.mark.parametrize("location", ["../secret.bin", "{absolute}", "missing.bin", "past"])
def test_errors_of_loading_show_no_path_of_any_machine(
    tmp_path: Path, load_with_weights: Callable[..., object], location: str
) -> None:
    absolute = tmp_path / "secret.bin"
    name, offset = ("weights.bin", 4) if location == "past" else (location, 0)
    with pytest.raises(BackendFailed) as caught:
        load_with_weights(name.format(absolute=absolute), offset)
    check_shown(str(caught.value), tmp_path)


@pytest.mark.parametrize(("version", "words"), [(99, "IR version: 99"), (8, "opset")])
def test_errors_of_unknown_versions_say_what_is_supported(
    tmp_path: Path, identity: Path, version: int, words: str
) -> None:
    model = onnx.load(str(identity))
    if version == 99:
        model.ir_version = version
    else:
        model.opset_import[0].version = 99
    onnx.save(model, str(tmp_path / "new.onnx"))
    with pytest.raises(BackendFailed, match=words) as caught:
        backend("onnxruntime")(onnx_config(tmp_path / "new.onnx", *echo_specs("FP32", (3,))))
    check_shown(str(caught.value), tmp_path)


def test_errors_of_running_show_no_path_of_the_library(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    artifact = write_onnx(
        tmp_path / "model.onnx",
        [helper.make_node("Reshape", ["x0", "shape"], ["y0"])],
        {"x0": ("FP32", ["batch", 3])},
        {"y0": ("FP32", ["batch", 3])},
        [helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 7])],
    )
    runner = backend("onnxruntime")(onnx_config(artifact, *echo_specs("FP32", (3,))))
    with pytest.raises(BackendFailed, match="cannot be reshaped") as caught:
        run(runner, {"x0": np.zeros((1, 3), np.float32)}, 1)
    check_shown(str(caught.value), tmp_path)


def check_shown(text: str, folder: Path) -> None:
    assert "onnxruntime_src" not in text and "::" not in text and ".cc:" not in text
    assert "[ONNXRuntimeError]" not in text
    assert str(folder) not in text


SPY = """
import os, sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print("telemetry disabled:", os.environ.get("ORT_DISABLE_TELEMETRY"))

sys.meta_path.insert(0, Spy())
from penstock.backends import backend
backend("onnxruntime")
"""


@pytest.mark.parametrize("inherited", [None, "0"])
def test_telemetry_is_off_before_the_library_is_imported(inherited: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    if inherited is not None:
        environment["ORT_DISABLE_TELEMETRY"] = inherited
    command = [sys.executable, "-c", SPY]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert output.stdout == "telemetry disabled: 1\n"
