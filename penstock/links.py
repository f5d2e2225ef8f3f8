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
    """Whether a path, links followed, is outside a folder. A loop leads nowhere."""
    try:
        return not path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return False


def find_outward(paths: Iterable[Path], root: Path) -> list[Path]:
    """Symbolic links among these files, below these folders, and below folders that they link to,
    which lead out of `root`."""
    outward: list[Path] = []
    pending, seen = list(paths), set[Path]()
    while pending:
        for path in walk(pending.pop(0)):
            if not path.is_symlink():
                continue
            if leads_out(path, root):
                outward.append(path)
            elif path.is_dir() and (target := path.resolve()) not in seen:
                seen.add(target)
                pending.append(target)
    return outward


def walk(path: Path) -> Iterator[Path]:
    """This path and everything below it, in order of the names. Linked folders are not entered."""
    yield path
    if path.is_symlink():
        return
    for folder, folders, files in os.walk(path):
        folders.sort()
        yield from (Path(folder) / name for name in sorted([*folders, *files]))
