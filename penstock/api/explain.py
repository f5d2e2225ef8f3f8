"""Explanations of a running server's batcher, for `penstock.explain` and `penstock explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.api import shown, terminal
from penstock.api.client_http import model_path
from penstock.api.endpoint import parse_endpoint
from penstock.api.server_http import RemoteServer
from penstock.errors import CommandLineError, ConfigError
from penstock.repository.model_source import URL
from penstock.serving.explain import Explanation

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_URL = "http://127.0.0.1:8000"


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
        path = f"{model_path(self.model, self.version)}/explain"
        return ExplainResult(RemoteServer(self.url, self.api_key).ask(path, Explanation))


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
