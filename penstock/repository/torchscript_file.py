"""TorchScript archives (`torch.jit.save`), recognised without torch and without unpickling.

Such a file holds a program in TorchScript, which runs with the server's rights, and says nothing
about its tensors. torch reads it with a reader that knows no Python objects; a file of `torch.save`
looks similar, can run any Python code, and is refused.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.repository import pt2_file

# The usual names of such files; others would not be told from a .pt2.
SUFFIXES = (".pt", ".pth", ".ts", ".bin")
# What only `torch.jit.save` writes, beside pickled data that both have.
CONSTANTS, CODE = "constants.pkl", "code/"
NUMBERED = re.compile(r".*__([0-9]+)")
DEPRECATED = (
    "is TorchScript, which PyTorch has deprecated: it runs as code with the server's rights, says "
    "nothing about its tensors and is optimised less; torch.export.save writes a better model.pt2"
)


def is_named(path: str | Path) -> bool:
    """Return whether a file may be TorchScript, by its name."""
    return Path(path).suffix in SUFFIXES


def is_script(path: Path) -> bool:
    try:
        check(path)
    except ConfigError:
        return False
    return True


def check(path: Path) -> None:
    """Raise ConfigError, in one line, unless the file is a TorchScript archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except pt2_file.BROKEN:
        # Before 1.6, torch.save wrote a bare pickle.
        raise ConfigError(f"is no TorchScript archive, but perhaps {pt2_file.PICKLE}") from None
    check_members(names)


def check_members(names: Collection[str]) -> None:
    """Raise ConfigError unless these are the members of a TorchScript archive, with or without
    their common folder."""
    inner = {name.partition("/")[2] for name in names} | set(names)
    if CONSTANTS in inner and any(name.startswith(CODE) for name in inner):
        return
    if "data.pkl" in inner:
        raise ConfigError(f"is a file of torch.save, {pt2_file.PICKLE}")
    raise ConfigError("is no TorchScript archive; expected a file written by torch.jit.save")


def position(name: str) -> int | None:
    """Return the position in Triton's names, such as 0 in `INPUT__0`; None for other names."""
    match = NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def positions(names: Sequence[str]) -> list[int]:
    """Return the position of each tensor as Triton does: of its name if all names tell one,
    otherwise that in the configuration. ConfigError for a position that is given twice."""
    told = [number for name in names if (number := position(name)) is not None]
    if len(told) < len(names):
        return list(range(len(names)))
    if len(set(told)) < len(told):
        raise ConfigError(f"{', '.join(names)}: two names end in the same position")
    return told
