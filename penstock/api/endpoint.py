"""Addresses of servers and their models, and what clients know about them. Values only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError
from penstock.types import TensorSpec

EXPECTED = "http://host:port or grpc://host:port (https and grpcs for TLS)"
# Segments of a path before /v2, percent-encoded.
PREFIX = r"(?P<prefix>(?:/(?!v2(?:/|$))[!-.0-~]+)*?)"
NAMED = r"/v2(?:/models/(?P<m>[^/]+)(?:/versions/(?P<v>[^/]+))?)?"
# OpenAI's API; a prefix with this segment must be followed by /v2.
OTHER_API = re.compile(r"/v1(/|$)")
HTTP_PATH = re.compile(rf"{PREFIX}(?P<api>{NAMED})?/?")
GRPC_PATH = re.compile(r"(?P<prefix>)(?:/(?P<m>[^/]+)(?:/(?P<v>[^/]+))?)?/?")
DEFAULT_PORTS = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 8001}


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model as the server describes it; shapes include the batch dimension."""

    name: str
    versions: tuple[str, ...] = ()
    platform: str = ""
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server, with the model that the URL names, if any."""

    scheme: str
    host: str
    port: int
    model: str = ""
    version: str = ""
    # Path that the server is mounted below, such as /models; HTTP only.
    prefix: str = ""

    @property
    def is_tls(self) -> bool:
        return self.scheme in ("https", "grpcs")

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Access:
    """How requests are sent: key, time limit, and the issuers of the server's certificate."""

    api_key: str = ""
    timeout_s: float = 60.0
    ca_file: str = ""

    def __post_init__(self) -> None:
        given = self.timeout_s
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not is_number or not 0 < given < math.inf:
            raise ConfigError([f"timeout_s: {given!r} is not a number of seconds above 0"])


def parse_endpoint(url: str) -> Endpoint:
    """Parse a server's or a model's URL; ConfigError says what is accepted."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError([f"{url}: invalid host or port; expected {EXPECTED}"]) from None
    if "@" in parts.netloc:
        raise ConfigError(["the URL has a user or password; give a key by api_key= instead"])
    if parts.scheme not in DEFAULT_PORTS or not host:
        raise ConfigError([f"{url}: expected {EXPECTED}"])
    is_http = parts.scheme in ("http", "https")
    match = (HTTP_PATH if is_http else GRPC_PATH).fullmatch(parts.path)
    if match is None or (OTHER_API.search(match["prefix"]) and not match["api"]):
        forms = "[/PREFIX]/v2/models/NAME[/versions/V]" if is_http else "/NAME[/V]"
        raise ConfigError([f"{url}: unknown path; expected {parts.scheme}://host:port{forms}"])
    model, version = (unquote(match[key] or "") for key in ("m", "v"))
    port = port or DEFAULT_PORTS[parts.scheme]
    return Endpoint(parts.scheme, host, port, model, version, match["prefix"])
