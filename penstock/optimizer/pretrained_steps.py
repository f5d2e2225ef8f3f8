"""The built-in steps of a Hugging Face folder around the model that is optimised.

With them, a candidate is measured from text or image to label, and the committed version is served
through the same stages as the folder itself. Data that holds the network's own inputs (tokens)
needs no steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.backends.processing import apply
from penstock.config import IMAGE, TOKENIZER, ModelConfig, Postprocess, Preprocess
from penstock.data.example_sets import rename
from penstock.errors import ConfigError, InvalidRequest
from penstock.optimizer import sent
from penstock.optimizer.plan import Plan
from penstock.optimizer.sent import Row
from penstock.repository import pretrained, pretrained_message
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import resolve
from penstock.repository.parameters import IMAGE_INPUT
from penstock.repository.pretrained import Pretrained
from penstock.repository.pretrained_message import PIXELS, TEXT, TOKENS
from penstock.types import TensorSpec

# Files that steps read: of the network, the tokenizer, images and sentence-transformers.
FILES = (
    pretrained.CONFIG,
    *pretrained_message.TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "merges.txt",
    pretrained.PREPROCESSOR,
    "modules.json",
    "sentence_bert_config.json",
)


def find_steps(plan: Plan, rows: Sequence[Row]) -> Pretrained | None:
    """Return the folder whose steps apply; None for other models, for data that holds tokens, and
    with the user's own functions. ConfigError for folders that cannot be measured from text."""
    if plan.preprocess or plan.postprocess:
        return None
    source = resolve(plan.model)
    found = pretrained.read(source.path) if source.kind is ModelKind.HUGGING_FACE else None
    if found is None or any(name in rows[0] for name in (TOKENS[0], PIXELS) if rows):
        return None
    if found.task == "image classifier":
        if not rows:
            raise ConfigError(["data: an image classifier needs some; expected a folder of images"])
        return found
    if not pretrained_message.has_tokenizer(found.folder):
        return None
    if found.task == "token classifier":
        if not rows:
            return None
        expected = f"expected data with its tokens: {', '.join(TOKENS[:2])}"
        raise ConfigError([f"data: token classifiers are not measured from text; {expected}"])
    return found


def exported_network(folder: Path) -> Path | None:
    """Return the ONNX file of a folder that has no weights of its own."""
    found = pretrained.read(folder)
    if found is None or found.has_weights:
        return None
    return folder / found.onnx_file


def copy_files(folder: Path, version: Path) -> None:
    names = [Path(name) for name in FILES if (folder / name).is_file()]
    names += [path.relative_to(folder) for path in sorted(folder.glob("*_*/config.json"))]
    for name in names:
        (version / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, version / name)


def user_input(found: Pretrained) -> TensorSpec:
    return IMAGE_INPUT if found.task == "image classifier" else TEXT


def network_rows(config: ModelConfig, found: Pretrained, rows: Sequence[Row]) -> list[Row]:
    """Return what the network gets for the user's rows. `config` is the network's."""
    spec = user_input(found)
    names = rename(spec, list(rows[0])) if rows else {}
    given = [
        {names.get(name, name): value for name, value in row.items()}
        for row in sent.without_labels(rows, [spec.name])
    ]
    if given and spec.name not in given[0]:
        there = ", ".join(f"'{name}'" for name in given[0])
        raise ConfigError([f"data: has {there}; expected one column of texts, called 'text'"])
    wrong = [row for row in given if row[spec.name].dtype != np.object_]
    if wrong:
        raise ConfigError([f"data: '{spec.name}' holds numbers; expected {spec.datatype}"])
    try:
        return apply(add_steps(config, found), given)
    except InvalidRequest as error:
        raise ConfigError([f"data: {error}"]) from None


def add_steps(config: ModelConfig, found: Pretrained) -> ModelConfig:
    outputs = [each for each in config.outputs if each.name in pretrained_message.ANSWERS]
    given = (outputs or list(config.outputs))[0]
    is_image = found.task == "image classifier"
    padding = config.padding
    if padding is not None:
        pad = float(pretrained.pad_token(found.config))
        axes = [replace(a, value=pad) if a.input == TOKENS[0] else a for a in padding.axes]
        padding = replace(padding, axes=tuple(axes))
    step = Preprocess(IMAGE if is_image else TOKENIZER, config.inputs, padding)
    return replace(
        config,
        inputs=(user_input(found),),
        outputs=tuple(pretrained_message.outputs(found, given)),
        padding=None,
        preprocess=step,
        postprocess=Postprocess(found.head, (given,)),
    )
