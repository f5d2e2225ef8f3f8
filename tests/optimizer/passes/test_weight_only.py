"""Integer weights: proposed for a few rows and many weights on a GPU, and read back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from linear_models import MLP, write_module
from served_builds import a_config, a_situation, a_table
from suites.onnx_models import opened, workshop

from penstock.config import BatchPolicy, ModelConfig
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes import weight_only
from penstock.optimizer.passes.weight_only import WeightOnly, rows_per_batch
from penstock.repository import pbtxt
from penstock.types import TensorSpec

PASS = WeightOnly()
INT8, INT4 = (Step("weight-only", {"weights": kind}) for kind in ("int8", "int4"))


@pytest.fixture
def build(tmp_path: Path):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    path = write_module(folder, MLP.replace("WIDTH = 64", "WIDTH = 128"))
    tensors = (TensorSpec("x", "FP32", (128,)),), (TensorSpec("y", "FP32", (128,)),)
    batching = BatchPolicy(8, is_dynamic=True)
    config = ModelConfig("m", "1", "pytorch", str(path), *tensors, 8, batching, file=path.name)
    (tmp_path / "m" / "config.pbtxt").write_text(pbtxt.write(config))
    return opened(tmp_path / "m")


def asked(build, monkeypatch, **changes):
    monkeypatch.setattr(weight_only, "MIN_WEIGHTS", 1000)
    config = replace(build.config, **{"device": "cuda", **changes})
    return PASS.propose(
        replace(a_situation(config), build=replace(build, config=config), times={}, rows=())
    )


def test_proposed_for_a_few_rows_and_many_weights(build, monkeypatch) -> None:
    assert asked(build, monkeypatch) == [INT8, INT4]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "on CPUs"),
        ({"max_batch_size": 65}, "up to 65 rows"),
        ({"options": {"penstock.fp8": "rowwise"}}, "decided already"),
        ({"backend": "python"}, "not a PyTorch module"),
    ],
)
def test_skipped_with_the_reason(build, monkeypatch, changes, reason) -> None:
    (skip,) = asked(build, monkeypatch, **changes)
    assert isinstance(skip, Skip) and reason in skip.reason


def test_small_models_are_skipped(build) -> None:
    config = replace(build.config, device="cuda")
    situation = replace(a_situation(config), build=replace(build, config=config))
    (skip,) = PASS.propose(situation)
    assert "fewer than" in skip.reason


def test_tokens_count_as_rows() -> None:
    config = a_config(TensorSpec("tokens", "INT64", (-1,)), max_batch=4)
    rows = [{"tokens": np.zeros(length, np.int64)} for length in (3, 10)]
    situation = replace(a_situation(config), times={}, rows=rows)
    assert rows_per_batch(situation) == 40
    # Measured batches say more than what is allowed.
    timed = replace(situation, times={(1, 1): a_table()})
    assert rows_per_batch(timed) == 320
    image = a_config(TensorSpec("x", "FP32", (4,)), max_batch=4)
    assert rows_per_batch(replace(a_situation(image), times={}, rows=())) == 4


def test_built_and_read_back(build, tmp_path: Path) -> None:
    PASS.build(build, INT4, tmp_path / "t" / "m", workshop(tmp_path))
    options = opened(tmp_path / "t" / "m").config.options
    assert options == {"penstock.weights": "int4", "penstock.dtype": "bf16"}
    half = replace(build, config=replace(build.config, options={"penstock.dtype": "fp16"}))
    PASS.build(half, INT8, tmp_path / "u" / "m", workshop(tmp_path))
    assert opened(tmp_path / "u" / "m").config.options["penstock.dtype"] == "fp16"

    fused = replace(build, config=replace(build.config, options={"penstock.fuse": "on"}))
    PASS.build(fused, INT8, tmp_path / "v" / "m", workshop(tmp_path))
    assert opened(tmp_path / "v" / "m").config.options["penstock.fuse"] == "on"

    def facts(text: str) -> Facts:
        return Facts("pytorch", built={"weights": text} if text else {})

    assert PASS.check(INT4, facts(""), facts("int4: 4 of 4 linear layers, 9 bytes")) == []
    assert PASS.check(INT4, facts(""), facts("")) == ["asked for int4, got none"]
    assert PASS.check(INT4, facts(""), facts("int8: 4 of 4 linear layers"))
