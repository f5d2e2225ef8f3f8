"""Trace files: JSON lists of bounded size that are complete after every write.

Belongs to the thread of `trace_writer`. Knows no requests, only the entries that a form makes.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

START, SEPARATOR, END = b"[\n", b",\n", b"\n]\n"
# Bytes of all files of one server. In one file, tracing then stops; of several, the oldest goes.
MAX_BYTES = 256 << 20
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class TraceFile:
    """With a log frequency, so many traces go to `path.0`, the next to `path.1`, and so on; files
    of these names are replaced. Without one, all go to `path`."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd: int | None = None
        # Whether the open file is one of several.
        self._is_indexed = False
        self._size = 0
        self._num_traces = 0
        self._index = 0
        self._ended: deque[tuple[Path, int]] = deque()

    def write(self, entries: Sequence[bytes], log_frequency: int = 0) -> bool:
        """Append the entries of a trace; False if the file is full. OSError if that fails."""
        if self._fd is not None and bool(log_frequency) != self._is_indexed:
            self.close()
        text = SEPARATOR.join(entries)
        if self._size + len(text) > self._max_bytes:
            return False
        if self._fd is None:
            self._open(is_indexed=bool(log_frequency))
        self._append(text)
        self._num_traces += 1
        if log_frequency and self._num_traces >= log_frequency:
            self.close()
        return True

    def close(self) -> None:
        """End the present file; it is complete."""
        if self._fd is None:
            return
        os.close(self._fd)
        self._fd = None
        if self._is_indexed:
            self._ended.append((self._name, self._size))
            self._index += 1
            self._num_traces = self._size = 0

    @property
    def _name(self) -> Path:
        if not self._is_indexed:
            return self._path
        return self._path.with_name(f"{self._path.name}.{self._index}")

    def _open(self, *, is_indexed: bool) -> None:
        self._is_indexed = is_indexed
        self._fd = os.open(self._name, FLAGS, 0o600)
        self._size = self._num_traces = 0

    def _append(self, text: bytes) -> None:
        """Replace the end of the list by the text and a new end."""
        assert self._fd is not None
        is_first = self._size == 0
        place = 0 if is_first else self._size - len(END)
        data = memoryview((START if is_first else SEPARATOR) + text + END)
        self._make_room(len(data))
        end = place + len(data)
        while data:
            written = os.pwrite(self._fd, data, place)
            place, data = place + written, data[written:]
        self._size = end

    def _make_room(self, num_bytes: int) -> None:
        total = self._size + num_bytes + sum(size for _, size in self._ended)
        while total > self._max_bytes and self._ended:
            path, size = self._ended.popleft()
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
