"""Open the user's model as a loadable folder: the folder itself, or a temporary copy if the model
is a file by itself or another number of threads is requested."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError
from penstock.optimizer import folders, shapes
from penstock.optimizer.candidates import Build, Candidate
from penstock.profiling.profiler import SAY_WHICH, read_config
from penstock.repository import layout
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import ModelSource, resolve


@contextmanager
def opened(model: str, name: str = "", num_threads: int | None = None) -> Iterator[Path]:
    """Yield the folder, which may be temporary. ConfigError says what is expected."""
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as made:
        source = resolve(model, name=name)
        folder = _from_file(source, Path(made)) if source.is_file else _from_folder(source)
        if num_threads is not None:
            folder = _with_threads(folder, num_threads, Path(made) / "threads")
        yield folder


def _from_folder(source: ModelSource) -> Path:
    found = source.read()
    config = found.only(source.path, "", SAY_WHICH)
    is_version = source.kind is ModelKind.VERSION_FOLDER
    return source.path if is_version else found.folders[config.name]


def _from_file(source: ModelSource, made: Path) -> Path:
    if source.kind is ModelKind.GGUF_FILE:
        problem = "is a language model, which is not profiled; use penstock bench"
        raise ConfigError([f"{source.path}: {problem}"])
    version = made / source.name / folders.VERSION
    version.mkdir(parents=True)
    folders.take_file(source, version, folders.link)
    return version.parent


def _with_threads(folder: Path, num_threads: int, made: Path) -> Path:
    config = read_config(folder)
    if config.backend not in shapes.THREADS:
        raise ConfigError([f"--threads: backend '{config.backend}' has no threads of its own"])
    target = made / config.name
    changed = shapes.with_instances(config, config.num_instances, num_threads)
    model = folder.parent if layout.folder_kind(folder) is ModelKind.VERSION_FOLDER else folder
    folders.write(Build(Candidate(), model, config), changed, target)
    return target
