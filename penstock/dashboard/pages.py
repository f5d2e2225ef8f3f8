"""Handlers of the server's own pages.

The files are static and open to everyone; they hold no data. The pages fetch the state route with
the visitor's API key, so they show what that key may see and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from importlib.resources import files

import msgspec

import penstock
from penstock.dashboard.event_feed import EventFeed
from penstock.dashboard.live_sampler import LiveSampler
from penstock.dashboard.openapi import describe_json
from penstock.dashboard.state import StateReader
from penstock.dashboard.what_if import WhatIf
from penstock.errors import NotAllowed, PenstockError
from penstock.operate import model_folders
from penstock.operate.monitor import Monitor
from penstock.protocols.gate import Gate
from penstock.protocols.handler_tasks import Reply, RouteCall, RouteHandler, decode_body
from penstock.serving.management import ManagementApi
from penstock.wire.documented import Links
from penstock.wire.live import WhatIfBody

# The file of each route.
FILES = {
    "/": "index.html",
    "/docs": "docs.html",
    "/dashboard": "dashboard.html",
    "/dashboard/common.js": "common.js",
    "/dashboard/app.js": "app.js",
    "/dashboard/charts.js": "charts.js",
    "/dashboard/versions.js": "versions.js",
    "/dashboard/live.js": "live.js",
    "/dashboard/live.css": "live.css",
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
EVENTS = "text/event-stream; charset=utf-8"
# Proxies that buffer would hold events back.
UNBUFFERED = b"X-Accel-Buffering: no\r\n"


class Pages:
    """`monitor` drives the live dashboard; None: it is still."""

    def __init__(
        self, management: ManagementApi, gate: Gate, monitor: Monitor | None = None
    ) -> None:
        self._management = management
        self._gate = gate
        # A server has a key file from its start, or none.
        self._needs_key = gate.keys is not None
        self._state = StateReader(management, self._needs_key)
        monitor = monitor or Monitor(management.catalog)
        self.sampler = LiveSampler(management, monitor)
        lifecycle, gpus = management.lifecycle, management.usage.gpus
        self.feed = EventFeed(self.sampler, monitor, lifecycle, gpus)
        self._what_if = WhatIf(management.catalog)
        folder = files("penstock.dashboard")
        self._files = {path: folder.joinpath(name).read_bytes() for path, name in FILES.items()}

    def handlers(self) -> Mapping[str, RouteHandler]:
        """Return the handlers by their names in the route table."""
        made = (
            self.start_page,
            self.asset,
            self.openapi,
            self.state,
            self.events,
            self.what_if,
        )
        return {handler.__name__: handler for handler in made}

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

    async def events(self, call: RouteCall) -> Reply:
        """Reply with a stream of what happens, a new event each second."""
        headers = call.headers

        def is_allowed() -> bool:
            try:
                self._gate.check_scope("metrics", headers)
            except NotAllowed:
                return False
            return True

        scopes = self._gate.scopes_of(headers)
        has_versions = await asyncio.to_thread(self._has_versions)
        start = partial(self.sampler.start, self._needs_key, scopes, has_versions)
        stream = self.feed.open(start, is_allowed)
        return Reply(b"", 200, EVENTS, PRIVATE + UNBUFFERED, stream)

    def _has_versions(self) -> bool:
        """Whether a repository is served, rather than a single model."""
        try:
            model_folders.find_repository(self._management.control.path)
        except PenstockError:
            return False
        return True

    async def what_if(self, call: RouteCall) -> Reply:
        """Reply with the predicted latency of a version at another rate."""
        body = decode_body(call.body, WhatIfBody)
        found = self._management.catalog.find(body.model, str(body.version))
        rate = self.sampler.current_rate(found.config.name, found.config.version)
        answer = await self._what_if.predict(body, rate)
        return Reply(msgspec.json.encode(answer), headers=PRIVATE)
