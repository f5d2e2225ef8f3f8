"""Front processes as the core sees them: started, listened to, restarted, drained.

A front decodes and encodes a protocol in a process of its own; its requests come as frames and go
to the models of the catalog like any others. What a front dies of does not touch the core: its
requests are cancelled and another front takes its place. Lives on the core's event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable

import msgspec

import penstock
from penstock import pbtxt
from penstock.config import GrpcConfig
from penstock.errors import (
    BackendFailed,
    ConfigError,
    NotFound,
    NotReady,
    PenstockError,
)
from penstock.protocols import access_log
from penstock.protocols.line import Line, Outbox, unpack
from penstock.protocols.v2_routes import EXTENSIONS
from penstock.serving.catalog import Catalog
from penstock.serving.model import Model
from penstock.serving.slab import Segment
from penstock.serving.supervisor import (
    FIRST_BACKOFF_S,
    HEALTHY_S,
    MAX_BACKOFF_S,
    MAX_LOAD_DEATHS,
    Life,
    ProcessLife,
    StartLife,
)
from penstock.types import Request, RequestedOutput, Response, Tensor
from penstock.wire import frames
from penstock.wire.v2 import encode_metadata

log = logging.getLogger("penstock.fronts")

GRPC_FRONT = functools.partial(ProcessLife, module="penstock.protocols.v2_grpc")
STOP_TIMEOUT_S = 5.0
# Of an error; what quotes the client's own names may be of any length.
MAX_TEXT = 2000


class Desk:
    """What fronts may ask of the core besides inference. Raises what it refuses with."""

    def __init__(
        self, catalog: Catalog, is_serving: Callable[[], bool], logs_requests: bool = False
    ) -> None:
        self.catalog = catalog
        self.logs_requests = logs_requests
        self._is_serving = is_serving
        self.is_draining = False

    def answer(self, ask: frames.Ask) -> bytes:
        match ask.kind:
            case "server_ready":
                is_ready = self._is_serving() and self.catalog.is_ready
                return _json({"ready": is_ready and not self.is_draining})
            case "server_metadata":
                version = penstock.__version__
                return _json({"name": "penstock", "version": version, "extensions": EXTENSIONS})
            case "model_ready":
                return _json({"ready": self._is_model_ready(ask)})
            case "model_metadata":
                return self._metadata(ask)
            case "model_config":
                config = self.catalog.find(ask.model_name, ask.model_version).config
                return bytes(pbtxt.to_message(config).SerializeToString())
            case "model_statistics":
                models = self.catalog.find_all(ask.model_name, ask.model_version)
                return _json({"model_stats": [model.metrics.statistics() for model in models]})

    def _is_model_ready(self, ask: frames.Ask) -> bool:
        try:
            model = self.catalog.find(ask.model_name, ask.model_version)
        except NotFound:
            return False
        return model.is_ready and not self.is_draining

    def _metadata(self, ask: frames.Ask) -> bytes:
        config = self.catalog.find(ask.model_name, ask.model_version).config
        return encode_metadata(
            config.name,
            self.catalog.versions(config.name),
            config.platform,
            config.inputs,
            config.outputs,
            config.max_batch_size > 0,
        )


class Call:
    """A request of a front, and the sink that answers it."""

    __slots__ = ("_number", "_session", "model", "request")

    def __init__(self, session: Session, frame: frames.Infer, model: Model) -> None:
        self._session = session
        self._number = frame.call
        self.model = model
        self.request = request = Request(
            self,
            session.unpack(frame.parcel),
            frame.received,
            id=frame.id,
            outputs=[RequestedOutput(name) for name in frame.outputs],
        )
        request.form = (frame.outputs, *map(_form, frame.parcel.pieces))
        request.parameters = frame.parameters or None
        request.priority = frame.priority
        request.timeout_s = frame.timeout_s

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if isinstance(answer, PenstockError):
            self._session.refuse(self._number, answer)
        else:
            self._session.reply(self._number, answer, final)


class LoggedCall(Call):
    """Also writes a line to the access log."""

    __slots__ = ()

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        super().respond(request, answer, final)
        error = "" if isinstance(answer, Response) else type(answer).__name__
        access_log.ended("grpc", error or "OK", self.model.config, request, error)


class Session:
    """One life of a front: its socket, its memory, and the requests it waits for."""

    def __init__(
        self, desk: Desk, life: Life, segment_bytes: int, told: Callable[[frames.FromFront], None]
    ) -> None:
        self._desk = desk
        self._told = told
        self._requests = Segment(segment_bytes)
        self._answers = Segment(segment_bytes)
        self._outbox = Outbox(self._answers)
        self._calls: dict[int, Call] = {}
        self._is_open = True
        self.life = life
        self._line: Line[frames.FromFront] = Line(
            life.sock, frames.decode_all_from_front, self._receive, self._lost
        )

    @property
    def num_running(self) -> int:
        """Requests without an answer, and answers that wait for memory."""
        return len(self._calls) + self._outbox.num_waiting

    def open(self, frame: frames.Open) -> None:
        fds = [self._requests.fd, self._answers.fd]
        socket.send_fds(self.life.sock, [frames.encode(frame)], fds)

    def stop(self) -> None:
        self._line.send(frames.Stop())

    def close(self) -> None:
        """The front has gone: nobody waits for its requests."""
        self._is_open = False
        self._line.read()  # Its last words count.
        self._line.close()
        for call in list(self._calls.values()):
            call.model.cancel(call.request)
        self._calls.clear()
        self.life.sock.close()
        self._requests.close()
        self._answers.close()

    def unpack(self, parcel: frames.Parcel) -> list[Tensor]:
        return unpack(parcel, self._requests)

    def refuse(self, number: int, error: PenstockError) -> None:
        self._calls.pop(number, None)
        kind = type(error).__name__
        text = str(error)[:MAX_TEXT]
        self._line.send(frames.InferReply(number, frames.Parcel(), error_kind=kind, error=text))

    def reply(self, number: int, answer: Response, is_final: bool) -> None:
        if not self._is_open:
            return
        if is_final:
            self._calls.pop(number, None)

        def send(parcel: frames.Parcel) -> None:
            parameters = dict(answer.parameters or {})
            frame = frames.InferReply(
                number, parcel, answer.model_name, answer.model_version, parameters
            )
            frame.is_final = is_final
            try:
                self._line.send(frame)
            except PenstockError as error:
                if parcel.offset is not None:
                    self._outbox.release(parcel.offset)
                self.refuse(number, BackendFailed(f"the answer: {error}"))

        try:
            self._outbox.post(number, answer.outputs, send)
        except PenstockError as error:
            self.refuse(number, BackendFailed(f"the answer: {error}"))

    def _lost(self) -> None:
        """A front without its socket is of no use."""
        if self._is_open:
            self.life.socket_closed()

    def _receive(self, frame: frames.FromFront) -> None:
        match frame:
            case frames.Infer():
                self._infer(frame)
            case frames.Release():
                for offset in frame.offsets:
                    self._outbox.release(offset)
            case frames.InferCancel():
                call = self._calls.get(frame.call)
                if call is not None:
                    call.model.cancel(call.request)
            case frames.Ask():
                self._line.send(self._answer(frame))
            case _:
                self._told(frame)

    def _infer(self, frame: frames.Infer) -> None:
        try:
            model = self._desk.catalog.find(frame.model_name, frame.model_version)
            if self._desk.is_draining:
                error = NotReady("the server is shutting down")
                model.refused(error, frame.received)
                raise error
            make = LoggedCall if self._desk.logs_requests else Call
            self._calls[frame.call] = call = make(self, frame, model)
            model.submit(call.request)
        except PenstockError as error:
            self.refuse(frame.call, error)
            if self._desk.logs_requests:
                kind = type(error).__name__
                access_log.refused("grpc", kind, frame.model_name, frame.received, kind)
        except Exception:  # The protocol edge.
            log.exception("a request of a front could not be submitted")
            self.refuse(frame.call, BackendFailed("internal error"))

    def _answer(self, ask: frames.Ask) -> frames.Answer:
        try:
            return frames.Answer(ask.call, self._desk.answer(ask))
        except PenstockError as error:
            return frames.Answer(ask.call, b"", type(error).__name__, str(error)[:MAX_TEXT])
        except Exception:  # The protocol edge.
            log.exception("a question of a front could not be answered")
            return frames.Answer(ask.call, b"", "BackendFailed", "internal error")


class Front:
    """Keeps one gRPC front running. `port` is where it listens, also after a restart."""

    def __init__(
        self, desk: Desk, host: str, config: GrpcConfig, start_life: StartLife = GRPC_FRONT
    ) -> None:
        self._desk = desk
        self._host = host
        self._config = config
        self._start_life = start_life
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._first_listening: asyncio.Future[None] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._is_stopping = False
        self._listening_at: float | None = None
        self._problems: tuple[str, ...] = ()
        self._num_deaths = 0
        self.num_restarts = 0
        self.port = config.port

    @property
    def pid(self) -> int:
        return self._session.life.pid if self._session is not None else 0

    @property
    def num_running(self) -> int:
        return self._session.num_running if self._session is not None else 0

    def start(self) -> None:
        """Start the process; `listening` tells when it takes connections."""
        self._timer = None
        self._listening_at = None
        self._problems = ()
        life = self._start_life(self._loop, self._died)
        max_bytes = self._config.max_message_bytes
        segment_bytes = max(self._config.segment_bytes, 2 * max_bytes)
        self._session = Session(self._desk, life, segment_bytes, self._told)
        self._session.open(
            frames.Open(frames.VERSION, self._host, self.port, segment_bytes, max_bytes)
        )

    async def listening(self) -> None:
        """ConfigError if it cannot."""
        await self._first_listening

    def drain(self) -> None:
        """New inferences are refused, accepted ones finish."""
        self._desk.is_draining = True

    async def close(self) -> None:
        """The front says goodbye to its clients and goes; after a while it is made to."""
        self._is_stopping = True
        self._first_listening.cancel()
        if self._timer is not None:
            self._timer.cancel()
        session = self._session
        if session is None:
            return
        session.stop()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._dead.wait()
        except TimeoutError:
            session.life.kill()
            await self._dead.wait()

    def _told(self, frame: frames.FromFront) -> None:
        match frame:
            case frames.Listening():
                self.port = frame.port
                self._listening_at = self._loop.time()
                if not self._first_listening.done():
                    self._first_listening.set_result(None)
                log.info(
                    "gRPC front listens on port %d (pid %d)",
                    frame.port,
                    self.pid,
                    extra={"front_pid": self.pid},
                )
            case frames.LoadFailed():
                self._problems = frame.problems

    def _died(self, reason: str) -> None:
        assert self._session is not None
        self._session.close()
        self._session = None
        if self._is_stopping:
            self._dead.set()
            return
        since = self._listening_at
        if since is not None and self._loop.time() - since >= HEALTHY_S:
            self._num_deaths = 0
        self._num_deaths += 1
        if not self._first_listening.done() and (
            self._problems or self._num_deaths >= MAX_LOAD_DEATHS
        ):
            problems = self._problems or (f"the gRPC front {reason} while starting",)
            self._first_listening.set_exception(ConfigError(problems))
            return
        delay_s = 0.0
        if self._num_deaths > 1:
            delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._num_deaths - 2))
        why = "; ".join(self._problems) or reason
        log.warning("the gRPC front %s; restart in %.1f s", why, delay_s, extra={"reason": why})
        self.num_restarts += 1
        self._timer = self._loop.call_later(delay_s, self.start)


def _form(piece: frames.Piece) -> object:
    return piece.name, piece.datatype, piece.shape, piece.nbytes


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
