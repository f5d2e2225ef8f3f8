"""What a MODEL is: every command and function that takes one asks `resolve`.

A file, a folder, a repository, `package.module:factory`, or the URL of a running server. Whatever
is not a model gets an error that names the next command. Loads nothing; `repository` and `pbtxt`
read configurations.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock import pbtxt, repository
from penstock.errors import ConfigError, NotFound
from penstock.repository import Found, ModelKind

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
ADDRESS = re.compile(r"[\w.-]+:\d+(/|$)")
# Characters of a name that is made from a file's name; others become "-".
NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)
FROM_TORCH = (
    "write the model with torch.export.save as model.pt2, or give package.module:factory, a "
    "function that returns the module with these weights"
)
# Files that hold a model, or a part of it, in a form that is not served, and what to do.
NOT_SERVED: Mapping[str, str] = {
    ".pt": f"a file of torch.save or TorchScript is a pickle, which can run any code; {FROM_TORCH}",
    ".pth": f"a state dict has no code; {FROM_TORCH}",
    ".bin": "weights have no code; give the folder that holds them and config.json, or "
    f"{FROM_TORCH}",
    ".ckpt": f"a checkpoint has no code; {FROM_TORCH}",
    ".safetensors": "weights have no code; give the folder that holds them and config.json, or "
    "package.module:factory, a function that returns the module with these weights",
    ".keras": "Keras models are not served; write it with model.export('model.onnx', "
    "format='onnx') and give that file",
    ".h5": "Keras models are not served; write it with model.export('model.onnx', "
    "format='onnx') and give that file",
    ".pb": "TensorFlow graphs are not served; convert it with python -m tf2onnx.convert "
    "--saved-model FOLDER --output model.onnx and give that file",
    ".tflite": "TensorFlow Lite is not served; convert it with python -m tf2onnx.convert "
    "--tflite FILE --output model.onnx and give that file",
    ".pkl": "a pickle can run any code and is not read; write scikit-learn models with skl2onnx as "
    "model.onnx, or load it in a model.py",
    ".joblib": "a pickle can run any code and is not read; write scikit-learn models with skl2onnx "
    "as model.onnx, or load it in a model.py",
    ".pbtxt": "the configuration of a model; give the folder that holds it",
}


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
            raise ConfigError([f"{self.location}: is {self.kind.value}; expected a file or folder"])
        return self.location

    @property
    def is_file(self) -> bool:
        return self.kind in FILE_KINDS.values()

    def names(self) -> list[str]:
        """Return the models there are, loadable or not."""
        self._check_served()
        return [self.name] if self.kind in BACKENDS else repository.names(self.path)

    def read(self) -> Found:
        """Read the configurations of what can be served; ConfigError if that is nothing."""
        self._check_served()
        if self.kind in BACKENDS:
            return self._read_file()
        if self.kind is not ModelKind.REPOSITORY or not self.name:
            return repository.read(self.path)
        try:
            return repository.read_one(self.path, self.name)
        except NotFound:
            there = repository.listed(self.names())
            problem = f"{self.path}: holds no model '{self.name}'; there: {there}"
            raise ConfigError([problem]) from None

    def read_one(self, name: str) -> Found:
        """Read one of `names()`; NotFound for others. Names are compared, never used as paths."""
        self._check_served()
        if self.kind not in BACKENDS:
            return repository.read_one(self.path, name)
        if name != self.name:
            raise NotFound(f"no such model: '{name}' is not served here; there: {self.name}")
        return self._read_file()

    def _check_served(self) -> None:
        if self.kind is ModelKind.URL:
            problem = "is a running server, which serves its models already"
            raise ConfigError([f"{self.location}: {problem}; use penstock bench {self.location}"])
        if self.kind is ModelKind.FACTORY:
            raise ConfigError(
                [
                    f"{self.location}: is {self.kind.value}, which does not say what tensors it "
                    f"takes; penstock optimize {self.location} makes a model that is served"
                ]
            )

    def _read_file(self) -> Found:
        """Read a file as version 1 of a model, configured by what the file says."""
        path = self.path
        found = Found(folders={self.name: path.parent})
        message = pbtxt.parse("")
        message.backend = BACKENDS[self.kind]
        try:
            config = pbtxt.resolve(message, self.name, path.parent, path)
            found.configs.append(replace(config, version="1"))
        except ConfigError as error:
            found.problems[self.name] = list(error.problems)
        return found


def resolve(model: str | os.PathLike[str], *, name: str = "") -> ModelSource:
    """Say what `model` is; ConfigError if it is none. `name` chooses a model of a repository, or
    names the one model of a file."""
    text = os.fspath(model)
    if URL.match(text):
        return ModelSource(ModelKind.URL, text, name)
    path = Path(os.path.abspath(text))
    if text and path.exists():
        return _resolve_path(path, text, name)
    if FACTORY.fullmatch(text):
        module = text.partition(":")[0].rpartition(".")[2]
        return ModelSource(ModelKind.FACTORY, text, name or module)
    raise ConfigError([f"{text}: {_missing(path, text) if text else 'is empty'}; expected {FORMS}"])


def _resolve_path(path: Path, text: str, name: str) -> ModelSource:
    if path.is_dir():
        kind = repository.folder_kind(path)
        if kind is ModelKind.REPOSITORY:
            return ModelSource(kind, path, name)
        source = ModelSource(kind, path, repository.names(path)[0])
        if name not in ("", source.name):
            raise ConfigError([f"{text}: holds no model '{name}'; there: {source.name}"])
        return source
    if path.name == repository.TEXT_CONFIG:
        return _resolve_path(path.parent, text, name)
    suffix = path.suffix.lower()
    if suffix in FILE_KINDS:
        stem = path.stem if suffix == repository.GGUF else valid_name(path.stem)
        return ModelSource(FILE_KINDS[suffix], path, name or stem)
    reason = NOT_SERVED.get(suffix, f"not a model; expected {FORMS}")
    raise ConfigError([f"{text}: {reason}"])


def valid_name(text: str) -> str:
    """Return a model's name from a file's: ASCII letters, digits, `_`, `.` and `-`; everything else
    becomes `-`."""
    return NOT_IN_NAMES.sub("-", text).strip(".-") or "model"


def _missing(path: Path, text: str) -> str:
    """Say that there is no such file, and what is there."""
    folder = path.parent
    if ADDRESS.match(text):
        return f"no such file or folder; did you mean http://{text}?"
    if not folder.is_dir():
        return "no such file or folder"
    there = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    similar = difflib.get_close_matches(path.name, there, n=3)
    also = f"; did you mean {' or '.join(str(Path(folder, each)) for each in similar)}?"
    return "no such file or folder" + (also if similar else "")
