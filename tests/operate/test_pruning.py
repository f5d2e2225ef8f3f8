"""Old versions go; what is served, loaded, new, or the way back stays."""

import errno
import os
from pathlib import Path

import pytest
from committed_versions import add_version
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, NotFound
from penstock.operate.promotion import Grounds
from penstock.operate.pruning import VersionsInUse, choose, prune
from penstock.repository import history, layout, versions

NONE = VersionsInUse((), (), ())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Version 2 is served, and was before it 1."""
    root = tmp_path / "models"
    for _ in range(5):
        add_version(root)
    versions.promote(root, "model", "1")
    versions.promote(root, "model", "2")
    return root


def there(root: Path) -> list[str]:
    return layout.version_folders(root / "model")


def test_the_newest_stay() -> None:
    assert choose(["1", "2", "9", "10"], NONE, 2) == {
        "1": "",
        "2": "",
        "9": "one of the 2 newest",
        "10": "one of the 2 newest",
    }
    assert choose(["1", "2"], NONE, 1) == {"1": "", "2": "the newest"}
    assert choose(["1"], NONE, 5) == {"1": "one of the 5 newest"}


numbers = st.lists(st.integers(1, 30).map(str), max_size=12, unique=True)


@given(numbers, numbers, numbers, numbers, st.integers(1, 40))
def test_what_is_in_use_stays(
    available: list[str], served: list[str], target: list[str], loaded: list[str], keep: int
) -> None:
    available = sorted(available, key=int)
    reasons = choose(available, VersionsInUse(served, target, loaded), keep)
    assert list(reasons) == available
    removed = {version for version, reason in reasons.items() if not reason}
    assert removed == set(available) - {*served, *target, *loaded, *available[-keep:]}


def test_old_versions_are_removed_and_the_history_says_so(root: Path) -> None:
    found = prune(root, "model", 1, Grounds("ada"))
    assert found.removed == ["3", "4"] and found.freed_bytes > 0 and not found.dry_run
    assert found.kept == {"1": "a rollback goes to it", "2": "served", "5": "the newest"}
    assert there(root) == ["1", "2", "5"]
    events = history.read(root / "model")[2:]
    assert [(each.kind, each.version, each.actor) for each in events] == [
        ("pruned", "3", "ada"),
        ("pruned", "4", "ada"),
    ]
    assert events[0].reason == "keep 1 version" and events[0].figures["num_bytes"]
    assert not list(root.rglob(".staging-*"))
    assert prune(root, "model", 1, Grounds()).removed == []


def test_a_dry_run_only_tells(root: Path) -> None:
    planned = prune(root, "model", 2, Grounds(), dry_run=True)
    assert (planned.removed, planned.dry_run) == (["3"], True)
    assert there(root) == ["1", "2", "3", "4", "5"]
    assert len(history.read(root / "model")) == 2
    assert prune(root, "model", 2, Grounds()).removed == planned.removed


def test_loaded_versions_stay(root: Path) -> None:
    found = prune(root, "model", 1, Grounds(), loaded=["3"])
    assert found.kept["3"] == "loaded by a server" and there(root) == ["1", "2", "3", "5"]


@pytest.mark.parametrize("keep", [0, -1])
def test_the_newest_is_always_kept(root: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="at least 1, the newest version, is kept"):
        prune(root, "model", keep, Grounds())


def test_a_repository_that_cannot_be_written_is_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ConfigError, match="Read-only file system; the repository must be writable"):
        prune(root, "model", 1, Grounds())
    assert len(there(root)) == 5


def test_a_model_that_is_not_there_is_not_found(root: Path) -> None:
    with pytest.raises(NotFound):
        prune(root, "other", 1, Grounds())
