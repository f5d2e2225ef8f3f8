"""Inference over gRPC: messages to requests, and one request a call, which is its sink.

`infer_stream` has streams of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from penstock.config import ModelConfig
from penstock.errors import (
    SHUTTING_DOWN,
    NotReady,
    PenstockError,
    QuotaExceeded,
    Unsupported,
)
from penstock.protocols import access_log
from penstock.protocols.gate import Gate
from penstock.protocols.grpc_call import RpcHead, UnaryCall
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.h2_stream import H2Stream
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.model import Model
from penstock.serving.model_table import ModelTable
from penstock.serving.regions import read_regions
from penstock.serving.served import Served
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import Buffer, ReplySink, Request, Response
from penstock.wire.v2 import classified, wants_classes
from penstock.wire.v2_pb import parse_infer
from penstock.wire.v2_pb_templates import PbCodec

# Takes a token of a key's rate. False: the function is called later, with None or with the refusal.
Take = Callable[[bytes, Callable[[QuotaExceeded | None], None]], bool]


def take_always(key: bytes, decided: Callable[[QuotaExceeded | None], None]) -> bool:
    """Leave rates to the table of models."""
    return True


class InferTarget(ReplySink, Protocol):
    """A sink and its request, once a model has it; the id is known before."""

    id: str
    model: Served | None
    request: Request | None
    # Whether it takes any number of answers.
    is_streamed: bool

    @property
    def is_over(self) -> bool:
        """Nobody waits for an answer."""

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """The metadata of its call."""

    def refuse(self, error: PenstockError) -> None: ...

    def refuse_bug(self) -> None:
        """Log the exception that is being handled, and answer."""


class OpenStream(Protocol):
    """A stream of requests."""

    def finish(self, reason: PenstockError) -> None:
        """Let it end once all is answered."""


class InferRpcs:
    """Turns messages into requests to models, and answers into messages."""

    def __init__(
        self,
        table: ModelTable,
        lifecycle: Lifecycle,
        gate: Gate,
        logs_requests: bool = False,
        take: Take = take_always,
    ) -> None:
        self._table = table
        self._tracer = table.tracer
        self._lifecycle = lifecycle
        self._take = take
        self._codec = PbCodec()
        self.gate = gate
        self.logs_requests = logs_requests
        # Open streams, which end when the server stops.
        self.streams: set[OpenStream] = set()

    def submit(self, data: Buffer, target: InferTarget, caller: bytes, received: float) -> None:
        """Submit a ModelInferRequest, perhaps later; raises if it is refused before a model has
        it. All requests are counted, also those that cannot be decoded."""
        if self._take(caller, partial(self._go_on, data, target, caller, received)):
            self._submit(data, target, caller, received)

    def _go_on(
        self,
        data: Buffer,
        target: InferTarget,
        caller: bytes,
        received: float,
        refusal: QuotaExceeded | None,
    ) -> None:
        """Submit a request that had to wait for a token, unless there is none for it."""
        if target.is_over:
            return
        try:
            self._submit(data, target, caller, received, refusal)
        except PenstockError as error:
            target.refuse(error)
        except Exception:  # The protocol edge.
            target.refuse_bug()

    def _submit(
        self,
        data: Buffer,
        target: InferTarget,
        caller: bytes,
        received: float,
        refusal: QuotaExceeded | None = None,
    ) -> None:
        name = version = ""
        form = self._codec.find(data)
        try:
            if form is None:
                try:
                    message, raw = parse_infer(data)
                    name, version = message.model_name, message.model_version
                    target.id = message.id
                finally:
                    self._count(caller, received, name, version, refusal)
            else:
                name, version = form.model_name, form.model_version
                self._count(caller, received, name, version, refusal)
            model = self._table.find(name, version)
            split = None
            if self._table.splits:
                model, split = self._table.choose(name, version, target.headers)
            try:
                if self._lifecycle.is_draining:
                    raise NotReady(SHUTTING_DOWN)
                if form is None:
                    request = self._codec.decode(message, raw, data, target, received)
                else:
                    request = form.fill(data, target, received)
                check_decoupled(model.config, request, target.is_streamed)
            except PenstockError as error:
                model.refused(error, received)
                raise
        except PenstockError as error:
            if self.logs_requests:
                access_log.refused("grpc", {"model": name}, received, error)
            raise
        request.caller = caller
        self._hand_over(request, model, target, split)

    def _hand_over(
        self, request: Request, model: Served, target: InferTarget, split: TrafficSplit | None
    ) -> None:
        """Submit a request that has been decoded."""
        if request.uses_regions and not isinstance(model, Model):
            self._read_regions(request, model)
        target.model, target.request = model, request
        if (forwarding := self._table.forwarding.get("grpc")) is not None:
            forwarding.add(request, target.headers)
        if split is not None:
            split.watch(request, model)
        if self._tracer.is_on:
            self._tracer.see(request, model.config, target.headers, "grpc")
        model.submit(request)

    def _read_regions(self, request: Request, model: Served) -> None:
        """Read the inputs that are in clients' memory, for a model that knows no regions."""
        try:
            read_regions(request, self._table.regions)
        except PenstockError as error:
            model.refused(error, request.timings.received)
            raise

    def _count(
        self, caller: bytes, received: float, name: str, version: str, refusal: QuotaExceeded | None
    ) -> None:
        """Raise QuotaExceeded if the key sends too many, as its shard knows or the table finds."""
        if refusal is not None:
            self._table.count_refusal(refusal, received, name, version)
            raise refusal
        self._table.count_request(caller, received, name, version)

    def encode(self, target: InferTarget, request: Request, answer: Response) -> list[Buffer]:
        """Return the parts of a ModelInferResponse."""
        if request.outputs and wants_classes(request):
            assert target.model is not None
            answer = classified(request, answer, target.model.config.outputs)
        return self._codec.encode(request, answer)

    def log(self, target: InferTarget, request: Request, answer: Response | PenstockError) -> None:
        assert target.model is not None
        access_log.ended("grpc", target.model.config, request, answer)

    def stop(self) -> None:
        """Let open streams end once they are answered."""
        for stream in list(self.streams):
            stream.finish(NotReady(SHUTTING_DOWN))


