"""docs/protocols.md says what the code does."""

import asyncio
import re
from pathlib import Path

from starlette.routing import Route

from penstock import pbtxt
from penstock.protocols.gate import RPC_SCOPES, scope_of
from penstock.protocols.v2_grpc import MISSING
from penstock.protocols.v2_routes import MISSING as MISSING_PATHS
from penstock.protocols.v2_routes import V2Routes
from penstock.serving.catalog import Catalog

TEXT = (Path(__file__).parents[1] / "docs" / "protocols.md").read_text()
RPC_ROWS = re.findall(r"^\| (`[^|]+`) \| (open|infer|admin) \| (.+) \|$", TEXT, re.M)
ROWS = re.findall(r"^\| (GET|POST|GET, POST) \| `(/[^`]+)` \| (\w+) \| (.+) \|$", TEXT, re.M)


async def served() -> set[tuple[str, str]]:
    routes = V2Routes(Catalog(), ".", is_explicit=True).application().routes
    return {
        (method, route.path)
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }


def test_every_route_is_in_the_table_and_every_row_is_a_route():
    documented = {(method, path) for method, path, _, state in ROWS if state != "no"}
    for name in ("infer", "generate", "generate_stream"):
        documented.remove(("POST", f"/v2/models/{{name}}/{name}"))
    there = {pair for pair in asyncio.run(served()) if "/versions/" not in pair[1]}
    assert documented == {pair for pair in there if pair[1] not in MISSING_PATHS}


def test_paths_that_are_missing_are_those_that_refuse():
    documented = {path for _, path, _, state in ROWS if state == "no"}
    assert documented == {path.replace("{rest:path}", "…") for path in MISSING_PATHS}


def test_scopes_are_those_of_the_gate():
    for _, path, scope, _ in ROWS:
        assert scope_of(path) == scope


def test_every_rpc_is_in_the_table_with_its_scope():
    documented = {
        name: scope
        for names, scope, _ in RPC_ROWS
        for name in re.findall(r"`([^`]+)`", names)
        if "." not in name
    }
    assert documented == {path.rpartition("/")[2]: scope for path, scope in RPC_SCOPES.items()}


def test_rpcs_that_are_missing_are_those_that_refuse():
    for names, _, state in RPC_ROWS:
        is_missing = any(names.startswith(f"`{start}") for start in MISSING)
        assert (state == "no") == is_missing


def test_refused_fields_are_named():
    for field in pbtxt.UNSUPPORTED:
        assert f"`{field}`" in TEXT
