"""PyTorch compiled ahead or at load, and channels-last: proposed where it fits, built as asked."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, Runner, backend
from penstock.config import PadAxis, Padding
from penstock.errors import ConfigError
from penstock.optimizer import folders
from penstock.optimizer.candidates import Build, Candidate, Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes import BuildContext, PassContext, find
from penstock.optimizer.plan import Plan
from penstock.optimizer.this_machine import read_machine
from penstock.optimizer.time_plan import TookTooLong
from penstock.optimizer.torch_source import take_factory

torch = pytest.importorskip("torch")
PLAN = Plan("model", "model", "out")
PASS = find("torch-compile")
MODULE = """
import torch


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x, y):
        return {"z": x * self.weight + y, "x": -x}


def convolution():
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 4, 3)


scale = Scale
"""
AHEAD = Step("torch-compile", {"mode": "ahead"})


def build_of(root: Path, monkeypatch, factory: str, *rows: dict[str, np.ndarray]) -> Build:
    (root / "compile_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(root)
    version = root / "original" / "1"
    version.mkdir(parents=True)
    config, _ = take_factory(f"compile_code:{factory}", rows, version)
    config = folders.write_config(root / "original", config)
    return Build(Candidate(), root / "original", config)


def scale(root: Path, monkeypatch, *lengths: int) -> Build:
    rows = [dict.fromkeys(("x", "y"), np.ones(length, np.float32)) for length in lengths]
    return build_of(root, monkeypatch, "scale", *rows)


def convolution(root: Path, monkeypatch) -> Build:
    image = np.ones((3, 8, 8), np.float32)
    return build_of(root, monkeypatch, "convolution", {"input": image})


def situation(build: Build, is_exhaustive: bool = True) -> PassContext:
    plan = replace(PLAN, is_exhaustive=is_exhaustive)
    return PassContext(plan, read_machine(), build, Facts("pytorch"), None, {})


def built(parent: Build, step: Step, target: Path) -> Build:
    PASS.build(parent, step, target, BuildContext(PLAN, read_machine(), None, target.parent))
    return Build(parent.candidate.then(step), target, folders.read_config(target))


def load(build: Build) -> Runner:
    return backend("pytorch")(build.config)


def facts(runner: Runner) -> Facts:
    return Facts("pytorch", built=dict(runner.built()))


@pytest.mark.verify  # The C++ compiler takes long.
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_package_compiled_ahead_is_served_at_every_size(tmp_path, monkeypatch) -> None:
    parent = scale(tmp_path, monkeypatch, 2, 3)
    package = built(parent, AHEAD, tmp_path / "package")
    names = {path.name for path in package.version_folder.iterdir()}
    assert "model.pt2" in names
    assert not names & {"module.py", "model.safetensors"}
    runner = load(package)
    for num_rows, length in ((1, 1), (3, 7), (32, 2)):
        x = np.random.default_rng(0).random((num_rows, length), np.float32)
        (answer,) = runner.start(Batch({"x": x, "y": x + 1}, num_rows)).wait()
        assert np.allclose(answer["z"], 3 * x + 1)
        assert np.array_equal(answer["x"], -x)
    assert PASS.check(AHEAD, Facts("pytorch"), facts(runner)) == []
    runner.close()
    assert PASS.propose(situation(package)) == [Skip("torch-compile", "compiled already")]
    one_input = replace(package.config, inputs=package.config.inputs[:1])
    with pytest.raises(ConfigError, match=r"takes 2 inputs by position and none by name"):
        load(replace(package, config=one_input))
    options = {"penstock.compile": "default"}
    fixed = tuple(replace(spec, shape=(2,)) for spec in package.config.inputs)
    with pytest.raises(ConfigError, match=r"1/model.pt2 is compiled already"):
        load(replace(package, config=replace(package.config, inputs=fixed, options=options)))


def test_channels_last_is_for_images_and_gives_the_same(tmp_path, monkeypatch) -> None:
    parent = convolution(tmp_path, monkeypatch)
    step = PASS.propose(situation(parent, is_exhaustive=False))[0]
    assert step == Step("torch-compile", {"memory_format": "channels_last"})
    build = built(parent, step, tmp_path / "last")
    x = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)
    ours, theirs = load(build), load(parent)
    answers = [next(iter(r.start(Batch({"input": x}, 2)).wait())) for r in (ours, theirs)]
    assert np.allclose(answers[0]["OUTPUT__0"], answers[1]["OUTPUT__0"], atol=1e-5)
    assert PASS.check(step, Facts("pytorch"), facts(ours)) == []
    assert PASS.check(step, Facts("pytorch"), facts(theirs)) == [
        "memory_format is nothing, expected channels_last"
    ]
    again = PASS.propose(situation(build, is_exhaustive=False))
    assert step not in again


def test_compiling_at_load_needs_fixed_shapes(tmp_path, monkeypatch) -> None:
    fixed = scale(tmp_path, monkeypatch, 2, 2)
    modes = [step.settings["mode"] for step in PASS.propose(situation(fixed))]
    assert modes == ["ahead", "default", "max-autotune"]
    free = tuple(replace(spec, shape=(-1,)) for spec in fixed.config.inputs)
    variable = replace(fixed, config=replace(fixed.config, inputs=free))
    assert PASS.propose(situation(variable)) == [AHEAD]
    build = built(fixed, Step("torch-compile", {"mode": "default"}), tmp_path / "compiled")
    assert build.config.options == {"penstock.compile": "default"}


def test_what_takes_minutes_is_skipped_unless_all_is_wanted(tmp_path, monkeypatch) -> None:
    (skip,) = PASS.propose(situation(scale(tmp_path, monkeypatch, 2, 3), is_exhaustive=False))
    assert isinstance(skip, Skip)
    assert skip.step == AHEAD
    assert "ONNX Runtime is there and compiles in seconds" in skip.reason


def on_gpu(build: Build, **changes: object) -> Build:
    return replace(build, config=replace(build.config, device="cuda", **changes))


def test_on_a_gpu_it_is_part_of_the_sequence(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    build = on_gpu(scale(tmp_path, monkeypatch, 2, 2))
    modes = [step.settings["mode"] for step in PASS.propose(situation(build, is_exhaustive=False))]
    assert modes == ["reduce-overhead", "ahead", "max-autotune"]


def test_what_compiles_for_minutes_needs_a_budget_for_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    build = on_gpu(scale(tmp_path, monkeypatch, 2, 2))
    seen = situation(build)
    short = replace(seen, plan=replace(PLAN, budget_s=360.0))
    assert [type(each) for each in PASS.propose(short)] == [Step, Skip, Step, Skip]
    # Repeated blocks alone are compiled in a fraction of the time.
    assert PASS.propose(short)[2] == Step("torch-compile", {"mode": "regional"})
    assert "the budget is 360 s" in PASS.propose(short)[-1].reason
    long = replace(seen, plan=replace(PLAN, budget_s=3600.0))
    assert [type(each) for each in PASS.propose(long)] == [Step] * 3


def test_lengths_that_come_again_are_compiled_at_load(tmp_path, monkeypatch) -> None:
    padding = Padding((PadAxis("x", 0), PadAxis("y", 0)), (2, 4))
    build = on_gpu(scale(tmp_path, monkeypatch, 2, 3), padding=padding)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert Step("torch-compile", {"mode": "reduce-overhead"}) in PASS.propose(situation(build))


def test_kernels_for_gpus_need_only_a_c_compiler(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    build = on_gpu(scale(tmp_path, monkeypatch, 2, 2))
    default, ahead, autotune = PASS.propose(situation(build))
    assert isinstance(default, Step) and isinstance(autotune, Step)
    assert ahead == Skip(
        "torch-compile", "no C++ compiler; expected one of g++, clang++, c++", AHEAD
    )


def test_a_compiler_that_takes_longer_than_there_is_time_is_ended(tmp_path, monkeypatch) -> None:
    parent = scale(tmp_path, monkeypatch, 2, 3)
    workshop = BuildContext(PLAN, read_machine(), None, tmp_path, lambda: 0.05)
    with pytest.raises(TookTooLong, match=r"no answer within 0\.05 s"):
        PASS.build(parent, AHEAD, tmp_path / "package", workshop)


def test_without_a_compiler_nothing_is_compiled(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (skip,) = PASS.propose(situation(scale(tmp_path, monkeypatch, 2, 3)))
    assert isinstance(skip, Skip)
    assert skip.reason.startswith("no C++ compiler; expected one of g++")


def test_others_are_skipped(tmp_path, monkeypatch) -> None:
    build = scale(tmp_path, monkeypatch, 2)
    other = replace(build, config=replace(build.config, backend="onnxruntime"))
    assert PASS.propose(situation(other)) == [Skip("torch-compile", "not a PyTorch model")]
