"""FP8 for packed encoders: only where a GPU has it, calibrated, and read back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from packable import texts, write
from served_builds import a_config, a_situation
from suites.onnx_models import opened, workshop

from penstock.errors import ConfigError
from penstock.optimizer.candidates import Skip, Step
from penstock.optimizer.examples import Examples, Split
from penstock.optimizer.facts import Facts
from penstock.optimizer.passes.fp8 import Fp8
from penstock.repository import pbtxt

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
    assert "pass packing" in reason(a_config())
    assert "pass packing" in reason(config)
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
