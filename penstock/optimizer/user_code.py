"""Functions of users' modules, `package.module:function`: import them, and copy them to where the
model is served."""

from __future__ import annotations

import importlib
import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import ConfigError

# Module attribute: files beside the module that its functions read.
FILES = "FILES"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """An imported `module:name`."""

    module: ModuleType
    name: str
    call: Callable[..., Any]

    @property
    def source(self) -> Path | None:
        """The single source file; None for parts of packages and installed modules."""
        file = getattr(self.module, "__file__", None)
        if file is None or "." in self.module.__name__ or Path(file).name == "__init__.py":
            return None
        path = Path(file).resolve()
        installed = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
        roots = [Path(root).resolve() for root in (*site.getsitepackages(), *installed)]
        is_installed = any(path.is_relative_to(root) for root in roots)
        return None if path.suffix != ".py" or is_installed else path

    @property
    def files(self) -> list[Path]:
        """Files that have to be copied with it."""
        folder = Path(self.module.__file__ or "").resolve().parent
        return [folder / name for name in getattr(self.module, FILES, ())]


def find(text: str, what: str) -> UserFunction:
    """Import a function; modules of the current folder are found too. `what` begins error texts."""
    name, _, function = text.partition(":")
    expected = "expected package.module:function"
    if not all(part.isidentifier() for part in name.split(".")) or not function.isidentifier():
        raise ConfigError([f"{what}: '{text}': {expected}"])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except Exception as error:  # Users' code may raise anything when it is imported.
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError([f"{what}: '{name}' cannot be imported: {reason}"]) from error
    call = getattr(module, function, None)
    if not callable(call):
        raise ConfigError([f"{what}: '{name}' has no function '{function}'; {expected}"])
    return UserFunction(module, function, call)


def take_along(function: UserFunction, folder: Path, file: str) -> str:
    """Write `file` to the version folder so that it provides the function; return a note on how."""
    problems = [f"{path}: no such file" for path in function.files if not path.is_file()]
    if problems:
        where = f"{function.module.__name__}.{FILES}"
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    for path in function.files:
        shutil.copyfile(path, folder / path.name)
    source = function.source
    if source is None:
        name = function.module.__name__
        (folder / file).write_text(f"from {name} import {function.name} as {function.name}\n")
        return f"'{name}' is imported where the model is served and must be installed there"
    shutil.copyfile(source, folder / file)
    return f"{source.name} is taken along"
