"""FP8 for packed encoders and for linear layers: only where a GPU has it, read back, and with
layers kept that lose too much."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from linear_models import SHAPE, TRANSFORMER, write_module, write_onnx
from packable import texts, write
from served_builds import a_config, a_situation
from suites.onnx_models import opened, workshop

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.examples import Examples, Split
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes.fp8 import Fp8, num_weights
from penstock.repository import pbtxt
from penstock.types import TensorSpec

PASS = Fp8()
ALL = Step("fp8", {"products": "qkv,out,inner,outer"})
THREE = Step("fp8", {"products": "qkv,out,inner"})
BY_ROW = Step("fp8", {"products": "qkv,out,inner,outer", "scaling": "rowwise"})
PACKED = {"penstock.pack": "tokens"}


def rows():
    """Of several lengths, each a request."""
    found = []
    for seed, length in enumerate((32, 5, 1, 17)):
        one = texts((length,), length, seed)
        found.append({name: array[0] for name, array in one.items()})
    return found


def reason(config, **options) -> str:
    (skip,) = PASS.propose(a_situation(config, **options))
    assert isinstance(skip, Skip)
    return skip.reason


def test_skipped_with_the_reason(tmp_path: Path) -> None:
    config = replace(write(tmp_path), device="cuda")
    assert "not a PyTorch module" in reason(a_config())
    assert "decided" in reason(replace(config, options=PACKED | {"penstock.fp8": "fp8.json"}))
    assert "FP8" in reason(replace(config, options=PACKED, device="cpu"))


def parent_of(tmp_path: Path):
    config = write(tmp_path / "m" / "1")
    config = replace(config, name="m", file="module.py", options=PACKED)
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    return opened(tmp_path / "m")


def test_ranges_are_found_in_the_calibration_part(tmp_path: Path) -> None:
    examples = Examples(rows(), None, Split((0, 1, 2), (3,), ()), "", "")
    work = replace(workshop(tmp_path), examples=examples)
    parent = parent_of(tmp_path)
    PASS.build(parent, THREE, tmp_path / "t" / "m", work)
    made = opened(tmp_path / "t" / "m")
    assert made.config.options["penstock.fp8"] == "fp8.json"
    assert made.config.options["penstock.dtype"] == "bf16"
    assert made.config.options["penstock.pack"] == "tokens"
    ranges = json.loads((made.version_folder / "fp8.json").read_text())
    assert list(ranges) == [f"{n}.{each}" for n in (0, 1) for each in ("qkv", "out", "inner")]
    assert all(np.isfinite(each) and each > 0 for each in ranges.values())
    fewer = Examples(rows(), None, Split((1, 2), (3,), ()), "", "")
    PASS.build(parent, ALL, tmp_path / "u" / "m", replace(work, examples=fewer))
    others = json.loads((tmp_path / "u" / "m" / "1" / "fp8.json").read_text())
    assert len(others) == 8
    assert all(others[name] <= each + 1e-6 for name, each in ranges.items())


@pytest.fixture
def gpu_with_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("gpu_with_fp8")
def test_what_is_fastest_is_proposed_first(tmp_path: Path) -> None:
    examples = Examples(rows(), None, Split((0, 1, 2), (3,), ()), "", "")
    config = replace(write(tmp_path), device="cuda", options=PACKED)
    situation = replace(a_situation(config), examples=examples)
    assert PASS.propose(situation) == [ALL, BY_ROW, THREE]


@pytest.mark.usefixtures("gpu_with_fp8")
def test_without_calibration_each_token_has_its_own_range(tmp_path: Path) -> None:
    config = replace(write(tmp_path), device="cuda", options=PACKED)
    skip, step = PASS.propose(replace(a_situation(config), examples=None))
    assert isinstance(skip, Skip) and "calibrate" in skip.reason
    assert step == BY_ROW
    PASS.build(parent_of(tmp_path), BY_ROW, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m")
    assert made.config.options["penstock.fp8"] == "rowwise"
    assert made.config.options["penstock.dtype"] == "bf16"
    assert not (made.version_folder / "fp8.json").exists()
    built = {"fp8": "96 of 96 products, each token by its own range"}
    assert PASS.check(BY_ROW, Facts("pytorch"), Facts("pytorch", built=built)) == []


def test_without_examples_there_is_nothing_to_go_by(tmp_path: Path) -> None:
    work = replace(workshop(tmp_path), examples=None)
    with pytest.raises(ConfigError, match="no examples"):
        PASS.build(parent_of(tmp_path), ALL, tmp_path / "t" / "m", work)


def test_a_model_that_is_not_in_fp8_is_caught() -> None:
    def facts(**built: str) -> Facts:
        return Facts("pytorch", built=built)

    assert PASS.check(ALL, facts(), facts(fp8="24 of 24 products")) == []
    assert PASS.check(THREE, facts(), facts(fp8="18 of 24 products")) == []
    (problem,) = PASS.check(ALL, facts(), facts(fp8="18 of 24 products"))
    assert problem == "asked for 4 products of each layer, got 18 of 24 products"
    assert "got none" in PASS.check(ALL, facts(), facts())[0]


LINEAR = Step("fp8", {"products": "linear", "scaling": "rowwise"})
CALIBRATED = Step("fp8", {"products": "linear"})


@pytest.fixture(params=["module.py", "model.onnx"])
def linear(request, tmp_path: Path):
    """A small transformer of four blocks' weights, as a build."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    write_file = write_module if request.param == "module.py" else write_onnx
    path = write_file(folder, TRANSFORMER)
    batching = BatchPolicy(8, is_dynamic=True)
    tensors = (TensorSpec("x", "FP32", SHAPE),), (TensorSpec("y", "FP32", (10,)),)
    backend = "pytorch" if request.param == "module.py" else "onnxruntime"
    config = ModelConfig("m", "1", backend, str(path), *tensors, 8, batching, file=path.name)
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    return opened(tmp_path / "m")


