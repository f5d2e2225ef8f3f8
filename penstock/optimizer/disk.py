"""Free space for a run: checked before long work and before the commit, told when it is not enough.

Reads the file system and writes nothing. The run, the journal, the evidence and the command use it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from penstock.benchmark.report import units
from penstock.errors import ConfigError

# Journal, report and configuration files.
MARGIN_BYTES = 4 << 20
# The original is placed in the run's folder; a candidate and the version are as large at most.
COPIES = 3


class WriteFailed(Exception):
    """The run cannot write its own files, so that nothing it finds out would be kept. Not a
    PenstockError: no candidate is to blame."""


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds a path, or will hold it."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def size_of(folder: Path) -> int:
    """Bytes of all files below it, and of those that links lead to."""
    files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
    return sum(os.path.getsize(file) for file in files if os.path.exists(file))


def missing_room(path: Path, num_bytes: int) -> str:
    """`needs 40 MiB, 12 MiB free`, or empty where so many bytes and the margin fit."""
    needed, free = num_bytes + MARGIN_BYTES, free_bytes(path)
    return "" if needed <= free else f"needs {units.size(needed)}, {units.size(free)} free"


def check_room(out: Path, model: Path, *, is_resumed: bool) -> None:
    """ConfigError before anything long begins. A run that is resumed has its files already, but
    for the version."""
    copies = 1 if is_resumed else COPIES
    missing = missing_room(out, copies * size_of(model))
    if missing:
        ways = "free some space, or choose another repository with --out"
        raise ConfigError([f"{out}: not enough disk space for this model: {missing}; {ways}"])
