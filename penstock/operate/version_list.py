"""Lists the versions of a model with what their evidence says. Reads names, sizes and manifests, no
model file."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from penstock.errors import ConfigError
from penstock.operate import evidence_figures as figures
from penstock.operate import model_folders
from penstock.repository import history, layout, versions
from penstock.repository import manifest as manifests
from penstock.wire.version_rows import VersionRow


def list_versions(root: Path, name: str, loaded: Collection[str] = ()) -> list[VersionRow]:
    """Return the versions of a model, oldest first; a server says which it has `loaded`. A model by
    itself is one row without a version. NotFound if there is no such model."""
    folder = model_folders.find_path(root, name)
    if not model_folders.has_versions(folder):
        return [VersionRow(name, "", is_served=True, is_loaded=bool(loaded))]
    problems: tuple[str, ...] = ()
    served, target = list[str](), tuple[str, ...]()
    try:
        served = versions.served_versions(folder)
        target = history.rollback_target(history.read(folder), served)
    except ConfigError as error:
        problems = error.problems
    rows = [
        _row(folder, version, version in served, version in loaded, target == (version,))
        for version in layout.version_folders(folder)
    ]
    rows[0].problems.extend(problems)
    return rows


def size_of(folder: Path) -> int:
    """Return the bytes of a version's files, as its manifest or the file system says."""
    try:
        manifest = manifests.read(folder)
    except ConfigError:
        manifest = None
    if manifest is not None:
        return manifest.num_bytes
    paths = [folder / name for name in manifests.names_below(folder)]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _row(
    folder: Path, version: str, is_served: bool, is_loaded: bool, is_target: bool
) -> VersionRow:
    name, path = folder.name, folder / version
    try:
        manifest, problems = manifests.read(path), list[str]()
    except ConfigError as error:
        manifest, problems = None, list(error.problems)
    evidence = {} if manifest is None else manifest.evidence
    return VersionRow(
        name,
        version,
        is_served,
        is_loaded,
        is_target,
        slo=figures.text_at(evidence, "slo"),
        outcome=figures.text_at(evidence, "outcome"),
        p99_s=figures.P99.find(evidence),
        throughput=figures.THROUGHPUT.find(evidence),
        max_rate=figures.MAX_RATE.find(evidence),
        accuracy=figures.ACCURACY.find(evidence),
        metric=figures.text_at(evidence, "accuracy", "metric"),
        memory_bytes=figures.MEMORY.find(evidence),
        cost_per_million=figures.COST.find(evidence),
        num_bytes=size_of(path),
        created="" if manifest is None else manifest.created,
        hardware=figures.hardware_of(evidence),
        problems=problems,
    )
