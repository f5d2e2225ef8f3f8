"""Links in a model repository: finds model files that are links to other places.

A symbolic link shows its target. A hard link does not: it can be any file of the file system under
a harmless name. A user who may write to the repository could use both to make the server read, and
answer with, files that this user cannot read. `repository` decides what is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def is_shared(file: Path) -> bool:
    """Whether a file has several hard links."""
    try:
        return file.is_file() and file.stat().st_nlink > 1
    except OSError:
        return False


def leads_out(path: Path, root: Path) -> bool:
    """Whether a path, with links resolved, is outside a folder. False for a loop of links."""
    try:
        return not path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        return False


def find_outward(paths: Iterable[Path], root: Path) -> list[Path]:
    """Return symbolic links that lead out of `root`, among these files, below these folders, and
    below folders that they link to."""
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
    """Yield this path and everything below it, sorted by name within each folder. Linked folders
    are not entered."""
    yield path
    if path.is_symlink():
        return
    for folder, folders, files in os.walk(path):
        folders.sort()
        yield from (Path(folder) / name for name in sorted([*folders, *files]))
