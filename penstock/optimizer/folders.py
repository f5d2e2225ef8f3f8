"""Builds as folders: files linked from the parent, plus a new configuration."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer.candidates import Build
from penstock.repository import history, layout, manifest, onnx_file, pbtxt
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import ModelSource
from penstock.repository.python_file import local_imports

VERSION = "1"
# Copies or links a file.
Place = Callable[[Path, Path], object]
COPIED = {".txt", ".py", ".json", ".pbtxt"}
# Files written by a commit. A version's own configuration would override that of the build.
OF_A_COMMIT = (layout.CONFIG, manifest.NAME, history.NAME)


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
    take_files(source, version, link, (*OF_A_COMMIT, *without))
    return version


def take_files(source: Path, version: Path, place: Place, without: Collection[str]) -> None:
    """Bring the files of a version folder into another, except those in `without`."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_left = name.as_posix() in without or "__pycache__" in name.parts
        if path.is_file() and not is_left:
            (version / name).parent.mkdir(parents=True, exist_ok=True)
            place(path, version / name)


def take_file(source: ModelSource, version: Path, place: Place) -> None:
    """Bring a model that is a file by itself into a version folder, under the name that its backend
    expects, with the files beside it that it needs."""
    path = source.path
    beside: list[str] = []
    match source.kind:
        case ModelKind.ONNX_FILE:
            beside = _weight_files(path)
        case ModelKind.OPENVINO_FILE if path.with_suffix(".bin").is_file():
            place(path.with_suffix(".bin"), version / "model.bin")
        case ModelKind.PYTHON_FILE:
            beside = [str(each.relative_to(path.parent)) for each in local_imports(path)]
    for name in beside:
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        place(path.parent / name, version / name)
    if source.kind is ModelKind.ONNX_FILE and onnx_file.has_zip_maps(path):
        (version / "model.onnx").write_bytes(onnx_file.without_zip_maps(path).SerializeToString())
    else:
        place(path, version / f"model{path.suffix.lower()}")


def _weight_files(path: Path) -> list[str]:
    """Return the external weight files of an ONNX model, which must be in its folder or below."""
    try:
        names = onnx_file.weight_files(path)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None
    folder = path.resolve().parent
    problems: list[str] = []
    for name in names:
        place = (folder / name).resolve()
        if not place.is_relative_to(folder):
            problems.append(f"{path}: its weights '{name}' lie outside the model's folder")
        elif not place.is_file():
            problems.append(f"{path}: its weights '{name}' are not beside it")
    if problems:
        raise ConfigError(problems)
    return names


def write_config(folder: Path, config: ModelConfig) -> ModelConfig:
    """Write a build's config.pbtxt and return it as parsed. The SLO from the parent's evidence is
    written explicitly: a build has no evidence."""
    config = replace(config, name=folder.name, version=VERSION, manifest="")
    config = replace(config, is_slo_from_evidence=False, unkept_slo="")
    (folder / layout.CONFIG).write_text(pbtxt.write(config), encoding="utf-8")
    return read_config(folder)


def write(parent: Build, config: ModelConfig, target: Path) -> None:
    """Write the parent with another configuration; the model's files stay the same."""
    carry_over(parent, target)
    write_config(target, config)


def read_config(folder: Path) -> ModelConfig:
    found = layout.read(folder)
    for problems in found.problems.values():
        raise ConfigError(problems)
    return found.configs[0]


def link_tree(source: Path, target: Path) -> None:
    """Write a folder of builds anew, with linked files."""
    shutil.copytree(source, target, copy_function=lambda old, new: link(Path(old), Path(new)))


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system cannot. A symbolic link could point elsewhere
    from its new place. Labels, code and configurations are copied: a server refuses to load those
    with further hard links, and the original may be served meanwhile."""
    if source.suffix not in COPIED:
        with suppress(OSError):
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)
