"""Detect language models: a GGUF file, a Hugging Face folder of a generative model, or a version of
one in a repository. Reads names and config.json, no weights."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock import repository
from penstock.errors import ConfigError

# Hugging Face suffixes of causal language models. They include families that we do not serve, so
# that the user gets an error that lists those we do.
GENERATING = ("ForCausalLM", "LMHeadModel")


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
    names = architectures(folder)
    return any(name.endswith(GENERATING) for name in names)


def architectures(folder: Path) -> list[str]:
    """Return the architectures in config.json; empty without such a file."""
    path = folder / repository.TEXT_CONFIG
    if not path.is_file():
        return []
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ConfigError([f"{path}: not JSON: {error}"]) from None
    names = found.get("architectures") if isinstance(found, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
