"""KServe v2 / Triton over HTTP: admits messages; inference, all other v2 routes, the metrics port.

Only translates: paths to rows of `route_table` and to Servables, bytes to requests (`wire.v2`),
errors to statuses by one table. The core and the front processes share this code; they differ only
in their `Router`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from penstock.config import HttpLimits
from penstock.errors import InvalidRequest, NotAllowed, NotReady, PenstockError, TooLarge
from penstock.protocols import access_log, audit_log, route_table
from penstock.protocols.audit_log import AdminCall
from penstock.protocols.gate import Gate
from penstock.protocols.handler_tasks import HandlerTasks, Reply, RouteCall, RouteHandler
from penstock.protocols.http import JSON, Exchange, Handler
from penstock.protocols.http_errors import Refusal, WrongHead, reply_error
from penstock.protocols.http_reader import MessageHead
from penstock.protocols.route_table import MISSING, Match, unsupported
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.serving.served import Served
from penstock.types import Parameter, Request, Response, Servable, TensorSpec
from penstock.wire import compression, json_errors
from penstock.wire.documented import IndexBody, LoadBody
from penstock.wire.v2 import Codec
from penstock.wire.v2_request import decode_raw

# Smaller answers are not worth compressing.
MIN_COMPRESSED_BYTES = 1024
# Characters of a path in errors and logs.
MAX_PATH = 200
METRICS = "text/plain; version=0.0.4; charset=utf-8"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


class InferCall:
    """An inference call as its message head describes it. Cached on the head (`MessageHead.note`),
    which is the same object for identical heads."""

    __slots__ = ("accepts", "caller", "json_bytes", "model_name", "model_version", "wants_timing")

    def __init__(self, match: Match, headers: Mapping[bytes, bytes]) -> None:
        self.model_name = match.model_name
        self.model_version = match.model_version
        self.json_bytes: int | None = None
        # As in `Request.caller`.
        self.caller = b""
        # Encoding that the client accepts for the answer.
        self.accepts = _accepted(headers.get(b"accept-encoding", b""))
        self.wants_timing = b"penstock-timing" in headers


@dataclass(slots=True, eq=False)
class InferSink:
    """Turns the answer of one infer request into the reply of its exchange."""

    _exchange: Exchange
    _codec: Codec
    _call: InferCall
    _model: Servable
    # The model's outputs, as for `Codec.encode_answer`.
    _specs: Sequence[TensorSpec] | None
    request: Request | None = None

    def abandon(self) -> None:
        if self.request is not None:
            self._model.cancel(self.request)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if isinstance(answer, PenstockError):
            reply_error(self._exchange, answer)
            return
        try:
            head, tail = self._codec.encode_answer(request, answer, self._specs)
        except PenstockError as error:
            reply_error(self._exchange, error)
            return
        except Exception:  # Keep serving.
            self._exchange.reply_bug()
            return
        headers = _BINARY % len(head) if tail else JSON
        call = self._call
        if call.wants_timing:
            headers += _server_timing(request)
        if call.accepts and len(head) + sum(map(len, tail)) >= MIN_COMPRESSED_BYTES:
            body = compression.deflate(b"".join((head, *tail)), call.accepts)
            headers += b"Content-Encoding: %b\r\n" % call.accepts
            self._exchange.reply(200, headers, (body,))
        elif tail:
            self._exchange.reply(200, headers, (head, *tail))
        else:
            self._exchange.reply(200, headers, (head,))


class LoggedSink(InferSink):
    __slots__ = ()

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        super().respond(request, answer, final)
        access_log.ended("http", cast(Served, self._model).config, request, answer)


class Router(Protocol):
    """Receives messages whose head has been parsed and admitted."""

    def count(self, call: InferCall, exchange: Exchange) -> None:
        """Called once for each inference request, before its body is looked at. QuotaExceeded when
        the key sends too many."""

    def infer(self, call: InferCall, exchange: Exchange) -> None: ...

    def refuse(self, exchange: Exchange, error: Refusal) -> bool:
        """Answer an inference request whose head or encoding is wrong. False: it is left to another
        process, which also logs it."""

    def other(self, exchange: Exchange, match: Match) -> None:
        """Handle anything but inference."""

    async def close(self) -> None: ...


class Models:
    """The `Router` of the core: to its own models and routes. Refuses inference while draining."""

    def __init__(
        self,
        management: ManagementApi,
        logs_requests: bool = False,
        handle_openai: Handler | None = None,
        handle_generate: Handler | None = None,
        gate: Gate | None = None,
        pages: Mapping[str, RouteHandler] | None = None,
    ) -> None:
        """`gate` resolves the names of callers; `pages` are the handlers of the server's pages."""
        self._gate = gate or Gate()
        self._make_sink = LoggedSink if logs_requests else InferSink
        self._catalog = management.catalog
        self._lifecycle = management.lifecycle
        self._codec = Codec()
        self._tasks = HandlerTasks()
        self._handlers = {**make_handlers(management), **(pages or {})}
        self._direct = {
            "openai": handle_openai,
            "generate": handle_generate,
            "generate_stream": handle_generate,
        }
        self.close = self._tasks.close

    def other(self, exchange: Exchange, match: Match) -> None:
        name = match.route.handler
        if (handler := self._handlers.get(name)) is not None:
            if match.route.scope == "admin":
                handler = with_audit(handler, self._gate.caller_name(exchange.head.headers))
            self._tasks.start(exchange, handler, match)
        elif (direct := self._direct.get(name)) is not None:
            exchange.caller = self._gate.caller(exchange.head.headers)
            self._check_rate(exchange)
            direct(exchange)
        else:
            raise no_route(exchange.head)

    def _check_rate(self, exchange: Exchange) -> None:
        """Apply the rate quota to text and embeddings requests; `count` does so for inference."""
        quotas = self._catalog.quotas
        if quotas.is_active and exchange.head.method == b"POST":
            quotas.check_rate(exchange.caller, exchange.received)

    def count(self, call: InferCall, exchange: Exchange) -> None:
        self._catalog.count_request(
            call.caller, exchange.received, call.model_name, call.model_version
        )

    def refuse(self, exchange: Exchange, error: Refusal) -> bool:
        reply_error(exchange, error)
        return True

    def infer(self, call: InferCall, exchange: Exchange) -> None:
        model = self._catalog.find(call.model_name, call.model_version)
        sink = self._make_sink(exchange, self._codec, call, model, model.config.outputs)
        try:
            if self._lifecycle.is_draining:
                raise NotReady("the server is shutting down")
            if call.json_bytes == 0:
                request = decode_raw(exchange.body, model.config, sink, exchange.received)
            else:
                request = self._codec.decode_infer(
                    exchange.body, call.json_bytes, sink, exchange.received
                )
        except PenstockError as error:
            model.refused(error, exchange.received)
            raise
        request.caller = call.caller
        sink.request = request
        exchange.waiter = sink
        model.submit(request)


