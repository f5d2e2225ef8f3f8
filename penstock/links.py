"""Links in a model repository: which files of a model are links to somewhere else.

A symbolic link shows where it leads. A hard link does not: it can be any file of the file system
under a harmless name. Both could make a server read, and answer with, files that whoever may write
to the repository cannot read. `repository` decides what is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def is_shared(file: Path) -> bool:
    """Whether a file has further hard links."""
    try:
        return file.is_file() and file.stat().st_nlink > 1
    except OSError:
        return False


def leads_out(path: Path, root: Path) -> bool:
    """Whether a path, links followed, is outside a folder. Loops count."""
    try:
        return not path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return True


def find_outward(paths: Iterable[Path], root: Path) -> list[Path]:
    """Symbolic links among these files, and those below these folders, that lead out of `root`."""
    return [path for path in walk(paths) if path.is_symlink() and leads_out(path, root)]


def walk(paths: Iterable[Path]) -> Iterator[Path]:
    """These paths and everything below them, in order of their names. Linked folders are not
    entered."""
    for path in paths:
        yield path
        for folder, folders, files in os.walk(path):
            folders.sort()
            yield from (Path(folder) / name for name in sorted([*folders, *files]))
