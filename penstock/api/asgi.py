"""An ASGI 3 application that serves models, as `penstock.asgi` returns it: when it starts and
stops. `protocols.asgi_http` answers its requests. Imports no web framework."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

from penstock.api.asgi_options import AsgiOptions
from penstock.errors import ConfigError, NotReady, PenstockError
from penstock.protocols.asgi_http import (
    AnswerEvents,
    AsgiExchange,
    AsgiHttp,
    Receive,
    Scope,
    Send,
    path_in_app,
)
from penstock.protocols.http_errors import reply_error
from penstock.protocols.http_reader import MessageHead
from penstock.protocols.route_table import find

if TYPE_CHECKING:
    from penstock.api.embedded import EmbeddedServer

STOPPED = "the application has stopped"
log = logging.getLogger("penstock.asgi")


class AsgiApp:
    """Serves one model or repository. It starts with the host's lifespan, with `async with`, or
    with the first request, on the event loop of that; it starts once and stops once."""

    def __init__(self, model: str, options: AsgiOptions) -> None:
        self._model = model
        self._options = options
        self._server: EmbeddedServer | None = None
        self._http: AsgiHttp | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_stopped = False

    def __repr__(self) -> str:
        return f"<AsgiApp {self._model}>"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @contextlib.asynccontextmanager
    async def lifespan(self, host: object = None) -> AsyncIterator[None]:
        """Serve for as long as the host application runs: `FastAPI(lifespan=models.lifespan)`."""
        async with self:
            yield

    async def start(self) -> None:
        """Load the models and return when they are ready. ConfigError if one cannot be loaded,
        NotReady after `stop`."""
        if self._is_stopped:
            raise NotReady(f"{STOPPED}; make another one with penstock.asgi")
        await asyncio.shield(self._begin())

    async def stop(self) -> None:
        """Finish requests in flight, up to `drain_s`, and end all processes."""
        self._is_stopped = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        if self._http is not None:
            self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._answer(scope, receive, send)
            case "lifespan":
                await self._run_lifespan(receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000, "reason": "HTTP only"})
            case kind:
                raise NotImplementedError(f"ASGI scope '{kind}'; expected http or lifespan")

    def _begin(self) -> asyncio.Task[None]:
        """Return the task that loads the models; the first call creates it."""
        if self._starting is None:
            from penstock.api.embedded import EmbeddedServer

            self._server = server = EmbeddedServer(self._model, self._options.served)
            self._http = http = AsgiHttp(server.v2, self._options.served.limits)
            server.count_running = lambda: http.num_running
            self._starting = asyncio.create_task(server.start())
        return self._starting

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._wait_until_loaded(scope)
        except PenstockError as error:
            await _refuse(scope, send, error)
            return
        assert self._http is not None
        await self._http.answer(scope, receive, send)

    async def _wait_until_loaded(self, scope: Scope) -> None:
        """Wait for models that are loading, except for health checks. NotReady if they cannot."""
        if self._is_stopped:
            raise NotReady(STOPPED)
        try:
            starting = self._begin()
            if starting.done():
                starting.result()
            elif not _is_open(scope):
                await asyncio.shield(starting)
        except ConfigError as error:
            log.error("models cannot be loaded: %s", error)
            # Nobody has asked for a key yet; reasons name files.
            reason = "" if self._options.served.api_keys else f": {error}"
            raise NotReady(f"models cannot be loaded{reason}") from None
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            raise NotReady(STOPPED) from None

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                try:
                    await self.start()
                except PenstockError as error:
                    await self.stop()
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _is_open(scope: Scope) -> bool:
    """Whether the path needs no model: health checks."""
    found = find(path_in_app(scope))
    return found is not None and found.route.scope == "open"


async def _refuse(scope: Scope, send: Send, error: PenstockError) -> None:
    answer = AnswerEvents()
    head = MessageHead(str(scope["method"]).encode("latin-1"), path_in_app(scope), {})
    reply_error(AsgiExchange(answer, head, b""), error)
    await answer.send_all(send)
