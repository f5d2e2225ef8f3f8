"""What tells whether the files of a model were written: their modification times and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from penstock.config import ModelConfig
from penstock.repository import links

# Loading a Python model writes there.
CACHE = "__pycache__"
# Folders of a model that all its versions read.
SHARED_FOLDERS = ("warmup", "initial_state")
# Modification time and size of each file; None if it is missing.
Stamps = Mapping[Path, tuple[int, int] | None]


def stamp(path: Path) -> tuple[int, int] | None:
    """Return what tells whether a file was written; None if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def stamps_below(paths: Iterable[Path]) -> Stamps:
    """Return the stamps of these files and of those in these folders."""
    stamps = {file: stamp(file) for path in paths for file in _files(path)}
    return {file: found for file, found in stamps.items() if found is not None}


def stamps_of(config: ModelConfig) -> Stamps:
    """Return the stamps of what a version is loaded from, without its configuration."""
    if not config.artifact:
        return {}
    artifact = Path(config.artifact)
    if config.folder.name != config.version:
        return stamps_below([artifact])
    shared = [config.folder.parent / name for name in SHARED_FOLDERS]
    return stamps_below([artifact, config.folder, *shared])


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a model, without hidden ones, which are not read."""
    start = len(path.parts)
    for each in links.walk(path):
        below = each.parts[start:]
        is_hidden = any(part.startswith(".") or part == CACHE for part in below)
        if not is_hidden and not each.is_dir():
            yield each
