"""Convolutions are fused where there are images, a module and a GPU; and only if some were."""

from dataclasses import replace
from pathlib import Path

import pytest
from served_builds import IMAGE, a_config, a_situation
from suites.onnx_models import opened, workshop

from penstock.optimizer import trials
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes.conv_fusion import ConvFusion
from penstock.optimizer.passes.torch_compile import TorchCompile
from penstock.repository import pbtxt
from penstock.types import TensorSpec

PASS = ConvFusion()
STEP = Step("conv-fusion", {"fuse": "on", "graphs": "on"})
ALONE = Step("conv-fusion", {"fuse": "on"})
ON_CPU = Step("conv-fusion", {"fuse": "convolutions"})
PHOTO = TensorSpec("photo", "FP32", (3, 8, 8))
FUSED = {"penstock.fuse": "convolutions"}


def on_gpu(config):
    return replace(config, backend="pytorch", device="cuda", artifact="module.py")


def reason(config, by=PASS) -> str:
    (skip,) = by.propose(a_situation(config))
    assert isinstance(skip, Skip)
    return skip.reason


def test_proposed_for_images_on_a_gpu() -> None:
    assert list(PASS.propose(a_situation(on_gpu(a_config(PHOTO))))) == [STEP]
    whole = replace(PHOTO, shape=(1, 3, 8, 8))
    assert list(PASS.propose(a_situation(on_gpu(a_config(whole, max_batch=0))))) == [STEP]


def test_proposed_for_features_on_a_gpu() -> None:
    sound = TensorSpec("sound", "FP32", (100, 80))
    assert list(PASS.propose(a_situation(on_gpu(a_config(sound))))) == [STEP]
    assert "no images" in reason(on_gpu(a_config(replace(sound, shape=(-1, 80)))))
    assert "no images" in reason(on_gpu(a_config(replace(sound, datatype="INT64"))))
    assert "no images" in reason(replace(on_gpu(a_config(sound)), device="cpu"))


def test_graphs_come_along_where_they_can_and_are_not_decided() -> None:
    photos = on_gpu(a_config(PHOTO))
    free = on_gpu(a_config(replace(PHOTO, shape=(3, -1, -1))))
    decided = replace(photos, options={"penstock.cuda_graphs": "off"})
    assert list(PASS.propose(a_situation(free))) == [ALONE]
    assert list(PASS.propose(a_situation(decided))) == [ALONE]


def test_skipped_with_the_reason() -> None:
    photos = on_gpu(a_config(PHOTO))
    assert "not a PyTorch module" in reason(a_config(PHOTO))
    assert "not a PyTorch module" in reason(replace(photos, artifact="model.pt2"))
    assert "no images" in reason(on_gpu(a_config(IMAGE)))
    assert "on CPUs" in reason(replace(photos, device="cpu"))
    assert "fused already" in reason(replace(photos, options=FUSED))
    assert "kept in FP32" in reason(replace(photos, options={"penstock.keep_fp32": "head"}))
    assert "compiled" in reason(replace(photos, options={"penstock.compile": "default"}))


@pytest.mark.parametrize("option", ["penstock.fp8", "penstock.weights"])
def test_linear_layers_of_another_precision_are_no_reason_not_to_fuse(option) -> None:
    """The backend leaves them."""
    photos = on_gpu(a_config(PHOTO))
    quantised = replace(photos, options={option: "some"})
    assert list(PASS.propose(a_situation(quantised))) == list(PASS.propose(a_situation(photos)))


def test_what_is_fused_is_not_compiled_too() -> None:
    config = replace(on_gpu(a_config(PHOTO)), options=FUSED)
    assert "fused" in reason(config, TorchCompile())


def test_only_the_configuration_changes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text("import torch\nfactory = torch.nn.Identity\n")
    config = replace(on_gpu(a_config(PHOTO)), name="m", file="module.py")
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    parent = opened(tmp_path / "m")
    PASS.build(parent, STEP, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m")
    assert made.config.options["penstock.fuse"] == "on"
    assert made.config.options["penstock.cuda_graphs"] == "on"
    assert made.artifact.read_bytes() == parent.artifact.read_bytes()


MODULE = """
from torch import nn

def factory():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
"""
CONFIG = """
backend: "pytorch" max_batch_size: 4 dynamic_batching { } default_model_filename: "module.py"
input { name: "photo" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
output { name: "scores" data_type: TYPE_FP32 dims: 2 }
instance_group { kind: KIND_CPU }
"""


@pytest.mark.slow
def test_built_and_read_back(tmp_path: Path) -> None:
    """On a CPU, where it only saves the normalisation; on a GPU: tests/gpu."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    save_file(space["factory"]().state_dict(), version / "model.safetensors")
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    parent = opened(tmp_path / "m")
    (step,) = PASS.propose(a_situation(parent.config, is_exhaustive=True))
    assert step == ON_CPU
    PASS.build(parent, step, tmp_path / "t" / "m", workshop(tmp_path))
    made = opened(tmp_path / "t" / "m")
    assert trials.keep_compiled(made) == 0
    facts = trials.inspect(made)
    assert facts.built["fusion"] == "1 convolutions: 1 torch"
    assert PASS.check(step, trials.inspect(parent), facts) == []


def test_a_model_without_fused_convolutions_is_caught() -> None:
    before = Facts("pytorch")

    def problems(step: Step = ALONE, **built: str) -> list[str]:
        return PASS.check(step, before, Facts("pytorch", built=built))

    assert problems(fusion="53 convolutions; batch 1: 20 cudnn, 33 triton") == []
    assert problems(fusion="10 convolutions: 10 torch") == []
    text = "0 convolutions, 12 linear layers, 5 norms; batch 1: 17 triton"
    assert problems(fusion=text) == []
    assert problems(fusion="0 convolutions; batch 1: 3 torch") != []
    assert "0 convolutions" in problems(fusion="0 convolutions: none")[0]
    assert "nothing" in problems()[0]
    assert problems(STEP, fusion="10 convolutions", cuda_graphs="6") == []
    assert problems(STEP, fusion="10 convolutions", cuda_graphs="0") == ["no graph was captured"]
