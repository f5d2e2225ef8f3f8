"""docs/protocols.md says what the code does."""

import re
from pathlib import Path

from penstock.protocols.route_table import ROUTES, RPC_ROUTES
from penstock.repository import pbtxt

TEXT = (Path(__file__).parents[1] / "docs" / "protocols.md").read_text()
RPC_ROWS = re.findall(r"^\| (`[^|]+`) \| (open|infer|shared_memory|admin) \| (.+) \|$", TEXT, re.M)
ROWS = re.findall(r"^\| (GET|POST|GET, POST) \| `(/[^`]*)` \| (\w+) \| (.+) \|$", TEXT, re.M)


def test_the_table_has_every_route_with_its_methods_and_scope():
    documented = {(methods, path, scope) for methods, path, scope, _ in ROWS}
    there = {
        (", ".join(m for m in route.methods if m != "HEAD"), route.path, route.scope)
        for route in ROUTES
        if "/versions/" not in route.path and route.handler != "openai"
    }
    assert documented == there


def test_routes_of_openai_are_named():
    for route in ROUTES:
        if route.handler == "openai":
            assert f"`{route.path.removesuffix('/{name:path}')}`" in TEXT


def test_every_rpc_is_in_the_table_with_its_scope():
    documented = {
        name: scope
        for names, scope, _ in RPC_ROWS
        for name in re.findall(r"`([^`]+)`", names)
        if "." not in name
    }
    there = {path.rpartition("/")[2]: route.scope for path, route in RPC_ROUTES.items()}
    assert documented == there


def test_refused_fields_are_named():
    for field in pbtxt.UNSUPPORTED:
        assert f"`{field}`" in TEXT
