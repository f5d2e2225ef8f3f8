"""Everything of v2 over HTTP that is not inference: health, metadata, configuration, statistics,
the repository, and metrics, as a Starlette application.

Reads the catalog; the only thing it changes is which models are loaded, and only in explicit mode.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

import penstock
from penstock.errors import InvalidRequest, PenstockError
from penstock.metrics import expose
from penstock.pbtxt import to_json
from penstock.protocols.v2_http import status_of
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.model import Model
from penstock.wire.v2 import encode_error, encode_metadata

EXTENSIONS = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


class V2Routes:
    """`path` is the repository; `is_explicit` allows loading and unloading over the API."""

    def __init__(self, catalog: Catalog, path: str, is_explicit: bool) -> None:
        self._catalog = catalog
        self.control = Control(catalog, path, is_explicit)
        self.is_loading = True
        self.is_draining = False

    def application(self) -> Starlette:
        model = "/v2/models/{name}"
        version = model + "/versions/{version}"
        change = "/v2/repository/models/{name}"
        routes = [
            Route("/v2", self.server_metadata),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/stats", self.statistics),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route(change + "/load", self.load, methods=["POST"]),
            Route(change + "/unload", self.unload, methods=["POST"]),
            Route("/metrics", self.metrics),
        ]
        for prefix in (model, version):
            routes += [
                Route(prefix, self.metadata),
                Route(prefix + "/ready", self.model_ready),
                Route(prefix + "/config", self.config),
                Route(prefix + "/stats", self.statistics),
            ]
        handlers: dict[Any, Any] = {
            HTTPException: _http_error,
            PenstockError: _penstock_error,
            Exception: _our_error,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def server_metadata(self, request: HttpRequest) -> HttpResponse:
        body = {"name": "penstock", "version": penstock.__version__, "extensions": EXTENSIONS}
        return _json(body)

    async def live(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(b"")

    async def ready(self, request: HttpRequest) -> HttpResponse:
        if self.is_draining:
            return _error("the server is shutting down", 503)
        if self.is_loading:
            return _error("models are loading", 503)
        if not self._catalog.is_ready:
            return _error(self._why_not_ready(), 503)
        return HttpResponse(b"")

    async def metadata(self, request: HttpRequest) -> HttpResponse:
        config = self._find(request).config
        body = encode_metadata(
            config.name,
            self._catalog.versions(config.name),
            config.platform,
            config.inputs,
            config.outputs,
            config.max_batch_size > 0,
        )
        return HttpResponse(body, media_type="application/json")

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        model = self._find(request)
        if self.is_draining or not model.is_ready:
            return _error("Model version not ready", 503)
        return HttpResponse(b"")

    async def config(self, request: HttpRequest) -> HttpResponse:
        return _json(to_json(self._find(request).config))

    async def statistics(self, request: HttpRequest) -> HttpResponse:
        name = request.path_params.get("name", "")
        models = self._catalog.find_all(name, request.path_params.get("version", ""))
        return _json({"model_stats": [model.metrics.statistics() for model in models]})

    async def metrics(self, request: HttpRequest) -> HttpResponse:
        text = expose(self._catalog.pending())
        return HttpResponse(text, media_type="text/plain; version=0.0.4")

    async def index(self, request: HttpRequest) -> HttpResponse:
        only_ready = (await _body(request)).get("ready", False)
        return _json(await self.control.index(only_ready))

    async def load(self, request: HttpRequest) -> HttpResponse:
        body = await _body(request)
        await self.control.load(request.path_params["name"], body.get("parameters") or ())
        return HttpResponse(b"")

    async def unload(self, request: HttpRequest) -> HttpResponse:
        await _body(request)
        await self.control.unload(request.path_params["name"])
        return HttpResponse(b"")

    def _why_not_ready(self) -> str:
        failed = [failure.name for failure in self._catalog.failures]
        waiting = [model.config.name for model in self._catalog if not model.is_ready]
        return f"not ready: {', '.join(sorted({*failed, *waiting}))}"

    def _find(self, request: HttpRequest) -> Model:
        return self._catalog.find(
            request.path_params["name"], request.path_params.get("version", "")
        )


async def _body(request: HttpRequest) -> dict[str, Any]:
    """An optional JSON object."""
    data = await request.body()
    if not data:
        return {}
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from None
    return body


def _json(body: object, status: int = 200) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(body), status, media_type="application/json")


def _error(text: str, status: int) -> HttpResponse:
    return HttpResponse(encode_error(text), status, media_type="application/json")


async def _http_error(request: HttpRequest, error: HTTPException) -> HttpResponse:
    reply = _error(error.detail, error.status_code)
    reply.headers.update(error.headers or {})
    return reply


async def _our_error(request: HttpRequest, error: Exception) -> HttpResponse:
    return _error("internal error", 500)


async def _penstock_error(request: HttpRequest, error: PenstockError) -> HttpResponse:
    return _error(str(error), status_of(error))
