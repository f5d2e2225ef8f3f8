"""Answers a model's requests from a cache that servers share, such as Redis.

A request waits until the store says whether it has the answer, which takes a few milliseconds at
most (`remote_store`), and goes on to the model if not. Answers are written behind the clients'
backs. Runs on the event loop. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.config import ModelConfig
from penstock.serving import remote_answers
from penstock.serving.answer_store import StoredAnswer, copy_answer, needed_bytes
from penstock.serving.metrics import ModelMetrics
from penstock.serving.remote_store import MAX_VALUE_BYTES, RemoteStore
from penstock.serving.replies import AnswerOrder
from penstock.serving.response_cache import StoringSink, digest_of, is_here, make_response, reply
from penstock.types import CANCELLED, Request, Response, Tensor, TensorSpec

GoOn = Callable[[Request], None]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request whose answer is being looked up; `go_on` takes it if there is none."""

    request: Request
    digest: bytes
    began: float
    go_on: GoOn
    order: AnswerOrder | None


@dataclass(slots=True, eq=False)
class SharedCache:
    """The cache of one load of one version. All servers that load the same files in the same way
    share its answers: its secret is made of the fingerprint of both.

    Invariant: a request is in `_waiting` until it is answered, cancelled, or goes on."""

    config: ModelConfig
    metrics: ModelMetrics
    store: RemoteStore
    clock: Callable[[], float] = time.monotonic
    _secret: bytes = b""
    _waiting: dict[Request, Waiting] = field(default_factory=dict)
    _drained: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = (self.config.name, self.config.version, self.config.fingerprint)
        self._secret = hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()

    def answers(self, request: Request, go_on: GoOn, order: AnswerOrder | None = None) -> bool:
        digest = digest_of(request, self._secret)
        if digest is None:
            return False
        waiting = Waiting(request, digest, self.clock(), go_on, order)
        if not self.store.look(self._key(digest), partial(self._hear, waiting)):
            return False
        # The protocol's buffers are its own again when this returns.
        request.inputs = [
            Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs
        ]
        self._waiting[request] = waiting
        return True

    def cancel(self, request: Request) -> bool:
        if self._waiting.pop(request, None) is None:
            return False
        request.timings.completed = now = self.clock()
        is_late = self.metrics.is_late(now - request.timings.received)
        self.metrics.failed("CANCELED", CANCELLED, is_late)
        request.respond(CANCELLED)
        self._check_drained()
        return True

    async def drain(self) -> None:
        if self._waiting:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(waiter)
            await waiter

    def keep(self, digest: bytes, response: Response, looked_s: float) -> None:
        began = self.clock()
        if is_here(response) and needed_bytes(response.outputs) <= MAX_VALUE_BYTES:
            value = remote_answers.encode(digest, copy_answer(response))
            self.store.put(self._key(digest), value)
        self.metrics.missed_cache(looked_s + self.clock() - began)

    def _key(self, digest: bytes) -> bytes:
        return f"penstock:{self.config.name}:{self.config.version}:{digest.hex()}".encode()

    def _hear(self, waiting: Waiting, value: bytes | None) -> None:
        request = waiting.request
        if self._waiting.pop(request, None) is None:
            return  # It was cancelled.
        found = None if value is None else self._read(request, waiting.digest, value)
        looked_s = self.clock() - waiting.began
        if found is None:
            request.sink = StoringSink(request.sink, self, waiting.digest, looked_s)
            waiting.go_on(request)
        else:
            timings = request.timings
            timings.queued = timings.dispatched = waiting.began
            timings.completed = waiting.began + looked_s
            self.metrics.found_in_cache(request, looked_s)
            reply(request, make_response(self, request, found), waiting.order)
        self._check_drained()

    def _read(self, request: Request, digest: bytes, value: bytes) -> StoredAnswer | None:
        specs = self.config.outputs
        if request.outputs:
            by_name = {spec.name: spec for spec in specs}
            wanted: list[TensorSpec] = []
            for each in request.outputs:
                if each.name not in by_name:
                    return None  # Admission refuses it.
                wanted.append(by_name[each.name])
            specs = tuple(wanted)
        return remote_answers.decode(value, digest, specs)

    def _check_drained(self) -> None:
        if not self._waiting:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained.clear()
