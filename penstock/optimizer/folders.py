"""Builds as folders: files linked from the parent, plus a new configuration."""

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
# Files written by a commit, not part of a build. A version's own configuration would override that
# of the build.
OF_A_COMMIT = (repository.CONFIG, manifest.NAME, "history.jsonl")


def carry_over(parent: Build, target: Path, without: Collection[str] = ()) -> Path:
    """Link the parent's files except its configuration and those in `without` (paths below its
    version folder); return the new version folder. Files are copied where links are impossible.
    Builds never change once written."""
    version = target / VERSION
    version.mkdir(parents=True)
    for path in parent.folder.iterdir():
        if path.is_file() and path.name not in OF_A_COMMIT:
            link(path, target / path.name)
    # The parent's version may have any number.
    source = parent.folder / parent.config.version
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_left = name.as_posix() in (*OF_A_COMMIT, *without) or "__pycache__" in name.parts
        if path.is_file() and not is_left:
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            link(path, version / name)
    return version


def write_config(folder: Path, config: ModelConfig) -> ModelConfig:
    """Write a build's config.pbtxt and return it as parsed. The SLO from the parent's evidence is
    written explicitly: a build has no evidence."""
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
    """Write the parent with another configuration; the model's files stay the same."""
    carry_over(parent, target)
    write_config(target, config)


def read_config(folder: Path) -> ModelConfig:
    found = repository.read(folder)
    for problems in found.problems.values():
        raise ConfigError(problems)
    return found.configs[0]


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system cannot. A symbolic link could point elsewhere
    from its new place."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
