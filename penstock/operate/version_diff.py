"""Compares two versions of a model: configuration, files by digest, and evidence."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path

from penstock.errors import ConfigError
from penstock.operate import evidence_figures as figures
from penstock.operate import model_folders
from penstock.operate.evidence_figures import Evidence, FigureKind
from penstock.repository import links, pbtxt, versions
from penstock.repository import manifest as manifests
from penstock.repository.layout import CONFIG
from penstock.repository.manifest import FileEntry
from penstock.wire.version_rows import FigureRow, FileChange, VersionDiff


def compare(root: Path, name: str, a: str, b: str) -> VersionDiff:
    """Return how version `b` differs from `a`; NotFound if there is no such model or version."""
    folders = [model_folders.find_version(root, name, version) for version in (a, b)]
    for folder in folders:
        if outward := links.find_outward([folder], root):
            where = outward[0].relative_to(root)
            raise ConfigError(f"{where}: a link that leads out of the repository")
    before, after = (_evidence(folder) for folder in folders)
    return VersionDiff(
        name,
        a,
        b,
        config=_compare_configs(root / name, a, b),
        files=_compare_files(*map(_files, folders)),
        figures=_compare_figures(before, after),
        a_steps=figures.steps_of(before),
        b_steps=figures.steps_of(after),
        notes=_notes(before, after, a, b),
    )


def _compare_configs(folder: Path, a: str, b: str) -> list[str]:
    texts = [pbtxt.to_text(versions.read_config(folder, version)) for version in (a, b)]
    before, after = (text.splitlines() for text in texts)
    names = f"{a}/{CONFIG}", f"{b}/{CONFIG}"
    return list(difflib.unified_diff(before, after, names[0], names[1], lineterm=""))


def _files(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a version, from its manifest, or read now if it has none. The
    configuration is compared by its lines."""
    manifest = manifests.read(folder)
    if manifest is None:
        names = [name for name in manifests.names_below(folder) if (folder / name).is_file()]
        entries = {name: _entry(folder / name) for name in names}
    else:
        entries = dict(manifest.files)
    entries.pop(CONFIG, None)
    return entries


def _entry(path: Path) -> FileEntry:
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(path.stat().st_size, digest)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _compare_files(a: dict[str, FileEntry], b: dict[str, FileEntry]) -> list[FileChange]:
    changes: list[FileChange] = []
    for name in sorted(a.keys() | b.keys()):
        before, after = a.get(name), b.get(name)
        if before is None and after is not None:
            changes.append(FileChange(name, "added", None, after.size))
        elif before is not None and after is None:
            changes.append(FileChange(name, "removed", before.size, None))
        elif before is not None and after is not None and before != after:
            changes.append(FileChange(name, "changed", before.size, after.size))
    return changes


def _evidence(folder: Path) -> Evidence:
    manifest = manifests.read(folder)
    return {} if manifest is None else manifest.evidence


def _compare_figures(a: Evidence, b: Evidence) -> list[FigureRow]:
    rows = [_figure_row(kind, kind.find(a), kind.find(b)) for kind in figures.KINDS]
    return [row for row in rows if row.a is not None or row.b is not None]


def _figure_row(kind: FigureKind, a: float | None, b: float | None) -> FigureRow:
    ratio = b / a if a and b is not None else None
    return FigureRow(kind.name, kind.unit, a, b, ratio)


def _notes(a: Evidence, b: Evidence, first: str, second: str) -> list[str]:
    notes = [
        f"version {version} has no evidence"
        for version, evidence in ((first, a), (second, b))
        if not evidence
    ]
    if notes:
        return notes
    told = {
        "hardware": [figures.hardware_of(each) for each in (a, b)],
        "SLO": [figures.text_at(each, "slo") for each in (a, b)],
        "load": [figures.text_at(each, "measured", "load") for each in (a, b)],
        "accuracy metric": [figures.text_at(each, "accuracy", "metric") for each in (a, b)],
    }
    return [
        f"{what} differs: {values[0] or 'none'} for version {first}, {values[1] or 'none'} "
        f"for version {second}"
        for what, values in told.items()
        if values[0] != values[1]
    ]
