"""The resolver of MODEL: every command and function that takes a model asks `resolve`.

A file, a folder, a repository, `package.module:factory`, or the URL of a running server. Whatever
is not a model gets an error that says what it is, by its name alone, and what to give instead.
Loads nothing; `layout` and `pbtxt` read configurations.
"""

from __future__ import annotations

import atexit
import difflib
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
from penstock.errors import ConfigError, InvalidRequest, NotFound
from penstock.repository import (
    layout,
    pbtxt,
    pbtxt_ensemble,
    pretrained,
    python_file,
    torchscript_file,
)
from penstock.repository.layout import ModelKind, RepositoryScan
from penstock.repository.pbtxt_fields import Proto

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
FACTORY_WRITER = "penstock.optimizer.torch_source"
# Characters of a name that is made from a file's name; others become "-".
NOT_IN_NAMES = re.compile(r"[^\w.-]+", re.ASCII)
MAX_NAMES = 5
ADDRESS = re.compile(r"[\w.-]+:\d+(/|$)")
FROM_TORCH = (
    "write the model with torch.export.save as model.pt2, or give package.module:factory, a "
    "function that returns the module with these weights"
)
FROM_FOLDER = "weights have no code; give the folder that holds them and config.json, or "
SAVED_MODEL = (
    "convert it with python -m tf2onnx.convert --saved-model FOLDER --output model.onnx and give "
    "that file"
)
# Files that hold a model, or a part of it, in a form that is not served, and what to do.
NOT_SERVED: Mapping[str, str] = {
    ".pt": f"a file of torch.save is a pickle, which can run any code; {FROM_TORCH}",
    ".pth": f"a state dict has no code; {FROM_TORCH}",
    ".ckpt": f"a checkpoint has no code; {FROM_TORCH}",
    ".bin": FROM_FOLDER + FROM_TORCH,
    ".safetensors": f"{FROM_FOLDER}package.module:factory, a function that returns the module with "
    "these weights",
    **dict.fromkeys(
        (".keras", ".h5"),
        "Keras models are not served; write it with model.export('model.onnx', format='onnx') and "
        "give that file",
    ),
    ".pb": f"TensorFlow graphs are not served; {SAVED_MODEL}",
    ".tflite": "TensorFlow Lite is not served; convert it with python -m tf2onnx.convert --tflite "
    "FILE --output model.onnx and give that file",
    **dict.fromkeys(
        (".pkl", ".pickle", ".joblib"),
        "a pickle can run any code and is not read; write scikit-learn models with skl2onnx as "
        "model.onnx, or load it in a model.py",
    ),
    **dict.fromkeys(
        (".plan", ".engine"),
        "a TensorRT plan does not tell its tensors; put it into a model's folder as 1/model.plan "
        "and declare them in config.pbtxt",
    ),
    ".pbtxt": "the configuration of a model; give the folder that holds it",
    **dict.fromkeys((".zip", ".tar", ".gz"), "an archive; unpack it and give what is in it"),
    ".mar": "an archive of TorchServe; unpack it and give what is in it",
}
SCRIPT = (
    "a TorchScript file does not tell its tensors; put it into a model's folder as 1/model.pt and "
    f"declare them in config.pbtxt; better, {FROM_TORCH}"
)
SAVED_MODEL_FILE, ADAPTER_FILE = "saved_model.pb", "adapter_config.json"


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

    def read(self, config_name: str = "") -> RepositoryScan:
        """Read the configurations of what can be served; ConfigError if that is nothing.
        `config_name` is as for `layout.read`."""
        self._check_served()
        if self.kind in BACKENDS:
            return self._read_file()
        if self.kind is ModelKind.FACTORY:
            return layout.read(_factory_folder(str(self.location), self.name))
        if self.kind is ModelKind.REPOSITORY and not layout.holds_models(self.path):
            raise ConfigError(f"{self.path}: {_describe_folder(self.path)}")
        if self.kind is not ModelKind.REPOSITORY or not self.name:
            return layout.read(self.path, config_name)
        try:
            return layout.read_one(self.path, self.name, config_name=config_name)
        except NotFound:
            there = layout.listed(self.names())
            problem = f"{self.path}: holds no model '{self.name}'; there: {there}"
            raise ConfigError(problem) from None

    def read_one(
        self, name: str, version: str = "", override: Proto | None = None, config_name: str = ""
    ) -> RepositoryScan:
        """Read one of `names()`, or only one version of it, with `override` instead of each
        config.pbtxt; NotFound for others. The names are compared, never used as paths."""
        if self.kind not in BACKENDS and self.kind is not ModelKind.FACTORY:
            self._check_served()
            return layout.read_one(self.path, name, version, override, config_name)
        if override is not None:
            raise InvalidRequest(f"{name}: {layout.NOT_OVERRIDDEN}")
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
        given = next(filter(Path.is_file, beside), None)
        if path.parent.name.isdigit() and given is not None:
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
    reason = _describe_missing(path, text) if text else "no model is given"
    raise ConfigError(f"{text}: {reason}; expected {FORMS}".removeprefix(": "))


