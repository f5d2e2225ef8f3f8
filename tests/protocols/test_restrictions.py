"""Restricted protocols: Triton's categories cover every route, and a secret opens them."""

import pytest

from penstock.config import Restriction
from penstock.errors import NotAllowed
from penstock.protocols.restrictions import CATEGORIES, category_of, check_restriction
from penstock.protocols.route_table import ROUTES, find

INFERENCE = {"inference": Restriction(b"infer-key", b"secret")}
# Pages without data, and scrapes, which Triton has on a port of their own.
FREE = {"start_page", "asset", "openapi", "metrics"}


def test_every_route_has_a_category_but_pages_and_scrapes() -> None:
    assert {route.handler for route in ROUTES if not category_of(route)} == FREE
    assert {route.handler for route in ROUTES} >= set(CATEGORIES)


@pytest.mark.parametrize(
    ("path", "category"),
    [
        ("/v2/health/live", "health"),
        ("/v2", "metadata"),
        ("/v2/models/m/versions/1/infer", "inference"),
        ("/v1/completions", "inference"),
        ("/v2/systemsharedmemory/status", "shared-memory"),
        ("/v2/models/m/config", "model-config"),
        ("/v2/repository/models/m/promote", "model-repository"),
        ("/v2/models/stats", "statistics"),
        ("/v2/models/m/trace/setting", "trace"),
        ("/v2/logging", "logging"),
    ],
)
def test_categories(path: str, category: str) -> None:
    match = find(path.encode())
    assert match is not None and category_of(match.route) == category


@pytest.mark.parametrize(
    "headers",
    [{}, {b"infer-key": b""}, {b"infer-key": b"secret2"}, {b"infer-key": b"secret\nsecret"},
     {b"infer-key": b"\xff"}, {b"other": b"secret"}],
)  # fmt: skip
def test_a_restricted_route_needs_its_header(headers: dict[bytes, bytes]) -> None:
    infer, live = find(b"/v2/models/m/infer"), find(b"/v2/health/live")
    assert infer is not None and live is not None
    with pytest.raises(NotAllowed, match="This API is restricted, expecting header 'infer-key'"):
        check_restriction(INFERENCE, infer.route, headers, "API")
    check_restriction(INFERENCE, live.route, headers, "API")
    check_restriction(INFERENCE, infer.route, {b"infer-key": b"secret"}, "API")
