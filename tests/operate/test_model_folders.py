"""What a REPOSITORY may be, and what is said about everything else."""

from collections.abc import Callable
from pathlib import Path

import pytest
from committed_versions import add_version

from penstock.errors import ConfigError, NotFound
from penstock.operate import model_folders


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add_version(tmp_path / "models")
    return tmp_path / "models"


def test_a_repository_is_found(root: Path) -> None:
    assert model_folders.find_repository(str(root)) == root
    assert model_folders.find_model(root, "model") == root / "model"
    assert model_folders.find_version(root, "model", "1") == root / "model" / "1"


@pytest.mark.parametrize(
    "path, reason",
    [
        ("nowhere", "no such folder; expected a model repository"),
        ("models/model", "is a model's folder; give its repository, {root}"),
        ("models/model/1", "is a version of a model; give its repository, {root}"),
        ("notes.txt", "is not a folder; expected a model repository"),
        ("alone.onnx", "is an ONNX file, which has no versions; expected a model repository"),
    ],
)
def test_what_is_no_repository_is_told_what_to_give(
    root: Path, write_identity: Callable[..., Path], path: str, reason: str
) -> None:
    write_identity(root.parent / "alone.onnx")
    (root.parent / "notes.txt").write_text("")
    with pytest.raises(ConfigError) as caught:
        model_folders.find_repository(root.parent / path)
    assert reason.format(root=root) in str(caught.value)


@pytest.mark.parametrize("name", ["other", "", ".", "..", "../models/model", "model/1", "model\0"])
def test_a_model_that_is_not_there_is_not_found(root: Path, name: str) -> None:
    with pytest.raises(NotFound, match="there: model"):
        model_folders.find_model(root, name)


@pytest.mark.parametrize("version", ["0", "2", "01", "", "../model/1", "1/", "latest"])
def test_a_version_that_is_not_there_is_not_found(root: Path, version: str) -> None:
    with pytest.raises(NotFound, match="there: 1"):
        model_folders.find_version(root, "model", version)


def test_a_model_by_itself_has_no_versions(root: Path) -> None:
    (root / "llama.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="llama: has no versions: it is a model by itself"):
        model_folders.find_model(root, "llama")
