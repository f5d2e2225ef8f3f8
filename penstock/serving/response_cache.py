"""Answers a model's requests from memory, if the same was asked and answered before.

A request that is found gets its answer at once, without a queue or a worker; the answer to another
one is copied when it passes. Each process that takes requests has a cache of its own, with a part
of the server's bytes. Runs on the event loop. Knows no protocol: what is kept are outputs as the
model gave them, so classes, compression and the client's choice of JSON or bytes apply to them as
to any other answer.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from penstock.config import ModelConfig
from penstock.errors import PenstockError
from penstock.serving.answer_store import AnswerStore, StoredAnswer, copy_answer, needed_bytes
from penstock.serving.metrics import ModelMetrics
from penstock.serving.replies import AnswerOrder
from penstock.types import ReplySink, Request, Response, Tensor

# Requests with more bytes are computed: hashing them would delay others. 16 MiB take 12 ms on the
# build machine (2 cores, 2026-11).
MAX_HASHED_BYTES = 16 << 20
DIGEST_BYTES = SECRET_BYTES = 32
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


# Takes a request whose answer was not found.
GoOn = Callable[[Request], None]


class AnswerCache(Protocol):
    """The cache of one load of one version, wherever its answers are."""

    @property
    def config(self) -> ModelConfig: ...

    def answers(self, request: Request, go_on: GoOn, order: AnswerOrder | None = None) -> bool:
        """Answer a request, in its turn if there is an `order`, or give it to `go_on` later. False:
        it has to be computed now. Its answer is kept when it comes."""

    def cancel(self, request: Request) -> bool:
        """Cancel a request that was neither answered nor given on. False: it is not here."""

    async def drain(self) -> None:
        """Wait until every request was answered or given on."""

    def keep(self, digest: bytes, response: Response, looked_s: float) -> None:
        """Keep an answer that was computed; looking for it took `looked_s`."""


def is_here(response: Response) -> bool:
    """Whether an answer is in tensors that can be copied."""
    return response.arrays is None and all(each.place is None for each in response.outputs)


def make_response(cache: AnswerCache, request: Request, stored: StoredAnswer) -> Response:
    """Return a kept answer as that to a request."""
    config, outputs = cache.config, stored.tensors_copied()
    made = Response(config.name, config.version, outputs, stored.parameters)
    made.keeper = SHARED_BYTES
    if stored.has_form and request.form is not None:
        # Templates of codecs are made for requests of one form.
        made.form = (cache, request.form)
    return made


def reply(request: Request, answer: Response, order: AnswerOrder | None) -> None:
    """Give a kept answer, in its turn among those that are computed."""
    if order is None:
        request.respond(answer)
    else:
        request.turn = order.enter()
        order.respond(request, answer)


@dataclass(slots=True, eq=False)
class ModelCache:
    """The cache of one load of one version. Its secret makes answers of earlier loads unreachable;
    they are the first to leave the store."""

    config: ModelConfig
    metrics: ModelMetrics
    store: AnswerStore
    clock: Callable[[], float] = time.monotonic
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))

    def answers(self, request: Request, go_on: GoOn, order: AnswerOrder | None = None) -> bool:
        found = self._find(request)
        if found is not None:
            reply(request, found, order)
        return found is not None

    def cancel(self, request: Request) -> bool:
        return False

    async def drain(self) -> None:
        """Do nothing: it answers at once."""

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
        return make_response(self, request, stored)

    def keep(self, digest: bytes, response: Response, looked_s: float) -> None:
        began = self.clock()
        if is_here(response) and needed_bytes(response.outputs) <= self.store.max_bytes:
            self.store.put(digest, copy_answer(response))
        self.metrics.missed_cache(looked_s + self.clock() - began)


class StoringSink:
    """The sink of a request that was not found: keeps its answer, then passes it on."""

    __slots__ = ("_cache", "_digest", "_inner", "_looked_s")

    def __init__(
        self, inner: ReplySink, cache: AnswerCache, digest: bytes, looked_s: float
    ) -> None:
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
