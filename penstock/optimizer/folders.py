"""Builds as folders: files carried over from the parent, and the configuration written beside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from penstock import manifest, pbtxt, repository
from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer.candidates import Build

VERSION = "1"
# Of one version, written by whoever commits it. A version's own configuration would count before
# that of the build.
OF_A_COMMIT = (repository.CONFIG, manifest.NAME, "history.jsonl")


def carry_over(parent: Build, target: Path, without: Collection[str] = ()) -> Path:
    """The parent's files, but for its configuration and those named `without` (below its version
    folder); the new version folder. Files are linked where the file system can: builds are never
    changed once they are written."""
    version = target / VERSION
    version.mkdir(parents=True)
    for path in parent.folder.iterdir():
        if path.is_file() and path.name not in OF_A_COMMIT:
            link(path, target / path.name)
    # Of the version that the parent is, whatever its number.
    source = parent.folder / parent.config.version
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_left = name.as_posix() in (*OF_A_COMMIT, *without) or "__pycache__" in name.parts
        if path.is_file() and not is_left:
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            link(path, version / name)
    return version


def write_config(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config.pbtxt of a build; what a reader makes of it. What evidence promised has to be said
    now: a build has none."""
    config = replace(
        config,
        name=folder.name,
        version=VERSION,
        manifest="",
        is_slo_from_evidence=False,
        unkept_slo="",
    )
    (folder / repository.CONFIG).write_text(pbtxt.write(config), encoding="utf-8")
    return read_config(folder)


def write(parent: Build, config: ModelConfig, target: Path) -> None:
    """The parent with other settings: the model's files stay as they are."""
    carry_over(parent, target)
    write_config(target, config)


def read_config(folder: Path) -> ModelConfig:
    found = repository.read(folder)
    for problems in found.problems.values():
        raise ConfigError(problems)
    return found.configs[0]


def link(source: Path, target: Path) -> None:
    """The same bytes without copying them, where the file system can. A symbolic link would lead
    elsewhere from its new place."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
