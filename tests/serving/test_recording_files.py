"""The ring of segment files: bounded, private, continued by the next process, and safe to fill."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from penstock.config import RecordPolicy
from penstock.errors import ConfigError
from penstock.serving.recording_files import RingPlace, SegmentRing, claim_folder
from penstock.wire.recording import MAGIC

KB = 1000


def ring(folder: Path, max_bytes: int = 64 * KB, place: RingPlace | None = None) -> SegmentRing:
    made = SegmentRing(folder / "m", "m", place or RingPlace())
    made.policy = RecordPolicy(max_bytes)
    return made


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted((folder / "m").iterdir())]


def test_files_are_private(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    made = ring(tmp_path)
    made.write([b"x" * KB])
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    (file,) = (tmp_path / "m").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_an_existing_folder_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir(mode=0o755)
    ring(tmp_path).write([b"x"])
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700


def test_the_ring_never_exceeds_its_size(tmp_path: Path) -> None:
    made = ring(tmp_path)
    for number in range(300):
        made.write([bytes([number % 256]) * (number % 7) * 300])
        assert sum(sizes(tmp_path)) <= 64 * KB
    assert sum(sizes(tmp_path)) > 48 * KB
    assert len(sizes(tmp_path)) > 4
    newest = max((tmp_path / "m").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest.read_bytes().endswith(bytes([299 % 256]) * 3)


def test_the_oldest_segment_goes_first(tmp_path: Path) -> None:
    made = ring(tmp_path)
    made.write([b"first" + bytes(7 * KB)])
    for _ in range(7):
        made.write([bytes(7 * KB)])
    assert any(b"first" in path.read_bytes() for path in (tmp_path / "m").iterdir())
    made.write([bytes(7 * KB)])
    made.write([bytes(7 * KB)])
    assert not any(b"first" in path.read_bytes() for path in (tmp_path / "m").iterdir())


def test_the_next_process_counts_and_removes_what_it_finds(tmp_path: Path) -> None:
    for _ in range(5):
        made = ring(tmp_path)
        for _ in range(20):
            made.write([bytes(2 * KB)])
        made.close()
        assert sum(sizes(tmp_path)) <= 64 * KB


def test_shards_share_the_size_and_remove_their_own(tmp_path: Path) -> None:
    shards = [ring(tmp_path, place=RingPlace(index, 2)) for index in range(2)]
    shards[1].write([b"other" + bytes(KB)])
    for _ in range(100):
        shards[0].write([bytes(KB)])
    assert sum(sizes(tmp_path)) <= 34 * KB
    assert any(b"other" in path.read_bytes() for path in (tmp_path / "m").iterdir())


def test_segments_of_shards_that_are_no_more_are_removed(tmp_path: Path) -> None:
    for index in range(4):
        made = ring(tmp_path, place=RingPlace(index, 4))
        for _ in range(20):
            made.write([bytes(KB)])
        made.close()
    alone = ring(tmp_path)
    for _ in range(100):
        alone.write([bytes(KB)])
    assert sum(sizes(tmp_path)) <= 64 * KB
    names = {path.name.split("-")[1] for path in (tmp_path / "m").iterdir()}
    assert names == {"00"}


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    made = ring(tmp_path)
    for _ in range(100):
        made.write([bytes(2 * KB)])
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"


def test_many_buffers_are_written_whole(tmp_path: Path) -> None:
    made = ring(tmp_path, 10**6)
    made.write([b"%05d" % number for number in range(3000)])
    (file,) = (tmp_path / "m").iterdir()
    assert file.read_bytes().endswith(b"".join(b"%05d" % number for number in range(3000)))


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ring(tmp_path)
    made.write([b"good"])
    before = sizes(tmp_path)
    whole = os.writev

    def half(fd: int, buffers: list[memoryview]) -> int:
        if sum(map(len, buffers)) > 10:
            return whole(fd, [buffers[0][:5]])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", half)
    with pytest.raises(OSError, match="No space"):
        made.write([b"x" * 15])
    assert sizes(tmp_path) == before
    monkeypatch.undo()
    made.write([b"again"])
    assert sum(sizes(tmp_path)) > sum(before)


def test_a_segment_has_its_header_even_if_an_old_one_could_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        made = ring(tmp_path)
        made.write([bytes(40 * KB)])
        made.close()
    made = ring(tmp_path)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patched, pytest.raises(PermissionError):
        patched.setattr(Path, "unlink", refuse)
        made.write([bytes(40 * KB)])
    made.write([b"again"])
    newest = max((tmp_path / "m").iterdir(), key=lambda path: path.name)
    assert newest.read_bytes().startswith(MAGIC) and newest.read_bytes().endswith(b"again")


def test_a_folder_that_was_removed_is_created_again(tmp_path: Path) -> None:
    made = ring(tmp_path)
    made.write([b"first"])
    shutil.rmtree(tmp_path / "m")
    for _ in range(20):
        made.write([bytes(KB)])
    assert sum(sizes(tmp_path)) >= 10 * KB
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    fd = claim_folder(tmp_path / "new" / "rec")
    with pytest.raises(ConfigError, match="another server records there"):
        claim_folder(tmp_path / "new" / "rec")
    os.close(fd)
    os.close(claim_folder(tmp_path / "new" / "rec"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--record .*/file/rec: cannot be written"):
        claim_folder(tmp_path / "file" / "rec")
