"""Free space: how much a run needs, and what is said when it is not there."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import ConfigError
from penstock.optimizer import workspace


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    def have(num_bytes: int) -> None:
        usage = SimpleNamespace(total=1 << 40, used=0, free=num_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return have


@pytest.mark.parametrize("is_useful", [False, True])
def test_the_folder_of_a_refused_run_goes_unless_a_later_run_can_resume(
    tmp_path: Path, is_useful: bool
) -> None:
    folder = tmp_path / "key"
    (folder / "original").mkdir(parents=True)
    refused = workspace.kept_if_useful(folder, lambda: is_useful)
    with pytest.raises(ConfigError), refused:
        raise ConfigError(["no"])
    assert folder.exists() == is_useful
    folder.mkdir(exist_ok=True)
    with pytest.raises(KeyboardInterrupt), workspace.kept_if_useful(folder, lambda: False):
        raise KeyboardInterrupt
    assert folder.exists()


def test_space_is_that_of_the_file_system_the_folder_will_be_on(tmp_path: Path) -> None:
    there = shutil.disk_usage(tmp_path).free
    assert workspace.free_bytes(tmp_path / "not" / "yet") == pytest.approx(there, rel=0.05)


def test_all_files_count_and_links_as_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "weights").write_bytes(bytes(1000))
    (tmp_path / "model" / "config").write_bytes(bytes(10))
    (tmp_path / "model" / "1" / "weights").symlink_to(tmp_path / "weights")
    (tmp_path / "model" / "1" / "away").symlink_to(tmp_path / "nowhere")
    assert workspace.size_of(tmp_path / "model") == 1010


def test_three_copies_and_a_margin_must_fit(tmp_path: Path, free) -> None:
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    free((3 << 20) + workspace.MARGIN_BYTES)
    workspace.check_room(tmp_path, tmp_path, is_resumed=False)
    free((3 << 20) + workspace.MARGIN_BYTES - 1)
    with pytest.raises(ConfigError, match=r"needs 7\.00 MiB, 7\.00 MiB free.*--out") as caught:
        workspace.check_room(tmp_path, tmp_path, is_resumed=False)
    assert str(tmp_path) in str(caught.value)
    # Only the version is missing.
    workspace.check_room(tmp_path, tmp_path, is_resumed=True)
