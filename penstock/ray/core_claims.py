"""Cores of a machine that one process has for itself, where several nodes of a cluster share it.

A claim is a lock on a file for each core. The kernel drops it with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import ConfigError

FOLDER = Path("/tmp") / f"penstock-cores-{os.getuid()}"


class CoreClaim:
    """The `cores` that were free, at most `count`. They stay claimed until `release`, or until this
    process ends. ConfigError if others could write to the folder."""

    def __init__(self, count: int, cores: Iterable[int], folder: Path = FOLDER) -> None:
        self._locks: dict[int, int] = {}
        folder_fd = _open_folder(folder)
        try:
            for core in cores:
                if len(self._locks) == count:
                    break
                flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(f"core-{core}", flags, 0o600, dir_fd=folder_fd)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                else:
                    self._locks[core] = fd
        finally:
            os.close(folder_fd)

    @property
    def cores(self) -> frozenset[int]:
        return frozenset(self._locks)

    def release(self) -> None:
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()


def _open_folder(folder: Path) -> int:
    """Return a descriptor of the folder, which is made if it is missing. Its parent is open to all:
    another user may have made it, to lead the locks to files of this one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; remove it") from None
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        raise ConfigError(f"{folder}: other users can write to it; remove it")
    return fd
