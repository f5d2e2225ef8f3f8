"""Detect language models: a GGUF file, a Hugging Face folder of a generative model, or a version of
one in a repository. Reads names and config.json, no weights."""

from __future__ import annotations

from pathlib import Path

from penstock import repository


def is_language_model(model: str) -> bool:
    path = Path(model)
    if path.suffix == repository.GGUF:
        return path.is_file()
    try:
        return path.is_dir() and any(map(_holds_one, [path, *_versions(path)]))
    except OSError:
        return False


def _versions(folder: Path) -> list[Path]:
    """Return the newest version folder, if any."""
    return [folder / name for name in repository.version_folders(folder)[-1:]]


def _holds_one(folder: Path) -> bool:
    if any(folder.glob(f"model{repository.GGUF}")):
        return True
    names = repository.architectures(folder)
    return any(name.endswith(repository.GENERATING) for name in names)
