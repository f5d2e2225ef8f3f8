"""Detect language models: a GGUF file, a Hugging Face folder of a generative model, or a version of
one in a repository. Reads names and config.json, no weights."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.repository import layout, pretrained
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import resolve


def is_language_model(model: str) -> bool:
    try:
        source = resolve(model)
    except ConfigError:
        return False
    match source.kind:
        case ModelKind.GGUF_FILE:
            return True
        case ModelKind.HUGGING_FACE | ModelKind.VERSION_FOLDER:
            return _holds_one(source.path)
        case ModelKind.MODEL_FOLDER:
            # The newest version decides.
            newest = layout.version_folders(source.path)[-1:]
            return any(_holds_one(source.path / name) for name in newest)
    return False


def _holds_one(folder: Path) -> bool:
    if any(folder.glob(f"model{layout.GGUF}")):
        return True
    names = layout.architectures(folder)
    return any(name.endswith(pretrained.GENERATORS) for name in names)
