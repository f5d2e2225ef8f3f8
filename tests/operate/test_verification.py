"""Every byte of every committed version is compared with its manifest."""

import shutil
from pathlib import Path

import pytest
from committed_versions import add_version

from penstock.errors import NotFound
from penstock.operate.verification import verify
from penstock.repository import history, versions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for _ in range(3):
        add_version(tmp_path / "models")
    return tmp_path / "models"


def states(root: Path) -> dict[str, str]:
    return {row.version: row.state for row in verify(root, "model")}


def test_whole_versions_are_whole(root: Path) -> None:
    versions.promote(root, "model", "1")
    assert states(root) == dict.fromkeys("123", "whole")


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "added", "manifest"])
def test_damage_is_named_and_hides_no_other_version(root: Path, damage: str) -> None:
    file = root / "model" / "2" / "weights"
    match damage:
        case "changed":
            file.write_bytes(b"Weights")
        case "cut":
            file.write_bytes(b"weight")
        case "missing":
            file.unlink()
        case "added":
            (file.parent / "other").write_bytes(b"")
        case "manifest":
            (file.parent / "manifest.json").write_bytes(b"{")
    assert states(root) == {"1": "whole", "2": "damaged", "3": "whole"}
    [problem] = next(row.problems for row in verify(root, "model") if row.version == "2")
    assert problem.startswith("2/")


def test_versions_made_by_hand_are_not_judged(root: Path) -> None:
    shutil.copytree(root / "model" / "1", root / "model" / "4")
    (root / "model" / "4" / "manifest.json").unlink()
    assert states(root)["4"] == "not committed"


def test_a_policy_or_history_that_is_wrong_is_damage_of_the_model(root: Path) -> None:
    versions.promote(root, "model", "2")
    with open(root / "model" / history.NAME, "ab") as file:
        file.write(b'{"time": "20')
    shutil.rmtree(root / "model" / "2")
    last = verify(root, "model")[-1]
    assert (last.version, last.state) == ("", "damaged")
    policy, line = last.problems
    assert "no version 2" in policy and line == "history.jsonl: line 2 cannot be read"


def test_a_configuration_that_cannot_be_read_is_damage(root: Path) -> None:
    (root / "model" / "config.pbtxt").write_text("{{{")
    assert verify(root, "model")[-1].state == "damaged"


def test_a_model_that_is_not_there_is_not_found(root: Path) -> None:
    with pytest.raises(NotFound):
        verify(root, "other")