def drawn(num: int = 8) -> Examples:
    random = np.random.default_rng(3)
    made = [{"x": random.standard_normal(SHAPE).astype(np.float32)} for _ in range(num)]
    half = num // 2
    return Examples(made, None, Split(tuple(range(half)), tuple(range(half, num)), ()), "", "")


def on_gpu(build, **options: str):
    """As the PyTorch engine would run it there."""
    return replace(build.config, device="cuda", options=options)


def test_the_weights_of_linear_layers_are_counted(linear) -> None:
    assert num_weights(linear) == 2 * (4 + 8) * 64 * 64


@pytest.mark.usefixtures("gpu_with_fp8")
def test_any_model_with_linear_layers_is_proposed(linear, monkeypatch) -> None:
    situation = a_situation(on_gpu(linear))
    situation = replace(situation, build=replace(linear, config=on_gpu(linear)), examples=drawn())
    (skip,) = PASS.propose(situation)
    assert isinstance(skip, Skip) and "fewer than" in skip.reason and skip.step == LINEAR
    monkeypatch.setattr("penstock.optimizer.passes.fp8.MIN_WEIGHTS", 1000)
    assert PASS.propose(situation) == [LINEAR]
    plan = replace(situation.plan, is_exhaustive=True)
    assert PASS.propose(replace(situation, plan=plan)) == [LINEAR, CALIBRATED]
    compiled = replace(linear, config=on_gpu(linear, **{"penstock.compile": "default"}))
    (skip,) = PASS.propose(replace(situation, build=compiled))
    assert "compiler" in skip.reason


def served_by_torch(build):
    return replace(build, config=replace(build.config, backend="pytorch"))


def test_ranges_of_linear_layers_are_calibrated(linear, tmp_path: Path) -> None:
    parent = served_by_torch(linear)
    work = replace(workshop(tmp_path), examples=drawn())
    PASS.build(parent, CALIBRATED, tmp_path / "t" / "m", work)
    ranges = json.loads((tmp_path / "t" / "m" / "1" / "fp8.json").read_text())
    assert len(ranges) == 12 and all(each > 0 for each in ranges.values())
    kept = Step("fp8", {**CALIBRATED.settings, "keep": ",".join(list(ranges)[:3])})
    PASS.build(parent, kept, tmp_path / "u" / "m", work)
    fewer = json.loads((tmp_path / "u" / "m" / "1" / "fp8.json").read_text())
    assert list(fewer) == list(ranges)[3:]


def test_layers_that_lose_too_much_are_kept(linear, tmp_path: Path) -> None:
    """The gate passes only with this one in float."""
    from penstock.backends.torch_linear import find_layers
    from penstock.optimizer import torch_layers

    parent = served_by_torch(linear)
    with torch_layers.opened(parent.config, drawn().rows, {"penstock.dtype": "bf16"}) as trial:
        names = list(find_layers(trial.loaded.module))
    wanted = names[5]
    asked = []

    def passes(step: Step) -> bool:
        asked.append(step.settings["keep"])
        return wanted in step.settings["keep"].split(",")

    work = replace(workshop(tmp_path), examples=drawn())
    step, layers = PASS.fall_back(parent, LINEAR, work, passes)
    assert step is not None
    assert step.settings["keep"] == wanted and [each.name for each in layers] == [wanted]
    none, worst = PASS.fall_back(parent, LINEAR, work, lambda step: False)
    assert none is None and {each.name for each in worst} <= {*names}
    assert PASS.fall_back(parent, ALL, work, lambda step: True) == (None, [])
    PASS.build(parent, step, tmp_path / "t" / "m", work)
    options = opened(tmp_path / "t" / "m").config.options
    assert options["penstock.fp8"] == "rowwise" and options["penstock.fp8_keep"] == wanted


def test_linear_layers_are_read_back() -> None:
    def facts(text: str) -> Facts:
        return Facts("pytorch", built={"fp8": text} if text else {})

    assert PASS.check(LINEAR, facts(""), facts("12 of 13 linear layers")) == []
    (problem,) = PASS.check(LINEAR, facts(""), facts(""))
    assert problem == "asked for linear layers in FP8, got none"
    assert PASS.check(LINEAR, facts(""), facts("0 of 13 linear layers"))
