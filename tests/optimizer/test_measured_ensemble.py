"""An ensemble as a repository of its own, with builds in it."""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from optimizer import small_ensembles
from suites import onnx_models

from penstock import slo
from penstock.errors import ConfigError
from penstock.optimizer import folders, measured_ensemble
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.examples import Examples, Split
from penstock.repository import layout

WISH = slo.parse("p99 < 20ms, throughput >= 50/s at 20/s")
NO_SAMPLES = Examples((), None, Split((), (), ()), "", "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_ensembles.write_ensemble(tmp_path / "models")


def test_only_the_ensemble_and_its_members_are_taken(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model.parent / "net", model.parent / "other")
    shutil.copytree(model.parent / "net" / "1", model.parent / "net" / "2")
    files = measured_ensemble.take(str(model), tmp_path / "taken")
    assert sorted(each.name for each in files.root.iterdir()) == ["net", "parse", "whole"]
    # The version that clients get.
    assert layout.version_folders(files.root / "net") == ["2"]
    assert set(files.members) == {"parse", "net"} and files.config.name == "whole"
    assert measured_ensemble.describe(files) == "ensemble of 'parse' and 'net'"


def test_a_missing_member_is_named(model: Path, tmp_path: Path) -> None:
    shutil.rmtree(model.parent / "net")
    with pytest.raises(ConfigError, match=r"step\[1\].model_name: no such model: 'net'"):
        measured_ensemble.take(str(model), tmp_path / "taken")


def test_problems_of_members_are_reported(model: Path, tmp_path: Path) -> None:
    (model.parent / "net" / "config.pbtxt").write_text("max_batch_size: many")
    with pytest.raises(ConfigError, match=r"net: config.pbtxt"):
        measured_ensemble.take(str(model), tmp_path / "taken")


def test_a_build_takes_the_place_of_its_member(model: Path, tmp_path: Path) -> None:
    files = measured_ensemble.take(str(model), tmp_path / "taken")
    config = folders.read_config(files.root / "net")
    folder = tmp_path / "builds" / "net"
    folders.write(Build(Candidate(), files.root / "net", config), config, folder)
    onnx.save(onnx_models.stack(1), tmp_path / "one.onnx")
    (folder / "1" / "model.onnx").unlink()
    shutil.copyfile(tmp_path / "one.onnx", folder / "1" / "model.onnx")
    build = Build(Candidate((Step("half"),)), folder, config)

    whole = measured_ensemble.MeasuredEnsemble(
        files, "net", WISH, NO_SAMPLES, tmp_path / "ensembles"
    )
    served = whole.around(build)
    assert served.config.name == "whole" and served.candidate == build.candidate
    found = layout.read(served.folder)
    assert not found.problems and {each.name for each in found.configs} == {"net", "parse", "whole"}
    own = (served.folder / "net" / "1" / "model.onnx").read_bytes()
    assert own == (tmp_path / "one.onnx").read_bytes()
    assert whole.around(build) == served
    original = whole.around(replace(build, candidate=Candidate(), folder=files.root / "net"))
    assert original.folder != served.folder


def test_a_member_gets_the_time_that_the_others_leave() -> None:
    assert str(measured_ensemble.member_slo(WISH, 0.005)) == (
        "p99 < 15ms, throughput >= 50/s at 20/s poisson"
    )
    assert measured_ensemble.member_slo(WISH, 0.0012345).latency_s == 0.0188
    # Not less than a quarter.
    assert measured_ensemble.member_slo(WISH, 1.0).latency_s == 0.005
