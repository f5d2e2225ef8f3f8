"""Builds as folders: what is carried over, and what is written beside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.optimizer import folders

CONFIG = """
backend: "null"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


def test_files_are_carried_over_but_for_those_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("model.onnx", "below/labels.txt", "old.bin", "__pycache__/code.pyc"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target = tmp_path / "target"
    folders.carry_over(source, target, {"old.bin"})
    there = sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file())
    assert there == ["below/labels.txt", "model.onnx"]
    assert (target / "model.onnx").samefile(source / "model.onnx")


def test_configuration_has_the_name_of_its_folder_and_promises_nothing_new(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    config = folders.read_config(folder)
    other = tmp_path / "other"
    (other / "1").mkdir(parents=True)
    written = folders.write_config(other, replace(config, num_instances=2, version="7"))
    assert (written.name, written.version, written.num_instances) == ("other", "1", 2)
    assert written == folders.read_config(other)


def test_folder_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="backend: not given"):
        folders.read_config(tmp_path / "model")


def test_writing_does_not_change_a_parent_that_shares_the_file(tmp_path: Path) -> None:
    """A configuration is never one of the linked files."""
    parent, child = tmp_path / "parent", tmp_path / "child"
    (parent / "1").mkdir(parents=True)
    (parent / "config.pbtxt").write_text(CONFIG)
    config = folders.read_config(parent)
    (child / "1").mkdir(parents=True)
    folders.carry_over(parent / "1", child / "1")
    folders.write_config(child, replace(config, num_instances=3))
    assert folders.read_config(parent).num_instances == 1