class V2Http:
    """The handler of the HTTP server: reads heads, checks the gate, and inflates bodies."""

    def __init__(
        self, router: Router, limits: HttpLimits, gate: Gate, logs_requests: bool = False
    ) -> None:
        self._logs_requests = logs_requests
        self._limits = limits
        self._gate = gate
        self._router = router
        self._infer = router.infer
        self._inflating: set[asyncio.Task[None]] = set()

    def screen(self, head: MessageHead) -> bool:
        """Tell whether `admit` would accept the message, before its body is read."""
        try:
            check_head(head, find_route(head), self._gate)
        except (NotAllowed, InvalidRequest, WrongHead):
            return False
        return True

    def handle(self, exchange: Exchange) -> None:
        call = exchange.head.note
        try:
            if call is None:
                match = admit(exchange, self._gate)
                if match.route.handler != "infer":
                    self._check_json_bytes(exchange, match)
                    self._router.other(exchange, match)
                    return
                call = InferCall(match, exchange.head.headers)
                call.caller = self._gate.caller(exchange.head.headers)
                self._router.count(call, exchange)
                if not self._look(call, exchange):
                    return
            else:
                assert isinstance(call, InferCall)
                self._router.count(call, exchange)
            self._infer(call, exchange)
        except (PenstockError, WrongHead) as error:
            self._refuse(exchange, call, error)

    def _refuse(self, exchange: Exchange, call: object, error: Refusal) -> None:
        """Answer a message that never reached a model, and write it to the access log."""
        path = exchange.head.path
        if isinstance(call, InferCall):
            what = {"model": call.model_name}
            if not self._router.refuse(exchange, error):
                return
        else:
            what = {"path": path[:MAX_PATH].decode("latin-1")}
            reply_error(exchange, error)
        if self._logs_requests:
            access_log.refused("http", what, exchange.received, error, path)

    async def close(self) -> None:
        for task in self._inflating:
            task.cancel()
        await asyncio.gather(*self._inflating, return_exceptions=True)
        await self._router.close()

    def _look(self, call: InferCall, exchange: Exchange) -> bool:
        """Check a head that was not seen before. False if its body has to be inflated first."""
        head = exchange.head
        encoding = head.headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"identity", *compression.ENCODINGS):
            text = f"Content-Encoding '{encoding.decode('latin-1')}' is not supported"
            raise WrongHead(415, text)
        if encoding != b"identity":
            task = asyncio.get_running_loop().create_task(self._inflate(call, exchange, encoding))
            self._inflating.add(task)
            task.add_done_callback(self._inflating.discard)
            return False
        call.json_bytes = self._json_bytes(exchange)
        head.note = call
        return True

    async def _inflate(self, call: InferCall, exchange: Exchange, encoding: bytes) -> None:
        """Inflate off the loop, because a few bytes may expand to many."""
        packed, limit = exchange.body, self._limits.max_body_bytes
        try:
            exchange.body = await asyncio.to_thread(compression.inflate, packed, encoding, limit)
            call.json_bytes = self._json_bytes(exchange)
            self._infer(call, exchange)
        except PenstockError as error:
            exchange.body = packed
            self._refuse(exchange, call, error)
        except Exception:  # Keep serving.
            exchange.reply_bug()

    def _json_bytes(self, exchange: Exchange) -> int | None:
        """Return the length of the JSON part; None when it is the whole body."""
        text = exchange.head.headers.get(b"inference-header-content-length")
        size = len(exchange.body)
        if text is None:
            length = None
        else:
            if not text.isdigit() or len(text) > 18:
                raise InvalidRequest(
                    "Inference-Header-Content-Length must be a number of bytes, "
                    f"got '{text.decode('latin-1')}'"
                )
            length = int(text)
            if length > size:
                raise InvalidRequest(
                    f"Inference-Header-Content-Length is {length}, the body has {size} bytes"
                )
        if (size if length is None else length) > self._limits.max_json_bytes:
            raise self._too_much_json("send large tensors as binary data, or ")
        return length

    def _check_json_bytes(self, exchange: Exchange, match: Match) -> None:
        if len(exchange.body) > self._limits.max_json_bytes:
            error = self._too_much_json()
            audit_refusal(match, self._gate.caller_name(exchange.head.headers), error)
            raise error

    def _too_much_json(self, advice: str = "") -> TooLarge:
        most = self._limits.max_json_bytes
        return TooLarge(
            f"the JSON of a request may have {most} bytes; {advice}raise --max-json-bytes"
        )


