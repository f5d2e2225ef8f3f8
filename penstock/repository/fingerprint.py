"""What the answers of a version depend on, as one text: its files, its configuration, and the
version of Penstock. Servers with the same fingerprint may share answers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.repository import history, pbtxt
from penstock.repository.manifest import CACHE

CHUNK_BYTES = 1 << 20
# Path, size, time of the last change, device and inode.
FileState = tuple[str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`states` are those of the files when they were read."""

    text: str
    states: tuple[FileState, ...]


def take(config: ModelConfig) -> Fingerprint:
    """Read all files of the model but those of other versions; takes about a second per GB.
    ConfigError if one cannot be read."""
    digest = hashlib.blake2b(digest_size=32)
    described = (penstock.__version__, pbtxt.describe(config), config.devices)
    _add(digest, repr(described).encode())
    try:
        before = states(config)
        for state in before:
            path = Path(state[0])
            _add(digest, path.relative_to(_folder(config)).as_posix().encode())
            _add(digest, _file_digest(path))
    except OSError as error:
        raise ConfigError(f"response_cache: the files cannot be read: {error}") from None
    return Fingerprint(digest.hexdigest(), before)


def check(config: ModelConfig, taken: Fingerprint) -> None:
    """Raise ConfigError if the files have changed since."""
    try:
        is_same = states(config) == taken.states
    except OSError:
        is_same = False
    if not is_same:
        text = "response_cache: the model's files changed while they were loaded; load it again"
        raise ConfigError(text)


def states(config: ModelConfig) -> tuple[FileState, ...]:
    found: list[FileState] = []
    for path in sorted(_files(config)):
        state = os.stat(path)
        found.append((str(path), state.st_size, state.st_mtime_ns, state.st_dev, state.st_ino))
    return tuple(found)


def _folder(config: ModelConfig) -> Path:
    return config.folder.parent


def _files(config: ModelConfig) -> Iterator[Path]:
    top = _folder(config)
    for folder, names, files in os.walk(top, followlinks=True):
        is_top = Path(folder) == top
        names[:] = [
            name
            for name in names
            if name != CACHE
            and not name.startswith(".")
            and not (is_top and name.isdecimal() and name != config.version)
        ]
        # The history grows with each promotion.
        kept = [name for name in files if not (is_top and name == history.NAME)]
        yield from (Path(folder, name) for name in kept)


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _add(digest: hashlib.blake2b, part: bytes) -> None:
    """Add a part, after its length."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
