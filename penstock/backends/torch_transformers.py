"""Networks of a Hugging Face folder, made by transformers from its config.json and safetensors.

Only classes of transformers itself are made, from files of the folder: no code of the folder and
nothing from the network is ever used. Called by the pytorch backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, first_line
from penstock.repository import pretrained

if TYPE_CHECKING:
    from torch.nn import Module

CLASSES = {
    "text classifier": "AutoModelForSequenceClassification",
    "token classifier": "AutoModelForTokenClassification",
    "image classifier": "AutoModelForImageClassification",
    "encoder": "AutoModel",
}
MAX_NAMES = 5


def load_network(folder: Path) -> Module:
    """Return the network in FP32. ConfigError if weights are missing: they would be random."""
    found = pretrained.read(folder)
    if found is None:
        raise ConfigError(f"{folder.name}: a language model; expected {pretrained.ACCEPTED}")
    module, info = _from_pretrained(CLASSES[found.task], folder)
    missing = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if found.task == "encoder" and missing and all("pooler" in name for name in missing):
        # Embeddings do not use the pooler, which is often saved without.
        missing = []
    if missing:
        listed = ", ".join(missing[:MAX_NAMES])
        more = f" and {len(missing) - MAX_NAMES} more" if missing[MAX_NAMES:] else ""
        problem = f"no weights for {listed}{more}, which {found.architecture} has"
        raise ConfigError(f"{folder.name}: {problem}")
    return module.float().eval()


def _from_pretrained(kind: str, folder: Path) -> tuple[Module, Mapping[str, Sequence[object]]]:
    library = _transformers()
    try:
        found: tuple[Module, Mapping[str, Sequence[object]]] = getattr(
            library, kind
        ).from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        return found
    except Exception as error:  # transformers raises many types for what it cannot read.
        text = f"{folder.name}: transformers cannot load it: {first_line(error)}"
        raise ConfigError(text) from error


def _transformers() -> ModuleType:
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend: the folder needs the package '{error.name}', which is not installed; "
            'pip install "penstock[hf]" brings it; a folder with onnx/model.onnx does not '
            "need it"
        ) from error
    library.utils.logging.disable_progress_bar()
    return library
