"""Everything of v2 over HTTP that is not inference: health, metadata, configuration, statistics,
the repository, and metrics, as a Starlette application.

Reads the catalog; the only thing it changes is which models are loaded, and only in explicit mode.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

import penstock
from penstock.errors import InvalidRequest, PenstockError, Unsupported
from penstock.metrics import FrontUse, expose
from penstock.pbtxt import to_json
from penstock.protocols.v2_http import status_of
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.explain import ProcessState, who_is_busy
from penstock.serving.served import Served
from penstock.usage import Member, Usage, cpu_s
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
# Paths of the protocol that are refused with a sentence, and what they are about.
MISSING = {
    "/v2/models/{name}/trace/setting": "trace settings are",
    "/v2/trace/setting": "trace settings are",
    "/v2/logging": "log settings are",
    "/v2/systemsharedmemory/{rest:path}": "system shared memory regions are",
    "/v2/cudasharedmemory/{rest:path}": "CUDA shared memory regions are",
}
# How long it is watched how busy processes are.
BUSY_S = 0.25
# Of a path, in an error.
MAX_PATH_TOLD = 200


class FrontProcess(Protocol):
    """What a scrape says of a front."""

    num_restarts: int
    num_connections: int

    @property
    def name(self) -> str:
        """What the log calls it."""

    @property
    def protocol(self) -> str: ...

    @property
    def number(self) -> int:
        """From 1 where there are several of a protocol; else 0."""

    @property
    def pid(self) -> int: ...


class V2Routes:
    """`path` is the repository; `is_explicit` allows loading and unloading over the API; `fronts`
    are the processes that speak to clients for this one."""

    def __init__(self, catalog: Catalog, path: str, is_explicit: bool) -> None:
        self._catalog = catalog
        self.control = Control(catalog, path, is_explicit)
        self.usage = Usage()
        self.fronts: Sequence[FrontProcess] = ()
        self.is_loading = True
        # Health is open to all; where others need a key, it gives names only.
        self.tells_reasons = True
        self.is_draining = False

    def application(self) -> Starlette:
        model = "/v2/models/{name}"
        version = model + "/versions/{version}"
        change = "/v2/repository/models/{name}"
        routes = [
            *self._watch_routes(),
            Route("/v2", self.server_metadata),
            Route("/v2/models/stats", self.statistics),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route(change + "/load", self.load, methods=["POST"]),
            Route(change + "/unload", self.unload, methods=["POST"]),
        ]
        for prefix in (model, version):
            routes += [
                Route(prefix, self.metadata),
                Route(prefix + "/ready", self.model_ready),
                Route(prefix + "/config", self.config),
                Route(prefix + "/stats", self.statistics),
                Route(prefix + "/explain", self.explain),
            ]
            routes += [
                _missing(path.replace(model, prefix), what)
                for path, what in MISSING.items()
                if path.startswith(model)
            ]
        routes += [
            _missing(path, what) for path, what in MISSING.items() if not path.startswith(model)
        ]
        return _application(routes)

    def metrics_application(self) -> Starlette:
        """What the metrics port serves."""
        return _application(self._watch_routes())

    def _watch_routes(self) -> list[Route]:
        return [
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/metrics", self.metrics),
        ]

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
            reason = "the server is shutting down" if self.is_draining else model.reason
            return _error(f"Model version not ready: {reason}".removesuffix(": "), 503)
        return HttpResponse(b"")

    async def config(self, request: HttpRequest) -> HttpResponse:
        return _json(to_json(self._find(request).config))

    async def statistics(self, request: HttpRequest) -> HttpResponse:
        name = request.path_params.get("name", "")
        models = self._catalog.find_all(name, request.path_params.get("version", ""))
        return _json({"model_stats": [model.metrics.statistics() for model in models]})

    async def explain(self, request: HttpRequest) -> HttpResponse:
        explanation = self._find(request).explain()
        processes = await self._processes()
        verdicts = [*explanation.verdicts, *who_is_busy(processes)]
        return _json(replace(explanation, verdicts=verdicts, processes=processes))

    async def metrics(self, request: HttpRequest) -> HttpResponse:
        # Reading /proc takes a moment for each process: not on the event loop.
        host = await asyncio.to_thread(self.usage.read, list(self._members()))
        text = expose(self._catalog.pending(), host, [_use(front) for front in self.fronts])
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

    async def _processes(self) -> list[ProcessState]:
        """Those between clients and batchers, and how busy they are for a moment."""
        shown = [ProcessState("core", os.getpid(), 0.0)]
        for front in self.fronts:
            if front.pid:
                shown.append(ProcessState(front.name, front.pid, 0.0, _num_connections(front)))
        pids = [each.pid for each in shown]
        before, began = await asyncio.to_thread(cpu_s, pids), time.monotonic()
        await asyncio.sleep(BUSY_S)
        after, took_s = await asyncio.to_thread(cpu_s, pids), time.monotonic() - began
        return [
            replace(each, busy=round((after[each.pid] - before[each.pid]) / took_s, 3))
            for each in shown
            if each.pid in before and each.pid in after
        ]

    def _members(self) -> Iterator[Member]:
        """The other processes of this server."""
        for front in self.fronts:
            if front.pid:
                number = str(front.number or "")
                yield Member(front.pid, f"{front.protocol}_front", instance=number)
        for model in self._catalog:
            config = model.config
            for instance in model.instances:
                if instance.pid:
                    index = str(instance.index)
                    yield Member(instance.pid, "worker", config.name, config.version, index)

    def _why_not_ready(self) -> str:
        reasons = {failure.name: "; ".join(failure.problems) for failure in self._catalog.failures}
        for model in self._catalog:
            if not model.is_ready:
                reasons[model.config.name] = model.reason
        told = sorted(reasons)
        if self.tells_reasons:
            told = [f"{name} ({reasons[name]})" if reasons[name] else name for name in told]
        return f"not ready: {', '.join(told)}"

    def _find(self, request: HttpRequest) -> Served:
        return self._catalog.find(
            request.path_params["name"], request.path_params.get("version", "")
        )


def _use(front: FrontProcess) -> FrontUse:
    number = str(front.number or "")
    return FrontUse(front.protocol, front.num_restarts, number, _num_connections(front))


def _num_connections(front: FrontProcess) -> int | None:
    # The gRPC library does not say how many it has.
    return None if front.protocol == "grpc" else front.num_connections


def _application(routes: list[Route]) -> Starlette:
    handlers: dict[Any, Any] = {
        HTTPException: _http_error,
        PenstockError: _penstock_error,
        Exception: _our_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def _missing(path: str, what: str) -> Route:
    async def refuse(request: HttpRequest) -> HttpResponse:
        raise Unsupported(f"{what} not supported by this server")

    return Route(path, refuse, methods=["GET", "POST"])


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
    text = error.detail
    if error.status_code == 404:
        path = request.scope["path"][:MAX_PATH_TOLD]
        text += f": there is no {path} here"
    reply = _error(text, error.status_code)
    reply.headers.update(error.headers or {})
    return reply


async def _our_error(request: HttpRequest, error: Exception) -> HttpResponse:
    return _error("internal error", 500)


async def _penstock_error(request: HttpRequest, error: PenstockError) -> HttpResponse:
    return _error(str(error), status_of(error))
