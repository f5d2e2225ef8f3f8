"""The pages as files: open, static, and nothing in them comes from elsewhere."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from page_server import KEYS, SECRETS, PageServer, null_config, page_server

from penstock.dashboard.pages import FILES
from penstock.protocols.gate import Gate
from penstock.protocols.route_table import ROUTES

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAX_BYTES = 300_000
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server([null_config("secret-model", {"x": ("INT32", (2,))})], Gate(KEYS)) as running:
        yield running


def read(name: str) -> str:
    return files("penstock.dashboard").joinpath(name).read_text()


@pytest.mark.parametrize("path", FILES)
def test_files_are_open_and_hold_no_data(server: PageServer, path: str) -> None:
    status, headers, body = server.ask(path, BROWSER)
    assert status == 200
    assert body.decode() == read(FILES[path])
    kind = TYPES[FILES[path].rpartition(".")[2]]
    assert headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert b"secret-model" not in body


@pytest.mark.parametrize("path", FILES)
def test_nothing_inline_and_nothing_from_elsewhere_may_run(server: PageServer, path: str) -> None:
    _, headers, _ = server.ask(path, BROWSER)
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize("name", FILES.values())
def test_files_use_relative_addresses_and_no_markup_from_data(name: str) -> None:
    text = read(name)
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", text.replace("// ", ""))
    assert not re.search(r"""(href|src)=["']/""", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"""\son\w+=["']|\sstyle=["']|<style|<script>""", text)
    assert not re.search(r"localStorage|sessionStorage|document\.cookie", text)


def test_all_files_together_are_small() -> None:
    assert sum(len(read(name).encode()) for name in FILES.values()) < MAX_BYTES


def test_every_file_has_its_route() -> None:
    rows = {route.path for route in ROUTES if route.handler in ("asset", "start_page")}
    assert rows == FILES.keys()


@pytest.mark.parametrize("accept", [None, "*/*", "application/json"])
def test_other_clients_get_links_that_exist(server: PageServer, accept: str | None) -> None:
    status, headers, body = server.ask("/", {"Accept": accept} if accept else {})
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["Vary"] == "Accept"
    links = json.loads(body)
    assert (links.pop("name"), bool(links.pop("version"))) == ("penstock", True)
    for path in links.values():
        statuses = {server.ask(f"/{path}", {"X-API-Key": secret})[0] for secret in SECRETS.values()}
        assert 200 in statuses


def test_unknown_paths_stay_not_found(server: PageServer) -> None:
    for path in ("/index.html", "/dashboard/", "/dashboard/pages.py", "/dashboard/../server.py"):
        assert server.ask(path, BROWSER)[0] == 404
