"""Answers a model's requests from memory, if the same was asked and answered before.

A request that is found gets its answer at once, without a queue or a worker; the answer to another
one is copied when it passes. Each process that takes requests has a cache of its own, with a part
of the server's bytes. Runs on the event loop. Knows no protocol: what is kept are outputs as the
model gave them, so classes, compression and the client's choice of JSON or bytes apply to them as
to any other answer.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock.config import CacheConfig, ModelConfig
from penstock.errors import PenstockError
from penstock.serving.answer_store import AnswerStore, StoredAnswer, copy_answer, needed_bytes
from penstock.serving.context import log_about
from penstock.serving.metrics import ModelMetrics
from penstock.serving.replies import AnswerOrder
from penstock.types import ReplySink, Request, Response, Tensor

log = logging.getLogger("penstock.cache")

# Requests with more bytes are computed: hashing them would delay others. 16 MiB take 12 ms on the
# build machine (2 cores, 2026-11).
MAX_HASHED_BYTES = 16 << 20
DIGEST_BYTES = SECRET_BYTES = 32
NO_CACHE = (
    "response_cache: every request is computed, as the server has no response cache; start it "
    "with --cache-config local,size=BYTES"
)
_encode = msgspec.msgpack.Encoder().encode


def digest_of(request: Request, secret: bytes) -> bytes | None:
    """Return a digest of all that an answer depends on; None if the request must be computed.
    Without the secret nobody can look for two requests with the same one."""
    inputs = request.inputs
    if request.is_mirror or request.uses_regions or request.takes_arrays:
        return None
    if sum(each.nbytes for each in inputs) > MAX_HASHED_BYTES:
        return None
    ordered = sorted(inputs, key=_name) if len(inputs) > 1 else inputs
    outputs = [each.name for each in request.outputs]
    tensors = [(each.name, each.datatype, each.shape, len(each.data)) for each in ordered]
    parameters = sorted(request.parameters.items()) if request.parameters else ()
    try:
        # It says where each part ends, so that no two requests are the same bytes.
        described = _encode((tensors, outputs, parameters))
    except (ValueError, OverflowError):
        return None  # A number or a text that has no encoding; admission says what is wrong.
    digest = hashlib.blake2b(described, digest_size=DIGEST_BYTES, key=secret)
    for each in ordered:
        digest.update(each.data)
    return digest.digest()


def _name(tensor: Tensor) -> str:
    return tensor.name


class SharedBytes:
    """The keeper of answers from the cache: nothing changes their bytes."""

    def keep(self, request: Request) -> Callable[[], None]:
        return _keep_nothing


def _keep_nothing() -> None:
    """Nothing is to be given back."""


SHARED_BYTES = SharedBytes()


@dataclass(slots=True, eq=False)
class ModelCache:
    """The cache of one load of one version. Its secret makes answers of earlier loads unreachable;
    they are the first to leave the store."""

    config: ModelConfig
    metrics: ModelMetrics
    store: AnswerStore
    clock: Callable[[], float] = time.monotonic
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))

    def answers(self, request: Request, order: AnswerOrder | None = None) -> bool:
        """Answer a request, in its turn if there is an `order`. False: it has to be computed, and
        its answer is kept when it comes."""
        found = self._find(request)
        if found is None:
            return False
        if order is None:
            request.respond(found)
        else:
            request.turn = order.enter()
            order.respond(request, found)
        return True

    def _find(self, request: Request) -> Response | None:
        """Return the answer to a request, and count it."""
        began = self.clock()
        digest = digest_of(request, self._secret)
        if digest is None:
            return None
        stored = self.store.get(digest)
        now = self.clock()
        if stored is None:
            request.sink = StoringSink(request.sink, self, digest, now - began)
            return None
        timings = request.timings
        timings.queued = timings.dispatched = began
        timings.completed = now
        self.metrics.found_in_cache(request, now - began)
        return self._respond(request, stored)

    def keep(self, digest: bytes, response: Response, looked_s: float) -> None:
        """Keep an answer that was computed; looking for it took `looked_s`."""
        began = self.clock()
        is_here = response.arrays is None and all(each.place is None for each in response.outputs)
        if is_here and needed_bytes(response.outputs) <= self.store.max_bytes:
            self.store.put(digest, copy_answer(response))
        self.metrics.missed_cache(looked_s + self.clock() - began)

    def _respond(self, request: Request, stored: StoredAnswer) -> Response:
        outputs = stored.tensors_copied()
        made = Response(self.config.name, self.config.version, outputs, stored.parameters)
        made.keeper = SHARED_BYTES
        if stored.has_form and request.form is not None:
            # Templates of codecs are made for requests of one form.
            made.form = (self, request.form)
        return made


class StoringSink:
    """The sink of a request that was not found: keeps its answer, then passes it on."""

    __slots__ = ("_cache", "_digest", "_inner", "_looked_s")

    def __init__(self, inner: ReplySink, cache: ModelCache, digest: bytes, looked_s: float) -> None:
        self._inner = inner
        self._cache = cache
        self._digest = digest
        self._looked_s = looked_s

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        try:
            if final and isinstance(answer, Response):
                self._cache.keep(self._digest, answer, self._looked_s)
        finally:
            # Whatever happens to the copy, the client gets its answer.
            self._inner.respond(request, answer, final)


@dataclass(slots=True, eq=False)
class Caches:
    """The response cache of one process, which all of its models share. `store` None: the operator
    wants none."""

    store: AnswerStore | None = None

    def divide(self, config: CacheConfig, num_shards: int) -> None:
        """Set the cache up in one of so many processes that divide its bytes."""
        self.store = AnswerStore(config.max_bytes // num_shards) if config.max_bytes else None

    def open(self, config: ModelConfig, metrics: ModelMetrics) -> ModelCache | None:
        """Return the cache of a version that is being loaded; None if its answers are not kept."""
        if self.store is None or not config.is_cached:
            return None
        metrics.num_caches = 1
        return ModelCache(config, metrics, self.store)

    def warn(self, config: ModelConfig) -> None:
        """Say so if a model wants a cache and there is none."""
        if config.is_cached and self.store is None:
            log_about(log, logging.WARNING, config, ": %s", NO_CACHE)
