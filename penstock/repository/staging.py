"""Atomic writes: files and folders are written in a hidden staging folder, then renamed.

Everything is on disk (fsync) before the rename. A staging folder is locked while its writer lives;
an unlocked one was left by a killed writer. Knows nothing of models; `versions` calls it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.errors import ConfigError, StorageFull
from penstock.repository.manifest import FileEntry

PREFIX = ".staging-"
# On file systems without locks, a staging folder older than this counts as abandoned.
ABANDONED_S = 86_400.0
CHUNK_BYTES = 1 << 20
# How long a writer waits for another one of the same folder, and how often it looks.
LOCK_WAIT_S, LOCK_POLL_S = 60.0, 0.02
FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Whether the file system, or the user's quota on it, is full."""
    return error.errno in FULL


def says_full(text: str) -> bool:
    """Whether an error text of another process or library says that a file system is full."""
    return any(os.strerror(number) in text for number in FULL)


@contextlib.contextmanager
def explain_full(what: str) -> Iterator[None]:
    """Raise StorageFull if a write fails for lack of space; other errors pass."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        problem = f"{what}: {error.strerror}; free some space and do it again"
        raise StorageFull(problem) from error


@contextlib.contextmanager
def stage(parent: Path) -> Iterator[Path]:
    """Create a staging folder, which readers ignore; locked while its writer lives."""
    path, lock = _claim(parent)
    try:
        yield path
    finally:
        # If it was renamed to become the model, it no longer exists.
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _claim(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        os.mkdir(path)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # Another writer removed it before it was locked.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path, lock
        os.close(lock)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keep other writers, of any process, out of a folder. The lock of a killed writer is free;
    file systems without locks have none. ConfigError if another writer takes too long."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _wait_for_lock(fd, folder)
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, folder: Path) -> None:
    ends = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > ends:
                problem = f"another process has been changing it for {LOCK_WAIT_S:.0f} s"
                raise ConfigError(f"{folder}: {problem}; try again") from None
            time.sleep(LOCK_POLL_S)
        except OSError:
            return
        else:
            return


def remove_abandoned(*parents: Path) -> None:
    for path in (path for parent in parents for path in parent.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _is_abandoned(path, lock):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _is_abandoned(path: Path, lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - path.stat().st_mtime > ABANDONED_S
    return True


def copy(source: Path, target: Path) -> FileEntry:
    """Copy a file and return the entry of the copy, even if the source changes meanwhile."""
    with open(source, "rb") as original:
        return _write(target, iter(lambda: original.read(CHUNK_BYTES), b""))


def write(path: Path, data: bytes) -> FileEntry:
    """Write a new file and return its entry; it must not exist yet."""
    return _write(path, (data,))


def _write(path: Path, chunks: Iterable[bytes]) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def append(path: Path, line: bytes) -> None:
    """Append a line, on a line of its own even after one that a crash cut off. If the disk is full,
    no part of the line is left."""
    with open(path, "ab+", buffering=0) as file:
        # One writer at a time: no line of another one may be cut off below. Closing unlocks.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            left = line + b"\n"
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring a folder's names to disk, which syncing the files does not do."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
