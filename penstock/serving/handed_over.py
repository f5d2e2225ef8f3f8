"""A model whose requests have one owner, the core, as a shard of several has it.

Requests go to the core as they came, and its answers to their sinks; `owned_model` is the other
end. Protocols and ensembles see an ordinary Servable. Counts only what never reaches the core.
Belongs to the shard's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, NotReady, Overloaded, PenstockError
from penstock.serving.drift import InputDrift
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.serving.parcels import ParcelQueue, Parcels
from penstock.serving.request_recorder import RequestRecorder
from penstock.serving.response_cache import AnswerCache
from penstock.serving.served import ModelProcess
from penstock.types import CANCELLED, Request, Response
from penstock.wire import frames
from penstock.wire.statuses import KINDS

IN_CORE = "in core"
# What this end says.
Handing = frames.HandOver | frames.TakeBack


class HandedOver:
    """Invariant: a request is in `_open` until its final answer; what comes later is dropped."""

    def __init__(
        self, config: ModelConfig, parcels: Parcels, send: Callable[[Handing], None]
    ) -> None:
        self.config = config
        self.metrics = ModelMetrics.from_config(config)
        self.recorder: RequestRecorder | None = None
        # Set by the owner if answers are kept: those that are found need not go to the core.
        self.cache: AnswerCache | None = None
        self._parcels = parcels
        self._queue: ParcelQueue[Handing] = ParcelQueue(parcels, send)
        self._calls = itertools.count(1)
        self._open: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._is_closing = False
        self._drained: list[asyncio.Future[None]] = []

    @property
    def is_ready(self) -> bool:
        return not self._is_closing

    @property
    def shown_state(self) -> str:
        return "UNLOADING" if self._is_closing else "READY"

    @property
    def reason(self) -> str:
        return ""

    @property
    def mode(self) -> str:
        return IN_CORE

    @property
    def processes(self) -> Sequence[ModelProcess]:
        return ()

    @property
    def num_waiting(self) -> int:
        """Always 0: the core counts those of all shards."""
        return 0

    @property
    def drift(self) -> Sequence[InputDrift]:
        return ()

    async def start(self) -> None:
        """Do nothing: the core has loaded it."""

    async def refresh(self) -> None:
        """Do nothing: the core has the figures."""

    def explain(self) -> Explanation:
        raise NotReady(f"model '{self.config.name}' is explained by the core")

    async def drain(self) -> None:
        """Wait until everything handed over has been answered."""
        if self.cache is not None:
            await self.cache.drain()
        if self._open:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(waiter)
            await waiter

    async def close(self) -> None:
        self._is_closing = True
        error = NotReady(f"model '{self.config.name}' is being unloaded")
        self.fail_all(error)
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def fail_all(self, error: PenstockError) -> None:
        """End all that is open; nothing is sent any more."""
        for call in list(self._open):
            self._queue.tell(frames.TakeBack(call))
            self._end(call, error)
        self._queue.close()

    def submit(self, request: Request) -> None:
        if self.recorder is not None:
            self.recorder.see(request)
        cache = None if self._is_closing else self.cache
        if cache is None or not cache.answers(request, self._hand_over):
            self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        try:
            if self._is_closing:
                raise NotReady(f"model '{self.config.name}' is being unloaded")
            message = self._describe(request)
            self._queue.check(request.inputs, message)
        except PenstockError as error:
            self.refused(error, request.timings.received)
            request.respond(error)
            return
        self._open[message.call] = request
        self._numbers[request] = message.call
        inputs, request.inputs = request.inputs, ()

        def pack(parcel: frames.Parcel) -> frames.HandOver:
            message.parcel = parcel
            return message

        self._queue.post(inputs, pack)

    def cancel(self, request: Request) -> None:
        if self.cache is not None and self.cache.cancel(request):
            return
        call = self._numbers.get(request)
        if call is not None:
            self._queue.tell(frames.TakeBack(call))
            self._end(call, CANCELLED)

    def refused(self, error: PenstockError, received: float) -> None:
        self.metrics.refused(error)
        self.metrics.fail_s += max(0.0, time.monotonic() - received)

    def hear(self, message: frames.HandBack) -> None:
        """Give an answer of the core to its request."""
        request = self._open.get(message.call)
        if request is None:
            pass
        elif message.error_kind:
            self._end(message.call, _error(message))
        else:
            self._respond(request, message)
        self._parcels.free(message.parcel)

    def _describe(self, request: Request) -> frames.HandOver:
        return frames.HandOver(
            next(self._calls),
            request.timings.received,
            frames.Parcel(),
            request.id,
            tuple(request.outputs),
            dict(request.parameters or {}),
            request.priority,
            request.timeout_s,
            request.caller,
            request.is_mirror,
            request.chain,
        )

    def _respond(self, request: Request, message: frames.HandBack) -> None:
        named = self.config.name, self.config.version
        outputs = self._parcels.read(message.parcel)
        answer = Response(*named, outputs, message.parameters or None, is_empty=message.is_empty)
        if message.times:
            timings, compute_s = request.timings, message.times[4:]
            timings.queued, timings.dispatched, timings.completed = message.times[:3]
            timings.instance_wait_s = message.times[3]
            timings.compute_s = (compute_s[0], compute_s[1], compute_s[2])
        if message.is_final:
            self._end(message.call, answer)
        else:
            request.respond(answer, final=False)

    def _end(self, call: int, answer: Response | PenstockError) -> None:
        request = self._open.pop(call)
        del self._numbers[request]
        request.respond(answer)
        if not self._open:
            for waiter in self._drained:
                if not waiter.done():
                    waiter.set_result(None)
            self._drained.clear()


def _error(message: frames.HandBack) -> PenstockError:
    kind, again_s = KINDS.get(message.error_kind, BackendFailed), message.retry_after_s
    if kind is Overloaded and again_s is not None:
        return Overloaded(message.error, again_s, message.reason)
    error = kind(message.error)
    if again_s is not None and isinstance(error, NotReady | Overloaded):
        error.retry_after_s = again_s
    return error
