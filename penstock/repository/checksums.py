"""Triton's `checksum` repository agent: MD5 digests of a model's files in its config.pbtxt.

They are read here, and compared before a worker or an engine loads the model. A manifest has
stronger digests; these are for repositories that were made for Triton.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.repository.pbtxt_fields import Proto

AGENT, PREFIX = "checksum", "MD5:"
DIGEST = re.compile("[0-9a-f]{32}")
# A file, and its digest.
Checksums = tuple[tuple[str, str], ...]


def read(message: Proto, folder: Path, problem: Callable[[str, str], None]) -> Checksums:
    """Return the files of the model's folder that have a digest. Report other agents, hash
    functions and files outside of the folder to `problem`."""
    found: list[tuple[str, str]] = []
    for index, agent in enumerate(message.agents):
        path = f"model_repository_agents.agents[{index}]"
        if agent.name != AGENT:
            problem(f"{path}.name", f"'{agent.name}' is not supported; expected {AGENT}")
            continue
        for key, value in sorted(agent.parameters.items()):
            name, where = key.removeprefix(PREFIX), f"{path}.parameters.{key}"
            if name == key or not name:
                problem(where, f"expected {PREFIX}FILE, a file of the model's folder")
            elif not DIGEST.fullmatch(value.lower()):
                problem(where, f"'{value}' is no MD5 digest; expected 32 hexadecimal digits")
            elif not _is_inside(folder, name):
                problem(where, f"'{name}' leaves the model's folder")
            else:
                found.append((str(folder / name), value.lower()))
    return tuple(found)


def check(checksums: Sequence[tuple[str, str]]) -> None:
    """Read every file and compare it. ConfigError names those that differ."""
    problems: list[str] = []
    for path, wanted in checksums:
        file = Path(path)
        name = f"{file.parent.name}/{file.name}"
        try:
            with file.open("rb") as content:
                got = hashlib.file_digest(content, _md5).hexdigest()
        except OSError as error:
            problems.append(f"{name}: cannot be read for its checksum: {error.strerror}")
            continue
        if got != wanted:
            problems.append(f"{name}: its MD5 is {got}, model_repository_agents says {wanted}")
    if problems:
        raise ConfigError(problems)


def _md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)


def _is_inside(folder: Path, name: str) -> bool:
    try:
        return (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False
