"""Facts about the file of a Python model: its tensors, and the modules beside it.

Tensors are known only by running the file, which `backends.python_reader` does in a child process.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.repository import model_code
from penstock.repository.signature import Signature

READER = "penstock.backends.python_reader"


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """The answer of the child process: a signature, or problems."""

    signature: Signature | None
    problems: tuple[str, ...] = ()


def read_signature(path: Path) -> Signature:
    """Read the tensors that the model declares; ConfigError if it declares none. Runs the file in a
    child process, once as long as neither it nor the modules beside it change."""
    report = _report(path, tuple(map(_stamp, (path, *local_imports(path)))))
    if report.signature is None:
        raise ConfigError(list(report.problems))
    return report.signature


def _stamp(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        status = path.stat()
        return status.st_mtime_ns, status.st_size
    return 0, 0


@lru_cache(maxsize=64)
def _report(path: Path, stamps: tuple[tuple[int, int], ...]) -> SignatureReport:
    return msgspec.json.decode(model_code.run(READER, str(path)), type=SignatureReport)


def local_imports(path: Path) -> list[Path]:
    """Return the modules beside a Python file that it imports, and those that they import."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        for module in _imported(waiting.pop()):
            if module != path and module not in found:
                found[module] = None
                waiting.append(module)
    return sorted(found)


def _imported(path: Path) -> list[Path]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [
        file
        for name in names
        if name.strip(".")
        for file in _files(path.parent.joinpath(*name.strip(".").split(".")))
    ]


def _files(path: Path) -> list[Path]:
    """Return the file of a module with those of its packages."""
    found = [path.with_name(f"{path.name}.py"), path / "__init__.py", path.parent / "__init__.py"]
    return [file for file in found if file.is_file()]
