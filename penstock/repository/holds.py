"""Marks versions that a server has loaded, so that no other process removes their files: a worker
that restarts reads them again.

The mark is a shared lock on the version's folder. It needs no file, ends with its process, and does
not exist on file systems without locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.config import ModelConfig
from penstock.errors import ConfigError

# How long `hold` waits for `free` of another process, which takes microseconds.
WAIT_S, POLL_S = 1.0, 0.01


def version_folder(config: ModelConfig) -> Path | None:
    """Return the folder of a version; None for a model by itself."""
    if config.manifest:
        return Path(config.manifest).parent
    parents = Path(config.artifact).parents if config.artifact else ()
    return next((path for path in parents if path.name == config.version), None)


def hold(folder: Path) -> int | None:
    """Mark a version as loaded, until the returned descriptor is closed; None if it cannot be."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    ends = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) and time.monotonic() < ends:
                time.sleep(POLL_S)
                continue
            os.close(fd)
            return None
        return fd


def is_held(folder: Path) -> bool:
    """Whether a process has marked the version as loaded."""
    try:
        with free(folder):
            return False
    except ConfigError:
        return True


@contextlib.contextmanager
def free(folder: Path) -> Iterator[None]:
    """Keep others from marking the version; ConfigError if one has."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = f"{folder.parent.name}: version {folder.name}"
            raise ConfigError(f"{name} is loaded by a server; unload it first") from None
        except OSError:
            pass  # A file system without locks.
        yield
    finally:
        os.close(fd)
