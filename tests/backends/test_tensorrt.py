"""The TensorRT backend by a stand-in for the library (`fake_tensorrt`); by TensorRT itself only on
a machine that has it: tests/gpu/test_tensorrt_cuda.py."""

import builtins
import sys
from dataclasses import replace
from pathlib import Path

import fake_tensorrt
import numpy as np
import pytest
from fake_tensorrt import forgotten, install
from onnx import helper
from suites.backend import MAX_BATCH, model_config, run
from suites.tensorrt import TensorRtContract, X, write_onnx

from penstock.backends import backend
from penstock.errors import BackendFailed, ConfigError
from penstock.types import TensorSpec

pytest.importorskip("torch")


@pytest.fixture
def unloaded(monkeypatch):
    """The backend's module is imported anew, and forgotten afterwards."""
    with forgotten():
        yield monkeypatch


@pytest.fixture
def fake(unloaded):
    return install(unloaded)


@pytest.mark.usefixtures("fake")
class TestContract(TensorRtContract):
    device = "cpu"

    def test_cpus_are_refused(self, tmp_path: Path, fake, monkeypatch) -> None:
        monkeypatch.setattr(fake, "CPU", "cpu")
        super().test_cpus_are_refused(tmp_path)

    def test_a_context_for_each_shape_only_with_graphs(self, tmp_path: Path) -> None:
        """A captured graph belongs to its context."""
        config, _ = self.linear(tmp_path)
        for graphs, expected in (("on", 3), ("off", 1)):
            fake_tensorrt.calls.clear()
            runner = self.load(replace(config, options={"penstock.cuda_graphs": graphs}))
            for num_rows in (1, 2, 5, 1, 2, 5):
                run(runner, {"x0": np.ones((num_rows, 3), np.float32)}, num_rows)
            assert fake_tensorrt.calls.count("context") == expected

    def test_half_of_the_free_memory_is_workspace(self, tmp_path: Path) -> None:
        self.linear(tmp_path)
        assert "WORKSPACE 500" in fake_tensorrt.calls

    def test_timing_cache_of_another_gpu_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "timing.cache").write_bytes(b"another GPU")
        self.linear(tmp_path)
        assert (tmp_path / "timing.cache").read_bytes() == b"timed;"

    @pytest.mark.parametrize("allows_tf32", [True, False])
    def test_tf32_is_off_unless_allowed(self, tmp_path: Path, allows_tf32: bool) -> None:
        node = helper.make_node("Neg", ["x0"], ["y0"])
        specs = [TensorSpec(name, "FP32", (2, 3)) for name in ("x0", "y0")]
        source = write_onnx(tmp_path / "a.onnx", [node], specs[:1], specs[1:])
        plan = self.build(source, tmp_path / "model.plan", allows_tf32=allows_tf32)
        assert f'"has_tf32": {str(allows_tf32).lower()}'.encode() in plan.read_bytes()

    def test_plan_of_another_version_says_what_to_do(self, tmp_path: Path) -> None:
        artifact = tmp_path / "model.plan"
        artifact.write_bytes(b"ftrt" + bytes(100))
        with pytest.raises(BackendFailed) as caught:
            self.load(self.artifact_config(artifact))
        assert str(caught.value) == (
            "1/model.plan: TensorRT 11.4.0.106 cannot load it on cpu: The engine plan file is not "
            "compatible with this version of TensorRT; a plan runs only on the model of GPU and "
            "with the version of TensorRT that built it; build it here from its ONNX file"
        )

    @pytest.mark.parametrize(
        ("name", "problem"),
        [("sizes", "a shape tensor"), ("on_host", "in host memory"), ("packed", "linear format")],
    )
    def test_tensors_that_are_not_plain_are_refused(
        self, tmp_path: Path, name: str, problem: str
    ) -> None:
        x = replace(X, name=name)
        y = replace(X, name="y0")
        config = self.plan(tmp_path, [helper.make_node("Neg", [name], ["y0"])], [x], [y])
        with pytest.raises(ConfigError, match=rf"1/model\.plan: '{name}' is .*{problem}"):
            self.load(config)

    def test_plan_for_at_least_two_rows_is_refused(self, tmp_path: Path) -> None:
        node = helper.make_node("Neg", ["x0"], ["y0"])
        specs = [TensorSpec(name, "FP32", (-1, 3)) for name in ("x0", "y0")]
        source = write_onnx(tmp_path / "a.onnx", [node], specs[:1], specs[1:])
        limits = {"x0": ([2, 3], [2, 3], [MAX_BATCH, 3])}
        plan = self.build(source, tmp_path / "model.plan", limits)
        with pytest.raises(ConfigError, match="built for at least 2 rows of 'x0'"):
            self.load(self.artifact_config(plan))

    def test_output_whose_shape_depends_on_the_data_is_refused(self, tmp_path: Path) -> None:
        node = helper.make_node("NonZero", ["x0"], ["y0"])
        y = TensorSpec("y0", "INT64", (2, -1))
        config = self.plan(tmp_path, [node], [replace(X, shape=(2, 3))], [y], max_batch_size=0)
        with pytest.raises(BackendFailed, match="output 'y0': its shape depends on the data"):
            run(self.load(config), {"x0": np.ones((2, 3), np.float32)}, 1)

    def test_empty_tensors_have_an_address_too(self, tmp_path: Path) -> None:
        config = self.echo_config(tmp_path, row_shape=(0,))
        assert run(self.load(config), {"x0": np.ones((2, 0), np.float32)}, 2)["y0"].shape == (2, 0)

    def test_wrong_options_and_optional_inputs_are_refused(self, tmp_path: Path) -> None:
        config = self.echo_config(tmp_path)
        inputs = (replace(config.inputs[0], is_optional=True),)
        config = replace(config, inputs=inputs, options={"penstock.cuda_graphs": "perhaps"})
        with pytest.raises(ConfigError) as caught:
            self.load(config)
        assert caught.value.problems == (
            "input 'x0': a plan needs all its inputs; it cannot be optional",
            "parameters.penstock.cuda_graphs: 'perhaps' is not one of on, off",
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"Layers": ["conv1", "relu1"]}', "not told"),
        ("", "not told"),
        ("[]", "not told"),
        (
            '{"Layers": [{"Outputs": [{"Name": "a", "Format/Datatype": "Half"}]}, '
            '{"Outputs": [{"Format/Datatype": "Half"}, {"Format/Datatype": "Int8"}]}]}',
            "Half 2,Int8 1",
        ),
        ('{"Layers": [{"Outputs": [{"Format": "linear", "DataType": "FP8"}]}]}', "FP8 1"),
    ],
    ids=["names", "empty", "list", "version 10", "version 11"],
)
def test_datatypes_are_read_from_both_forms_of_the_inspector(fake, text, expected) -> None:
    class Engine:
        def create_engine_inspector(self):
            return self

        def get_engine_information(self, format):
            return text

    assert fake.layer_datatypes(Engine()) == expected


