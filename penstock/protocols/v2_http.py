"""KServe v2 / Triton over HTTP: infer on the short path, everything else through Starlette.

Translates and nothing more: paths to Servables, bytes to requests (`wire.v2`), errors to statuses
by one table.
"""

from __future__ import annotations

import re
from math import ceil
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

import penstock
from penstock.config import HttpLimits
from penstock.errors import (
    BackendFailed,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NotReady,
    Overloaded,
    PenstockError,
    TooLarge,
    Unsupported,
)
from penstock.metrics import expose
from penstock.protocols.asgi import AsgiBridge
from penstock.protocols.http import Exchange
from penstock.serving.catalog import Catalog
from penstock.serving.model import Model
from penstock.types import Request, Response
from penstock.wire.v2 import Codec, encode_error, encode_metadata

STATUS: dict[type[PenstockError], int] = {
    InvalidRequest: 400,
    TooLarge: 413,
    NotFound: 404,
    NotReady: 503,
    Overloaded: 503,
    DeadlineExceeded: 504,
    Cancelled: 499,
    Unsupported: 501,
    BackendFailed: 500,
}
EXTENSIONS = ("binary_tensor_data", "parameters", "schedule_policy")
_INFER = re.compile(rb"/v2/models/([^/]+)(?:/versions/([0-9]+))?/infer")
_JSON = b"Content-Type: application/json\r\n"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


class InferSink:
    """Turns the answer of one infer request into the reply of its exchange."""

    __slots__ = ("_codec", "_exchange", "_model", "request")

    def __init__(self, exchange: Exchange, codec: Codec, model: Model) -> None:
        self._exchange = exchange
        self._codec = codec
        self._model = model
        self.request: Request | None = None

    def abandon(self) -> None:
        """The client left."""
        if self.request is not None:
            self._model.cancel(self.request)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if isinstance(answer, PenstockError):
            reply_error(self._exchange, answer)
            return
        try:
            head, tail = self._codec.encode_answer(request, answer)
        except PenstockError as error:
            reply_error(self._exchange, error)
            return
        if tail:
            self._exchange.reply(200, _BINARY % len(head), (head, *tail))
        else:
            self._exchange.reply(200, _JSON, (head,))


class InferCall:
    """What is asked of which model, from the head of a message. A head that comes again is the same
    object, so this is worked out once for all of them (`Head.note`)."""

    __slots__ = ("json_bytes", "model_name", "model_version")

    def __init__(self, model_name: str, model_version: str, json_bytes: int | None) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.json_bytes = json_bytes


class WrongHead(Exception):
    """A message that HTTP itself refuses."""

    def __init__(self, status: int, text: str, headers: bytes = b"") -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers


