"""A model whose requests the core itself queues, although shards take the connections.

For models with state across requests, which must have one owner. Shards hand the requests over
(`handed_over`); here they are ordinary requests of an ordinary model, whose answers go back. What
a shard had open is cancelled when its process ends. Belongs to the core's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, PenstockError
from penstock.serving.drift import InputDrift
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import add, record
from penstock.serving.model import Model
from penstock.serving.parcels import ParcelQueue, Parcels
from penstock.serving.pipeline import StagePipeline
from penstock.serving.served import ModelProcess
from penstock.serving.shard import ModelReading
from penstock.serving.shards import PartHost, ShardedVersion, Shards, ShardSession
from penstock.serving.traffic_split import MirrorRequest
from penstock.types import Request, Response, Servable, Tensor
from penstock.wire import frames

# Characters of an error, which may quote the request.
MAX_TEXT = 1 << 14


class RequestOwner:
    """The core's part of one model (`shards.PartHost`): the open requests of all shards."""

    def __init__(self, number: int, model: Model | StagePipeline) -> None:
        self.number = number
        self._model = model
        self._shards: dict[int, HandingProcess] = {}

    def join(self, shard: int, session: ShardSession) -> None:
        def tell(answer: frames.HandBack) -> None:
            session.send(frames.ToPart(self.number, answer))

        self._shards[shard] = HandingProcess(self._model, session.parcels, tell)

    def leave(self, shard: int) -> None:
        if (handing := self._shards.pop(shard, None)) is not None:
            handing.close()

    def receive(self, shard: int, message: frames.FromPartMessage) -> None:
        handing = self._shards.get(shard)
        if handing is None:
            return
        match message:
            case frames.HandOver():
                handing.submit(message)
            case frames.TakeBack(call):
                handing.cancel(call)


class HandingProcess:
    """What one shard, or to a shard the core, has handed over for one model."""

    def __init__(
        self, model: Servable, parcels: Parcels, tell: Callable[[frames.HandBack], None]
    ) -> None:
        self._model = model
        self._parcels = parcels
        self._queue = ParcelQueue(parcels, tell)
        self._open: dict[int, Request] = {}
        self._is_closed = False

    def submit(self, message: frames.HandOver) -> None:
        kind = MirrorRequest if message.is_mirror else Request
        sink = HandedSink(self, message.call)
        tensors = self._parcels.read(message.parcel)
        made = kind(sink, tensors, message.received, id=message.id, outputs=message.outputs)
        made.parameters = message.parameters or None
        made.priority, made.timeout_s = message.priority, message.timeout_s
        made.caller, made.chain = message.caller, message.chain
        self._open[message.call] = made
        self._model.submit(made)
        if not made.is_done:
            # Those that have no rows yet; the shard needs its memory for others.
            made.inputs = [Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in made.inputs]
        self._parcels.free(message.parcel)

    def cancel(self, call: int) -> None:
        if (request := self._open.get(call)) is not None:
            self._model.cancel(request)

    def close(self) -> None:
        """Cancel everything: the shard has ended."""
        self._is_closed = True
        self._queue.close()
        for request in list(self._open.values()):
            self._model.cancel(request)

    def answer(
        self, call: int, request: Request, answer: Response | PenstockError, final: bool
    ) -> None:
        if final:
            self._open.pop(call, None)
        if self._is_closed:
            return
        outputs: Sequence[Tensor] = ()
        if isinstance(answer, PenstockError):
            message = _describe_error(call, answer)
        else:
            outputs, message = answer.outputs, _describe(call, request, answer, final)
            try:
                self._queue.check(outputs, message)
            except PenstockError as error:
                if not final:
                    self._model.cancel(request)
                outputs, message = (), _describe_error(call, BackendFailed(f"the answer: {error}"))

        def pack(parcel: frames.Parcel) -> frames.HandBack:
            message.parcel = parcel
            return message

        self._queue.post(outputs, pack)


@dataclass(slots=True, eq=False)
class HandedSink:
    """Receives the answers to a request of a shard."""

    _shard: HandingProcess
    _call: int

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self._shard.answer(self._call, request, answer, final)


class OwnedModel(ShardedVersion):
    """A version that the core runs, for clients of all shards."""

    def __init__(self, config: ModelConfig, shards: Shards, model: Model | StagePipeline) -> None:
        super().__init__(config, shards)
        self.model = model
        self._owner = RequestOwner(next(shards.numbers), model)
        self.metrics = ModelMetrics.from_config(config)

    @property
    def parts(self) -> Sequence[PartHost]:
        return (self._owner,)

    @property
    def opening(self) -> frames.OpenModel:
        return frames.OpenModel(self.number, self.config, (self._owner.number,), ())

    @property
    def is_ready(self) -> bool:
        return not self._is_closing and self.model.is_ready

    @property
    def shown_state(self) -> str:
        return "UNLOADING" if self._is_closing else self.model.shown_state

    @property
    def reason(self) -> str:
        return self.model.reason

    @property
    def mode(self) -> str:
        return self.model.mode

    @property
    def processes(self) -> Sequence[ModelProcess]:
        return self.model.processes

    @property
    def drift(self) -> Sequence[InputDrift]:
        return self.model.drift

    async def start(self) -> None:
        """Load the workers, then open the model in all shards."""
        await self.model.start()
        self._sum()
        await self._shards.open_model(self)

    async def drain(self) -> None:
        # Together: what shards wait for may need sequences to end here.
        await asyncio.gather(super().drain(), self.model.drain())

    async def close(self) -> None:
        """End it here, so that all requests are answered, and then in the shards."""
        self._is_closing = True
        await self.model.close()
        await self._shards.retire_model(self)

    def join(self, shard: int, session: ShardSession) -> None:
        self._owner.join(shard, session)

    def leave(self, shard: int) -> None:
        self._owner.leave(shard)
        super().leave(shard)

    def submit(self, request: Request) -> None:
        """Take a request of the core itself."""
        self.model.submit(request)

    def cancel(self, request: Request) -> None:
        self.model.cancel(request)

    def count(self, readings: Mapping[int, ModelReading]) -> None:
        """Add what shards have refused by themselves to the figures of the core."""
        super().count(readings)
        self._sum()

    async def refresh(self) -> None:
        """Do nothing: all is here."""

    def explain(self) -> Explanation:
        return self.model.explain()

    def _sum(self) -> None:
        own, metrics = self.model.metrics, ModelMetrics.from_config(self.config)
        metrics.load_s, metrics.num_restarts = own.load_s, own.num_restarts
        metrics.num_deaths = dict(own.num_deaths)
        for each in (*self._retired, *self._readings.values()):
            add(metrics, each.metrics)
        add(metrics, record(own))
        metrics.responses = own.responses
        self.metrics, self.num_waiting = metrics, self.model.num_waiting


def _describe(call: int, request: Request, answer: Response, final: bool) -> frames.HandBack:
    timings = request.timings
    completed = timings.completed or time.monotonic()
    waits = timings.queued, timings.dispatched, completed, timings.instance_wait_s
    parameters = dict(answer.parameters or {})
    times = (*waits, *timings.compute_s)
    empty = answer.is_empty
    return frames.HandBack(call, frames.Parcel(), final, times, parameters, is_empty=empty)


def _describe_error(call: int, error: PenstockError) -> frames.HandBack:
    return frames.HandBack(
        call,
        frames.Parcel(),
        error_kind=type(error).__name__,
        error=str(error)[:MAX_TEXT],
        reason=error.reason,
        retry_after_s=getattr(error, "retry_after_s", None),
    )