class TestWithoutTheLibrary:
    def problem(self) -> str:
        with pytest.raises(ConfigError) as caught:
            backend("tensorrt")(model_config("tensorrt", "model.plan", [X], [X]))
        [text] = caught.value.problems
        return text

    def test_the_command_that_installs_it_is_named(self, unloaded) -> None:
        unloaded.setitem(sys.modules, "tensorrt", None)
        assert self.problem() == (
            "backend: 'tensorrt' needs the package 'tensorrt', which is not installed; "
            'pip install "penstock[torch]" tensorrt brings it'
        )

    def test_bindings_without_libraries_are_named(self, unloaded) -> None:
        load = builtins.__import__

        def fail(name, *args):
            if name == "tensorrt":
                raise ImportError("libnvinfer.so.11: cannot open shared object file")
            return load(name, *args)

        unloaded.setattr(builtins, "__import__", fail)
        assert self.problem() == (
            "backend: 'tensorrt': TensorRT cannot be loaded: libnvinfer.so.11: cannot open shared "
            "object file; pip install tensorrt brings its libraries"
        )

    def test_an_old_version_is_refused(self, unloaded) -> None:
        unloaded.setitem(sys.modules, "tensorrt", fake_tensorrt)
        unloaded.setattr(fake_tensorrt, "__version__", "8.6.1")
        assert "TensorRT 8.6.1 is installed; expected 10 or newer" in self.problem()
