"""What the user named, as a model's folder that can be loaded: itself, or a copy beside nobody's
files when it is a bare ONNX file or is to have other threads."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from penstock import pbtxt, repository
from penstock.backends import MODULES
from penstock.errors import ConfigError, NotFound
from penstock.optimizer.profile.profiler import read_config

# The option of each backend that sets how many threads an instance has.
THREAD_OPTIONS = {
    "onnxruntime": "intra_op_thread_count",
    "pytorch": "intra_op_thread_count",
    "openvino": "inference_num_threads",
}
assert THREAD_OPTIONS.keys() <= MODULES.keys()


@contextmanager
def opened(model: str, name: str = "", num_threads: int | None = None) -> Iterator[Path]:
    """The folder, which lives as long as it is open. ConfigError says what was expected."""
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as made:
        path = Path(model)
        folder = _from_file(path, Path(made)) if path.is_file() else _from_repository(path, name)
        if num_threads is not None:
            folder = _with_threads(folder, num_threads, Path(made) / "threads")
        yield folder


def _from_repository(path: Path, name: str) -> Path:
    if not name:
        folders = repository.read(path).folders
        if len(folders) > 1:
            there = repository.listed(sorted(folders))
            raise ConfigError([f"{path}: holds {there}; say which by --model"])
        return next(iter(folders.values()))
    try:
        return repository.read_one(path, name).folders[name]
    except NotFound:
        there = repository.listed(repository.names(path))
        raise ConfigError([f"{path}: holds no model '{name}'; there: {there}"]) from None


def _from_file(path: Path, made: Path) -> Path:
    if path.suffix != ".onnx":
        raise ConfigError(
            [f"{path}: expected a model's folder, a repository, or a file that ends in .onnx"]
        )
    folder = made / (re.sub(r"[^\w.-]", "-", path.stem).lstrip(".-") or "model")
    version = folder / "1"
    version.mkdir(parents=True)
    _link(path, version / "model.onnx")
    for name in _external(path):
        source = (path.parent / name).resolve()
        if not source.is_relative_to(path.parent.resolve()) or not source.is_file():
            raise ConfigError([f"{path}: its weights '{name}' are not beside it"])
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        _link(source, version / name)
    return folder


def _external(path: Path) -> set[str]:
    """Files beside the model that hold its weights."""
    import onnx

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # onnx and protobuf raise many types for a broken file.
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError([f"{path}: cannot be read as ONNX: {text}"]) from None
    return {
        entry.value
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }


def _with_threads(folder: Path, num_threads: int, made: Path) -> Path:
    config = read_config(folder)
    option = THREAD_OPTIONS.get(config.backend)
    if option is None:
        raise ConfigError([f"--threads: backend '{config.backend}' has no threads of its own"])
    target = made / folder.name
    version = Path(config.artifact).parent
    for source in sorted(version.rglob("*")):
        # What a manifest says of the config would no longer be true.
        if source.is_file() and source.name not in ("manifest.json", "config.pbtxt"):
            place = target / config.version / source.relative_to(version)
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(source, place)
    options = {**config.options, option: str(num_threads)}
    (target / "config.pbtxt").write_text(pbtxt.write(replace(config, options=options)))
    return target


def _link(source: Path, target: Path) -> None:
    """The same bytes without copying them, where the file system can."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
