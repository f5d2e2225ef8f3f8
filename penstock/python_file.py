"""What a Python model's file says about itself."""

from __future__ import annotations

import ast
from pathlib import Path


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
