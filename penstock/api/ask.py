"""Requests of the command line to a running server; errors are readable."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from urllib.parse import quote

import msgspec

from penstock.benchmark.targets.http_messages import parse_url
from penstock.errors import CommandLineError, ConfigError
from penstock.serving.explain import Explanation

TIMEOUT_S = 10.0
WRONG_PORT = "is this a Penstock server's HTTP port?"


def explanation(url: str, model: str, version: str = "", api_key: str = "") -> Explanation:
    """Return the server's explanation of a model; ConfigError if it has none."""
    try:
        parse_url(url)
    except ConfigError as error:
        raise CommandLineError([f"--url {error}"]) from None
    path = f"/v2/models/{quote(model, safe='')}"
    if version:
        path += f"/versions/{quote(version, safe='')}"
    body = _get(url.rstrip("/") + path + "/explain", url, api_key)
    try:
        return msgspec.json.decode(body, type=Explanation)
    except msgspec.DecodeError as error:
        raise ConfigError(
            [f"{url}: this is no Penstock server, or one of another version ({error})"]
        ) from None


def _get(address: str, url: str, api_key: str) -> bytes:
    request = urllib.request.Request(address)
    if api_key:
        request.add_header("X-API-Key", api_key)
    # No proxy: the server is close, and the key must not leak.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError([_refusal(url, error.code, error.read())]) from None
    except http.client.HTTPException:
        text = f"what answers speaks no HTTP: {WRONG_PORT}"
        raise ConfigError([f"{url}: {text}"]) from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError([f"{url}: the server cannot be reached: {reason}"]) from None


def _refusal(url: str, status: int, body: bytes) -> str:
    try:
        text = msgspec.json.decode(body, type=dict[str, str])["error"]
    except (msgspec.DecodeError, KeyError):
        text = f"status {status}"
    if status == 401:
        return f"{url}: {text}; give one with the scope 'metrics' by --api-key or PENSTOCK_API_KEY"
    if status == 404 and "unknown model" not in text:
        return f"{url}: {text}: {WRONG_PORT}"
    return f"{url}: {text}"
