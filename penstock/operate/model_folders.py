"""Where the versions of a model are: repositories and model folders, and what to give instead.

Names are compared with what is there, never used as paths. Everything in `operate` that takes a
repository asks here first.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import ConfigError, NotFound
from penstock.repository import layout, model_source
from penstock.repository.layout import ModelKind
from penstock.repository.versions import AnyPath

EXPECTED = "expected a model repository, a folder with <model>/<version>/"


def find_repository(path: AnyPath) -> Path:
    """Return the folder of a repository; ConfigError says what `path` is instead."""
    text = os.fspath(path)
    if not os.path.exists(text):
        raise ConfigError(f"{text}: no such folder; {EXPECTED}")
    if not os.path.isdir(text) and Path(text).suffix.lower() not in model_source.FILE_KINDS:
        raise ConfigError(f"{text}: is not a folder; {EXPECTED}")
    source = model_source.resolve(text)
    match source.kind:
        case ModelKind.REPOSITORY:
            return source.path
        case ModelKind.MODEL_FOLDER:
            parent = source.path.parent
        case ModelKind.VERSION_FOLDER:
            parent = source.path.parent.parent
        case kind:
            raise ConfigError(f"{text}: is {kind.value}, which has no versions; {EXPECTED}")
    raise ConfigError(f"{text}: is {source.kind.value}; give its repository, {parent}")


def find_model(root: Path, name: str) -> Path:
    """Return the folder of a model with versions. NotFound if there is no such model, ConfigError
    if it has no versions."""
    path = find_path(root, name)
    if not has_versions(path):
        advice = f"move its files to {root / name / '1'} to give it versions"
        raise ConfigError(f"{name}: has no versions: it is a model by itself; {advice}")
    return path


def find_path(root: Path, name: str) -> Path:
    """Return the folder of a model, with versions or without; a path that does not exist for a
    model that is a file. NotFound if there is no such model."""
    there = layout.names(root)
    if name not in there:
        known = layout.listed(there)
        raise NotFound(f"no such model: '{name}' is not in the repository; there: {known}")
    return root / name


def has_versions(path: Path) -> bool:
    return path.is_dir() and bool(layout.version_folders(path))


def find_version(root: Path, name: str, version: str) -> Path:
    """Return the folder of a version; NotFound if there is none."""
    folder = find_model(root, name)
    available = layout.version_folders(folder)
    if version not in available:
        raise NotFound(f"{name}: no version {version!r}; there: {layout.listed(available)}")
    return folder / version
