"""The core as a front process sees it: models that take requests, and answers to questions.

A front finds a `RemoteModel` by name and submits requests to it as it would to the model itself;
frames and shared memory do the rest. Knows no protocol. Belongs to the front's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping
from types import MappingProxyType

from penstock.errors import BackendFailed, ConfigError, Overloaded, PenstockError, TooLarge
from penstock.protocols.line import Line, Outbox, unpack
from penstock.serving.slab import Segment
from penstock.types import CANCELLED, Parameter, Request, Response
from penstock.wire import frames

# Requests that may wait for memory while the segment is full of others.
MAX_WAITING = 1024


def _kinds(base: type[PenstockError]) -> dict[str, type[PenstockError]]:
    """Every kind of error below this one, by name."""
    kinds = {}
    for kind in base.__subclasses__():
        kinds[kind.__name__] = kind
        kinds |= _kinds(kind)
    return kinds


# What the core may answer with. The operator's own mistakes are none of a client's business.
KINDS = _kinds(PenstockError)
del KINDS[ConfigError.__name__]


class RemoteModel:
    """A model of the core as a Servable. That it exists is found out by asking it."""

    __slots__ = ("_name", "_remote", "_version")

    def __init__(self, remote: Remote, name: str, version: str) -> None:
        self._remote = remote
        self._name = name
        self._version = version

    def submit(self, request: Request) -> None:
        self._remote.submit(request, self._name, self._version)

    def cancel(self, request: Request) -> None:
        self._remote.cancel(request)


class Remote:
    """Invariant: a request is in `_calls` from `submit` to its final answer, cancelled or not,
    because the core may read its tensors until then. `stopped` is set when the core says so or has
    gone."""

    def __init__(self, sock: socket.socket, requests: Segment, answers: Segment) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(requests)
        self._answers = answers
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[Request, int | None]] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self.stopped = asyncio.Event()
        self._line: Line[frames.ToFront] = Line(
            sock, frames.decode_all_to_front, self._receive, self.stopped.set
        )

    @property
    def num_running(self) -> int:
        return len(self._calls) + self._outbox.num_waiting

    @property
    def num_extents_held(self) -> int:
        return self._outbox.num_held

    def find(self, name: str, version: str = "") -> RemoteModel:
        return RemoteModel(self, name, version)

    def send(self, frame: frames.Listening | frames.LoadFailed) -> None:
        self._line.send(frame)

    def close(self) -> None:
        self._line.close()

    async def ask(
        self,
        kind: frames.AskKind,
        name: str = "",
        version: str = "",
        parameters: Mapping[str, Parameter] = MappingProxyType({}),
    ) -> bytes:
        """The core's answer; raises what it refuses with. Whoever is cancelled here takes the
        question back."""
        call = next(self._numbers)
        question: asyncio.Future[bytes] = self._loop.create_future()
        self._questions[call] = question
        try:
            self._line.send(frames.Ask(call, kind, name, version, dict(parameters)))
            return await question
        except asyncio.CancelledError:
            self._line.send(frames.Cancel(call))
            raise
        finally:
            del self._questions[call]

    def submit(self, request: Request, name: str, version: str) -> None:
        # The number of the call is where the Servable that admits a request keeps its own.
        request.turn = call = next(self._numbers)
        if self._outbox.num_waiting >= MAX_WAITING:
            request.respond(Overloaded("too many requests wait for memory"))
            return

        def send(parcel: frames.Parcel) -> None:
            self._send(request, name, version, parcel)

        try:
            self._outbox.post(call, request.inputs, send)
        except PenstockError as error:
            request.respond(error)

    def cancel(self, request: Request) -> None:
        if request.is_done:
            return
        if request.turn in self._calls:
            self._line.send(frames.Cancel(request.turn))
        else:
            self._outbox.withdraw(request.turn)
        request.respond(CANCELLED)

    def _send(self, request: Request, name: str, version: str, parcel: frames.Parcel) -> None:
        call = request.turn
        frame = frames.Infer(
            call,
            name,
            version,
            request.timings.received,
            parcel,
            request.id,
            tuple([output.name for output in request.outputs]),
            dict(request.parameters or {}),
            request.priority,
            request.timeout_s,
            _classes(request),
        )
        request.inputs = ()
        try:
            self._line.send(frame)
        except TooLarge as error:
            if parcel.offset is not None:
                self._outbox.release(parcel.offset)
            request.respond(error)
            return
        self._calls[call] = (request, parcel.offset)

    def _receive(self, frame: frames.ToFront) -> None:
        match frame:
            case frames.InferReply():
                self._reply(frame)
            case frames.Answer():
                self._answer(frame)
            case frames.Ping():
                self._line.send(frames.Pong())
            case frames.Stop():
                self.stopped.set()
            case frames.Open():
                pass  # Only the first frame, which is read before there is a loop.

    def _reply(self, frame: frames.InferReply) -> None:
        known = self._calls.get(frame.call)
        if known is not None:
            self._hand_over(frame, *known)
        self._release(frame.parcel)

    def _hand_over(self, frame: frames.InferReply, request: Request, offset: int | None) -> None:
        if frame.is_final:
            del self._calls[frame.call]
            if offset is not None:
                self._outbox.release(offset)
        if frame.error_kind:
            request.respond(_error(frame.error_kind, frame.error))
            return
        if not request.is_done:
            outputs = unpack(frame.parcel, self._answers)
            response = Response(
                frame.model_name, frame.model_version, outputs, frame.parameters or None
            )
            request.respond(response, frame.is_final)

    def _answer(self, frame: frames.Answer) -> None:
        question, body = self._questions.get(frame.call), frame.body
        if frame.parcel is not None:
            (piece,) = unpack(frame.parcel, self._answers)
            body = bytes(piece.data)
            self._release(frame.parcel)
        if question is None or question.done():
            return
        if frame.error_kind:
            question.set_exception(_error(frame.error_kind, frame.error))
        else:
            question.set_result(body)

    def _release(self, parcel: frames.Parcel) -> None:
        if parcel.offset is not None:
            self._line.send(frames.Release((parcel.offset,)))


def _classes(request: Request) -> dict[str, int]:
    return {
        output.name: int(output.parameters["classification"])
        for output in request.outputs
        if "classification" in output.parameters
    }


def _error(kind: str, text: str) -> PenstockError:
    return KINDS.get(kind, BackendFailed)(text)