class MetricsHttp:
    """The handler of the metrics listener: scrapes and health, behind the same gate. Scrapers then
    need no access to the inference port, which serves these paths too."""

    def __init__(self, gate: Gate, management: ManagementApi) -> None:
        self._gate = gate
        self._handlers = make_handlers(management)
        self._tasks = HandlerTasks()
        self.close = self._tasks.close

    def handle(self, exchange: Exchange) -> None:
        try:
            match = admit(exchange, self._gate, is_metrics_port=True)
        except (PenstockError, WrongHead) as error:
            reply_error(exchange, error)
        else:
            self._tasks.start(exchange, self._handlers[match.route.handler], match)


def admit(exchange: Exchange, gate: Gate, is_metrics_port: bool = False) -> Match:
    """Return the route of a message that passes the gate. Raises NotAllowed or InvalidRequest from
    the gate, WrongHead if there is no such path or method."""
    head = exchange.head
    match = find_route(head, is_metrics_port)
    try:
        return check_head(head, match, gate)
    except (NotAllowed, InvalidRequest, WrongHead) as error:
        if match is not None:
            audit_refusal(match, gate.caller_name(head.headers), error)
        raise


def find_route(head: MessageHead, is_metrics_port: bool = False) -> Match | None:
    match = route_table.find(head.path)
    if match is not None and is_metrics_port and not match.route.is_on_metrics_port:
        return None
    return match


