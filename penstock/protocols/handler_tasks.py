"""Routes other than inference and text: coroutine handlers, each request in its own task.

Owns the tasks, the handlers of the management API, and the metrics port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from penstock.errors import InvalidRequest, PenstockError
from penstock.protocols import audit_log
from penstock.protocols.gate import Gate
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import WrongHead, reply_error
from penstock.protocols.load_bodies import LoadParameters, read_load
from penstock.protocols.route import Match
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.types import Buffer, Parameter
from penstock.wire import json_errors
from penstock.wire.documented import (
    CudaRegionBody,
    IndexBody,
    LoadBody,
    LogSettingsBody,
    SystemRegionBody,
    TraceSettingsBody,
    UnloadBody,
)
from penstock.wire.json_errors import JsonObject
from penstock.wire.version_rows import PromoteBody, PruneBody, RollbackBody

JSON = "application/json"
# A client of a stream that has not read as much is disconnected. With several shards, the limit of
# its shard holds instead.
MAX_BEHIND_BYTES = 1 << 20
METRICS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class RouteCall:
    """Input of a handler: the matched row, the body, and the headers by their lower-case names."""

    match: Match
    body: Buffer = b""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    # As in `Request.caller`.
    caller: bytes = b""
    method: bytes = b"GET"


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    status: int = 200
    content_type: str = JSON
    # Additional headers, each with its line end.
    headers: bytes = b""
    # Instead of `body`: parts that are sent as they come, until there are no more.
    stream: AsyncGenerator[bytes] | None = None


Schema = TypeVar("Schema", bound=msgspec.Struct)
RouteHandler = Callable[[RouteCall], Awaitable[Reply]]


class HandlerTasks:
    """Runs handlers and replies. A client that leaves cancels its task; `close` cancels all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, exchange: Exchange, handler: RouteHandler, match: Match) -> None:
        task = asyncio.get_running_loop().create_task(self._run(exchange, handler, match))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.abandon = task.cancel

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, exchange: Exchange, handler: RouteHandler, match: Match) -> None:
        try:
            head, caller = exchange.head, exchange.caller
            call = RouteCall(match, exchange.body, head.headers, caller, head.method)
            reply = await handler(call)
        except PenstockError as error:
            reply_error(exchange, error)
        except Exception:  # Keep serving.
            exchange.reply_bug()
        else:
            has_body = reply.body or reply.stream
            headers = f"Content-Type: {reply.content_type}\r\n".encode() if has_body else b""
            if reply.stream is not None:
                await _stream(exchange, headers + reply.headers, reply.stream)
            else:
                exchange.reply(reply.status, headers + reply.headers, (reply.body,))


async def _stream(exchange: Exchange, headers: bytes, parts: AsyncGenerator[bytes]) -> None:
    """Send the parts as they come. A client that reads too slowly is disconnected."""
    async with aclosing(parts):
        exchange.start_stream(200, headers)
        try:
            async for part in parts:
                if exchange.is_finished or exchange.head.method == b"HEAD":
                    break
                if exchange.num_unsent > MAX_BEHIND_BYTES:
                    exchange.abort()
                    return
                exchange.stream(part)
        except Exception:  # Keep serving.
            exchange.reply_bug()
        else:
            exchange.end_stream()


def with_audit(handler: RouteHandler, caller: str) -> RouteHandler:
    """Wrap a handler so that each call is written to the audit log."""

    async def run(call: RouteCall) -> Reply:
        admin = audit_log.http_call(call.match, caller, call.body)
        return await audit_log.record_answer(admin, handler(call))

    return run


def make_handlers(management: ManagementApi) -> dict[str, RouteHandler]:
    """Return the handlers by their names in the route table."""

    async def answer(call: RouteCall) -> Reply:
        match, action = call.match, call.match.route.handler
        named = match.model_name, match.model_version
        if match.route.body is LoadBody:
            sent = read_load(call.body, decode_body(call.body, LoadBody).parameters or {})
        else:
            sent = LoadParameters(_parameters(call))
        asked = ManagementCall(action, *named, sent.parameters, call.caller, sent.files)
        return Reply(await management.answer(asked))

    async def metrics(call: RouteCall) -> Reply:
        return Reply(await management.metrics(), content_type=METRICS)

    own = dict.fromkeys(management.actions, answer)
    return {**own, "metrics": metrics}


def decode_body(data: Buffer, schema: type[Schema]) -> Schema:
    """Decode the JSON of a request; an empty body counts as an empty object."""
    try:
        return msgspec.json.decode(data or b"{}", type=schema)
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(data, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None


def decode_object(data: Buffer) -> JsonObject:
    """Decode a JSON object of any names; an empty body counts as an empty one."""
    try:
        return msgspec.json.decode(data or b"{}", type=JsonObject)
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(data, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None


def _parameters(call: RouteCall) -> Mapping[str, Parameter]:
    """Return the parameters of a management call, from its path and its JSON."""
    schema, region = call.match.route.body, call.match.region
    if schema in (TraceSettingsBody, LogSettingsBody):
        return _settings(call.body) if call.method == b"POST" else {}
    if schema is None:
        names = call.match.names
        return {key: names[key] for key in names if key not in ("name", "version")}
    body = decode_body(call.body, schema)
    match body:
        case IndexBody():
            return {"ready": body.ready}
        case UnloadBody():
            return dict(body.parameters or {})
        case SystemRegionBody():
            place = {"offset": body.offset, "byte_size": body.byte_size}
            return {"region": region, "key": body.key, **place}
        case CudaRegionBody():
            place = {"device_id": body.device_id, "byte_size": body.byte_size}
            return {"region": region, "raw_handle": body.raw_handle.b64, **place}
        case PromoteBody() | RollbackBody() | PruneBody():
            return msgspec.structs.asdict(body)
    return {}


def _settings(body: Buffer) -> Mapping[str, Parameter]:
    """Return the settings that a client changes, whatever their values: they are checked later."""
    given = decode_object(body)
    return {"settings": msgspec.json.encode(given).decode()} if given else {}


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
            match = self._gate.admit(exchange.head, is_metrics_port=True)
        except (PenstockError, WrongHead) as error:
            reply_error(exchange, error)
        else:
            self._tasks.start(exchange, self._handlers[match.route.handler], match)
