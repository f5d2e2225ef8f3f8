"""Runs an ASGI application (Starlette) behind our HTTP server: all that is not inference."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from penstock.protocols.http import Exchange

log = logging.getLogger("penstock.http")

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class AsgiBridge:
    """Owns the tasks it starts; `close` ends them."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        call = _Call(exchange)
        task = call.task = asyncio.get_running_loop().create_task(call.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.waiter = call

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Call:
    """One request through the application."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_body_read = False
        self._status = 500
        self._headers = b""
        self._is_streaming = False
        self.task: asyncio.Task[None] | None = None

    def abandon(self) -> None:
        """The client left."""
        if self.task is not None:
            self.task.cancel()

    async def run(self, app: App) -> None:
        try:
            await app(self._scope(), self._receive, self._send)
            if not self._exchange.is_finished:
                raise RuntimeError("the application returned without a complete answer")
        except asyncio.CancelledError:
            raise
        except Exception:  # The protocol edge.
            log.exception("while answering %r", self._exchange.head.path)
            if self._is_streaming:
                self._exchange.abort()
            else:
                self._exchange.reply_error(500, "internal error")

    def _scope(self) -> Message:
        head = self._exchange.head
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": head.method.decode("latin-1"),
            "scheme": "http",
            "path": _unquoted(head.path),
            "raw_path": head.path,
            "query_string": head.query,
            "root_path": "",
            "headers": list(head.headers.items()),
        }

    async def _receive(self) -> Message:
        if self._is_body_read:
            # The client's leaving cancels the task, so there is nothing else to tell.
            await asyncio.Event().wait()
        self._is_body_read = True
        return {"type": "http.request", "body": bytes(self._exchange.body), "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            lines = []
            for name, value in message.get("headers", ()):
                if name.lower() != b"content-length":
                    lines.append(b"%b: %b\r\n" % (name, value))
            self._headers = b"".join(lines)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if not more and not self._is_streaming:
            self._exchange.reply(self._status, self._headers, (body,))
            return
        if not self._is_streaming:
            self._is_streaming = True
            self._exchange.start_stream(self._status, self._headers)
        await self._exchange.can_write()
        self._exchange.stream(body)
        if not more:
            self._exchange.end_stream()


def _unquoted(path: bytes) -> str:
    from urllib.parse import unquote_to_bytes

    return unquote_to_bytes(path).decode("utf-8", "replace")
