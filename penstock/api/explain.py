"""Explanations of a running server's batcher, for `penstock.explain` and `penstock explain`."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.api import shown, terminal
from penstock.api.client_http import error_text, model_path
from penstock.api.endpoint import parse_endpoint
from penstock.benchmark.targets.http_messages import parse_url
from penstock.errors import CommandLineError, ConfigError
from penstock.repository.model_source import URL
from penstock.serving.explain import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 10.0
WRONG_PORT = "is this a Penstock server's HTTP port?"


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """A server's explanation of one model."""

    explanation: Explanation

    @property
    def verdicts(self) -> list[str]:
        """Why batches are as they are, one sentence each."""
        return list(self.explanation.verdicts)

    def __rich__(self) -> RenderableType:
        return terminal.explained(self.explanation)

    def __str__(self) -> str:
        return shown.to_text(self.__rich__())

    def _repr_html_(self) -> str:
        return shown.to_html(self.__rich__())


@dataclass(frozen=True, slots=True)
class ExplainedModel:
    """A model on a running server."""

    url: str
    model: str
    version: str = ""
    api_key: str = ""

    def ask(self) -> ExplainResult:
        """Return the server's explanation; ConfigError if it has none."""
        try:
            parse_url(self.url)
        except ConfigError as error:
            raise CommandLineError([f"--url {error}"]) from None
        path = f"{model_path(self.model, self.version)}/explain"
        body = self._get(self.url.rstrip("/") + path)
        try:
            return ExplainResult(msgspec.json.decode(body, type=Explanation))
        except msgspec.DecodeError as error:
            problem = f"this is no Penstock server, or one of another version ({error})"
            raise ConfigError([f"{self.url}: {problem}"]) from None

    def _get(self, address: str) -> bytes:
        request = urllib.request.Request(address)
        if self.api_key:
            request.add_header("X-API-Key", self.api_key)
        # No proxy: the server is close, and the key must not leak.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                problem = _refusal(error.code, error.read())
        except http.client.HTTPException:
            problem = f"what answers speaks no HTTP: {WRONG_PORT}"
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            problem = f"the server cannot be reached: {reason}"
        raise ConfigError([f"{self.url}: {problem}"])


def _refusal(status: int, body: bytes) -> str:
    text = error_text(status, body)
    if status == 401:
        return f"{text}; give one with the scope 'metrics' by --api-key or PENSTOCK_API_KEY"
    if status == 404 and "unknown model" not in text:
        return f"{text}: {WRONG_PORT}"
    return text


def locate(model: str, url: str = "", version: str = "", api_key: str = "") -> ExplainedModel:
    """Locate a model on a server, by its name and the server's URL, or by its own URL,
    http://host:port/v2/models/NAME."""
    if not URL.match(model):
        return ExplainedModel(url or DEFAULT_URL, model, version, api_key)
    if url:
        raise CommandLineError([f"--url is given twice: {url}, and {model} as MODEL"])
    try:
        endpoint = parse_endpoint(model)
    except ConfigError as error:
        raise CommandLineError(error.problems) from None
    if endpoint.scheme not in ("http", "https"):
        raise CommandLineError([f"{model}: servers explain over HTTP; give their HTTP port"])
    if not endpoint.model:
        raise CommandLineError([f"{model}: names no model; expected {endpoint.url}/v2/models/NAME"])
    return ExplainedModel(endpoint.url, endpoint.model, version or endpoint.version, api_key)
