"""The built-in steps behind a network, by the batch: labels and scores, or embeddings.

`classifier` turns logits into LABEL, SCORE and SCORES by `id2label` and `problem_type` of
config.json; `token_classifier` turns the logits of all tokens into ENTITIES, as JSON; `embedding`
pools the vectors of all tokens as the folder's sentence-transformers modules say. They run in the
network's worker, on whole batches of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.backends import Batch, Execution, Outputs, PerRequest, Runner
from penstock.config import (
    CLASSIFIER,
    EMBEDDING,
    HEAD_INPUTS,
    OFFSETS,
    TOKEN_CLASSIFIER,
    ModelConfig,
)
from penstock.repository import pretrained
from penstock.types import Array

MASK = "attention_mask"
# The label of tokens that are no entity.
OUTSIDE = "O"


class ClassifierHead:
    """Logits [rows, classes] to labels and scores."""

    def __init__(self, folder: Path, logits: str) -> None:
        described = pretrained.read_config(folder)
        self._labels = np.array(
            [each.encode() for each in pretrained.labels(described)], dtype=np.object_
        )
        self._activation = pretrained.activation(described)
        self._logits = logits

    def __call__(self, outputs: Outputs, inputs: Outputs) -> dict[str, Array]:
        scores = activate(outputs[self._logits].astype(np.float32), self._activation)
        best = scores.argmax(axis=-1)
        return {
            "LABEL": self._labels[best][:, None],
            "SCORE": np.take_along_axis(scores, best[:, None], axis=-1),
            "SCORES": scores,
        }


class EmbeddingHead:
    """Vectors of tokens [rows, tokens, size] to one vector a row; vectors that the network has
    pooled itself are only normalised."""

    def __init__(self, folder: Path, vectors: str) -> None:
        self._settings = pretrained.embedding(folder)
        self._vectors = vectors

    def __call__(self, outputs: Outputs, inputs: Outputs) -> dict[str, Array]:
        vectors = outputs[self._vectors].astype(np.float32)
        if vectors.ndim > 2:
            mask = inputs.get(MASK, np.ones(vectors.shape[:2], np.int64))
            vectors = pool(vectors, mask, self._settings.pooling)
        if self._settings.is_normalized:
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / np.maximum(lengths, 1e-12)
        return {"EMBEDDING": vectors}


class TokenClassifierHead:
    """Logits [rows, tokens, classes] to the entities of each text, and the scores of its tokens.
    Tokens without characters of the text (special tokens, padding) count as none."""

    def __init__(self, folder: Path, logits: str) -> None:
        self._labels = pretrained.labels(pretrained.read_config(folder))
        self._logits = logits

    def __call__(self, outputs: Outputs, inputs: Outputs) -> dict[str, Array]:
        logits = outputs[self._logits].astype(np.float32)
        scores = activate(logits, "softmax")
        offsets = inputs[OFFSETS]
        is_text = offsets[..., 1] > offsets[..., 0]
        best = scores.argmax(axis=-1)
        top = np.take_along_axis(scores, best[..., None], axis=-1)[..., 0]
        entities = np.empty((len(logits), 1), dtype=np.object_)
        for row in range(len(logits)):
            kept = np.flatnonzero(is_text[row])
            tokens = [
                Token(self._labels[best[row, n]], float(top[row, n]), *offsets[row, n].tolist())
                for n in kept
            ]
            entities[row, 0] = msgspec.json.encode(group(tokens))
        return {"ENTITIES": entities, "SCORES": scores * is_text[..., None], "OFFSETS": offsets}


class Token(NamedTuple):
    """The label of a token, and the characters of the text that it covers."""

    label: str
    score: float
    start: int
    end: int

    @property
    def tag(self) -> str:
        """The label without its B- or I-."""
        return self.label[2:] if self.label[:2] in ("B-", "I-") else self.label


class Entity(msgspec.Struct):
    """Adjacent tokens of one tag; the names are those of transformers' pipelines."""

    entity_group: str
    score: float
    start: int
    end: int


