"""The resolver of MODEL: every command and function that takes a model asks `resolve`.

A file, a folder, a repository, `package.module:factory`, or the URL of a running server. Whatever
is not a model gets an error that names the next command. Loads nothing; `layout` and `pbtxt`
read configurations.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec

from penstock.config import ModelConfig
from penstock.errors import ConfigError, NotFound
from penstock.repository import layout, model_code, model_hints, pbtxt
from penstock.repository.layout import ModelKind, RepositoryScan

FORMS = (
    "model.onnx, model.pt2, model.xml, model.gguf, model.py, a Hugging Face folder, a model's "
    "folder, a version of it, a repository, package.module:factory, or the URL of a running server"
)
# Files that are a model by themselves, and the backend that loads them.
FILE_KINDS: Mapping[str, ModelKind] = {
    ".onnx": ModelKind.ONNX_FILE,
    ".pt2": ModelKind.PT2_FILE,
    ".xml": ModelKind.OPENVINO_FILE,
    ".gguf": ModelKind.GGUF_FILE,
    ".py": ModelKind.PYTHON_FILE,
}
BACKENDS: Mapping[ModelKind, str] = {
    ModelKind.ONNX_FILE: "onnxruntime",
    ModelKind.PT2_FILE: "pytorch",
    ModelKind.OPENVINO_FILE: "openvino",
    ModelKind.PYTHON_FILE: "python",
}
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
URL = re.compile(r"[a-z][a-z0-9+]*://", re.IGNORECASE)
FACTORY_WRITER = "penstock.optimizer.factory_folder"
# Characters of a name that is made from a file's name; others become "-".
NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as the user gave it."""

    kind: ModelKind
    # Absolute path; a URL or a factory as text.
    location: Path | str
    # Name of the model; empty for a repository of which none was chosen, and for URLs.
    name: str = ""

    @property
    def path(self) -> Path:
        """The location of a file or folder."""
        if isinstance(self.location, str):
            raise ConfigError(f"{self.location}: is {self.kind.value}; expected a file or folder")
        return self.location

    @property
    def is_file(self) -> bool:
        return self.kind in FILE_KINDS.values()

    def names(self) -> list[str]:
        """Return the models there are, loadable or not."""
        self._check_served()
        is_one = self.kind in BACKENDS or self.kind is ModelKind.FACTORY
        return [self.name] if is_one else layout.names(self.path)

    def read(self) -> RepositoryScan:
        """Read the configurations of what can be served; ConfigError if that is nothing."""
        self._check_served()
        if self.kind in BACKENDS:
            return self._read_file()
        if self.kind is ModelKind.FACTORY:
            return layout.read(_factory_folder(str(self.location), self.name))
        if self.kind is ModelKind.REPOSITORY and not layout.holds_models(self.path):
            reason = model_hints.describe_folder(self.path, tuple(FILE_KINDS), FORMS)
            raise ConfigError(f"{self.path}: {reason}")
        if self.kind is not ModelKind.REPOSITORY or not self.name:
            return layout.read(self.path)
        try:
            return layout.read_one(self.path, self.name)
        except NotFound:
            there = layout.listed(self.names())
            problem = f"{self.path}: holds no model '{self.name}'; there: {there}"
            raise ConfigError(problem) from None

    def read_one(self, name: str) -> RepositoryScan:
        """Read one of `names()`; NotFound for others. Names are compared, never used as paths."""
        if self.kind not in BACKENDS and self.kind is not ModelKind.FACTORY:
            self._check_served()
            return layout.read_one(self.path, name)
        if name != self.name:
            raise NotFound(f"no such model: '{name}' is not served here; there: {self.name}")
        # Asked for again, a factory may be other code.
        _factory_folder.cache_clear()
        return self.read()

    def _check_served(self) -> None:
        if self.kind is ModelKind.URL:
            problem = "is a running server, which serves its models already"
            raise ConfigError(f"{self.location}: {problem}; use penstock bench {self.location}")

    def _read_file(self) -> RepositoryScan:
        """Read a file as version 1 of a model, configured by what the file says."""
        path = self.path
        message = pbtxt.parse("")
        message.backend = BACKENDS[self.kind]

        def read() -> ModelConfig:
            config = pbtxt.resolve(message, self.name, path.parent, path)
            return replace(config, notes=(*self._file_notes(), *config.notes))

        return layout.read_alone(self.name, path.parent, read)

    def _file_notes(self) -> list[str]:
        path = self.path
        notes: list[str] = []
        if valid_name(path.stem) == self.name != path.stem:
            rule = "in a model's name, characters other than letters, digits, _ . - become -"
            notes.append(f"served as '{self.name}': {rule}")
        beside = [folder / layout.CONFIG for folder in (path.parent, path.parent.parent)]
        if path.parent.name.isdigit() and any(file.is_file() for file in beside):
            given = next(file for file in beside if file.is_file())
            notes.append(f"{given} is not used; give {path.parent} to serve this version with it")
        return notes


def resolve(model: str | os.PathLike[str], *, name: str = "") -> ModelSource:
    """Say what `model` is; ConfigError if it is not a model. `name` chooses a model of a
    repository, or names the one model of a file."""
    text = os.fspath(model)
    if URL.match(text):
        return ModelSource(ModelKind.URL, text, name)
    path = Path(os.path.abspath(text))
    if text and path.exists():
        return _resolve_path(path, text, name)
    if FACTORY.fullmatch(text):
        module = text.partition(":")[0].rpartition(".")[2]
        return ModelSource(ModelKind.FACTORY, text, name or module)
    reason = model_hints.describe_missing(path, text) if text else "no model is given"
    raise ConfigError(f"{text}: {reason}; expected {FORMS}".removeprefix(": "))


def _resolve_path(path: Path, text: str, name: str) -> ModelSource:
    if path.is_dir():
        kind = layout.folder_kind(path)
        if kind is ModelKind.REPOSITORY:
            return ModelSource(kind, path, name)
        source = ModelSource(kind, path, layout.names(path)[0])
        if name not in ("", source.name):
            raise ConfigError(f"{text}: holds no model '{name}'; there: {source.name}")
        return source
    if not path.is_file():
        raise ConfigError(f"{text}: is no regular file; expected {FORMS}")
    if path.name == layout.TEXT_CONFIG:
        return _resolve_path(path.parent, text, name)
    suffix = path.suffix.lower()
    if suffix in FILE_KINDS:
        stem = path.stem if suffix == layout.GGUF else valid_name(path.stem)
        return ModelSource(FILE_KINDS[suffix], path, name or stem)
    raise ConfigError(f"{text}: {model_hints.describe_file(path, FORMS)}")


@lru_cache(maxsize=8)
def _factory_folder(factory: str, name: str) -> Path:
    """Return the folder of a model that a factory makes, which exists as long as this process."""
    made = Path(tempfile.mkdtemp(prefix="penstock-factory-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = made / name
    try:
        report = model_code.run(FACTORY_WRITER, factory, str(folder))
        problems = msgspec.json.decode(report, type=list[str])
    except ConfigError as error:
        problems = [f"{factory}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return folder


def valid_name(text: str) -> str:
    """Return a model's name from a file's: ASCII letters, digits, `_`, `.` and `-`; everything else
    becomes `-`."""
    return NOT_IN_NAMES.sub("-", text).strip(".-") or "model"
