"""manifest.json of a committed version: its files with size and SHA-256, and its evidence.

`versions` writes it, `layout` compares names and sizes when it reads, a worker compares the
digests before it loads. A version folder without one was made by hand and is not checked. The
evidence is an open JSON object; only the fields used here are checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from penstock import slo
from penstock.errors import ConfigError

NAME = "manifest.json"
# Increment it when an older reader would misinterpret a newer file.
FORMAT = 1
# Python writes there when code of a version is imported.
CACHE = "__pycache__"
# Outcomes of an optimisation whose SLO is enforced; None: the evidence has no outcome.
KEPT = ("kept", "met", None)


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`files` are keyed by their path in the version folder, with slashes."""

    format: int
    created: str
    files: dict[str, FileEntry]
    evidence: dict[str, object] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Encode as JSON; ConfigError if the evidence is not JSON."""
        try:
            return (json.dumps(asdict(self), indent=2, allow_nan=False) + "\n").encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"evidence: cannot be written as JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class _FormatNumber:
    format: int


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_formats = msgspec.json.Decoder(_FormatNumber)
_manifests = msgspec.json.Decoder(Manifest)


def is_plain(name: str) -> bool:
    """Whether a file name stays inside its folder and is normalised."""
    path = PurePosixPath(name)
    is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return is_inside and str(path) == name and name.isprintable()


def read(folder: Path) -> Manifest | None:
    """Read the manifest of a version folder; None if it has none."""
    path = folder / NAME
    if not os.path.lexists(path):
        return None
    where = f"{folder.name}/{NAME}"
    if not path.is_file():
        raise ConfigError(f"{where}: not a file")
    try:
        data = path.read_bytes()
        found = _formats.decode(data).format
        if found != FORMAT:
            raise ConfigError(f"{where}: format {found}; this version of Penstock reads {FORMAT}")
        manifest = _manifests.decode(data)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from None
    strange = [name for name in manifest.files if not is_plain(name)]
    if strange:
        raise ConfigError([f"{where}: files: '{name}' leaves the folder" for name in strange])
    return manifest


def check_files(manifest: Manifest, folder: Path) -> list[str]:
    """List files that are missing, have another size or were added, without reading any file."""
    known = {NAME, *manifest.files}
    added = [f"{folder.name}/{name}" for name in names_below(folder) if name not in known]
    hint = "remove it, or commit it as a new version"
    problems = [f"{path}: is not in {NAME}; {hint}" for path in added]
    unloaded = "it is not loaded until it is committed again"
    for name, entry in sorted(manifest.files.items()):
        size = _size(folder / name)
        if size != entry.size:
            there = "missing" if size is None else f"{size} bytes, {NAME} says {entry.size}"
            why = f"version {folder.name} is incomplete: {unloaded}"
            problems.append(f"{folder.name}/{name}: {there}; {why}")
    return problems


def names_below(folder: Path) -> list[str]:
    """List everything but folders, except Python's caches and names with a leading dot, which file
    systems leave behind and no backend opens."""
    found: list[str] = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != CACHE and not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        names = [name for name in (*names, *links) if not name.startswith(".")]
        found += [Path(path, name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def _size(path: Path) -> int | None:
    """Return the size of a file; None if it is missing or not a regular file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def check_digests(folder: Path) -> None:
    """Read every file and compare it with the manifest. ConfigError names those that differ."""
    manifest = read(folder)
    if manifest is None:
        raise ConfigError(f"{folder.name}/{NAME}: it was there and is gone")
    problems = check_files(manifest, folder)
    for name, entry in sorted(manifest.files.items()) if not problems else ():
        try:
            with open(folder / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            problems.append(f"{folder.name}/{name}: cannot be read: {error.strerror}")
            continue
        if found != entry.sha256:
            digests = f"sha256 {found}, {NAME} says {entry.sha256}; commit changes as a new version"
            problems.append(f"{folder.name}/{name}: differs from what was committed: {digests}")
    if problems:
        raise ConfigError(problems)


def unkept(evidence: Mapping[str, object]) -> str:
    """Return the outcome of the evidence if its SLO was not kept; empty if it was, or if there is
    no outcome. Versions from before 2026-11 say "met"."""
    outcome = evidence.get("outcome")
    return "" if outcome in KEPT else str(outcome)


def price_per_hour(evidence: Mapping[str, object]) -> float | None:
    """Return the price of the machine that the evidence names, if any."""
    price = evidence.get("price_per_hour")
    if isinstance(price, int | float) and 0 < price < math.inf:
        return float(price)
    return None


def promised(evidence: Mapping[str, object]) -> slo.Slo | None:
    """Return the SLO of the evidence; ConfigError starts with its path."""
    if "slo" not in evidence:
        return None
    text = evidence["slo"]
    if not isinstance(text, str):
        raise ConfigError(f"evidence.slo: {json.dumps(text)} is not text like 'p99 < 20ms'")
    try:
        return slo.parse(text)
    except ConfigError as error:
        raise ConfigError([f"evidence.slo: {problem}" for problem in error.problems]) from None
