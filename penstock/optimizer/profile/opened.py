"""Open the user's model as a loadable folder: the folder itself, or a temporary copy if the model
is a bare ONNX file or another number of threads is requested."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock import repository
from penstock.errors import BackendFailed, ConfigError, NotFound
from penstock.optimizer import folders, onnx_model, shapes
from penstock.optimizer.candidates import Build, Candidate
from penstock.optimizer.profile.profiler import read_config


@contextmanager
def opened(model: str, name: str = "", num_threads: int | None = None) -> Iterator[Path]:
    """Yield the folder, which may be temporary. ConfigError says what is expected."""
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as made:
        path = Path(model)
        folder = _from_file(path, Path(made)) if path.is_file() else _from_repository(path, name)
        if num_threads is not None:
            folder = _with_threads(folder, num_threads, Path(made) / "threads")
        yield folder


def _from_repository(path: Path, name: str) -> Path:
    if not name:
        found = repository.read(path).folders
        if len(found) > 1:
            there = repository.listed(sorted(found))
            raise ConfigError([f"{path}: holds {there}; say which by --model"])
        return next(iter(found.values()))
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
    folders.link(path, version / "model.onnx")
    for name in _external(path):
        source = (path.parent / name).resolve()
        if not source.is_relative_to(path.parent.resolve()) or not source.is_file():
            raise ConfigError([f"{path}: its weights '{name}' are not beside it"])
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        folders.link(source, version / name)
    return folder


def _external(path: Path) -> set[str]:
    """Return the files beside the model that hold its weights."""
    try:
        return onnx_model.external_files(onnx_model.read(path, weights=False))
    except BackendFailed as error:
        raise ConfigError([f"{path.parent}: {error}"]) from None


def _with_threads(folder: Path, num_threads: int, made: Path) -> Path:
    config = read_config(folder)
    if config.backend not in shapes.THREADS:
        raise ConfigError([f"--threads: backend '{config.backend}' has no threads of its own"])
    target = made / folder.name
    changed = shapes.with_instances(config, config.num_instances, num_threads)
    folders.write(Build(Candidate(), folder, config), changed, target)
    return target
