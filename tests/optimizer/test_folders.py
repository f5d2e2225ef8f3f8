"""Builds as folders: what is carried over, and what is written beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
from served_builds import mean_build, read

from penstock.errors import ConfigError
from penstock.optimizer import folders, shapes
from penstock.optimizer.candidates import Build, Candidate
from penstock.repository import versions
from penstock.repository.layout import read as read_repository
from penstock.slo import parse


def names_below(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_files_are_carried_over_but_for_those_named(tmp_path: Path, write_onnx) -> None:
    parent = mean_build(tmp_path, write_onnx)
    for name in ("1/below/labels.txt", "1/old.bin", "1/__pycache__/code.pyc", "labels.txt"):
        (parent.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (parent.folder / name).write_text(name)
    target = tmp_path / "other" / "model"
    version = folders.carry_over(parent, target, {"old.bin"})
    assert version == target / "1"
    assert names_below(target) == ["1/below/labels.txt", "1/model.onnx", "labels.txt"]
    assert (version / "model.onnx").samefile(parent.artifact)


def test_files_below_folders_can_be_left_out(tmp_path: Path, write_onnx) -> None:
    parent = mean_build(tmp_path, write_onnx)
    (parent.version_folder / "weights").mkdir()
    (parent.version_folder / "weights" / "old.bin").write_text("0")
    version = folders.carry_over(parent, tmp_path / "other" / "model", {"weights/old.bin"})
    assert names_below(version) == ["model.onnx"]


def test_symbolic_links_become_files(tmp_path: Path, write_onnx) -> None:
    """Downloads are often folders of links to a cache beside them."""
    parent = mean_build(tmp_path, write_onnx)
    (tmp_path / "model" / "cache").mkdir()
    moved = parent.artifact.rename(tmp_path / "model" / "cache" / "blob")
    parent.artifact.symlink_to("../cache/blob")
    version = folders.carry_over(parent, tmp_path / "far" / "away" / "model")
    assert not (version / "model.onnx").is_symlink()
    assert (version / "model.onnx").samefile(moved)


def test_configuration_has_the_name_of_its_folder_and_promises_nothing_new(
    tmp_path: Path, write_onnx
) -> None:
    parent = mean_build(tmp_path, write_onnx)
    other = tmp_path / "other"
    folders.carry_over(parent, other)
    written = folders.write_config(other, replace(parent.config, num_instances=2, version="7"))
    assert (written.name, written.version, written.num_instances) == ("other", "1", 2)
    assert written == folders.read_config(other)


def test_folder_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="backend: not given"):
        folders.read_config(tmp_path / "model")


def test_files_stay_and_settings_change(tmp_path: Path, write_onnx) -> None:
    parent = mean_build(tmp_path, write_onnx)
    target = tmp_path / "other" / "renamed"
    folders.write(parent, replace(parent.config, num_instances=3), target)
    found = read(target).config
    assert (found.num_instances, found.name) == (3, "renamed")
    assert Path(found.artifact).read_bytes() == parent.artifact.read_bytes()
    assert found.inputs == parent.config.inputs


def test_the_parent_is_not_touched(tmp_path: Path, write_onnx) -> None:
    """A configuration is never one of the linked files."""
    parent = mean_build(tmp_path, write_onnx, config="max_batch_size: 0")
    before = (parent.folder / "config.pbtxt").read_bytes()
    folders.write(parent, replace(parent.config, num_instances=2), tmp_path / "other" / "model")
    assert (parent.folder / "config.pbtxt").read_bytes() == before


def test_a_version_with_settings_of_its_own_gets_the_new_ones(tmp_path: Path, write_onnx) -> None:
    parent = mean_build(tmp_path, write_onnx)
    (parent.folder / "1" / "config.pbtxt").write_text("instance_group { count: 7 kind: KIND_CPU }")
    parent = read(parent.folder)
    assert parent.config.num_instances == 7
    folders.write(parent, replace(parent.config, num_instances=2), tmp_path / "other" / "model")
    assert read(tmp_path / "other" / "model").config.num_instances == 2
    assert (parent.folder / "1" / "config.pbtxt").exists()


def test_what_a_committed_version_promised_is_kept(tmp_path: Path, write_onnx) -> None:
    source = mean_build(tmp_path, write_onnx)
    root = tmp_path / "models"
    root.mkdir()
    versions.commit(root, "model", source.version_folder, source.config, {"slo": "p99 < 20ms"})
    parent = read(root / "model")
    assert parent.config.is_slo_from_evidence
    target = tmp_path / "other" / "model"
    folders.write(parent, replace(parent.config, num_instances=2), target)
    found = read(target).config
    assert (found.num_instances, found.batching.slo_latency_s) == (2, 0.020)
    assert (root / "model" / "1" / "manifest.json").exists()


def test_and_fixed_mode_stays_fixed_when_it_is_committed(tmp_path: Path, write_onnx) -> None:
    source = mean_build(tmp_path, write_onnx)
    settings = {"mode": "fixed", "max_batch": "8"}
    config = shapes.with_batching(source.config, settings, parse("p99 < 20ms"))
    root = tmp_path / "models"
    root.mkdir()
    versions.commit(root, "model", source.version_folder, config, {"slo": "p99 < 20ms"})
    assert read(root / "model").config.batching.slo_latency_s is None


def test_a_committed_version_of_any_number_can_be_the_parent(tmp_path: Path, write_onnx) -> None:
    source = mean_build(tmp_path, write_onnx)
    root = tmp_path / "models"
    root.mkdir()
    for _ in range(2):
        versions.commit(root, "model", source.version_folder, source.config)
    versions.promote(root, "model", "2")
    parent = Build(Candidate(), root / "model", read_repository(root / "model").configs[0])
    assert parent.config.version == "2"
    target = tmp_path / "next" / "model"
    folders.write(parent, replace(parent.config, num_instances=2), target)
    made = read(target).config
    assert (made.version, made.num_instances, made.manifest) == ("1", 2, "")
    assert names_below(target) == ["1/model.onnx", "config.pbtxt"]


def test_files_that_a_server_refuses_with_links_are_copied(tmp_path):
    (tmp_path / "labels.txt").write_text("a")
    (tmp_path / "model.onnx").write_bytes(b"weights")
    for name in ("labels.txt", "model.onnx"):
        folders.link(tmp_path / name, tmp_path / f"linked {name}")
    assert (tmp_path / "labels.txt").stat().st_nlink == 1
    assert (tmp_path / "linked labels.txt").read_text() == "a"
    assert (tmp_path / "model.onnx").stat().st_nlink == 2
