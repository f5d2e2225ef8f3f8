"""OpenAI's embeddings API over HTTP, for any model with one text input and one vector output.

Each text is a request of its own and is batched by the model: all rows of one request need outputs
of one shape, also in the outputs that embeddings do not use. Tokens are counted in the worker, by
the model's preprocessing function.
"""

from __future__ import annotations

import base64
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config import CLASSIFIER, TOKEN_CLASSIFIER, ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, PenstockError
from penstock.protocols import access_log
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import reply_error
from penstock.protocols.text_answers import counted
from penstock.serving.model_table import ModelTable
from penstock.serving.padding import bf16_floats
from penstock.serving.served import Served
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import (
    CANCELLED,
    Array,
    Request,
    RequestedOutput,
    Response,
    Tensor,
    TensorSpec,
    from_array,
    num_elements,
    to_array,
)
from penstock.wire.documented import EmbeddingsList, OpenAiModel, describe_model
from penstock.wire.openai_prompts import EmbeddingsBody, read_embeddings

Vectors = npt.NDArray[np.float32]
FLOATS = ("FP32", "FP16", "BF16", "FP64")
MAX_TENSORS_TOLD = 8
# Heads whose scores are no embedding.
CLASSIFIERS = {CLASSIFIER: "a classifier", TOKEN_CLASSIFIER: "a token classifier"}
log = logging.getLogger("penstock.http")


@dataclass(frozen=True, slots=True)
class EmbeddingsHttp:
    """Handler of the embeddings route, behind the gate. The caller turns errors into responses."""

    _catalog: ModelTable
    _is_logged: bool = False

    def ready_models(self) -> list[OpenAiModel]:
        """Return the models that are ready to embed, each once, dated by the time of their file."""
        found: dict[str, OpenAiModel] = {}
        for model in self._catalog:
            config = model.config
            if model.is_ready and config.name not in found and is_embedder(config):
                found[config.name] = describe_model(config.name, _written_at(config.artifact))
        return list(found.values())

    def handle(self, exchange: Exchange) -> None:
        asked = read_embeddings(exchange.body)
        model, split = self._catalog.choose(asked.model, "", exchange.head.headers)
        with counted(model, exchange.received):
            texts = [each for each in asked.input if isinstance(each, str)]
            if len(texts) < len(asked.input):
                raise InvalidRequest("input: tokens are not served here; expected texts", "input")
            embedder = embedder_of(model.config)
            size = embedder.size
            if asked.dimensions is not None and 0 < size < asked.dimensions:
                text = f"dimensions is {asked.dimensions}; expected at most {size}"
                raise InvalidRequest(text, "dimensions")
        answer = EmbeddingsAnswer(exchange, model, asked, embedder, self._is_logged, split)
        exchange.abandon = answer.abandon
        answer.begin(texts)


@dataclass(frozen=True, slots=True)
class Embedder:
    text: TensorSpec
    vector: str
    # Length of a vector; 0: unknown until the model answers.
    size: int
    has_batch: bool

    def input(self, text: str) -> Tensor:
        shape = (1,) * (len(self.text.shape) + self.has_batch)
        element = np.array(text.encode(), dtype=np.object_)
        return from_array(self.text.name, "BYTES", element.reshape(shape))


def embedder_of(config: ModelConfig) -> Embedder:
    """Return how to ask a model for vectors. InvalidRequest if it is not an embedding model."""
    kind = CLASSIFIERS.get(config.postprocess.function) if config.postprocess else None
    if kind is not None:
        raise InvalidRequest(
            f"model '{config.name}' is {kind}: it has scores, no embedding; expected an embedding "
            f"model. Ask /v2/models/{config.name}/infer for labels and scores",
            "model",
        )
    texts = [each for each in config.inputs if each.is_text]
    others = [each for each in config.inputs if each not in texts and not each.is_optional]
    vectors = [each for each in config.outputs if _is_vector(each)]
    if len(texts) != 1 or others or len(vectors) != 1:
        raise InvalidRequest(
            f"model '{config.name}' takes {_told(config.inputs)} and gives "
            f"{_told(config.outputs)}; expected one text (BYTES, of one element) and one vector of "
            "floats a row",
            "model",
        )
    (vector,) = vectors
    size = max(0, num_elements(vector.shape))
    return Embedder(texts[0], vector.name, size, config.max_batch_size > 0)


def is_embedder(config: ModelConfig) -> bool:
    try:
        embedder_of(config)
    except InvalidRequest:
        return False
    return True


def _written_at(artifact: str) -> int:
    """Return the modification time in seconds since 1970; 0 if the file is missing."""
    try:
        return int(os.stat(artifact).st_mtime)
    except OSError:
        return 0


