"""Front processes as the core sees them: started, listened to, restarted, drained.

A front decodes and encodes a protocol in a process of its own; its requests come as frames and go
to the models of the catalog like any others. What a front dies of does not touch the core: its
requests are cancelled and another front takes its place; one that does not answer pings any more is
killed. Lives on the core's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

import msgspec

import penstock
from penstock import pbtxt
from penstock.config import GrpcConfig
from penstock.errors import (
    BackendFailed,
    ConfigError,
    NotReady,
    PenstockError,
)
from penstock.protocols import access_log
from penstock.protocols.gate import Keys
from penstock.protocols.line import Line, Outbox, status_name, unpack
from penstock.protocols.v2_routes import EXTENSIONS
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.model import Model
from penstock.serving.slab import Segment
from penstock.serving.supervisor import (
    MAX_LOAD_DEATHS,
    Life,
    ProcessLife,
    StartLife,
    backoff_s,
    deaths_in_a_row,
)
from penstock.types import Request, RequestedOutput, Response, Tensor
from penstock.wire import frames
from penstock.wire.v2 import classified, encode_metadata

log = logging.getLogger("penstock.fronts")

GRPC_FRONT = functools.partial(ProcessLife, module="penstock.protocols.v2_grpc")
STOP_TIMEOUT_S = 5.0
PING_S = 1.0
# How long a front may take until it listens.
START_S = 60.0
# Of an error; what quotes the client's own names may be of any length.
MAX_TEXT = 2000


class Desk:
    """What fronts may ask of the core besides inference. Raises what it refuses with."""

    def __init__(
        self,
        catalog: Catalog,
        control: Control,
        is_serving: Callable[[], bool],
        logs_requests: bool = False,
    ) -> None:
        self.catalog = catalog
        self._control = control
        self.logs_requests = logs_requests
        self._is_serving = is_serving
        self.is_draining = False
        self._answers: Mapping[frames.AskKind, Callable[[frames.Ask], Awaitable[bytes]]] = {
            "server_ready": self._server_ready,
            "server_metadata": self._server_metadata,
            "model_ready": self._model_ready,
            "model_metadata": self._model_metadata,
            "model_config": self._model_config,
            "model_statistics": self._model_statistics,
            "repository_index": self._index,
            "model_load": self._load,
            "model_unload": self._unload,
        }

    async def answer(self, ask: frames.Ask) -> bytes:
        return await self._answers[ask.kind](ask)

    async def _server_ready(self, ask: frames.Ask) -> bytes:
        is_ready = self._is_serving() and self.catalog.is_ready
        return _json({"ready": is_ready and not self.is_draining})

    async def _server_metadata(self, ask: frames.Ask) -> bytes:
        version = penstock.__version__
        return _json({"name": "penstock", "version": version, "extensions": EXTENSIONS})

    async def _model_ready(self, ask: frames.Ask) -> bytes:
        model = self.catalog.find(ask.model_name, ask.model_version)
        return _json({"ready": model.is_ready and not self.is_draining})

    async def _model_config(self, ask: frames.Ask) -> bytes:
        config = self.catalog.find(ask.model_name, ask.model_version).config
        return bytes(pbtxt.to_message(config).SerializeToString())

    async def _model_statistics(self, ask: frames.Ask) -> bytes:
        models = self.catalog.find_all(ask.model_name, ask.model_version)
        return _json({"model_stats": [model.metrics.statistics() for model in models]})

    async def _index(self, ask: frames.Ask) -> bytes:
        return _json({"models": await self._control.index(ask.parameters.get("ready", False))})

    async def _load(self, ask: frames.Ask) -> bytes:
        await self._control.load(ask.model_name, ask.parameters)
        return b""

    async def _unload(self, ask: frames.Ask) -> bytes:
        await self._control.unload(ask.model_name)
        return b""

    async def _model_metadata(self, ask: frames.Ask) -> bytes:
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

    __slots__ = ("_number", "_session", "_wants_classes", "model", "request")

    def __init__(self, session: Session, frame: frames.Infer, model: Model) -> None:
        self._session = session
        self._number = frame.call
        self._wants_classes = bool(frame.classes)
        self.model = model
        self.request = request = Request(
            self,
            session.unpack(frame.parcel),
            frame.received,
            id=frame.id,
            outputs=[_requested(name, frame.classes) for name in frame.outputs],
        )
        request.form = (frame.outputs, *map(_form, frame.parcel.pieces))
        request.parameters = frame.parameters or None
        request.priority = frame.priority
        request.timeout_s = frame.timeout_s

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if self._wants_classes and isinstance(answer, Response):
            try:
                answer = classified(request, answer, self.model.config.outputs)
            except PenstockError as error:
                answer = error
        if isinstance(answer, PenstockError):
            self._session.refuse(self._number, answer)
        else:
            self._session.reply(self._number, answer, final)


class LoggedCall(Call):
    """Also writes a line to the access log."""

    __slots__ = ()

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        super().respond(request, answer, final)
        if isinstance(answer, Response):
            access_log.ended("grpc", "OK", self.model.config, request, "")
        else:
            kind = type(answer).__name__
            access_log.ended("grpc", status_name(answer), self.model.config, request, kind)


class Session:
    """One life of a front: its socket, its memory, and the requests it waits for."""

    def __init__(
        self,
        desk: Desk,
        life: Life,
        requests: Segment,
        answers: Segment,
        told: Callable[[frames.FromFront], None],
    ) -> None:
        self._desk = desk
        self._told = told
        self._requests = requests
        self._answers = answers
        self._outbox = Outbox(answers)
        self._calls: dict[int, Call] = {}
        self._questions: dict[int, asyncio.Task[None]] = {}
        self._is_open = True
        self.life = life
        self._line: Line[frames.FromFront] = Line(
            life.sock, frames.decode_all_from_front, self._receive, self._lost
        )

    @property
    def num_running(self) -> int:
        """Requests and questions without an answer, and answers that wait for memory."""
        return len(self._calls) + len(self._questions) + self._outbox.num_waiting

    def open(self, frame: frames.Open) -> None:
        fds = [self._requests.fd, self._answers.fd]
        try:
            socket.send_fds(self.life.sock, [frames.encode(frame)], fds)
        except OSError as error:
            log.error("the gRPC front cannot be given its memory: %s", error)
            self.life.kill()

    def ping(self) -> None:
        self._line.send(frames.Ping())

    def read(self) -> None:
        """What the front has said by now."""
        self._line.read()

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
        for question in self._questions.values():
            question.cancel()
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
            case frames.Cancel():
                self._cancel(frame.call)
            case frames.Ask():
                self._ask(frame)
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
                what = {"model": frame.model_name}
                kind = type(error).__name__
                access_log.refused("grpc", status_name(error), what, frame.received, kind)
        except Exception:  # The protocol edge.
            log.exception("a request of a front could not be submitted")
            self.refuse(frame.call, BackendFailed("internal error"))

    def _cancel(self, number: int) -> None:
        if call := self._calls.get(number):
            call.model.cancel(call.request)
        elif question := self._questions.get(number):
            question.cancel()

    def _ask(self, ask: frames.Ask) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(ask))
        self._questions[ask.call] = task
        task.add_done_callback(lambda _: self._questions.pop(ask.call))

    async def _answer(self, ask: frames.Ask) -> None:
        try:
            self._post(ask.call, await self._desk.answer(ask))
        except PenstockError as error:
            kind, text = type(error).__name__, str(error)[:MAX_TEXT]
            self._line.send(frames.Answer(ask.call, b"", kind, text))
        except Exception:  # The protocol edge.
            log.exception("a question of a front could not be answered")
            self._line.send(frames.Answer(ask.call, b"", "BackendFailed", "internal error"))

    def _post(self, number: int, body: bytes) -> None:
        if not self._is_open:
            return

        def send(parcel: frames.Parcel) -> None:
            is_inline = parcel.offset is None
            self._line.send(
                frames.Answer(number, parcel.data, parcel=None if is_inline else parcel)
            )

        try:
            self._outbox.post(number, [Tensor("body", "UINT8", (len(body),), body)], send)
        except PenstockError as error:
            raise BackendFailed(f"the answer: {error}") from None


class Silence:
    """How long a process has not answered. Only time in which we asked counts, tick by tick: if we
    were stopped ourselves, it may have been as well. Pure."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._ticked = now
        self._silent_s = 0.0

    def heard(self) -> None:
        self._silent_s = 0.0

    def is_over(self, now: float) -> bool:
        """Called about every PING_S; True when the process is to be given up."""
        self._silent_s += min(now - self._ticked, 2 * PING_S)
        self._ticked = now
        return self._silent_s > self._limit_s


