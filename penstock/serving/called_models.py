"""A shard's end of the calls that models make to other models.

A call becomes an ordinary request to the model that the table has under this name, so admission,
batches, statistics and deadlines are those of all requests; its sink sends the answers back to the
worker. It runs for those whose batch makes it: with their API key, until they cancel or their
worker dies. Belongs to the shard's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.config import ModelConfig
from penstock.errors import BackendFailed, DeadlineExceeded, PenstockError, Unsupported
from penstock.processes.channel import Datagrams, socket_pair
from penstock.serving.batches import RunningBatch
from penstock.serving.call_parcels import pack, unpack
from penstock.types import (
    CANCELLED,
    Buffer,
    Parameter,
    Request,
    RequestedOutput,
    Response,
    Tensor,
)
from penstock.wire import frames
from penstock.wire.v2_request import apply_parameters

if TYPE_CHECKING:
    from penstock.serving.served import Served
    from penstock.serving.traffic_split import TrafficSplit
    from penstock.serving.worker_place import WorkerPlace

log = logging.getLogger("penstock.model")

# Characters of an error, which may quote the request.
MAX_TEXT = 1 << 14
# The backend whose models are code that can call others.
CALLING_BACKEND = "python"


# Actions of the management API that a model's code may call.
ACTIONS = frozenset({"load", "unload", "model_ready"})


class ModelManager(Protocol):
    """Answers a management call; `caller` is as in `Request.caller`."""

    async def __call__(
        self,
        action: str,
        name: str,
        version: str,
        parameters: Mapping[str, Parameter],
        files: Mapping[str, Buffer],
        caller: bytes,
    ) -> bytes: ...


class Callees(Protocol):
    """The models that can be called (`model_table.ModelTable`). `manage` is None where their code
    cannot load models."""

    manage: ModelManager | None

    def choose(
        self, name: str, version: str, headers: Mapping[bytes, bytes]
    ) -> tuple[Served, TrafficSplit | None]: ...


class ModelCalls:
    """The calls of all workers of one model; of a model that can call none, there are none."""

    def __init__(
        self, config: ModelConfig, callees: Callees | None, clock: Callable[[], float]
    ) -> None:
        self.name = f"{config.name}/{config.version}"
        self.callees = callees
        self.clock = clock
        # Longest wait for an instance. Callers wait with an instance of theirs, so models that call
        # each other in several chains could otherwise wait for each other for ever.
        self.max_queued_s = config.hang_s
        self._can_call = config.backend == CALLING_BACKEND and callees is not None
        self._links: dict[int, CallLink] = {}

    def connect(self, loop: asyncio.AbstractEventLoop, place: WorkerPlace) -> CallLink | None:
        """Return the link to the new worker of a place; None if its model can call no others."""
        if not self._can_call:
            return None
        link = self._links[place.index] = CallLink(loop, self, place)
        return link

    def cancelled(self) -> None:
        """Cancel what batches have called whose requests have all been cancelled."""
        for link in self._links.values():
            link.cancel_unwanted()

    def tick(self) -> None:
        for link in self._links.values():
            link.end_late()


class OpenCall(NamedTuple):
    request: Request
    model: Served
    # The batch that waits for it; None if that has ended.
    batch: RunningBatch | None
    began: float


class CallLink:
    """The calls of one worker. Invariant: a call is open until its final answer, which is sent
    unless the worker is gone or has cancelled it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, calls: ModelCalls, place: WorkerPlace
    ) -> None:
        self._calls = calls
        self._place = place
        self._open: dict[int, OpenCall] = {}
        # Management calls.
        self._managing: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False
        # The worker's end, until it is sent.
        self._ours, self.theirs = socket_pair()
        self._line = Datagrams(loop, self._ours, self._receive, self.close, takes_fds=True)

    def close(self) -> None:
        """Cancel everything: the worker has ended."""
        if self._is_closed:
            return
        self._is_closed = True
        self._line.close()
        self._ours.close()
        self.theirs.close()
        for number in [*self._open, *self._managing]:
            self._cancel(number)

    def cancel_unwanted(self) -> None:
        for number, call in list(self._open.items()):
            batch = call.batch
            if batch is not None and not batch.is_merged and _is_unwanted(batch):
                self._end(number, CANCELLED)

    def end_late(self) -> None:
        """End calls that no instance takes in time, although the model has some."""
        now, most_s = self._calls.clock(), self._calls.max_queued_s
        for number, call in list(self._open.items()):
            is_queued = hasattr(call.request, "ticket") and not call.request.timings.dispatched
            if is_queued and call.model.is_ready and now - call.began > most_s:
                name = call.model.config.name
                text = f"no instance of model '{name}' took the call in {most_s:g} s"
                self._end(number, DeadlineExceeded(f"{text}; more instances may help"))

    def _receive(self, data: memoryview) -> None:
        fds, self._line.fds = self._line.fds, []
        frame = frames.decode_worker_call(data)
        match frame:
            case frames.CallModel():
                self._start(frame, fds)
            case frames.CancelCall(call):
                self._cancel(call)
            case frames.Waited(total_s):
                self._place.waited_s, self._place.waited_at = total_s, self._calls.clock()

    def _start(self, frame: frames.CallModel, fds: Sequence[int]) -> None:
        running = (*self._place.batches, *self._place.returned)
        batch = next((each for each in running if each.id == frame.batch), None)
        try:
            tensors = unpack(frame.parcel, fds)
            if frame.action:
                self._start_managing(frame, tensors, batch)
                return
            request = self._make_request(frame, tensors, batch)
            assert self._calls.callees is not None
            model, split = self._calls.callees.choose(frame.model_name, frame.model_version, {})
        except PenstockError as error:
            self._send_error(frame.call, error)
            return
        now = self._calls.clock()
        self._open[frame.call] = OpenCall(request, model, batch, now)
        if split is not None:
            split.watch(request, model)
        model.submit(request)

    def _start_managing(
        self, frame: frames.CallModel, files: Sequence[Tensor], batch: RunningBatch | None
    ) -> None:
        """Answer a management call in a task of its own."""
        request, callees = self._make_request(frame, (), batch), self._calls.callees
        manage = None if callees is None else callees.manage
        if manage is None or frame.action not in ACTIONS:
            raise Unsupported("models cannot load others here; only in `penstock serve`")
        waiting = {name.rpartition("/")[0] for name in request.chain}
        if frame.action != "model_ready" and frame.model_name in waiting:
            why = "it waits for this call, itself or through the models that it calls"
            raise Unsupported(f"a model cannot {frame.action} '{frame.model_name}': {why}")
        sent = {each.name: each.data for each in files}
        named = frame.action, frame.model_name, frame.model_version
        answer = manage(*named, frame.parameters, sent, request.caller)
        task = asyncio.get_running_loop().create_task(self._finish_managing(frame.call, answer))
        self._managing[frame.call] = task
        task.add_done_callback(lambda task: self._managing.pop(frame.call, None))

    async def _finish_managing(self, number: int, answer: Awaitable[bytes]) -> None:
        try:
            await answer
        except PenstockError as error:
            self._send_error(number, error)
        except Exception:  # The caller must not wait for ever.
            log.exception("%s: a management call failed", self._calls.name)
            self._send_error(number, BackendFailed("internal error; this is a bug"))
        else:
            if not self._is_closed:
                self._line.send(frames.encode(frames.CallAnswer(number, frames.Parcel())))

    def _make_request(
        self, frame: frames.CallModel, tensors: Sequence[Tensor], batch: RunningBatch | None
    ) -> Request:
        outputs = tuple([RequestedOutput(name) for name in frame.outputs])
        sink, now = CallSink(self, frame.call), self._calls.clock()
        request = Request(sink, tensors, now, id=frame.id, outputs=outputs)
        if not frame.action:
            apply_parameters(request, dict(frame.parameters))
        waiting = [] if batch is None else batch.requests
        before = dict.fromkeys(name for each in waiting for name in each.chain)
        request.chain = (*before, self._calls.name)
        callers = {each.caller for each in waiting}
        if len(callers) == 1 and batch is not None and not batch.is_merged:
            (request.caller,) = callers
        return request

    def answer(self, number: int, answer: Response | PenstockError, final: bool) -> None:
        if number not in self._open:
            return
        if final:
            del self._open[number]
        if isinstance(answer, PenstockError):
            self._send_error(number, answer)
            return
        try:
            packed = pack(answer.outputs)
        except PenstockError as error:
            self._abort(number, final)
            self._send_error(number, error)
            return
        parameters = dict(answer.parameters or {})
        empty = answer.is_empty
        frame = frames.CallAnswer(number, packed.parcel, final, parameters, is_empty=empty)
        data = frames.encode(frame)
        if len(data) > frames.MAX_FRAME_BYTES:
            self._abort(number, final)
            self._send_error(number, BackendFailed("the answer's description is too large"))
        else:
            self._line.send(data, packed.fds)
        packed.close()

    def _send_error(self, number: int, error: PenstockError) -> None:
        kind, text = type(error).__name__, str(error)[:MAX_TEXT]
        frame = frames.CallAnswer(number, frames.Parcel(), error_kind=kind, error=text)
        if not self._is_closed:
            self._line.send(frames.encode(frame))

    def _abort(self, number: int, final: bool) -> None:
        """Cancel the rest of the answers."""
        if not final:
            self._cancel(number)

    def _end(self, number: int, error: PenstockError) -> None:
        self._cancel(number)
        self._send_error(number, error)

    def _cancel(self, number: int) -> None:
        """Cancel a call that nobody waits for any more."""
        call = self._open.pop(number, None)
        if call is not None:
            call.model.cancel(call.request)
        task = self._managing.pop(number, None)
        if task is not None:
            task.cancel()


@dataclass(frozen=True, slots=True)
class CallSink:
    """Receives the answers to a call."""

    _link: CallLink
    _call: int

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self._link.answer(self._call, answer, final)


def check_chain(chain: Sequence[str], callee: str) -> None:
    """Raise Unsupported if a model waits for a request that it would get itself, perhaps through
    others and ensembles: all its instances may be busy with such callers, and then none ever ends.
    Pure."""
    if callee in chain:
        cycle = " -> ".join((*chain[list(chain).index(callee) :], callee))
        raise Unsupported(
            f"the call would close a cycle of models, each waiting for the next: {cycle}; "
            "a model cannot call itself, directly or through others"
        )


def _is_unwanted(batch: RunningBatch) -> bool:
    return all(each.is_done for each in batch.requests)
