"""A folder of models in Triton's layout to resolved configurations.

    <repository>/<model>/[config.pbtxt]
    <repository>/<model>/<version>/model.onnx

A model without a config.pbtxt gets one worked out from its file. All problems of all models are
found in one pass; one bad model does not hide the others. Links may not lead out of the repository.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import pbtxt
from penstock.config import ModelConfig
from penstock.errors import ConfigError, NotFound

MAX_VERSION = 2**63 - 1


@dataclass(slots=True)
class Found:
    """What a repository holds: versions that can be loaded, and problems by model."""

    configs: list[ModelConfig] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)


def read(path: str | os.PathLike[str]) -> Found:
    """Every model of a repository, or the one model if `path` is its folder."""
    root = Path(os.path.abspath(path))
    if not root.is_dir():
        raise ConfigError([f"{path}: no such folder; expected a model repository or a model"])
    if _is_model(root):
        # A link that the operator names is where the repository is.
        folders, root = [root], root.resolve()
    else:
        folders = _folders(root)
    if not any(map(_is_model, folders)):
        raise ConfigError(
            [
                f"{path}: holds no model; expected <model>/<version>/model.onnx, "
                "with the version a number"
            ]
        )
    return _read_all(folders, root)


def _read_all(folders: Sequence[Path], root: Path) -> Found:
    found = Found()
    for folder in folders:
        try:
            found.configs += _read_model(folder, root)
        except ConfigError as error:
            found.problems[folder.name] = list(error.problems)
    return found


def names(path: str | os.PathLike[str]) -> list[str]:
    """The models of a repository by name, loadable or not."""
    root = Path(os.path.abspath(path))
    if not root.is_dir():
        raise ConfigError([f"{path}: no such folder; expected a model repository or a model"])
    if _is_model(root):
        return [root.name]
    return [folder.name for folder in _folders(root)]


def read_one(path: str | os.PathLike[str], name: str) -> Found:
    """One model of a repository. The name is compared with what is there, never made a path."""
    root = Path(os.path.abspath(path))
    folders = [root] if _is_model(root) else _folders(root)
    for folder in folders:
        if folder.name == name:
            return _read_all([folder], root.resolve() if folder is root else root)
    raise NotFound(f"failed to load '{name}', failed to poll from model repository")


def _folders(root: Path) -> list[Path]:
    return sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))


def _read_model(folder: Path, root: Path) -> list[ModelConfig]:
    """The versions of one model that its version policy asks for."""
    if not folder.resolve().is_relative_to(root.resolve()):
        raise ConfigError(["folder: a link that leads out of the repository"])
    message = _message(folder / "config.pbtxt")
    problems: list[str] = []
    versions = _versions(folder, message, problems)
    configs: list[ModelConfig] = []
    for version in versions:
        try:
            if not (folder / version).resolve().is_relative_to(root.resolve()):
                raise ConfigError([f"{version}: a link that leads out of the repository"])
            configs.append(pbtxt.resolve(message, folder.name, folder / version))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    return configs


def _message(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"config.pbtxt: cannot be read: {error}"]) from None
    return pbtxt.parse(text)


def _is_model(folder: Path) -> bool:
    return folder.is_dir() and (
        (folder / "config.pbtxt").is_file() or bool(_version_folders(folder))
    )


def _version_folders(folder: Path) -> list[str]:
    """Names that are version numbers: digits without a leading zero, within 64 bits."""
    return sorted(
        (
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir()
            and entry.name.isascii()
            and entry.name.isdigit()
            and not entry.name.startswith("0")
            and int(entry.name) <= MAX_VERSION
        ),
        key=int,
    )


def _versions(folder: Path, message: Any, problems: list[str]) -> list[str]:
    """Those the policy asks for; where it asks for missing ones, those there are."""
    available = _version_folders(folder)
    if not available:
        raise ConfigError([f"{folder.name}: no version folder; expected one named by a number"])
    policy = message.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return available
        case "specific":
            wanted = {str(number) for number in policy.specific.versions}
            missing = sorted(wanted - set(available))
            if missing or not wanted:
                problems.append(
                    f"version_policy.specific: no version {', '.join(missing) or 'named'}; "
                    f"there are {', '.join(available)}"
                )
            return [version for version in available if version in wanted] or available[-1:]
        case _:
            return available[-max(1, policy.latest.num_versions) :]
