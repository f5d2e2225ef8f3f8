"""Cores of a machine that one process has for itself, where several nodes of a cluster share it.

A claim is a lock on a file for each core. The kernel drops it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/tmp") / f"penstock-cores-{os.getuid()}"


class CoreClaim:
    """The `cores` that were free, at most `count`. They stay claimed until `release`, or until this
    process ends."""

    def __init__(self, count: int, cores: Iterable[int], folder: Path = FOLDER) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._locks: dict[int, int] = {}
        for core in cores:
            if len(self._locks) == count:
                break
            fd = os.open(folder / f"core-{core}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
            else:
                self._locks[core] = fd

    @property
    def cores(self) -> frozenset[int]:
        return frozenset(self._locks)

    def release(self) -> None:
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()
