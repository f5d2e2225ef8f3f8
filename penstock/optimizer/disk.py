"""Checks of free disk space, before long work and before the commit.

Reads the file system and writes nothing. The run, the journal, the evidence and the command use it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock import units
from penstock.errors import ConfigError

# Journal, report and configuration files.
MARGIN_BYTES = 4 << 20
# The run's folder has a copy of the original; a candidate and the version are at most as large.
COPIES = 3


class WriteFailed(Exception):
    """The run cannot write its own files, so its results would be lost. Not a PenstockError: no
    candidate caused it."""


def free_bytes(path: Path) -> int:
    """Return the free space of the file system that holds a path, or will hold it."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def size_of(folder: Path) -> int:
    """Return the size of all files below a folder, following links to files."""
    files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    return sum(os.path.getsize(file) for file in files if os.path.exists(file))


def missing_room(path: Path, num_bytes: int) -> str:
    """Return `needs 40 MiB, 12 MiB free`, or empty if these bytes and the margin fit."""
    needed, free = num_bytes + MARGIN_BYTES, free_bytes(path)
    return "" if needed <= free else f"needs {units.size(needed)}, {units.size(free)} free"


def check_room(out: Path, model: Path, *, is_resumed: bool) -> None:
    """Raise ConfigError if space is short, before anything long begins. A resumed run has all its
    files but the version."""
    copies = 1 if is_resumed else COPIES
    missing = missing_room(out, copies * size_of(model))
    if missing:
        ways = "free some space, or choose another repository with --out"
        raise ConfigError([f"{out}: not enough disk space for this model: {missing}; {ways}"])
