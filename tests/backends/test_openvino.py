"""The OpenVINO backend: IR and ONNX made here, properties read back, mismatches told in full."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
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

# Through the backend, which keeps the library from reporting home.
ov = pytest.importorskip("penstock.backends.openvino").ov
WriteOnnx = Callable[..., Path]


def ov_config(
    artifact: Path,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int = MAX_BATCH,
    **options: str,
) -> ModelConfig:
    return model_config("openvino", artifact, inputs, outputs, max_batch_size, options)


def problems_of(config: ModelConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        backend("openvino")(config)
    return caught.value.problems


def to_ir(artifact: Path) -> Path:
    """The ONNX file as model.xml and model.bin beside it."""
    path = artifact.with_suffix(".xml")
    ov.save_model(ov.Core().read_model(artifact), path, compress_to_fp16=False)
    artifact.unlink()
    return path


@pytest.fixture
def identity(tmp_path: Path, write_identity: WriteOnnx) -> Path:
    return write_identity(tmp_path / "model.onnx", "FP32", ("batch", 3))


@pytest.fixture
def add_weights(tmp_path: Path, write_onnx: WriteOnnx) -> Path:
    """An IR with weights: y = x + [1, 2, 3]."""
    (tmp_path / "1").mkdir()
    onnx_file = write_onnx(
        tmp_path / "1" / "model.onnx",
        [helper.make_node("Add", ["x0", "weights"], ["y0"])],
        {"x0": ("FP32", ["batch", 3])},
        {"y0": ("FP32", ["batch", 3])},
        [helper.make_tensor("weights", TensorProto.FLOAT, [3], [1, 2, 3])],
    )
    return to_ir(onnx_file)


class TestOnnx(BackendContract, ArtifactContract):
    backend_name = "openvino"

    @pytest.fixture(autouse=True)
    def writers(self, write_onnx: WriteOnnx, write_identity: WriteOnnx) -> None:
        self.write_onnx, self.write_identity = write_onnx, write_identity

    def made(self, artifact: Path) -> Path:
        return artifact

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        if datatype == "BYTES":
            pytest.skip("the Python interface of OpenVINO breaks memory with texts")
        if datatype in ("INT64", "UINT32", "UINT64"):
            pytest.skip(f"OpenVINO computes {datatype} as INT32, so not every number comes back")
        sizes = [f"size{i}" if size < 0 else size for i, size in enumerate(row_shape)]
        shape = ["batch", *sizes] if max_batch_size else sizes
        artifact = self.write_identity(folder / "model.onnx", datatype, shape, num_tensors)
        specs = echo_specs(datatype, row_shape, num_tensors)
        return ov_config(self.made(artifact), *specs, max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        """Three numbers a row cannot be laid out in pairs, six can."""
        artifact = self.write_onnx(
            folder / "model.onnx",
            [helper.make_node("Reshape", ["x", "pairs"], ["y"])],
            {"x": ("FP32", ["batch", 3])},
            {"y": ("FP32", ["half", 2])},
            [helper.make_tensor("pairs", TensorProto.INT64, [2], [-1, 2])],
        )
        inputs, outputs = [TensorSpec("x", "FP32", (3,))], [TensorSpec("y", "FP32", (2,))]
        bad, good = (Batch({"x": np.zeros((rows, 3), np.float32)}, rows) for rows in (1, 2))
        return ov_config(self.made(artifact), inputs, outputs), bad, good

    def good_artifact(self, folder: Path) -> Path:
        return self.made(self.write_identity(folder / "good.onnx", "FP32", ("batch", 3)))

    def artifact_config(self, artifact: Path) -> ModelConfig:
        return ov_config(artifact, *echo_specs("FP32", (3,)))


class TestIr(TestOnnx):
    def made(self, artifact: Path) -> Path:
        return to_ir(artifact)


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_broken_file_of_the_right_name_is_refused_in_one_line(
    tmp_path: Path, write_identity: WriteOnnx, suffix: str
) -> None:
    good = write_identity(tmp_path / "good.onnx", "FP32", ("batch", 3))
    good = to_ir(good) if suffix == ".xml" else good
    whole, artifact = good.read_bytes(), tmp_path / f"broken{suffix}"
    step = max(1, len(whole) // 64)
    contents = [whole[:size] for size in range(0, len(whole) - 2, step)]
    for content in (*contents, b"\0" * 4096, b"\xff" * 4096, b"not a model\n"):
        artifact.write_bytes(content)
        with pytest.raises(PenstockError) as caught:
            backend("openvino")(ov_config(artifact, *echo_specs("FP32", (3,))))
        assert artifact.name in str(caught.value) or "the model has only" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_weights_beside_the_ir_are_read(add_weights: Path) -> None:
    runner = backend("openvino")(ov_config(add_weights, *echo_specs("FP32", (3,))))
    assert run(runner, {"x0": np.zeros((1, 3), np.float32)}, 1)["y0"].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("what", ["missing", "truncated"])
def test_ir_without_its_weights_is_refused(add_weights: Path, what: str) -> None:
    weights = add_weights.with_suffix(".bin")
    if what == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BackendFailed, match="1/model.xml: OpenVINO cannot"):
        backend("openvino")(ov_config(add_weights, *echo_specs("FP32", (3,))))


def test_weights_may_not_be_a_link_out_of_the_version_folder(
    tmp_path: Path, add_weights: Path
) -> None:
    weights = add_weights.with_suffix(".bin")
    weights.rename(tmp_path / "outside.bin")
    weights.symlink_to(tmp_path / "outside.bin")
    [problem] = problems_of(ov_config(add_weights, *echo_specs("FP32", (3,))))
    assert problem == "1/model.xml: its weights model.bin leave the version folder"


@pytest.mark.parametrize("location", ["../secret.bin", "{absolute}", "link.bin", "missing.bin"])
def test_onnx_weights_that_leave_the_version_folder_are_not_read(
    tmp_path: Path, write_onnx: WriteOnnx, location: str
) -> None:
    (tmp_path / "1").mkdir()
    np.array([1, 2, 3], np.float32).tofile(tmp_path / "secret.bin")
    (tmp_path / "1" / "link.bin").symlink_to(tmp_path / "secret.bin")
    tensor = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[3])
    tensor.data_location = TensorProto.EXTERNAL
    location = location.format(absolute=tmp_path / "secret.bin")
    for key, value in {"location": location, "offset": "0", "length": "12"}.items():
        tensor.external_data.add(key=key, value=value)
    artifact = write_onnx(
        tmp_path / "1" / "model.onnx",
        [helper.make_node("Add", ["x0", "weights"], ["y0"])],
        {"x0": ("FP32", ["batch", 3])},
        {"y0": ("FP32", ["batch", 3])},
        [tensor],
    )
    with pytest.raises(BackendFailed, match="1/model.onnx: OpenVINO cannot"):
        backend("openvino")(ov_config(artifact, *echo_specs("FP32", (3,))))


@pytest.mark.parametrize("datatype", ["INT64", "UINT32", "UINT64"])
def test_numbers_that_openvino_would_change_are_refused(
    tmp_path: Path, write_identity: WriteOnnx, datatype: str
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", datatype, ("batch", 2))
    runner = backend("openvino")(ov_config(artifact, *echo_specs(datatype, (2,))))
    dtype = np.dtype(datatype.lower())
    fits = np.array([[0, 2**31 - 1]], dtype)
    assert_same(run(runner, {"x0": fits}, 1)["y0"], fits, datatype)
    with pytest.raises(BackendFailed, match="input 'x0': 2147483648 does not fit INT32"):
        run(runner, {"x0": np.array([[1, 2**31]], dtype)}, 1)
    empty = np.zeros((0, 2), dtype)
    assert_same(run(runner, {"x0": empty}, 0)["y0"], empty, datatype)


def test_optional_inputs_are_refused(identity: Path) -> None:
    """The library would compute with what the batch before has sent."""
    [x0], outputs = echo_specs("FP32", (3,))
    [problem] = problems_of(ov_config(identity, [replace(x0, is_optional=True)], outputs))
    assert problem == "input 'x0': OpenVINO needs all inputs; it cannot be optional"


def test_state_does_not_outlive_its_batch(tmp_path: Path) -> None:
    """y is x and all that came before it."""
    opset = pytest.importorskip("openvino.opset6")
    x = opset.parameter([1, 3], np.float32, name="x")
    zeros = opset.constant(np.zeros((1, 3), np.float32))
    total = opset.add(opset.read_value(zeros, "total"), x)
    total.set_friendly_name("total")
    kept, y = opset.assign(total, "total"), opset.result(total)
    model = ov.Model([y], [kept], [x], "running_total")
    model.outputs[0].get_tensor().set_names({"y"})
    ov.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    inputs, outputs = [TensorSpec("x", "FP32", (1, 3))], [TensorSpec("y", "FP32", (1, 3))]
    runner = backend("openvino")(ov_config(tmp_path / "model.xml", inputs, outputs, 0))
    for _ in range(2):
        assert run(runner, {"x": np.ones((1, 3), np.float32)}, 1)["y"].tolist() == [[1, 1, 1]]


def test_bytes_are_refused_with_the_backends_that_have_them(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "BYTES", ("batch", 1))
    problems = problems_of(ov_config(artifact, *echo_specs("BYTES", (1,))))
    assert problems == (
        "input 'x0': BYTES is not supported; use backend 'onnxruntime' or 'python'",
        "output 'y0': BYTES is not supported; use backend 'onnxruntime' or 'python'",
    )


@pytest.mark.parametrize("is_ir", [True, False])
def test_variable_dimensions_take_any_size(
    tmp_path: Path, write_identity: WriteOnnx, is_ir: bool
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", ("batch", "length", 2))
    artifact = to_ir(artifact) if is_ir else artifact
    runner = backend("openvino")(ov_config(artifact, *echo_specs("FP32", (-1, 2))))
    for rows, length in ((1, 1), (3, 7), (1, 100), (3, 7)):
        array = values("FP32", (rows, length, 2), length)
        assert_same(run(runner, {"x0": array}, rows)["y0"], array, "FP32")


def test_only_the_configured_outputs_are_given_in_any_order(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", ("batch", 3), num_tensors=3)
    inputs, outputs = echo_specs("FP32", (3,), num_tensors=3)
    runner = backend("openvino")(ov_config(artifact, inputs[::-1], [outputs[2], outputs[0]]))
    arrays = {spec.name: values("FP32", (1, 3), seed) for seed, spec in enumerate(inputs)}
    got = run(runner, arrays, 1)
    assert set(got) == {"y0", "y2"}
    assert_same(got["y0"], arrays["x0"], "FP32")
    assert_same(got["y2"], arrays["x2"], "FP32")


def test_precision_is_f32_unless_asked_for(identity: Path) -> None:
    built = backend("openvino")(ov_config(identity, *echo_specs("FP32", (3,)))).built()
    assert built["inference_precision_hint"] == "f32"
    assert built["performance_hint"] == "LATENCY"
    assert built["enable_cpu_pinning"] == "False"
    assert built["devices"] == "CPU"


def test_precision_that_the_processor_lacks_is_refused_not_replaced(identity: Path) -> None:
    """Whatever the processor has: what was built is what was asked for, or there is an error."""
    for precision in ("bf16", "f16"):
        config = ov_config(identity, *echo_specs("FP32", (3,)), inference_precision=precision)
        try:
            built = backend("openvino")(config).built()
        except ConfigError as error:
            [problem] = error.problems
            assert problem.startswith(
                f"parameters.inference_precision: asked for {precision}, got "
            )
        else:
            assert built["inference_precision_hint"] == precision


@pytest.mark.parametrize("key", ["inference_num_threads", "INFERENCE_NUM_THREADS"])
def test_threads_are_set_and_read_back(identity: Path, key: str) -> None:
    built = backend("openvino")(ov_config(identity, *echo_specs("FP32", (3,)), **{key: "1"}))
    assert built.built()["inference_num_threads"] == "1"


@pytest.mark.parametrize("key", ["inference_num_threads", "num_streams"])
def test_more_threads_than_there_are_is_an_error_not_fewer(identity: Path, key: str) -> None:
    [problem] = problems_of(ov_config(identity, *echo_specs("FP32", (3,)), **{key: "1000"}))
    assert problem.startswith(f"parameters.{key}: asked for 1000, got ")


def test_any_property_can_be_set_and_is_read_back(identity: Path) -> None:
    options = {"ov.ENABLE_HYPER_THREADING": "NO", "ov.ENABLE_CPU_PINNING": "YES"}
    built = backend("openvino")(ov_config(identity, *echo_specs("FP32", (3,)), **options)).built()
    assert built["enable_hyper_threading"] == "False"
    assert "enable_cpu_pinning" in built


def test_unknown_property_is_refused_by_name(identity: Path) -> None:
    config = ov_config(identity, *echo_specs("FP32", (3,)), **{"ov.NO_SUCH_THING": "1"})
    with pytest.raises(BackendFailed, match="NO_SUCH_THING"):
        backend("openvino")(config)


def test_every_wrong_option_is_reported_at_once(identity: Path) -> None:
    config = ov_config(
        identity,
        *echo_specs("FP32", (3,)),
        performance_hint="fastest",
        inference_precision="int8",
        inference_num_threads="many",
        num_streams="-1",
    )
    problems = problems_of(replace(config, device="cuda"))
    assert [problem.split(":")[0] for problem in problems] == [
        "device",
        "parameters.performance_hint",
        "parameters.inference_precision",
        "parameters.inference_num_threads",
        "parameters.num_streams",
    ]


def test_every_mismatch_is_reported_at_once_with_both_sides(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", ("batch", 3), num_tensors=2)
    problems = problems_of(
        ov_config(
            artifact,
            [TensorSpec("x0", "INT8", (9,))],
            [TensorSpec("nowhere", "FP32", (3,))],
        )
    )
    assert problems == (
        "input 'x0': configured as INT8, the model has FP32",
        "input 'x0': configured as [-1, 9], the model has [-1, 3]",
        "output 'nowhere': the model has only y0, y1",
        "input: the model needs 'x1', which is not configured",
    )


def test_fixed_batch_dimension_is_refused_when_batches_are_wanted(
    tmp_path: Path, write_identity: WriteOnnx
) -> None:
    artifact = write_identity(tmp_path / "model.onnx", "FP32", (4, 3))
    problems = problems_of(ov_config(artifact, *echo_specs("FP32", (3,))))
    assert all("max_batch_size must be 0" in problem for problem in problems)


SPY = """
import sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("openvino_telemetry"):
            print("looked for", name)

sys.meta_path.insert(0, Spy())
from penstock.backends import backend
backend("openvino")
print("telemetry:", sys.modules.get("openvino_telemetry"))
"""


def test_telemetry_is_never_imported() -> None:
    command = [sys.executable, "-c", SPY]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    assert output.stdout == "telemetry: None\n"
