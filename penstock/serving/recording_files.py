"""Segment files of one model's recording: a ring of bounded size on disk.

Each shard writes segments of its own into the model's folder and removes its oldest; a number in
their names says whose they are. Belongs to one thread. Knows no requests, only bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RecordPolicy
from penstock.errors import ConfigError
from penstock.types import Buffer
from penstock.wire.recording import SUFFIX, SegmentHeader, encode_header

# Nanoseconds since 1970, shard and process.
NAME = re.compile(r"\d{19,}-(\d{2,})-\d+" + re.escape(SUFFIX))
LOCK = ".lock"
# Parts of the ring: removing the oldest loses one of so many.
NUM_SEGMENTS = 8
# Limit of the system on the buffers of one write.
MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Which of several shards writes. Segments of shards that are no more belong to one of them."""

    shard: int = 0
    num_shards: int = 1

    def owns(self, name: str) -> bool:
        match = NAME.fullmatch(name)
        return match is not None and int(match[1]) % self.num_shards == self.shard


class SegmentRing:
    """Invariant: the segments of this shard take at most its part of `policy.max_bytes`, after
    `write`. Segments of an earlier process of the shard count, and are removed in their turn."""

    def __init__(self, folder: Path, model: str, place: RingPlace) -> None:
        self._folder = folder
        self._model = model
        self._place = place
        self.policy = RecordPolicy()
        self._segments: deque[tuple[Path, int]] = deque()
        self._total_bytes = 0
        self._is_found = False
        self._fd: int | None = None
        self._size = 0

    @property
    def max_bytes(self) -> int:
        """The part of the ring that this shard may fill."""
        return self.policy.max_bytes // self._place.num_shards

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append records that belong together; OSError if that fails, and nothing is written."""
        if not self._is_found:
            self._find()
        size = sum(map(len, buffers))
        if self._fd is not None and self._size + size > self.max_bytes // NUM_SEGMENTS:
            self.close()
        if self._fd is None:
            buffers = [self._begin(), *buffers]
            size += len(buffers[0])
        assert self._fd is not None
        try:
            self._make_room(size)
            _write_all(self._fd, buffers)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self.close()
            raise
        self._size += size
        self._total_bytes += size

    def close(self) -> None:
        """End the present segment. Writing again begins another."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        path, _ = self._segments.pop()
        if self._size:
            self._segments.append((path, self._size))
        else:
            path.unlink(missing_ok=True)
        self._size = 0

    def _find(self) -> None:
        """Create the folder, which others cannot read, and count what earlier processes left."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        names = sorted(each.name for each in self._folder.iterdir() if self._place.owns(each.name))
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size = (self._folder / name).stat().st_size
                self._segments.append((self._folder / name, size))
                self._total_bytes += size
        self._is_found = True

    def _begin(self) -> bytes:
        """Open a new segment and return its header."""
        # Operators remove recordings while the server runs.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        now_ns, place = time.time_ns(), self._place
        name = f"{now_ns:019d}-{place.shard:02d}-{os.getpid()}{SUFFIX}"
        path = self._folder / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._segments.append((path, 0))
        header = SegmentHeader(self._model, place.shard, self.policy.share, now_ns / 1e9)
        return encode_header(header)

    def _make_room(self, size: int) -> None:
        """Remove the oldest segments until so many bytes fit; never the one that is written."""
        while self._total_bytes + size > self.max_bytes and len(self._segments) > 1:
            path, removed = self._segments[0]
            path.unlink(missing_ok=True)
            self._segments.popleft()
            self._total_bytes -= removed


def claim_folder(folder: Path) -> int:
    """Create the folder for recordings, check that it can be written, and keep other servers out:
    two would remove each other's files. Return the descriptor that holds the claim."""
    path = folder / LOCK
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        text = f"--record {folder}: cannot be written: {error.strerror}"
        raise ConfigError(text) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        text = "another server records there; give each server a folder of its own"
        raise ConfigError(f"--record {folder}: {text}") from None
    return fd


def _write_all(fd: int, buffers: Sequence[Buffer]) -> None:
    for start in range(0, len(buffers), MAX_BUFFERS):
        views = [memoryview(each) for each in buffers[start : start + MAX_BUFFERS]]
        while views:
            written = os.writev(fd, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]