def _is_vector(spec: TensorSpec) -> bool:
    """Whether the output is one vector of any length; leading dimensions of 1 do not count."""
    long = [each for each in spec.shape if each != 1]
    return spec.datatype in FLOATS and len(long) == 1 and spec.shape[-1] == long[0]


def _told(specs: Sequence[TensorSpec]) -> str:
    told = [f"{each.name} {each.datatype} {list(each.shape)}" for each in specs[:MAX_TENSORS_TOLD]]
    more = ["and others"] if len(specs) > MAX_TENSORS_TOLD else []
    return ", ".join(told + more) or "no tensors"


@dataclass(slots=True, eq=False)
class EmbeddingsAnswer:
    """The answer to one HTTP request; ends once, with all vectors or with an error."""

    _exchange: Exchange
    _model: Served
    _asked: EmbeddingsBody
    _embedder: Embedder
    _is_logged: bool
    _split: TrafficSplit | None = None
    _requests: list[Request] = field(default_factory=list)
    _num_submitted: int = 0
    # Keyed by the `id()` of their request.
    _vectors: dict[int, Vectors] = field(default_factory=dict)
    _is_over: bool = False

    def begin(self, texts: Sequence[str]) -> None:
        outputs = [RequestedOutput(self._embedder.vector)]
        received, caller = self._exchange.received, self._exchange.caller
        for text in texts:
            inputs = [self._embedder.input(text)]
            request = Request(self, inputs, received, outputs=outputs)
            request.caller = caller
            self._requests.append(request)
        for request in self._requests:
            if not self._is_over:
                self._num_submitted += 1
                if self._split is not None:
                    self._split.watch(request, self._model)
                self._model.submit(request)

    def abandon(self) -> None:
        self._give_up()
        self._note(CANCELLED)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if self._is_over:
            return
        try:
            if isinstance(answer, PenstockError):
                raise answer
            found = vectors_of(answer, self._embedder.vector)
            self._vectors[id(request)] = _cut(found, self._asked.dimensions)
            if len(self._vectors) == len(self._requests):
                self._is_over = True
                self._reply()
                self._note(None)
        except PenstockError as error:
            self._fail(error)
        except Exception:  # The edge of the protocol: every error is answered.
            log.exception("vectors of '%s' cannot be given", self._asked.model)
            self._fail(BackendFailed("the model's vectors cannot be put together"))

    def _fail(self, error: PenstockError) -> None:
        self._give_up()
        reply_error(self._exchange, error)
        self._note(error)

    def _give_up(self) -> None:
        self._is_over = True
        for request in self._requests[: self._num_submitted]:
            self._model.cancel(request)

    def _note(self, error: PenstockError | None) -> None:
        if self._is_logged:
            path, received = self._exchange.head.path, self._exchange.received
            what = {**access_log.about(self._model.config), "rows": len(self._requests)}
            access_log.record("http", what, {"total": time.monotonic() - received}, error, path)

    def _reply(self) -> None:
        found = np.concatenate([self._vectors[id(each)] for each in self._requests])
        shown: Sequence[object] = found.tolist()
        if self._asked.encoding_format == "base64":
            little = found.astype("<f4")
            shown = [base64.b64encode(each.tobytes()).decode() for each in little]
        rows = [
            {"object": "embedding", "index": number, "embedding": vector}
            for number, vector in enumerate(shown)
        ]
        num_tokens = sum(each.num_tokens for each in self._requests)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        answer = EmbeddingsList("list", rows, self._asked.model, usage)
        self._exchange.reply_json(msgspec.json.encode(answer))


def vectors_of(answer: Response, name: str) -> Vectors:
    """Return one vector for each row, copied: the answer's memory is only borrowed."""
    (tensor,) = [each for each in answer.outputs if each.name == name]
    array: Array = to_array(tensor)
    if tensor.datatype == "BF16":
        array = bf16_floats(array)
    found: Vectors = np.array(array, dtype=np.float32).reshape(-1, array.shape[-1])
    if not np.isfinite(found).all():
        raise BackendFailed("the model gave a vector with numbers that are not finite")
    return found


def _cut(vectors: Vectors, num_dimensions: int | None) -> Vectors:
    """Cut vectors to `num_dimensions` numbers and scale them to unit length."""
    if num_dimensions is None:
        return vectors
    if num_dimensions > vectors.shape[-1]:
        text = f"dimensions is {num_dimensions}; expected at most {vectors.shape[-1]}"
        raise InvalidRequest(text, "dimensions")
    cut = vectors[:, :num_dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.asarray(cut / np.where(lengths > 0, lengths, 1), dtype=np.float32)
