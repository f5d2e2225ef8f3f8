"""Errors of `penstock explain` in words; that it works is tests/e2e/test_watch.py's business."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.api.explain import ExplainedModel
from penstock.api.server_http import WRONG_PORT
from penstock.errors import ConfigError


class Other(BaseHTTPRequestHandler):
    """Some other server, which answers as told."""

    status, body = 200, b""
    seen: list[tuple[str, str | None]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["X-API-Key"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Other.seen = []
    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def complaint(url: str, status: int = 200, body: object = b"") -> str:
    Other.status = status
    Other.body = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ConfigError) as caught:
        ExplainedModel(url, "m").ask()
    [problem] = caught.value.problems
    return problem


def test_no_error_shows_a_password():
    for url in ("http://me:hunter2@127.0.0.1:1", "ftp://me:hunter2@x", "http://me:hunter2@x:y"):
        with pytest.raises(ConfigError) as caught:
            ExplainedModel(url, "m").ask()
        assert "hunter2" not in str(caught.value)


def test_nobody_is_there():
    with pytest.raises(ConfigError, match=r"cannot be reached: .*refused"):
        ExplainedModel("http://127.0.0.1:1", "m").ask()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_an_address_that_is_none(url):
    with pytest.raises(ConfigError, match="expected http://host:port"):
        ExplainedModel(url, "m").ask()


def test_a_key_is_missing(url):
    text = complaint(url, 401, {"error": "this needs an API key"})
    assert "this needs an API key" in text and "PENSTOCK_API_KEY" in text


def test_no_such_model(url):
    error = "Request for unknown model: 'm' is not found"
    assert complaint(url, 404, {"error": error}) == f"{url}: {error}"


@pytest.mark.parametrize("body", [{"error": "Not Found"}, b"<html>", {"detail": 3}])
def test_a_server_of_another_kind(url, body):
    assert "is this a Penstock server's HTTP port?" in complaint(url, 404, body)


@pytest.mark.parametrize("greeting", [b"\0\0\x12\x04\0\0\0\0\0\xff\n", b""])
def test_a_port_that_speaks_no_http(greeting):
    """As gRPC's does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            ExplainedModel(url, "m").ask()
        thread.join()
    [problem] = caught.value.problems
    assert problem == f"{url}: what answers speaks no HTTP: {WRONG_PORT}"


@pytest.mark.parametrize("body", [b"", b"hello", {"model": "m"}])
def test_an_answer_of_another_kind(url, body):
    assert "no Penstock server" in complaint(url, 200, body)


def test_names_are_quoted_and_the_key_is_sent(url, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    Other.status, Other.body = 200, b""
    with pytest.raises(ConfigError):
        ExplainedModel(url + "/", "a/b ?", "3", "secret").ask()
    assert Other.seen == [("/v2/models/a%2Fb%20%3F/versions/3/explain", "secret")]
