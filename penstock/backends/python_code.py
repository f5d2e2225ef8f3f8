"""The file of a Python model as an imported module, and the calls into its code.

Any of them may raise anything, also SystemExit. Knows no form of models.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.config import ModelConfig
from penstock.errors import ConfigError, PenstockError, describe_error

MAX_TEXT_CHARS = 1000
log = logging.getLogger("penstock.python")
_numbers = itertools.count()


class Code:
    """A model's file as an imported module. Its folder is on sys.path until `close`, and the module
    has a package of its own, so `import other` and `from . import other` find files beside it."""

    def __init__(self, config: ModelConfig) -> None:
        self._path = Path(config.artifact)
        self._label = config.label
        self._package = f"penstock_python_model_{next(_numbers)}"
        self._tasks: asyncio.Runner | None = None

    def load(self) -> ModuleType:
        """Run the file; raise ConfigError with the failing line."""
        if not self._path.is_file():
            what = "not a file" if self._path.exists() else "no such file"
            raise self.problem(f"{what}; expected Python code")
        folder = str(self._path.parent)
        package = ModuleType(self._package)
        package.__path__ = [folder]
        sys.modules[self._package] = package
        sys.modules["triton_python_backend_utils"] = pb_utils
        sys.path.insert(0, folder)
        pb_utils.MODEL_DIR.set(folder)
        name = f"{self._package}.model"
        spec = spec_from_file_location(name, self._path, loader=_Loader(name, str(self._path)))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        with self.explained():
            spec.loader.exec_module(module)
        return module

    def result(self, value: object) -> object:
        """Return the value, awaited if it is awaitable, on one event loop for all calls."""
        if not inspect.isawaitable(value):
            return value
        if self._tasks is None:
            self._tasks = asyncio.Runner()

        async def wait() -> object:
            return await value

        return self._tasks.run(wait())

    def problem(self, text: str) -> ConfigError:
        return ConfigError(f"{self._label}: {text[:MAX_TEXT_CHARS]}")

    @contextmanager
    def explained(self, what: str = "") -> Iterator[None]:
        """Turn exceptions of the model's code during load into a ConfigError of one line."""
        try:
            yield
        except PenstockError:
            raise
        except BaseException as error:  # A model's code may raise anything, also SystemExit.
            if not self._says_all(error):
                log.error("the model raised %s", type(error).__name__, exc_info=error)
            raise self.problem(what + self._describe(error)) from error

    def close(self) -> None:
        if self._tasks is not None:
            self._tasks.close()
        folder = str(self._path.parent)
        if folder in sys.path:
            sys.path.remove(folder)
        for name in [n for n in list(sys.modules) if n.partition(".")[0] == self._package]:
            del sys.modules[name]

    def _says_all(self, error: BaseException) -> bool:
        """Whether one line says all; other errors are logged with their traceback."""
        if isinstance(error, OSError):
            return bool(error.filename == str(self._path))  # The file itself cannot be read.
        return isinstance(error, SyntaxError | ModuleNotFoundError | SystemExit)

    def _describe(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.lineno is not None:
            file = Path(error.filename or self._path)
            where = "" if file == self._path else f"{file.name} "
            return f"{where}line {error.lineno}: {error.msg}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(self._path)]
        where = f"line {lines[-1]}: " if lines else ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            name = error.name.removeprefix(f"{self._package}.")
            return f"{where}needs the module '{name}', which is not installed and not beside it"
        return where + next(iter(describe_error(error).splitlines()), "")


class _Loader(SourceFileLoader):
    """Loader without bytecode cache: the repository may be read-only, and a cache stale."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def end_model(code: Code, goodbye: Callable[[], object] | None) -> None:
    """Close the model, which may fail, and then its module."""
    try:
        if goodbye is not None:
            code.result(goodbye())
    except BaseException:  # A model's code may raise anything; the worker exits all the same.
        log.exception("the model failed while it was closed")
    finally:
        code.close()
