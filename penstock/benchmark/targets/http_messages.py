"""HTTP as text: URLs and requests out, heads and errors of answers in. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from penstock.errors import ConfigError

MAX_ANSWER_BYTES = 64 << 20
MAX_TEXT = 160
# Distinct error texts kept per status.
MAX_TEXTS = 8
# Characters of a Server-Timing header that are parsed.
MAX_TIMING = 1024
WITHOUT_BODY = ("GET", "DELETE")
_OURS = ("host", "content-length", "transfer-encoding", "connection")
_CREDENTIALS = re.compile("^([^/:]*:(?://)?).*@", re.DOTALL)
_WITH_DIGITS = re.compile(r"[\w-]*\d[\w-]*")
# A metric's name, other parameters, and its duration.
_DURATION = re.compile(r'([^\s,;="]+)\s*(?:;[^,;]*)*?;\s*dur\s*=\s*"?(\d+(?:\.\d*)?)', re.I)

T = TypeVar("T")


class Url(NamedTuple):
    """A server's address, and the path given with it."""

    text: str
    host: str
    port: int
    is_tls: bool
    # The value of the Host header.
    name: str
    # Including the query.
    path: str

    @property
    def origin(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.name}"


@dataclass(slots=True)
class HttpAnswer:
    """A whole answer, read as it arrives. Header names are lower case; the last of each counts."""

    status: int = 0
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def error_text(self) -> str:
        return error_text(self.body) or f"status {self.status}"

    def decode(self, kind: type[T]) -> T:
        """Decode a good answer's JSON; ValueError says why it is not one."""
        if not self.is_good:
            raise ValueError(f"status {self.status}")
        try:
            return msgspec.json.decode(self.body, type=kind, strict=False)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status, self.headers = status, headers

    def chunk(self, data: bytes) -> None:
        if len(self.body) <= MAX_ANSWER_BYTES:
            self.body += data

    def end(self) -> str | None:
        if len(self.body) > MAX_ANSWER_BYTES:
            return f"the answer is longer than {MAX_ANSWER_BYTES} bytes"
        return None


def hide_password(address: str) -> str:
    """Mask an address for errors and logs: all up to the last @ may be a password."""
    return _CREDENTIALS.sub(r"\1***@", address)


def split_url(text: str, expected: str) -> tuple[SplitResult, int | None]:
    """Return the parts of an address and its port; ConfigError if they are invalid, or for a user
    or password, which no target would send."""
    shown = hide_password(text)
    if "@" in re.split("[/?#]", text.partition("://")[2], maxsplit=1)[0]:
        raise ConfigError([f"{shown}: no user or password is allowed in a URL"])
    try:
        parts = urlsplit(text)
        return parts, parts.port
    except ValueError:
        raise ConfigError([f"{shown}: invalid host or port; expected {expected}"]) from None


def parse_url(text: str) -> Url:
    """Parse http://host[:port][/path] or https; ConfigError otherwise."""
    parts, port = split_url(text, "http://host:port/…")
    shown = hide_password(text)
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
    """Return a whole request. `headers` are written unchecked: see `check_headers`."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {url.name}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method not in WITHOUT_BODY:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise ConfigError for invalid headers, and for those that the client sets itself."""
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


def error_text(body: bytes | bytearray) -> str:
    """Return a server's error message on one line: the text of v2, OpenAI or FastAPI, or the first
    line of any other body that is not HTML."""
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


def shortened(text: str, most: int = MAX_TEXT) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


class Causes:
    """Error texts, one per cause: answers with the same status whose texts differ only in numbers
    and ids are reported with the first such text."""

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
    """Return seconds by name from a Server-Timing header, skipping entries without a duration."""
    found = _DURATION.findall(value[:MAX_TIMING].decode("latin-1"))
    return {name: float(milliseconds) / 1e3 for name, milliseconds in found}
