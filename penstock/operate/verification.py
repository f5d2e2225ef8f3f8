"""Checks the versions of a model against their manifests, byte by byte, and what refers to them."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.operate import model_folders
from penstock.repository import history, layout
from penstock.repository import manifest as manifests
from penstock.wire.version_rows import VerifyRow


def verify(root: Path, name: str) -> list[VerifyRow]:
    """Read every file of every committed version and compare it with its digest. The last row is
    about the model itself, if something is wrong there, or if it has no versions. NotFound if there
    is no such model."""
    folder = model_folders.find_path(root, name)
    if not model_folders.has_versions(folder):
        return [VerifyRow(name, "", "not committed")]
    rows = [_verify_version(folder, version) for version in layout.version_folders(folder)]
    if problems := _model_problems(folder):
        rows.append(VerifyRow(name, "", "damaged", problems))
    return rows


def _verify_version(folder: Path, version: str) -> VerifyRow:
    try:
        if manifests.read(folder / version) is None:
            return VerifyRow(folder.name, version, "not committed")
        manifests.check_digests(folder / version)
    except ConfigError as error:
        return VerifyRow(folder.name, version, "damaged", list(error.problems))
    return VerifyRow(folder.name, version, "whole")


def _model_problems(folder: Path) -> list[str]:
    problems: list[str] = []
    try:
        layout.chosen(folder, layout.read_message(folder), problems)
        numbers = history.unreadable_lines(folder)
    except ConfigError as error:
        return [*problems, *error.problems]
    return problems + [f"{history.NAME}: line {number} cannot be read" for number in numbers]
