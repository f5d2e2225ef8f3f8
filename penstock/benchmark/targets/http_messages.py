"""HTTP as text: addresses and requests out, what an answer's head or error says in. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.errors import ConfigError

MAX_TEXT = 160
# Different texts of one status.
MAX_TEXTS = 8
# Of a Server-Timing header; more is not looked at.
MAX_TIMING = 1024
WITHOUT_BODY = ("GET", "DELETE")
_OURS = ("host", "content-length", "transfer-encoding", "connection")
_CREDENTIALS = re.compile("^([^/:]*:(?://)?).*@", re.DOTALL)
_WITH_DIGITS = re.compile(r"[\w-]*\d[\w-]*")
# A name, other parameters, and the one that counts.
_DURATION = re.compile(
    r'([^\s,;="]+)\s*(?:;[^,;]*)*?;\s*dur\s*=\s*"?(\d+(?:\.\d*)?)', re.IGNORECASE
)


class Url(NamedTuple):
    """Where a server is, and the path that was given with it."""

    text: str
    host: str
    port: int
    is_tls: bool
    # As the Host header says it.
    name: str
    # With the query.
    path: str

    @property
    def origin(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.name}"


class Answer(NamedTuple):
    """Header names are lower case; a repeated header keeps its last value."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


def hide_password(address: str) -> str:
    """An address as errors and logs may show it. Everything up to the last @ may be a password,
    also where the address is malformed."""
    return _CREDENTIALS.sub(r"\1***@", address)


def check_no_credentials(address: str) -> None:
    """ConfigError for a user or a password in an address: no target would send them."""
    authority = re.split("[/?#]", address.partition("://")[2], maxsplit=1)[0]
    if "@" in authority:
        raise ConfigError([f"{hide_password(address)}: no user or password is allowed in a URL"])


def parse_url(text: str) -> Url:
    """ConfigError unless it is http://host[:port][/path], or https."""
    check_no_credentials(text)
    shown = hide_password(text)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigError([f"{shown}: invalid host or port; expected http://host:port/…"]) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError([f"{shown}: expected http://host:port/…"])
    if not all(" " < character <= "~" for character in text):
        raise ConfigError([f"{shown}: expected plain characters; write others as %XX"])
    is_tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    default = 443 if is_tls else 80
    return Url(text, parts.hostname, port or default, is_tls, parts.netloc, path)


def request_bytes(
    url: Url, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> bytes:
    """A whole message. `headers` are written as they are: see `check_headers`."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {url.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method not in WITHOUT_BODY:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def check_headers(headers: Mapping[str, str]) -> None:
    """ConfigError for what cannot be a header, or is the client's own to say."""
    problems = []
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            problems.append(f"header {name!r}: expected a name of letters, digits and dashes")
        elif name.lower() in _OURS:
            problems.append(f"header {name!r}: cannot be chosen, the client sets it")
        elif not re.fullmatch(r"[\t\x20-\x7e\x80-\xff]*", value):
            problems.append(f"header {name!r}: expected one line of Latin-1 text, got {value!r}")
    if problems:
        raise ConfigError(problems)


def error_text(body: bytes) -> str:
    """What a server says of an error, on one line: the text of v2, OpenAI or FastAPI, or the first
    line of anything else that is not a page."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        line = body.decode("utf-8", "replace").strip().partition("\n")[0]
        return "" if line.startswith("<") else shortened(line)
    if isinstance(decoded, dict):
        for key in ("error", "message", "detail"):
            value = decoded.get(key)
            if isinstance(value, dict):
                value = value.get("message")
            if isinstance(value, str) and value:
                return shortened(value)
    return shortened(str(decoded)) if decoded else ""


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


class Causes:
    """One spelling per cause: answers of one status whose texts differ only in numbers and ids are
    told by the first of them."""

    def __init__(self) -> None:
        self._texts: dict[int, dict[str, str]] = {}

    def of(self, status: int, body: bytes) -> str:
        text = error_text(body)
        key = _WITH_DIGITS.sub("#", text)
        known = self._texts.setdefault(status, {})
        if key not in known:
            if len(known) >= MAX_TEXTS:
                return f"status {status}"
            known[key] = f"status {status}: {text}" if text else f"status {status}"
        return known[key]


def server_timing(value: bytes) -> dict[str, float]:
    """Seconds by name, from the header of that name; entries without a duration are left out."""
    found = _DURATION.findall(value[:MAX_TIMING].decode("latin-1"))
    return {name: float(milliseconds) / 1e3 for name, milliseconds in found}
