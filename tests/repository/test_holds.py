"""A loaded version is marked; what is marked is not removed, by this process or another."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from committed_versions import CONFIG, add_version

from penstock.errors import ConfigError
from penstock.repository import holds, layout, versions
from penstock.repository.history import Cause

HOLDER = """
import sys
from pathlib import Path
from penstock.repository import holds
assert holds.hold(Path(sys.argv[1])) is not None
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for _ in range(2):
        add_version(tmp_path / "models")
    return tmp_path / "models"


def remove(root: Path) -> None:
    versions.remove(root, "model", "1", Cause("pruned"))


def test_a_held_version_is_not_removed(root: Path) -> None:
    folder = root / "model" / "1"
    first, second = holds.hold(folder), holds.hold(folder)
    assert first is not None and second is not None, "several servers may have it"
    assert holds.is_held(folder) and not holds.is_held(root / "model" / "2")
    for fd in (first, second):
        with pytest.raises(ConfigError, match="version 1 is loaded by a server; unload it first"):
            remove(root)
        os.close(fd)
    assert not holds.is_held(folder)
    remove(root)
    assert layout.version_folders(root / "model") == ["2"]


def test_a_hold_ends_with_its_process(root: Path) -> None:
    folder = root / "model" / "1"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert holds.is_held(folder)
        process.kill()
    assert not holds.is_held(folder)


def test_a_version_that_is_being_removed_is_not_held(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "WAIT_S", 0.05)
    with holds.free(root / "model" / "1"):
        assert holds.hold(root / "model" / "1") is None
    assert holds.hold(root / "model" / "9") is None


def test_the_folder_of_a_version_is_that_of_its_files() -> None:
    committed = replace(CONFIG, manifest="/r/model/3/manifest.json", version="3")
    assert holds.version_folder(committed) == Path("/r/model/3")
    by_hand = replace(CONFIG, artifact="/r/model/2/net/model.onnx", version="2")
    assert holds.version_folder(by_hand) == Path("/r/model/2")
    assert holds.version_folder(replace(CONFIG, artifact="/r/model.onnx")) is None
    assert holds.version_folder(CONFIG) is None
