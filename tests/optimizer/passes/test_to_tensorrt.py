"""TensorRT plans as a step: proposed where it is installed, in the precision of the model, for the
shapes that are served; built by a stand-in for the library (`fake_tensorrt`)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_tensorrt import forgotten, install
from onnx import TensorProto, helper, numpy_helper

from penstock.backends import Batch, backend
from penstock.config import ModelConfig, PadAxis, Padding
from penstock.errors import ConfigError
from penstock.optimizer import folders, trial_child, trials
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.machine import Machine
from penstock.optimizer.passes import BuildContext, PassContext, find
from penstock.optimizer.passes.to_tensorrt import profile
from penstock.optimizer.plan import Plan
from penstock.types import TensorSpec

PLAN = Plan("model", "model", "out")
PASS = find("tensorrt")
MACHINE = Machine("cpu", 2, 1 << 30, (), versions={"tensorrt-cu13": "11.4"})
FP16 = Step("tensorrt", {"precision": "fp16"})
WEIGHT = np.random.default_rng(0).random((3, 2), np.float32)


def build_of(root: Path, sizes: tuple[object, ...] = ("n", 3), **changes: object) -> Build:
    """y = x @ WEIGHT, on a GPU."""
    (root / "original" / "1").mkdir(parents=True)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [*sizes[:-1], 2])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = [numpy_helper.from_array(WEIGHT, "w")]
    graph = helper.make_graph([node], "graph", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, root / "original" / "1" / "model.onnx")
    config = folders.read_config(root / "original")
    config = replace(config, device="cuda", is_gpu_optional=False, **changes)
    return Build(Candidate(), root / "original", config)


def situation(
    build: Build, machine: Machine = MACHINE, quantised: Mapping[str, int] | None = None
) -> PassContext:
    facts = Facts("pytorch", quantised=dict(quantised or {}))
    return PassContext(PLAN, machine, build, facts, None, {})


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("", "fp32"), ("fp16", "fp16"), ("bf16", "tf32"), ("tf32", "tf32"), ("fp32", "fp32")],
)
def test_precision_is_that_of_the_model(tmp_path: Path, dtype: str, precision: str) -> None:
    build = build_of(tmp_path, options={"penstock.dtype": dtype} if dtype else {})
    assert PASS.propose(situation(build)) == [Step("tensorrt", {"precision": precision})]


def test_quantised_files_keep_what_they_say(tmp_path: Path) -> None:
    build = build_of(tmp_path, options={"penstock.dtype": "fp16"})
    found = PASS.propose(situation(build, quantised={"Conv": 3}))
    assert found == [Step("tensorrt", {"precision": "quantised"})]


def test_without_tensorrt_it_says_how_to_get_it(tmp_path: Path) -> None:
    machine = Machine("cpu", 2, 1 << 30, (), versions={"torch": "2.13"})
    reason = "not installed; pip install tensorrt brings it"
    assert PASS.propose(situation(build_of(tmp_path), machine)) == [Skip("tensorrt", reason)]


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"backend": "pytorch"}])
def test_other_models_are_skipped(tmp_path: Path, changes: dict[str, str]) -> None:
    build = build_of(tmp_path)
    other = replace(build, config=replace(build.config, **changes))
    if "backend" in changes:
        other = replace(other, config=replace(other.config, artifact="model.pt2"))
    assert PASS.propose(situation(other)) == [Skip("tensorrt", "only for ONNX files on a GPU")]


def test_sizes_without_a_limit_are_skipped(tmp_path: Path) -> None:
    build = build_of(tmp_path, ("n", "s", 3))
    reason = "'x' [-1, 3] has no largest size (penstock.pad_buckets)"
    assert PASS.propose(situation(build)) == [Skip("tensorrt", reason)]
    padded = replace(build.config, padding=Padding((PadAxis("x", 0),), (8, 32)))
    assert PASS.propose(situation(replace(build, config=padded))) == [
        Step("tensorrt", {"precision": "fp32"})
    ]


def test_datatypes_that_it_does_not_take_are_skipped(tmp_path: Path) -> None:
    build = build_of(tmp_path)
    specs = (TensorSpec("x", "BYTES", (3,)),)
    build = replace(build, config=replace(build.config, inputs=specs))
    assert PASS.propose(situation(build)) == [
        Skip("tensorrt", "'x' has a datatype that it does not take")
    ]


@pytest.mark.parametrize(
    ("max_batch_size", "shape", "padding", "expected"),
    [
        (16, (3,), None, {"x": ([1, 3], [16, 3], [256, 3])}),
        (512, (3,), None, {"x": ([1, 3], [512, 3], [512, 3])}),
        (0, (2, 3), None, {}),
        (
            16,
            (-1, 3),
            Padding((PadAxis("x", 0),), (8, 32)),
            {"x": ([1, 1, 3], [16, 32, 3], [256, 32, 3])},
        ),
        (0, (-1, 3), Padding((PadAxis("x", 0),), (8, 32)), {"x": ([1, 3], [32, 3], [32, 3])}),
    ],
)
def test_profile_covers_what_is_served(
    tmp_path: Path, max_batch_size: int, shape: tuple[int, ...], padding: Padding, expected: dict
) -> None:
    config = build_of(tmp_path).config
    inputs = (TensorSpec("x", "FP32", shape),)
    config = replace(config, inputs=inputs, max_batch_size=max_batch_size, padding=padding)
    assert profile(config) == expected


class TestBuild:
    @pytest.fixture
    def _fake(self, monkeypatch):
        """The child of a trial, in this process."""

        def build_here(config: ModelConfig, question: trial_child.BuildPlan, timeout_s: float):
            question.device = "cpu"
            trial_child.build_plan(question)

        with forgotten():
            install(monkeypatch)
            monkeypatch.setattr(trials, "build_plan", build_here)
            yield

    def built(self, parent: Build, step: Step, target: Path) -> ModelConfig:
        cache = target.parent / "cache"
        cache.mkdir(exist_ok=True)
        PASS.build(parent, step, target, BuildContext(PLAN, MACHINE, None, cache))
        assert (cache / "tensorrt-timing.cache").is_file()
        assert [each.name for each in cache.iterdir()] == ["tensorrt-timing.cache"]
        return folders.read_config(target)

    @pytest.mark.usefixtures("_fake")
    @pytest.mark.parametrize("precision", ["fp16", "fp32", "tf32"])
    def test_plan_is_served_in_the_precision_asked_for(
        self, tmp_path: Path, precision: str
    ) -> None:
        step = Step("tensorrt", {"precision": precision})
        parent = build_of(tmp_path, options={"penstock.dtype": precision, "penstock.fuse": "x"})
        (parent.version_folder / "compiled.bin").write_bytes(b"code of the parent")
        config = self.built(parent, step, tmp_path / "plan")
        assert config.backend == "tensorrt"
        assert dict(config.options) == {"penstock.cuda_graphs": "on"}
        assert [each.name for each in (tmp_path / "plan" / "1").iterdir()] == ["model.plan"]
        plan = Path(config.artifact).read_bytes()
        assert (b'"has_tf32": true' in plan) == (precision != "fp32")
        runner = backend("tensorrt")(replace(config, device="cpu"))
        x = np.random.default_rng(1).random((2, 3), np.float32)
        (answer,) = runner.start(Batch({"x": x}, 2)).wait()
        np.testing.assert_allclose(answer["y"], x @ WEIGHT, rtol=2e-3)
        after = Facts("tensorrt", built=dict(runner.built()))
        assert PASS.check(step, Facts("pytorch"), after) == []
        if precision != "fp16":
            assert PASS.check(FP16, Facts("pytorch"), after) == [
                "no layer computes in half or fp16; layers compute in FLOAT 1"
            ]

    def test_without_the_library_the_child_says_so(self, tmp_path: Path) -> None:
        """By a real child process."""
        pytest.importorskip("torch")
        with pytest.raises(ConfigError, match="needs the package 'tensorrt', which is not"):
            self.built(build_of(tmp_path), FP16, tmp_path / "plan")


def test_build_on_another_backend_is_noticed() -> None:
    after = Facts("onnxruntime", built={"onnxruntime": "1.30"})
    assert PASS.check(FP16, Facts("pytorch"), after) == ["runs on 'onnxruntime', expected tensorrt"]
