"""Versions whose answers may differ have different fingerprints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.repository import fingerprint, history
from penstock.types import TensorSpec


def model(root: Path) -> ModelConfig:
    folder = root / "m" / "1"
    (folder / "weights").mkdir(parents=True)
    (folder / "model.py").write_text("one")
    (folder / "weights" / "a.bin").write_bytes(b"weights")
    (root / "m" / "labels.txt").write_text("a\nb\n")
    (root / "m" / "2").mkdir()
    spec = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    artifact = str(folder / "model.py")
    return ModelConfig("m", "1", "python", artifact, spec[:1], spec[1:], 4, BatchPolicy(4))


def edit_code(folder: Path) -> None:
    (folder / "1" / "model.py").write_text("two")


def edit_weights(folder: Path) -> None:
    (folder / "1" / "weights" / "a.bin").write_bytes(b"WEIGHTS")


def rename(folder: Path) -> None:
    (folder / "1" / "weights" / "a.bin").rename(folder / "1" / "weights" / "b.bin")


def move_a_byte(folder: Path) -> None:
    (folder / "1" / "model.py").write_text("onew")
    (folder / "1" / "weights" / "a.bin").write_bytes(b"eights")


def add_a_file(folder: Path) -> None:
    (folder / "1" / "more.py").write_text("")


def edit_labels(folder: Path) -> None:
    (folder / "labels.txt").write_text("b\na\n")


@pytest.mark.parametrize(
    "change", [edit_code, edit_weights, rename, move_a_byte, add_a_file, edit_labels]
)
def test_a_change_of_any_file_is_another_fingerprint(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    config = model(tmp_path)
    before = fingerprint.take(config)
    assert fingerprint.take(config) == before
    fingerprint.check(config, before)
    change(tmp_path / "m")
    assert fingerprint.take(config).text != before.text
    with pytest.raises(ConfigError, match="changed while they were loaded; load it again"):
        fingerprint.check(config, before)


def test_the_same_bytes_written_again_are_noticed_but_the_same(tmp_path: Path) -> None:
    config = model(tmp_path)
    before = fingerprint.take(config)
    (tmp_path / "m" / "1" / "model.py").unlink()
    (tmp_path / "m" / "1" / "model.py").write_text("one")
    assert fingerprint.take(config).text == before.text


@pytest.mark.parametrize("name", ["2/model.py", "1/__pycache__/model.pyc", history.NAME, ".lock/x"])
def test_other_versions_and_what_the_server_writes_do_not_matter(tmp_path: Path, name: str) -> None:
    config = model(tmp_path)
    before = fingerprint.take(config)
    path = tmp_path / "m" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("something")
    assert fingerprint.take(config) == before


def test_another_configuration_is_another_fingerprint(tmp_path: Path) -> None:
    config = model(tmp_path)
    other = replace(config, options={"intra_op_thread_count": "2"})
    assert fingerprint.take(config).text != fingerprint.take(other).text


def test_the_same_model_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    first, second = model(tmp_path / "a"), model(tmp_path / "b")
    assert fingerprint.take(first).text == fingerprint.take(second).text


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    config = model(tmp_path)
    (tmp_path / "m" / "1" / "gone").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="response_cache: the files cannot be read: .*gone"):
        fingerprint.take(config)
