"""The private folders of models that came with a load."""

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError, StorageFull
from penstock.repository import staging
from penstock.repository.loaded_folders import LoadedFolders

FILES = {PurePosixPath("1/model.onnx"): b"one", PurePosixPath("2/sub/w.bin"): b"two"}


def config(artifact: Path) -> ModelConfig:
    return ModelConfig("m", "1", "onnxruntime", str(artifact), (), (), 0, BatchPolicy(1))


def test_a_model_lives_until_its_last_version_has_ended(tmp_path):
    folders = LoadedFolders(tmp_path / "mine")
    first = folders.write("m", "max_batch_size: 2", FILES)
    second = folders.write("m", "", FILES)
    assert (first / "m" / "config.pbtxt").read_text() == "max_batch_size: 2"
    assert (first / "m" / "2" / "sub" / "w.bin").read_bytes() == b"two"
    one, two = (config(first / "m" / each) for each in ("1/model.onnx", "2/sub/w.bin"))
    assert folders.holds(one) and not folders.holds(replace(one, artifact="/elsewhere/1/x"))
    folders.release(replace(one, artifact=str(tmp_path / "r" / "m" / "1" / "model.onnx")))
    folders.release(one)
    assert not (first / "m" / "1").exists() and (first / "m" / "2" / "sub" / "w.bin").exists()
    folders.release(two)
    assert not first.exists() and (second / "m" / "1" / "model.onnx").exists()
    folders.close()
    assert list((tmp_path / "mine").iterdir()) == []


def test_nobody_else_can_read_them(tmp_path):
    folders = LoadedFolders(tmp_path / "mine")
    folders.write("m", "", FILES)
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
    folders.close()


def test_folders_of_a_killed_server_are_removed(tmp_path):
    left = tmp_path / "mine" / f"{staging.PREFIX}1-abc"
    left.mkdir(parents=True)
    living, other = LoadedFolders(tmp_path / "mine"), LoadedFolders(tmp_path / "mine")
    kept = living.write("m", "", FILES)
    other.write("m", "", FILES)
    assert not left.exists() and kept.exists()
    living.close()
    other.close()


def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a folder of this user"):
        LoadedFolders(tmp_path / "mine").write("m", "", FILES)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    folders = LoadedFolders(tmp_path / "mine")
    kept = folders.write("m", "", FILES)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "write", full)
    with pytest.raises(StorageFull, match="m: the files of the load were not stored"):
        folders.write("m", "", FILES)
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]
    folders.close()
