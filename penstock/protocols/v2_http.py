"""KServe v2 / Triton over HTTP: admits messages and routes them, inference to its model.

Only translates: paths to Servables, bytes to requests (`wire.v2`), errors to statuses by one table.
The core and the shards share this code; they differ only in their `Router`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

from penstock.config import HttpLimits
from penstock.errors import (
    SHUTTING_DOWN,
    InvalidRequest,
    NotFound,
    NotReady,
    PenstockError,
    TooLarge,
    Unsupported,
)
from penstock.protocols import access_log, audit_log
from penstock.protocols.gate import Gate, no_route, short_path
from penstock.protocols.handler_tasks import HandlerTasks, RouteHandler, make_handlers, with_audit
from penstock.protocols.http import Exchange, Handler
from penstock.protocols.http_errors import Refusal, WrongHead, reply_error
from penstock.protocols.http_reader import LongBody, MessageHead, Rejection
from penstock.protocols.infer_bodies import InferBodies, json_bytes_of, too_much_json
from penstock.protocols.infer_http import InferCall, InferSink, LoggedSink
from penstock.protocols.route import Match
from penstock.protocols.route_table import find
from penstock.protocols.tensor_bodies import TensorBody, make_body
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi
from penstock.serving.model import Model
from penstock.serving.model_table import ModelTable
from penstock.serving.regions import read_regions
from penstock.serving.served import Served
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import Request
from penstock.wire.documented import LoadBody
from penstock.wire.v2 import Codec
from penstock.wire.v2_request import decode_raw

# Errors as which bodies are counted that HTTP itself refuses, by status.
REJECTIONS = {413: TooLarge, 503: NotReady}


ONCE_ONLY = (
    "HTTP end point doesn't support models with decoupled transaction policy; use "
    "generate_stream, or ModelStreamInfer over gRPC"
)


class Parked(Exception):
    """A message waits for a token of its key's rate; the router calls `V2Http.handle` again."""


class Router(Protocol):
    """Receives messages whose head has been parsed and admitted."""

    def count(self, call: InferCall, exchange: Exchange) -> None:
        """Count an inference request before its body is read; QuotaExceeded if too many came, or
        Parked."""

    def refused(self, call: InferCall, received: float, error: Refusal) -> None:
        """Count an inference request whose body or encoding is wrong, before `refuse`."""

    def infer(self, call: InferCall, exchange: Exchange) -> None: ...

    def prepare(self, call: InferCall, json_bytes: int, num_bytes: int) -> LongBody | None:
        """Return memory for the body of an inference request; None: it is read as any other."""

    def other(self, exchange: Exchange, match: Match) -> None:
        """Handle anything but inference."""

    async def close(self) -> None: ...


