"""The same files with other settings."""

from dataclasses import replace
from pathlib import Path

from served_builds import mean_build, read

from penstock import versions
from penstock.optimizer import reconfigure, shapes
from penstock.slo import parse


def test_files_stay_and_settings_change(tmp_path: Path, write_onnx):
    parent = mean_build(tmp_path, write_onnx)
    config = replace(parent.config, num_instances=3)
    target = tmp_path / "other" / "renamed"
    reconfigure.write(parent, config, target)
    found = read(target).config
    assert (found.num_instances, found.name) == (3, "renamed")
    assert Path(found.artifact).read_bytes() == parent.artifact.read_bytes()
    assert found.inputs == parent.config.inputs


def test_the_parent_is_not_touched(tmp_path: Path, write_onnx):
    parent = mean_build(tmp_path, write_onnx, config="max_batch_size: 0")
    before = (parent.folder / "config.pbtxt").read_bytes()
    reconfigure.write(parent, replace(parent.config, num_instances=2), tmp_path / "other" / "model")
    assert (parent.folder / "config.pbtxt").read_bytes() == before


def test_a_version_with_settings_of_its_own_gets_the_new_ones(tmp_path: Path, write_onnx):
    parent = mean_build(tmp_path, write_onnx)
    (parent.folder / "1" / "config.pbtxt").write_text("instance_group { count: 7 kind: KIND_CPU }")
    parent = read(parent.folder)
    assert parent.config.num_instances == 7
    reconfigure.write(parent, replace(parent.config, num_instances=2), tmp_path / "other" / "model")
    assert read(tmp_path / "other" / "model").config.num_instances == 2
    assert (parent.folder / "1" / "config.pbtxt").exists()


def test_what_a_committed_version_promised_is_kept(tmp_path: Path, write_onnx):
    source = mean_build(tmp_path, write_onnx)
    root = tmp_path / "models"
    root.mkdir()
    versions.commit(root, "model", source.version_folder, source.config, {"slo": "p99 < 20ms"})
    parent = read(root / "model")
    assert parent.config.is_slo_from_evidence
    target = tmp_path / "other" / "model"
    reconfigure.write(parent, replace(parent.config, num_instances=2), target)
    found = read(target).config
    assert (found.num_instances, found.batching.slo_latency_s) == (2, 0.020)
    assert (root / "model" / "1" / "manifest.json").exists()


def test_and_fixed_mode_stays_fixed_when_it_is_committed(tmp_path: Path, write_onnx):
    source = mean_build(tmp_path, write_onnx)
    settings = {"mode": "fixed", "max_batch": "8"}
    config = shapes.with_batching(source.config, settings, parse("p99 < 20ms"))
    root = tmp_path / "models"
    root.mkdir()
    versions.commit(root, "model", source.version_folder, config, {"slo": "p99 < 20ms"})
    assert read(root / "model").config.batching.slo_latency_s is None
