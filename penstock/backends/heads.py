"""The built-in steps behind a network, by the batch: labels and scores, or embeddings.

`classifier` turns logits into LABEL, SCORE and SCORES by `id2label` and `problem_type` of
config.json; `embedding` pools the vectors of all tokens as the folder's sentence-transformers
modules say. They run in the network's worker, on whole batches of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from penstock import pretrained
from penstock.backends import Batch, Execution, LoadRunner, Outputs, PerRequest, Runner
from penstock.config import CLASSIFIER, EMBEDDING, ModelConfig
from penstock.errors import ConfigError
from penstock.types import Array, TensorSpec

MASK = "attention_mask"


class ClassifierHead:
    """Logits [rows, classes] to labels and scores."""

    def __init__(self, config: ModelConfig) -> None:
        described = pretrained.read_config(config.folder)
        self._labels = np.array(
            [each.encode() for each in pretrained.labels(described)], dtype=np.object_
        )
        self._activation = pretrained.activation(described)
        assert config.postprocess is not None
        self._logits = config.postprocess.outputs[0].name

    def __call__(self, outputs: Outputs, mask: Array | None) -> dict[str, Array]:
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

    def __init__(self, config: ModelConfig) -> None:
        found = pretrained.embedding(config.folder)
        self._pooling = found.pooling
        self._is_normalized = found.is_normalized
        assert config.postprocess is not None
        self._vectors = config.postprocess.outputs[0].name

    def __call__(self, outputs: Outputs, mask: Array | None) -> dict[str, Array]:
        vectors = outputs[self._vectors].astype(np.float32)
        if vectors.ndim > 2:
            mask = np.ones(vectors.shape[:2], np.int64) if mask is None else mask
            vectors = pool(vectors, mask, self._pooling)
        if self._is_normalized:
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / np.maximum(lengths, 1e-12)
        return {"EMBEDDING": vectors}


Head = ClassifierHead | EmbeddingHead
KINDS: Mapping[str, type[Head]] = {CLASSIFIER: ClassifierHead, EMBEDDING: EmbeddingHead}


def open_head(config: ModelConfig) -> Head:
    assert config.postprocess is not None
    return KINDS[config.postprocess.function](config)


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


class Headed:
    """A Runner whose answers go through a head. Warm-up and trials at load run the network."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    needs_requests = False

    def __init__(self, inner: Runner, head: Head) -> None:
        self.inner = inner
        self._head = head

    @property
    def keeps_rows_apart(self) -> bool:
        return self.inner.keeps_rows_apart

    @property
    def runs_ahead(self) -> bool:
        return self.inner.runs_ahead

    def built(self) -> Mapping[str, str]:
        return self.inner.built()

    def start(self, batch: Batch) -> Execution:
        return HeadedExecution(self.inner.start(batch), self._head, batch.inputs.get(MASK))

    def close(self) -> None:
        self.inner.close()


class HeadedExecution:
    """An execution of the network, and then of the head."""

    __slots__ = ("_head", "_inner", "_mask")

    def __init__(self, inner: Execution, head: Head, mask: Array | None) -> None:
        self._inner = inner
        self._head = head
        self._mask = mask

    @property
    def prepare_s(self) -> float:
        return self._inner.prepare_s

    @property
    def finish_s(self) -> float:
        return self._inner.finish_s

    def wait(self) -> Iterable[Outputs | PerRequest]:
        for answer in self._inner.wait():
            # `load` refuses models that see requests.
            assert not isinstance(answer, PerRequest)
            yield self._head(answer, self._mask)


def load(config: ModelConfig, load_model: LoadRunner) -> Headed:
    inner = load_model(config.model)
    try:
        if inner.needs_requests:
            problem = "not for code that sees requests"
            raise ConfigError([f"parameters.penstock.postprocess: {problem}"])
        return Headed(inner, open_head(config))
    except BaseException:
        inner.close()
        raise