class LocalInference:
    """The models of this process, for a `Router`: inference, and what else uses them directly.
    Refuses inference while draining."""

    def __init__(
        self,
        table: ModelTable,
        lifecycle: Lifecycle,
        logs_requests: bool = False,
        handle_openai: Handler | None = None,
        handle_generate: Handler | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`gate` resolves the names of callers."""
        self._gate = gate or Gate()
        self._make_sink = LoggedSink if logs_requests else InferSink
        self._catalog = table
        self._tracer = table.tracer
        self._lifecycle = lifecycle
        self._codec = Codec()
        generate = dict.fromkeys(("generate", "generate_stream"), handle_generate)
        self._direct = {"openai": handle_openai, **generate}

    def handle_directly(self, exchange: Exchange, match: Match) -> bool:
        """Handle text and embeddings; False if the route is another."""
        direct = self._direct.get(match.route.handler)
        if direct is None:
            return False
        exchange.caller = self._gate.caller(exchange.head.headers)
        self._check_rate(exchange)
        direct(exchange)
        return True

    def _check_rate(self, exchange: Exchange) -> None:
        """Apply the rate quota to text and embeddings requests; `count` does so for inference."""
        quotas = self._catalog.quotas
        if quotas.is_active and exchange.head.method == b"POST":
            quotas.check_rate(exchange.caller, exchange.received)

    def count(self, call: InferCall, exchange: Exchange) -> None:
        name, version = call.model_name, call.model_version
        self._catalog.count_request(call.caller, exchange.received, name, version)

    def refused(self, call: InferCall, received: float, error: Refusal) -> None:
        if isinstance(error, WrongHead):
            error = Unsupported(str(error))
        with contextlib.suppress(NotFound, NotReady):
            self._catalog.find(call.model_name, call.model_version).refused(error, received)

    def prepare(self, call: InferCall, json_bytes: int, num_bytes: int) -> LongBody | None:
        if self._lifecycle.is_draining:
            return None
        try:
            model = self._catalog.find(call.model_name, call.model_version)
            if self._catalog.splits:
                model, _ = self._choose(call)
        except PenstockError:
            return None  # `infer` reports it.
        if not isinstance(model, Model):
            return None
        return make_body(self._codec, model, json_bytes, num_bytes)

    def infer(self, call: InferCall, exchange: Exchange) -> None:
        model = self._catalog.find(call.model_name, call.model_version)
        split = None
        if self._catalog.splits:
            model, split = self._choose(call, exchange.long)
        sink = self._make_sink(exchange, self._codec, call, model, model.config.outputs)
        try:
            self._check_answers(model)
            body, received, long = exchange.body, exchange.received, exchange.long
            if long is not None:
                assert isinstance(long, TensorBody)
                request = long.request(model, sink, received)
            elif call.json_bytes == 0:
                request = decode_raw(body, model.config, sink, received)
            else:
                request = self._codec.decode_infer(body, call.json_bytes, sink, received)
        except PenstockError as error:
            model.refused(error, exchange.received)
            raise
        request.caller = call.caller
        if request.uses_regions and not isinstance(model, Model):
            self._read_regions(request, model, exchange)
        sink.request = request
        exchange.abandon = sink.abandon
        if split is not None or self._tracer.is_on or self._catalog.forwarding:
            self._note(request, model, call, split)
        if long is None or not isinstance(model, Model):
            model.submit(request)
        else:
            model.submit(request, long.reservation)

    def _check_answers(self, model: Served) -> None:
        """Raise if no request to this model gets its one answer now."""
        if self._lifecycle.is_draining:
            raise NotReady(SHUTTING_DOWN)
        if model.config.is_decoupled:
            raise Unsupported(ONCE_ONLY)

    def _choose(
        self, call: InferCall, long: LongBody | None = None
    ) -> tuple[Served, TrafficSplit | None]:
        """Return the version that answers and its split, if the model has one. A body that was
        received into the memory of a version stays there."""
        named = call.model_name, call.model_version
        model, split = self._catalog.choose(*named, call.headers)
        if split is not None and isinstance(long, TensorBody):
            model = split.confirm(long.model)
        return model, split

    def _note(
        self, request: Request, model: Served, call: InferCall, split: TrafficSplit | None
    ) -> None:
        """Do what only some servers do with a request before it is submitted."""
        if (forwarding := self._catalog.forwarding.get("http")) is not None:
            forwarding.add(request, call.headers)
        if split is not None:
            split.watch(request, model)
        if self._tracer.is_on:
            self._tracer.see(request, model.config, call.headers, "http")

    def _read_regions(self, request: Request, model: Served, exchange: Exchange) -> None:
        """Read the inputs that are in clients' memory, for a model that knows no regions."""
        try:
            read_regions(request, self._catalog.regions)
        except PenstockError as error:
            model.refused(error, exchange.received)
            raise


class Models:
    """The `Router` of a process with models and all routes."""

    def __init__(
        self,
        management: ManagementApi,
        logs_requests: bool = False,
        handle_openai: Handler | None = None,
        handle_generate: Handler | None = None,
        gate: Gate | None = None,
        pages: Mapping[str, RouteHandler] | None = None,
    ) -> None:
        """`pages` are the handlers of the server's pages."""
        self._gate = gate or Gate()
        self._local = local = LocalInference(
            management.catalog,
            management.lifecycle,
            logs_requests,
            handle_openai,
            handle_generate,
            gate,
        )
        self.count, self.refused = local.count, local.refused
        self.infer, self.prepare = local.infer, local.prepare
        self._tasks = HandlerTasks()
        self._handlers = {**make_handlers(management), **(pages or {})}
        self.close = self._tasks.close

    def other(self, exchange: Exchange, match: Match) -> None:
        name = match.route.handler
        if (handler := self._handlers.get(name)) is not None:
            if match.route.is_audited:
                handler = with_audit(handler, self._gate.caller_name(exchange.head.headers))
            exchange.caller = self._gate.caller(exchange.head.headers)
            self._tasks.start(exchange, handler, match)
        elif not self._local.handle_directly(exchange, match):
            raise no_route(exchange.head)


class V2Http:
    """The handler of the HTTP server: reads heads, checks the gate, and inflates bodies."""

    def __init__(
        self, router: Router, limits: HttpLimits, gate: Gate, logs_requests: bool = False
    ) -> None:
        self._logs_requests = logs_requests
        self._limits = limits
        self._gate = gate
        self.screen = gate.screen
        self._router = router
        self._infer = router.infer
        self._bodies = InferBodies(limits, router.infer, self._refuse, router.refused)

    def handle(self, exchange: Exchange) -> None:
        call = exchange.head.note
        try:
            if call is None:
                match = self._gate.admit(exchange.head)
                if match.route.handler != "infer":
                    self._check_json_bytes(exchange, match)
                    self._router.other(exchange, match)
                    return
                call = InferCall(match, exchange.head.headers)
                call.caller = self._gate.caller(exchange.head.headers)
                self._router.count(call, exchange)
                if not self._bodies.read(call, exchange):
                    return
            else:
                assert isinstance(call, InferCall)
                self._router.count(call, exchange)
            self._infer(call, exchange)
        except Parked:
            return
        except (PenstockError, WrongHead) as error:
            self._refuse(exchange, call, error)

    def rejected(self, rejection: Rejection, received: float) -> None:
        """Count an inference request whose body cannot be received."""
        head = rejection.head
        match = None if head is None else find(head.path)
        if head is None or match is None or match.route.handler != "infer":
            return
        if self.screen(head):
            error = REJECTIONS.get(rejection.status, InvalidRequest)(str(rejection))
            self._router.refused(InferCall(match, head.headers), received, error)

    def prepare(self, head: MessageHead) -> LongBody | None:
        """Return memory for a long body, before it is read. None if the message is no inference
        with binary tensors, or will be refused, which happens when it is complete."""
        call, length = head.note, head.content_length
        if call is None:
            call = self._read_head(head)
        if not isinstance(call, InferCall) or call.json_bytes is None or length is None:
            return None
        return self._router.prepare(call, call.json_bytes, length)

    def _read_head(self, head: MessageHead) -> InferCall | None:
        """Return the call that a new head announces, if its body has binary tensors; decides
        nothing."""
        match, headers = find(head.path), head.headers
        if match is None or match.route.handler != "infer" or not self.screen(head):
            return None
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return None
        call = InferCall(match, headers)
        try:
            call.json_bytes = json_bytes_of(headers, head.content_length or 0, self._limits)
        except PenstockError:
            return None
        return call

    def _refuse(self, exchange: Exchange, call: object, error: Refusal) -> None:
        """Answer a message that never reached a model, and write it to the access log."""
        path = exchange.head.path
        what = {"path": short_path(exchange.head)}
        if isinstance(call, InferCall):
            what = {"model": call.model_name}
        reply_error(exchange, error)
        if self._logs_requests:
            access_log.refused("http", what, exchange.received, error, path)

    async def close(self) -> None:
        await self._bodies.close()
        await self._router.close()

    def _check_json_bytes(self, exchange: Exchange, match: Match) -> None:
        # A load may carry files, which are not tensors.
        is_load = match.route.body is LoadBody
        if not is_load and len(exchange.body) > self._limits.max_json_bytes:
            error = too_much_json(self._limits)
            caller = self._gate.caller_name(exchange.head.headers)
            audit_log.record_refusal(match, caller, error)
            raise error