def check_decoupled(config: ModelConfig, request: Request, is_streamed: bool) -> None:
    """Raise Unsupported if a request cannot have any number of responses, but may get them."""
    if not config.is_decoupled:
        return
    if not is_streamed:
        text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
        raise Unsupported(f"{text}; use ModelStreamInfer")
    if any(output.place is not None for output in request.outputs):
        text = "decoupled models have any number of responses, which shared memory cannot hold"
        raise Unsupported(f"outputs in shared memory: {text}")


class InferOnce(UnaryCall):
    """A ModelInfer."""

    __slots__ = ("_rpcs", "id", "model", "request")
    is_streamed = False

    def __init__(
        self, rpcs: InferRpcs, server: GrpcServer, stream: H2Stream, head: RpcHead
    ) -> None:
        super().__init__(server, stream, head)
        self._rpcs = rpcs
        self.id = ""
        self.model: Served | None = None
        self.request: Request | None = None

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        return self.stream.head.headers

    def run(self, data: Buffer) -> None:
        self._rpcs.submit(data, self, self.head.caller, self.server.now())

    def refuse(self, error: PenstockError) -> None:
        self.fail(error)

    def refuse_bug(self) -> None:
        self.fail_bug()

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if isinstance(answer, PenstockError):
            self.fail(answer)
        elif not self.is_over:
            try:
                self.reply(self._rpcs.encode(self, request, answer))
            except PenstockError as error:
                self.fail(error)
            except Exception:  # Keep serving.
                self.fail_bug()
        # Breaks the cycle of call and request, which only the GC would free.
        self.request = None
        if self._rpcs.logs_requests:
            self._rpcs.log(self, request, answer)

    def left(self) -> None:
        if self.model is not None and self.request is not None:
            self.model.cancel(self.request)