class V2Http:
    """The handler of the HTTP server. `is_draining` refuses new inferences."""

    def __init__(self, catalog: Catalog, limits: HttpLimits) -> None:
        self._catalog = catalog
        self._limits = limits
        self._codec = Codec()
        self._bridge = AsgiBridge(self._application())
        self.is_draining = False
        self.is_loading = True

    def handle(self, exchange: Exchange) -> None:
        call = exchange.head.note
        try:
            if call is None:
                match = _INFER.fullmatch(exchange.head.path)
                if match is None:
                    self._bridge.handle(exchange)
                    return
                call = exchange.head.note = self._call(match, exchange)
            assert isinstance(call, InferCall)
            self._infer(call, exchange)
        except WrongHead as wrong:
            exchange.reply_error(wrong.status, str(wrong), wrong.headers)
        except PenstockError as error:
            reply_error(exchange, error)

    async def close(self) -> None:
        await self._bridge.close()

    def _infer(self, call: InferCall, exchange: Exchange) -> None:
        if self.is_draining:
            raise NotReady("the server is shutting down")
        model = self._catalog.find(call.model_name, call.model_version)
        sink = InferSink(exchange, self._codec, model)
        sink.request = request = self._codec.decode_infer(
            exchange.body, call.json_bytes, sink, exchange.received
        )
        exchange.waiter = sink
        model.submit(request)

    def _call(self, match: re.Match[bytes], exchange: Exchange) -> InferCall:
        """What the head of an infer message says; depends on nothing else."""
        head = exchange.head
        if head.method != b"POST":
            text = f"infer takes POST, not {head.method.decode('latin-1')}"
            raise WrongHead(405, text, b"Allow: POST\r\n")
        encoding = head.headers.get(b"content-encoding", b"identity")
        if encoding != b"identity":
            text = f"Content-Encoding '{encoding.decode('latin-1')}' is not supported"
            raise WrongHead(415, text)
        name, version = unquote(match[1].decode("latin-1")), (match[2] or b"").decode()
        return InferCall(name, version, self._json_bytes(exchange))

    def _json_bytes(self, exchange: Exchange) -> int | None:
        """The length of the JSON part; None when it is the whole body."""
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
            if length == 0:
                raise Unsupported("raw binary requests (header length 0) are not supported")
        if (size if length is None else length) > self._limits.max_json_bytes:
            raise TooLarge(
                f"the JSON of a request may have {self._limits.max_json_bytes} bytes; "
                "send large tensors as binary data"
            )
        return length

    def _application(self) -> Starlette:
        model = "/v2/models/{name}"
        version = model + "/versions/{version}"
        routes = [
            Route("/v2", self._server_metadata),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route(model, self._metadata),
            Route(version, self._metadata),
            Route(model + "/ready", self._model_ready),
            Route(version + "/ready", self._model_ready),
            Route("/metrics", self._metrics),
        ]
        handlers = {
            HTTPException: _http_error,
            PenstockError: _penstock_error,
            Exception: _our_error,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
        app.router.redirect_slashes = False
        return app

    async def _server_metadata(self, request: HttpRequest) -> HttpResponse:
        import msgspec

        body = {"name": "penstock", "version": penstock.__version__, "extensions": EXTENSIONS}
        return _json(msgspec.json.encode(body))

    async def _live(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"")

    async def _ready(self, request: HttpRequest) -> HttpResponse:
        if self.is_draining:
            return _json(encode_error("the server is shutting down"), 503)
        if self.is_loading:
            return _json(encode_error("models are loading"), 503)
        if not self._catalog.is_ready:
            return _json(encode_error(self._why_not_ready()), 503)
        return HttpResponse(b"")

    def _why_not_ready(self) -> str:
        failed = [f.name for f in self._catalog.failures]
        waiting = [m.config.name for m in self._catalog if not m.is_ready]
        return f"not ready: {', '.join(sorted({*failed, *waiting}))}"

    async def _metadata(self, request: HttpRequest) -> HttpResponse:
        config = self._find(request).config
        return _json(
            encode_metadata(
                config.name,
                self._catalog.versions(config.name),
                config.platform,
                config.inputs,
                config.outputs,
                config.max_batch_size > 0,
            )
        )

    async def _model_ready(self, request: HttpRequest) -> HttpResponse:
        model = self._find(request)
        if self.is_draining or not model.is_ready:
            return _json(encode_error("Model version not ready"), 503)
        return HttpResponse(b"")

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        text = expose(self._catalog.pending())
        return HttpResponse(text, media_type="text/plain; version=0.0.4")

    def _find(self, request: HttpRequest) -> Model:
        version = request.path_params.get("version", "")
        return self._catalog.find(request.path_params["name"], str(version))


def status_of(error: PenstockError) -> int:
    return STATUS.get(type(error), 500)


def reply_error(exchange: Exchange, error: PenstockError) -> None:
    headers = b""
    if isinstance(error, Overloaded):
        headers = b"Retry-After: %d\r\n" % max(1, ceil(error.retry_after_s))
    exchange.reply_error(status_of(error), str(error), headers)


def _json(body: bytes, status: int = 200) -> HttpResponse:
    return HttpResponse(body, status, media_type="application/json")


async def _http_error(request: HttpRequest, error: HTTPException) -> HttpResponse:
    reply = _json(encode_error(error.detail), error.status_code)
    reply.headers.update(error.headers or {})
    return reply


async def _our_error(request: HttpRequest, error: Exception) -> HttpResponse:
    return _json(encode_error("internal error"), 500)


async def _penstock_error(request: HttpRequest, error: PenstockError) -> HttpResponse:
    return _json(encode_error(str(error)), status_of(error))
