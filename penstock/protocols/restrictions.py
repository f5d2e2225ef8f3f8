"""Restricted protocols (Triton's `--http-restricted-api`): groups of routes that need a header with
a secret, in addition to any API key. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from penstock.config import Restriction
from penstock.errors import NotAllowed
from penstock.protocols.route import Route

# The category of each handler of the route table; others, such as pages and scrapes, have none.
_HANDLERS = {
    "health": "live ready model_ready",
    "metadata": "server_metadata metadata",
    "inference": "infer generate generate_stream openai",
    "model-config": "config",
    "model-repository": "index load unload versions history diff promote rollback rollout verify "
    "prune",
    "statistics": "statistics explain state events what_if",
    "trace": "trace",
    "logging": "logging",
}
CATEGORIES = {
    handler: category for category, handlers in _HANDLERS.items() for handler in handlers.split()
}


def category_of(route: Route) -> str:
    """Return Triton's category of a route; empty if it has none."""
    if route.scope == "shared_memory":
        return "shared-memory"
    return CATEGORIES.get(route.handler, "")


def check_restriction(
    restricted: Mapping[str, Restriction], route: Route, headers: Mapping[bytes, bytes], what: str
) -> None:
    """Raise NotAllowed for a message that lacks the header which its category needs. The time that
    this takes does not reveal how much of a guess is right."""
    found = restricted.get(category_of(route))
    if found is None:
        return
    given = headers.get(found.header, b"")
    if not hmac.compare_digest(given, found.value):
        header = found.header.decode()
        raise NotAllowed(f"This {what} is restricted, expecting header '{header}'")
