"""Runs coroutine handlers for the HTTP server: each request is its own task.

Owns the tasks; knows neither paths nor models. Used for everything except inference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import reply_error
from penstock.protocols.route_table import Match
from penstock.types import Buffer

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class RouteCall:
    """Input of a handler: the matched row, the body, and the headers by their lower-case names."""

    match: Match
    body: Buffer = b""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    status: int = 200
    content_type: str = JSON
    # Additional headers, each with its line end.
    headers: bytes = b""


RouteHandler = Callable[[RouteCall], Awaitable[Reply]]


class HandlerTasks:
    """Runs handlers and sends their replies. A client that disconnects cancels its task; `close`
    cancels all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, exchange: Exchange, handler: RouteHandler, match: Match) -> None:
        task = asyncio.get_running_loop().create_task(self._run(exchange, handler, match))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.waiter = _Cancelling(task)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, exchange: Exchange, handler: RouteHandler, match: Match) -> None:
        try:
            reply = await handler(RouteCall(match, exchange.body, exchange.head.headers))
        except PenstockError as error:
            reply_error(exchange, error)
        except Exception:  # Keep serving.
            exchange.reply_bug()
        else:
            headers = f"Content-Type: {reply.content_type}\r\n".encode() if reply.body else b""
            exchange.reply(reply.status, headers + reply.headers, (reply.body,))


@dataclass(frozen=True, slots=True)
class _Cancelling:
    task: asyncio.Task[None]

    def abandon(self) -> None:
        self.task.cancel()