def is_language_model(model: str) -> bool:
    """Return whether it is a GGUF file, a Hugging Face folder of a generative model, or a version
    of one in a repository. Reads names and config.json, no weights."""
    try:
        source = resolve(model)
    except ConfigError:
        return False
    match source.kind:
        case ModelKind.GGUF_FILE:
            return True
        case ModelKind.HUGGING_FACE | ModelKind.VERSION_FOLDER:
            return _generates(source.path)
        case ModelKind.MODEL_FOLDER:
            # The newest version decides.
            newest = layout.version_folders(source.path)[-1:]
            return any(_generates(source.path / name) for name in newest)
    return False


def is_ensemble(model: str) -> bool:
    """Return whether it is an ensemble, or a version of one, in a repository."""
    try:
        source = resolve(model)
        if source.kind not in (ModelKind.MODEL_FOLDER, ModelKind.VERSION_FOLDER):
            return False
        folder, version = source.path, ""
        if source.kind is ModelKind.VERSION_FOLDER:
            folder, version = folder.parent, folder.name
        own = version if version and layout.has_own_config(folder, version) else ""
        return pbtxt_ensemble.is_ensemble(layout.read_message(folder, own))
    except ConfigError:
        return False


def _generates(folder: Path) -> bool:
    if any(folder.glob(f"model{layout.GGUF}")):
        return True
    return any(name.endswith(pretrained.GENERATORS) for name in layout.architectures(folder))


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
    if suffix in torchscript_file.SUFFIXES and torchscript_file.is_script(path):
        raise ConfigError(f"{text}: {SCRIPT}")
    raise ConfigError(f"{text}: {NOT_SERVED.get(suffix, f'not a model; expected {FORMS}')}")


@lru_cache(maxsize=8)
def _factory_folder(factory: str, name: str) -> Path:
    """Return the folder of a model that a factory makes, which exists as long as this process."""
    made = Path(tempfile.mkdtemp(prefix="penstock-factory-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    folder = made / name
    try:
        report = python_file.run_code(FACTORY_WRITER, factory, str(folder))
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


def _describe_missing(path: Path, text: str) -> str:
    """Say that there is no such path, and what the user may have meant."""
    missing = "no such file or folder"
    if ADDRESS.match(text):
        return f"{missing}; did you mean http://{text}?"
    if path.is_symlink():
        return f"is a link that leads nowhere, to {path.readlink()}"
    folder = path.parent
    if not folder.is_dir():
        return missing
    similar = difflib.get_close_matches(path.name, _names(folder), n=3)
    also = f"; did you mean {' or '.join(str(folder / each) for each in similar)}?"
    return missing + (also if similar else "")


def _describe_folder(folder: Path) -> str:
    names = _names(folder)
    if not names:
        return f"is an empty folder; expected {FORMS}"
    if SAVED_MODEL_FILE in names:
        command = SAVED_MODEL.replace("FOLDER", str(folder))
        return f"is a SavedModel of TensorFlow, which is not served; {command}"
    if ADAPTER_FILE in names:
        return (
            "is a LoRA adapter, which is a part of a model; merge it with peft's "
            "merge_and_unload(), write the result with save_pretrained and give that folder"
        )
    files = [name for name in names if (folder / name).is_file()]
    # Any folder may hold Python files; few of them are models.
    endings = tuple(suffix for suffix in FILE_KINDS if suffix != ".py")
    models = [name for name in files if name == "model.py" or name.lower().endswith(endings)]
    if len(models) == 1:
        return f"is no model's folder, but holds one: give {folder / models[0]}"
    if models:
        some = ", ".join(models[:MAX_NAMES]) + ", …" * bool(models[MAX_NAMES:])
        return f"holds several models ({some}); give one of them, such as {folder / models[0]}"
    for name in files:
        if (reason := NOT_SERVED.get(Path(name).suffix.lower())) is not None:
            return f"holds no model, but {name}: {reason}"
    expected = "<model>/<version>/model.onnx, with the version a number"
    return f"holds no model; expected {expected}, or {FORMS}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    except OSError:
        return []
