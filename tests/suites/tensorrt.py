"""What the TensorRT backend must do, as tests: by a stand-in for the library on the CPU, and by
TensorRT itself on a GPU (`tests/gpu/test_tensorrt_cuda.py`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from penstock.backends import Batch, backend
from penstock.config import ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, TensorSpec
from suites.backend import MAX_BATCH, ArtifactContract, BackendContract, model_config, run

LONGEST = 16
SUPPORTED = ("FP32", "FP16", "BF16", "INT8", "INT32", "INT64", "UINT8", "BOOL")
X, Y = TensorSpec("x0", "FP32", (3,)), TensorSpec("y0", "FP32", (3,))


def onnx_type(datatype: str) -> int:
    if datatype == "BF16":
        return onnx.TensorProto.BFLOAT16
    return helper.np_dtype_to_tensor_dtype(DATATYPES[datatype].numpy)


def write_onnx(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    weights: Sequence[onnx.TensorProto] = (),
) -> Path:
    """A model of these nodes; -1 is a variable size."""

    def value(spec: TensorSpec) -> onnx.ValueInfoProto:
        sizes = [size if size >= 0 else f"n{axis}" for axis, size in enumerate(spec.shape)]
        return helper.make_tensor_value_info(spec.name, onnx_type(spec.datatype), sizes)

    graph = helper.make_graph(nodes, "g", map(value, inputs), map(value, outputs), list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def batched(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [replace(spec, shape=(-1, *spec.shape)) for spec in specs]


def profile(specs: Sequence[TensorSpec], max_rows: int = MAX_BATCH) -> dict:
    """Limits for each variable input, with the batch dimension if it has one."""
    found = {}
    for spec in specs:
        if -1 in spec.shape:
            low = [1 if size < 0 else size for size in spec.shape]
            high = [LONGEST if size < 0 else size for size in spec.shape]
            if max_rows and spec.shape[0] < 0:
                high[0] = max_rows
            found[spec.name] = (low, high, high)
    return found


class TensorRtContract(BackendContract, ArtifactContract):
    backend_name = "tensorrt"
    device = "cuda:0"

    def build(self, source: Path, target: Path, *profiles: dict, **more: object) -> Path:
        from penstock.backends.tensorrt import build_plan

        cache = target.parent / "timing.cache"
        settings = {"device": self.device, "allows_tf32": False, "timing_cache": cache, **more}
        build_plan(source, target, profiles=[each for each in profiles if each], **settings)
        return target

    def plan(
        self,
        folder: Path,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        max_batch_size: int = MAX_BATCH,
        weights: Sequence[onnx.TensorProto] = (),
    ) -> ModelConfig:
        """Build a plan, and return its configuration."""
        both = [batched(specs) if max_batch_size else list(specs) for specs in (inputs, outputs)]
        source = write_onnx(folder / "source.onnx", nodes, *both, weights)
        plan = self.build(source, folder / "model.plan", profile(both[0], max_batch_size))
        config = model_config("tensorrt", plan, inputs, outputs, max_batch_size)
        # Answers are valid until their slot is used again, and each instance has one.
        return replace(config, device=self.device, num_instances=2)

    def echo_config(
        self,
        folder: Path,
        datatype: str = "FP32",
        row_shape: Sequence[int] = (3,),
        max_batch_size: int = MAX_BATCH,
        num_tensors: int = 1,
    ) -> ModelConfig:
        if datatype not in SUPPORTED:
            pytest.skip(f"TensorRT has no {datatype}")
        numbers = range(num_tensors)
        inputs = [TensorSpec(f"x{n}", datatype, tuple(row_shape)) for n in numbers]
        outputs = [TensorSpec(f"y{n}", datatype, tuple(row_shape)) for n in numbers]
        nodes = [helper.make_node("Identity", [f"x{n}"], [f"y{n}"]) for n in numbers]
        return self.plan(folder, nodes, inputs, outputs, max_batch_size)

    def failing_model(self, folder: Path) -> tuple[ModelConfig, Batch, Batch]:
        """Longer than the plan's profile allows."""
        config = self.echo_config(folder, row_shape=(-1,))
        bad, good = (np.ones((2, length), np.float32) for length in (LONGEST + 1, 2))
        return config, Batch({"x0": bad}, 2), Batch({"x0": good}, 2)

    def good_artifact(self, folder: Path) -> Path:
        return Path(self.echo_config(folder).artifact)

    def artifact_config(self, artifact: Path) -> ModelConfig:
        return replace(model_config("tensorrt", artifact, [X], [Y]), device=self.device)

    def linear(self, folder: Path) -> tuple[ModelConfig, np.ndarray]:
        weight = np.random.default_rng(0).random((3, 2), np.float32)
        node = helper.make_node("MatMul", ["x0", "w"], ["y0"])
        tensors = [numpy_helper.from_array(weight, "w")]
        output = TensorSpec("y0", "FP32", (2,))
        return self.plan(folder, [node], [X], [output], weights=tensors), weight

    @pytest.mark.parametrize("graphs", ["on", "off"])
    def test_layers_compute_with_and_without_graphs(self, tmp_path: Path, graphs: str) -> None:
        config, weight = self.linear(tmp_path)
        runner = self.load(replace(config, options={"penstock.cuda_graphs": graphs}))
        rng = np.random.default_rng(1)
        for num_rows in (1, 2, 5, 2, 1, 5, 2):
            x = rng.random((num_rows, 3), np.float32)
            found = run(runner, {"x0": x}, num_rows)["y0"]
            np.testing.assert_allclose(found, x @ weight, rtol=1e-3)
        captured = runner.built()["cuda_graphs"]
        assert captured == ("3" if graphs == "on" else "off")

    def test_what_was_built_is_read_back_by_the_inspector(self, tmp_path: Path) -> None:
        config, _ = self.linear(tmp_path)
        built = self.load(config).built()
        assert built["form"] == "TensorRT plan" and built["profiles"] == "1"
        assert int(built["layers"]) >= 1 and int(built["gpu_memory_bytes"]) > 0
        assert "float" in built["datatypes"].casefold() or "fp32" in built["datatypes"].casefold()

    def test_each_shape_uses_a_profile_that_allows_it(self, tmp_path: Path) -> None:
        specs = [TensorSpec("x0", "FP32", (-1, -1))], [TensorSpec("y0", "FP32", (-1, -1))]
        node = helper.make_node("Neg", ["x0"], ["y0"])
        source = write_onnx(tmp_path / "source.onnx", [node], *specs)
        short = {"x0": ([1, 1], [4, 4], [MAX_BATCH, 4])}
        long = {"x0": ([1, 5], [1, 8], [2, 8])}
        plan = self.build(source, tmp_path / "model.plan", short, long)
        spec = [replace(each[0], shape=(-1,)) for each in specs]
        config = replace(model_config("tensorrt", plan, *[[s] for s in spec]), device=self.device)
        runner = self.load(config)
        assert runner.built()["profiles"] == "2"
        for shape in ((5, 3), (1, 8), (2, 6), (5, 4)):
            x = np.random.default_rng(0).random(shape, np.float32)
            np.testing.assert_array_equal(run(runner, {"x0": x}, shape[0])["y0"], -x)
        with pytest.raises(BackendFailed, match=r"outside the plan's profiles: 'x0' \[5, 8\]"):
            run(runner, {"x0": np.ones((5, 8), np.float32)}, 5)

    def test_larger_batches_than_the_plan_allows_are_refused(self, tmp_path: Path) -> None:
        config = replace(self.echo_config(tmp_path), max_batch_size=64)
        with pytest.raises(ConfigError, match=r"64, but the plan was built for at most 5 rows"):
            self.load(config)

    def test_tensors_are_compared_with_the_configuration(self, tmp_path: Path) -> None:
        config = self.echo_config(tmp_path)
        with pytest.raises(ConfigError, match=r"configured as INT64, the model has FP32"):
            self.load(replace(config, inputs=(replace(X, datatype="INT64"),)))

    def test_a_model_with_an_unknown_operator_is_not_built(self, tmp_path: Path) -> None:
        node = helper.make_node("NoSuchThing", ["x0"], ["y0"], name="odd")
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, [3])],
            [helper.make_tensor_value_info("y0", onnx.TensorProto.FLOAT, [3])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        onnx.save(model, tmp_path / "odd.onnx")
        with pytest.raises(BackendFailed, match=r"cannot read odd\.onnx: NoSuchThing 'odd'"):
            self.build(tmp_path / "odd.onnx", tmp_path / "model.plan")
        assert not (tmp_path / "model.plan").exists()

    def test_open_sizes_need_a_profile(self, tmp_path: Path) -> None:
        node = helper.make_node("Neg", ["x0"], ["y0"])
        source = write_onnx(tmp_path / "a.onnx", [node], batched([X]), batched([Y]))
        with pytest.raises(BackendFailed, match=r"cannot build a plan: \w.*[Pp]rofile"):
            self.build(source, tmp_path / "model.plan")

    def test_timing_cache_is_kept_for_the_next_build(self, tmp_path: Path) -> None:
        self.linear(tmp_path)
        size = (tmp_path / "timing.cache").stat().st_size
        assert size > 0
        self.linear(tmp_path)
        assert (tmp_path / "timing.cache").stat().st_size >= size

    def test_cpus_are_refused(self, tmp_path: Path) -> None:
        config = replace(self.echo_config(tmp_path), device="cpu")
        with pytest.raises(ConfigError, match=r"device: 'cpu': a TensorRT plan runs on GPUs only"):
            backend("tensorrt")(config)
