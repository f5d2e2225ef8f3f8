"""All v2 routes over HTTP except inference: health, metadata, configuration, statistics, the
repository, and metrics. These and `pages` are the handlers that `route_table` names.

Reads the catalog; the only thing it changes is which models are loaded, and only in explicit mode.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import msgspec

import penstock
from penstock.errors import InvalidRequest, NotReady, Unsupported
from penstock.protocols.handler_tasks import Reply, RouteCall, RouteHandler
from penstock.protocols.route_table import MISSING
from penstock.repository.pbtxt import to_json
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.explain import ProcessState, who_is_busy
from penstock.serving.metrics import FrontUse, expose
from penstock.serving.served import Served
from penstock.serving.usage import Member, ProcessUsage, cpu_s
from penstock.wire import json_errors
from penstock.wire.v2 import IndexBody, LoadBody, UnloadBody, encode_metadata

EXTENSIONS = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    # The request header Penstock-Timing, whatever the server is called.
    "penstock_timing",
)
# Span over which CPU use of processes is measured.
BUSY_S = 0.25
Body = TypeVar("Body")


class FrontProcess(Protocol):
    """The state of a front that a scrape reports."""

    num_restarts: int
    num_connections: int

    @property
    def name(self) -> str:
        """The front's name in the log."""

    @property
    def protocol(self) -> str: ...

    @property
    def number(self) -> int:
        """From 1 if there are several of a protocol; otherwise 0."""

    @property
    def pid(self) -> int: ...


class V2Routes:
    """`path` is the repository; `is_explicit` allows loading and unloading over the API; `fronts`
    are the front processes."""

    def __init__(
        self, catalog: Catalog, path: str, is_explicit: bool, allows_hard_links: bool = False
    ) -> None:
        self._catalog = catalog
        self.control = Control(catalog, path, is_explicit, allows_hard_links)
        self.usage = ProcessUsage()
        self.fronts: Sequence[FrontProcess] = ()
        # Handlers of the server's own pages.
        self.pages: Mapping[str, RouteHandler] = {}
        self.server_id = "penstock"
        self.is_loading = True
        # Health needs no key; where other routes do, it reports names only.
        self.tells_reasons = True
        self.is_draining = False

    def handlers(self) -> Mapping[str, RouteHandler]:
        """Return the handlers by their names in the route table."""
        return {
            "live": self.live,
            "ready": self.ready,
            "metrics": self.metrics,
            "server_metadata": self.server_metadata,
            "metadata": self.metadata,
            "model_ready": self.model_ready,
            "config": self.config,
            "statistics": self.statistics,
            "explain": self.explain,
            "index": self.index,
            "load": self.load,
            "unload": self.unload,
            **{name: _missing(what) for name, what in MISSING.items()},
            **self.pages,
        }

    async def server_metadata(self, call: RouteCall) -> Reply:
        return Reply(describe_server(self.server_id))

    async def live(self, call: RouteCall) -> Reply:
        return _json({"live": True})

    async def ready(self, call: RouteCall) -> Reply:
        if self.is_draining:
            raise NotReady("the server is shutting down")
        if self.is_loading:
            raise NotReady("models are loading")
        if not self._catalog.is_ready:
            raise NotReady(self._why_not_ready())
        return _json({"ready": True})

    async def metadata(self, call: RouteCall) -> Reply:
        config = self._find(call).config
        body = encode_metadata(
            config.name,
            self._catalog.versions(config.name),
            config.platform,
            config.inputs,
            config.outputs,
            config.max_batch_size > 0,
        )
        return Reply(body)

    async def model_ready(self, call: RouteCall) -> Reply:
        model = self._find(call)
        if self.is_draining or not model.is_ready:
            reason = "the server is shutting down" if self.is_draining else model.reason
            raise NotReady(f"Model version not ready: {reason}".removesuffix(": "))
        return _json({"name": model.config.name, "ready": True})

    async def config(self, call: RouteCall) -> Reply:
        return _json(to_json(self._find(call).config))

    async def statistics(self, call: RouteCall) -> Reply:
        match = call.match
        models = self._catalog.find_all(match.model_name, match.model_version)
        return _json({"model_stats": [model.metrics.statistics() for model in models]})

    async def explain(self, call: RouteCall) -> Reply:
        explanation = self._find(call).explain()
        processes = await self._processes()
        verdicts = [*explanation.verdicts, *who_is_busy(processes)]
        return _json(replace(explanation, verdicts=verdicts, processes=processes))

    async def metrics(self, call: RouteCall) -> Reply:
        # Reading /proc takes a moment per process: not on the event loop.
        host = await asyncio.to_thread(self.usage.read, list(self._members()))
        text = expose(self._catalog.pending(), host, [_use(front) for front in self.fronts])
        return Reply(text, content_type="text/plain; version=0.0.4; charset=utf-8")

    async def index(self, call: RouteCall) -> Reply:
        return _json(await self.control.index(_body(call, IndexBody).ready))

    async def load(self, call: RouteCall) -> Reply:
        parameters = _body(call, LoadBody).parameters or ()
        await self.control.load(call.match.model_name, parameters)
        return Reply(b"")

    async def unload(self, call: RouteCall) -> Reply:
        _body(call, UnloadBody)
        await self.control.unload(call.match.model_name)
        return Reply(b"")

    async def _processes(self) -> list[ProcessState]:
        """Return the core and the fronts, with their CPU use over BUSY_S."""
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
        """Yield the other processes of this server."""
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

    def _find(self, call: RouteCall) -> Served:
        return self._catalog.find(call.match.model_name, call.match.model_version)


def describe_server(server_id: str) -> bytes:
    """Return the server's metadata, for every protocol."""
    return msgspec.json.encode(
        {"name": server_id, "version": penstock.__version__, "extensions": EXTENSIONS}
    )


def _use(front: FrontProcess) -> FrontUse:
    number = str(front.number or "")
    return FrontUse(front.protocol, front.num_restarts, number, _num_connections(front))


def _num_connections(front: FrontProcess) -> int | None:
    # The gRPC library does not report its number of connections.
    return None if front.protocol == "grpc" else front.num_connections


def _missing(what: str) -> RouteHandler:
    async def refuse(call: RouteCall) -> Reply:
        raise Unsupported(f"{what} not supported by this server")

    return refuse


def _body(call: RouteCall, schema: type[Body]) -> Body:
    """Decode the JSON object of a request; an empty body counts as an empty object."""
    assert call.match.route.body is schema
    try:
        return msgspec.json.decode(call.body or b"{}", type=schema)
    except msgspec.DecodeError as error:
        text = json_errors.explain(call.body, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None
    except (RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from None


def _json(body: object) -> Reply:
    return Reply(msgspec.json.encode(body))