class Front:
    """Keeps one gRPC front running. `port` is where it listens, also after a restart."""

    def __init__(
        self,
        desk: Desk,
        host: str,
        config: GrpcConfig,
        keys: Keys | None = None,
        start_life: StartLife = GRPC_FRONT,
    ) -> None:
        self._desk = desk
        self._host = host
        self._config = config
        self._keys = keys
        self._start_life = start_life
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._silence = Silence(START_S, self._loop.time())
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
        self._silence = Silence(START_S, self._loop.time())
        max_bytes = self._config.max_message_bytes
        segment_bytes = max(self._config.segment_bytes, 2 * max_bytes)
        try:
            self._session = self._launch(segment_bytes)
        except OSError as error:
            self._restart(f"could not be started ({error})")
            return
        keys = None
        if self._keys is not None:
            keys = {digest: tuple(scopes) for digest, scopes in self._keys.scopes.items()}
        self._session.open(
            frames.Open(
                frames.VERSION,
                self._host,
                self.port,
                segment_bytes,
                max_bytes,
                self._config.compression,
                keys,
            )
        )
        if self._ticker is None:
            self._ticker = self._loop.call_later(PING_S, self._tick)

    def _launch(self, segment_bytes: int) -> Session:
        with contextlib.ExitStack() as undo:
            requests = undo.enter_context(contextlib.closing(Segment(segment_bytes)))
            answers = undo.enter_context(contextlib.closing(Segment(segment_bytes)))
            life = self._start_life(self._loop, self._died)
            undo.pop_all()
        return Session(self._desk, life, requests, answers, self._told)

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
        for timer in (self._timer, self._ticker):
            if timer is not None:
                timer.cancel()
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
            case frames.Pong():
                self._silence.heard()
            case frames.Listening():
                self._silence = Silence(self._config.hang_s, self._loop.time())
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

    def _tick(self) -> None:
        """Ask whether the front is there; SIGKILL turns a hang into a death."""
        self._ticker = self._loop.call_later(PING_S, self._tick)
        session = self._session
        if session is None:
            return
        session.read()  # The answer may have come while we were busy.
        if self._silence.is_over(self._loop.time()):
            log.error("the gRPC front hangs; killing pid %d", self.pid)
            session.life.kill()
        else:
            session.ping()

    def _died(self, reason: str) -> None:
        assert self._session is not None
        self._session.close()
        self._session = None
        if self._is_stopping:
            self._dead.set()
            return
        self._restart(reason)

    def _restart(self, reason: str) -> None:
        """After a death, or a start that failed: what was missing may be there the next time."""
        since = self._listening_at
        well_s = self._loop.time() - since if since is not None else 0.0
        self._num_deaths = deaths_in_a_row(self._num_deaths, well_s)
        if not self._first_listening.done() and (
            self._problems or self._num_deaths >= MAX_LOAD_DEATHS
        ):
            problems = self._problems or (
                f"the gRPC front {reason} while starting, {MAX_LOAD_DEATHS} times",
            )
            self._first_listening.set_exception(ConfigError(problems))
            return
        delay_s = backoff_s(self._num_deaths)
        why = "; ".join(self._problems) or reason
        log.warning("the gRPC front %s; restart in %.1f s", why, delay_s, extra={"reason": why})
        self.num_restarts += 1
        self._timer = self._loop.call_later(delay_s, self.start)


def _requested(name: str, classes: Mapping[str, int]) -> RequestedOutput:
    if name in classes:
        return RequestedOutput(name, {"classification": classes[name]})
    return RequestedOutput(name)


def _form(piece: frames.Piece) -> object:
    return piece.name, piece.datatype, piece.shape, piece.nbytes


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
