"""Staging folders: whose they are, and who removes those that are nobody's."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import StorageFull
from penstock.repository import staging


def test_a_stage_is_gone_when_its_writer_is_done_or_fails(tmp_path: Path) -> None:
    with staging.stage(tmp_path) as stage:
        assert stage.name.startswith(".staging-") and stage.is_dir()
        staging.write(stage / "a", b"1")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), staging.stage(tmp_path) as stage:
        (stage / "deep" / "er").mkdir(parents=True)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_was_renamed_stays(tmp_path: Path) -> None:
    with staging.stage(tmp_path) as stage:
        staging.write(stage / "a", b"1")
        os.rename(stage, tmp_path / "place")
    assert (tmp_path / "place" / "a").read_bytes() == b"1"


def test_what_a_live_writer_has_is_left_alone_and_what_a_dead_one_left_is_removed(
    tmp_path: Path,
) -> None:
    script = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from penstock.repository import staging\n"
        "with staging.stage(Path(sys.argv[1])) as stage:\n"
        "    staging.write(stage / 'a', b'1')\n"
        "    print(stage.name, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout is not None
        stage = tmp_path / writer.stdout.readline().strip()
        staging.remove_abandoned(tmp_path)
        assert (stage / "a").exists()
        writer.kill()
        writer.wait()
    assert stage.exists()
    staging.remove_abandoned(tmp_path)
    assert not stage.exists()


def test_without_locks_only_an_old_stage_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    old, new = tmp_path / ".staging-old", tmp_path / ".staging-new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    staging.remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".staging-new"]
    with staging.stage(tmp_path) as stage:
        assert stage.is_dir()


def test_a_link_or_a_file_of_that_name_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a").touch()
    (tmp_path / ".staging-link").symlink_to("precious")
    (tmp_path / ".staging-file").touch()
    staging.remove_abandoned(tmp_path)
    assert (tmp_path / "precious" / "a").exists()


@pytest.mark.parametrize("size", [0, 1, staging.CHUNK_BYTES, staging.CHUNK_BYTES * 2 + 7])
def test_copies_and_their_entries_are_exact(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    entry = staging.copy(tmp_path / "source", tmp_path / "new" / "folder" / "target")
    assert (tmp_path / "new" / "folder" / "target").read_bytes() == data
    assert (entry.size, entry.sha256) == (size, hashlib.sha256(data).hexdigest())


def test_lines_are_appended_also_after_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    staging.append(path, b"one")
    staging.append(path, b"two")
    with open(path, "ab") as file:
        file.write(b"thr")
    staging.append(path, b"four")
    assert path.read_bytes() == b"one\ntwo\nthr\nfour\n"


def test_which_errors_mean_a_full_disk() -> None:
    assert staging.is_full(OSError(errno.ENOSPC, "No space left on device"))
    assert staging.is_full(OSError(errno.EDQUOT, "Quota exceeded"))
    assert not staging.is_full(OSError(errno.EACCES, "Permission denied"))
    assert staging.says_full("OSError: [Errno 28] No space left on device: 'weights.bin'")
    assert not staging.says_full("OSError: [Errno 13] Permission denied: 'weights.bin'")


def test_a_full_disk_is_explained_and_other_errors_pass() -> None:
    full = r"model: not committed: No space left on device; free some space"
    with pytest.raises(StorageFull, match=full), staging.explain_full("model: not committed"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(PermissionError), staging.explain_full("model: not committed"):
        raise PermissionError


def test_a_line_that_does_not_fit_leaves_no_part_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    staging.append(path, b"one")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        staging.append(path, b"two")
    assert path.read_bytes() == b"one\n"
    monkeypatch.undo()
    staging.append(path, b"three")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_line_that_does_not_fit_cuts_off_no_line_of_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    staging.append(path, b"one")
    other = threading.Thread(target=staging.append, args=(path, b"three"))

    def full(fd: int) -> None:
        monkeypatch.undo()
        other.start()
        other.join(0.2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        staging.append(path, b"two")
    other.join()
    assert path.read_bytes() == b"one\nthree\n"