def group(tokens: Sequence[Token]) -> list[Entity]:
    """Join adjacent tokens of one tag, as the aggregation strategy "simple" of transformers does.
    A label B- begins a new entity; tokens labelled O are left out."""
    groups: list[list[Token]] = []
    for token in tokens:
        begins = token.label.startswith("B-")
        if groups and groups[-1][-1].tag == token.tag and not begins:
            groups[-1].append(token)
        else:
            groups.append([token])
    return [
        Entity(each[0].tag, float(np.mean([t.score for t in each])), each[0].start, each[-1].end)
        for each in groups
        if each[0].tag != OUTSIDE
    ]


Head = ClassifierHead | EmbeddingHead | TokenClassifierHead
KINDS: Mapping[str, type[Head]] = {
    CLASSIFIER: ClassifierHead,
    EMBEDDING: EmbeddingHead,
    TOKEN_CLASSIFIER: TokenClassifierHead,
}
# Outputs of heads that are as long as the network's.
AS_LONG: Mapping[str, tuple[str, ...]] = {TOKEN_CLASSIFIER: ("SCORES", "OFFSETS")}


def open_head(config: ModelConfig) -> Head:
    """Open the head that the configuration names, on the network's first output."""
    assert config.postprocess is not None
    name = config.postprocess.outputs[0].name
    return KINDS[config.postprocess.function](config.folder, name)


def activate(logits: Array, activation: pretrained.Activation) -> Array:
    """Return scores: softmax or sigmoid of the logits, or the logits themselves."""
    if activation == "none":
        return logits
    if activation == "sigmoid":
        # In the form that does not overflow for either sign.
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits)), np.float32)
    with np.errstate(under="ignore"):
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)


def pool(vectors: Array, mask: Array, pooling: pretrained.Pooling) -> Array:
    """Pool the vectors of the tokens that the mask marks, as sentence-transformers does."""
    if pooling == "cls":
        return np.asarray(vectors[:, 0])
    kept = mask.astype(np.float32)[..., None]
    if pooling == "max":
        return np.asarray(np.where(kept > 0, vectors, -np.inf).max(axis=1), np.float32)
    if pooling == "lasttoken":
        last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] > 0, axis=1)
        return np.asarray(vectors[np.arange(len(vectors)), last])
    counts = np.maximum(kept.sum(axis=1), 1e-9)
    divisor = np.sqrt(counts) if pooling == "mean_sqrt_len_tokens" else counts
    return np.asarray((vectors * kept).sum(axis=1) / divisor, np.float32)


class Headed(Runner):
    """A Runner whose answers go through a head. Warm-up and trials at load run the network."""

    def __init__(self, config: ModelConfig, inner: Runner) -> None:
        assert config.postprocess is not None
        self.inner = inner
        self.keeps_rows_apart, self.runs_ahead = inner.keeps_rows_apart, inner.runs_ahead
        self._head = open_head(config)
        function = config.postprocess.function
        self._not_for_network = HEAD_INPUTS.get(function, ())
        # Axes of outputs that follow the padded ones; see `Proof.crops`.
        self.crops = tuple((name, 0) for name in AS_LONG.get(function, ()))

    def built(self) -> Mapping[str, str]:
        return self.inner.built()

    def start(self, batch: Batch) -> Execution:
        inputs, hidden = batch.inputs, self._not_for_network
        if hidden:
            batch = batch.without(hidden)
        return HeadedExecution(self.inner.start(batch), self._head, inputs)

    def close(self) -> None:
        self.inner.close()


@dataclass(slots=True)
class HeadedExecution:
    inner: Execution
    head: Head
    inputs: Outputs
    # Known once `wait` is exhausted.
    prepare_s: float = 0.0
    finish_s: float = 0.0

    def wait(self) -> Iterable[Outputs | PerRequest]:
        for answer in self.inner.wait():
            # `processing.load` refuses models that see requests.
            assert not isinstance(answer, PerRequest)
            yield self.head(answer, self.inputs)
        self.prepare_s, self.finish_s = self.inner.prepare_s, self.inner.finish_s