def check_head(head: MessageHead, match: Match | None, gate: Gate) -> Match:
    """Return the route if the gate lets the message pass and the method fits; else as `admit`."""
    gate.check_host(head.headers)
    gate.check_keys(head.headers)
    if match is None:
        raise no_route(head)
    gate.check_scope(match.route.scope, head.headers)
    methods, method = match.route.methods, head.method.decode("latin-1")
    if method not in methods:
        text = f"{_short_path(head)} takes {' or '.join(methods)}, not {method}"
        raise WrongHead(405, text, f"Allow: {', '.join(methods)}\r\n".encode())
    return match


def audit_refusal(match: Match, caller: str, error: Refusal) -> None:
    """Write an administrative call that never reached its handler to the audit log."""
    if match.route.scope == "admin":
        audit_log.record(_admin_call(match, caller), error)


def with_audit(handler: RouteHandler, caller: str) -> RouteHandler:
    """Wrap a handler so that each call is written to the audit log."""

    async def run(call: RouteCall) -> Reply:
        return await audit_log.record_answer(_admin_call(call.match, caller), handler(call))

    return run


def _admin_call(match: Match, caller: str) -> AdminCall:
    return AdminCall("http", caller, match.route.handler, match.model_name)


def no_route(head: MessageHead) -> WrongHead:
    return WrongHead(404, f"Not Found: there is no {_short_path(head)} here")


def _short_path(head: MessageHead) -> str:
    return head.path[:MAX_PATH].decode("latin-1")


def _accepted(header: bytes) -> bytes:
    """Return the first supported encoding that the client accepts; empty for none."""
    for item in header.lower().split(b","):
        name, _, quality = item.partition(b";")
        if name.strip() in compression.ENCODINGS and quality.strip() not in (b"q=0", b"q=0.0"):
            return name.strip()
    return b""


def _server_timing(request: Request) -> bytes:
    timings = request.timings
    parts = (
        ("decode", timings.queued - timings.received),
        ("queue_batch", timings.dispatched - timings.queued - timings.instance_wait_s),
        ("queue_instance", timings.instance_wait_s),
        ("compute_input", timings.compute_input_s),
        ("compute_infer", timings.compute_infer_s),
        ("compute_output", timings.compute_output_s),
        ("total", timings.completed - timings.received),
    )
    text = ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in parts)
    return f"Server-Timing: {text}\r\n".encode()


# Routes other than inference.


def make_handlers(management: ManagementApi) -> dict[str, RouteHandler]:
    """Return the handlers by their names in the route table."""

    async def answer(call: RouteCall) -> Reply:
        match = call.match
        asked = ManagementCall(
            match.route.handler, match.model_name, match.model_version, _parameters(call)
        )
        return Reply(await management.answer(asked))

    async def metrics(call: RouteCall) -> Reply:
        return Reply(await management.metrics(), content_type=METRICS)

    async def refuse(call: RouteCall) -> Reply:
        raise unsupported(call.match.route.handler)

    return {
        **dict.fromkeys(management.actions, answer),
        **dict.fromkeys(MISSING, refuse),
        "metrics": metrics,
    }


def _parameters(call: RouteCall) -> Mapping[str, Parameter]:
    """Decode the JSON object of a request; an empty body counts as an empty object."""
    schema = call.match.route.body
    if schema is None:
        return {}
    try:
        body = msgspec.json.decode(call.body or b"{}", type=schema)
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(call.body, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None
    match body:
        case IndexBody():
            return {"ready": body.ready}
        case LoadBody():
            return dict.fromkeys(body.parameters or (), True)
    return {}
