"""Builds as folders: files carried over from the parent, and the configuration written beside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from penstock import pbtxt, repository
from penstock.config import ModelConfig
from penstock.errors import ConfigError

VERSION = "1"


def carry_over(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """The files of a version folder, linked where the file system can: builds are never changed
    once they are written. `without` names files below the folder."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_dir() or name in without or "__pycache__" in path.parts:
            continue
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, place)
        except OSError:
            shutil.copyfile(path, place)


def write_config(folder: Path, config: ModelConfig) -> ModelConfig:
    """The config.pbtxt of a build; what a reader makes of it."""
    config = replace(
        config, name=folder.name, version=VERSION, manifest="", is_slo_from_evidence=False
    )
    (folder / repository.CONFIG).write_text(pbtxt.write(config))
    return read_config(folder)


def read_config(folder: Path) -> ModelConfig:
    found = repository.read(folder)
    for problems in found.problems.values():
        raise ConfigError(problems)
    return found.configs[0]
