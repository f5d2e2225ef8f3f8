"""Handlers of the server's own pages.

The files are static and open to everyone; they hold no data. The pages fetch the state route with
the visitor's API key, so they show what that key may see and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.resources import files

import msgspec

import penstock
from penstock.dashboard.openapi import describe_json
from penstock.dashboard.state import StateReader
from penstock.protocols.gate import Gate
from penstock.protocols.handler_tasks import Reply, RouteCall, RouteHandler
from penstock.serving.management import ManagementApi
from penstock.wire.documented import Links

# The file of each route.
FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/dashboard/app.js": "app.js",
    "/dashboard/docs.js": "docs.js",
    "/dashboard/style.css": "style.css",
}
# Nothing inline, nothing from elsewhere, no frame around it. Images are those that a visitor picks.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    f"Content-Security-Policy: {POLICY}\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Cache-Control: no-cache\r\n"
).encode()
VARIES = b"Vary: Accept\r\n"
PRIVATE = b"Cache-Control: no-store\r\n"


class Pages:
    def __init__(self, management: ManagementApi, gate: Gate) -> None:
        self._management = management
        self._gate = gate
        # A server has a key file from its start, or none.
        self._needs_key = gate.keys is not None
        self._state = StateReader(management, self._needs_key)
        folder = files("penstock.dashboard")
        self._files = {path: folder.joinpath(name).read_bytes() for path, name in FILES.items()}

    def handlers(self) -> Mapping[str, RouteHandler]:
        """Return the handlers by their names in the route table."""
        return {h.__name__: h for h in (self.start_page, self.asset, self.openapi, self.state)}

    async def start_page(self, call: RouteCall) -> Reply:
        """Reply with a page to browsers, with links to other clients."""
        if b"text/html" in call.headers.get(b"accept", b"").lower():
            page = await self.asset(call)
            return Reply(page.body, 200, page.content_type, page.headers + VARIES)
        links = Links(self._management.server_id, penstock.__version__)
        return Reply(msgspec.json.encode(links), headers=VARIES)

    async def asset(self, call: RouteCall) -> Reply:
        route = call.match.route
        return Reply(self._files[route.path], 200, f"{route.media}; charset=utf-8", HEADERS)

    async def openapi(self, call: RouteCall) -> Reply:
        # The first time takes a tenth of a second: not on the event loop.
        return Reply(await asyncio.to_thread(describe_json, self._needs_key))

    async def state(self, call: RouteCall) -> Reply:
        found = self._state.read(self._gate.scopes_of(call.headers))
        return Reply(msgspec.json.encode(found), headers=PRIVATE)
