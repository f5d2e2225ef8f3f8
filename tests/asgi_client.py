"""A host of ASGI applications for tests: it calls them as a web server would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

App = Callable[..., Awaitable[None]]


@dataclass
class AsgiAnswer:
    """All events that the application sent. A client that is slow takes none before `is_reading` is
    set."""

    events: list[dict[str, Any]] = field(default_factory=list)
    is_reading: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> int:
        return int(self.events[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        pairs = self.events[0]["headers"]
        found = {name.decode(): value.decode() for name, value in pairs}
        assert len(found) == len(pairs), "a header is sent twice"
        return found

    @property
    def parts(self) -> list[bytes]:
        return [event["body"] for event in self.events[1:]]

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def is_complete(self) -> bool:
        return len(self.events) > 1 and not self.events[-1]["more_body"]


@dataclass
class AsgiClient:
    """Sends messages to an application. `gone` disconnects the clients that wait."""

    app: App
    root_path: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        answer: AsgiAnswer | None = None,
    ) -> AsgiAnswer:
        """Return the answer. A sequence is a body in parts; without its length in the headers, one
        that the client does not announce."""
        parts = [body] if isinstance(body, bytes) else list(body)
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        if isinstance(body, bytes) and "content-length" not in {name.lower() for name, _ in pairs}:
            pairs.append(("content-length", str(len(body))))
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": self.root_path,
            "headers": [(name.lower().encode(), value.encode()) for name, value in pairs],
        }
        if answer is None:
            answer = AsgiAnswer()
            answer.is_reading.set()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(event: dict[str, Any]) -> None:
            await answer.is_reading.wait()
            answer.events.append(event)

        await self.app(scope, receive, send)
        return answer
