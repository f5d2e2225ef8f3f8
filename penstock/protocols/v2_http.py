"""KServe v2 / Triton over HTTP: admits messages and routes them, inference to its model.

Only translates: paths to Servables, bytes to requests (`wire.v2`), errors to statuses by one table.
The core and the front processes share this code; they differ only in their `Router`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from penstock.config import HttpLimits
from penstock.errors import InvalidRequest, NotReady, PenstockError, TooLarge
from penstock.protocols import access_log, audit_log
from penstock.protocols.gate import Gate, no_route, short_path
from penstock.protocols.handler_tasks import (
    HandlerTasks,
    RouteHandler,
    make_handlers,
    with_audit,
)
from penstock.protocols.http import Exchange, Handler
from penstock.protocols.http_errors import Refusal, WrongHead, reply_error
from penstock.protocols.infer_http import InferCall, InferSink, LoggedSink
from penstock.protocols.route import Match
from penstock.serving.management import ManagementApi
from penstock.wire import compression
from penstock.wire.v2 import Codec
from penstock.wire.v2_request import decode_raw


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
        self.screen = gate.screen
        self._router = router
        self._infer = router.infer
        self._inflating: set[asyncio.Task[None]] = set()

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
            what = {"path": short_path(exchange.head)}
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
            caller = self._gate.caller_name(exchange.head.headers)
            audit_log.record_refusal(match, caller, error)
            raise error

    def _too_much_json(self, advice: str = "") -> TooLarge:
        most = self._limits.max_json_bytes
        return TooLarge(
            f"the JSON of a request may have {most} bytes; {advice}raise --max-json-bytes"
        )
