"""Any URL: a method, headers and a body in which `{name}` stands for a field of the input.

In a body that is a JSON object or list, a field is JSON: text inside quotes is escaped, anything
else is written as a value. In any other body, text is inserted as it is. `{{name}}` stands for a
literal `{name}`; braces around anything but a name are literal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import numpy as np

from penstock.benchmark.targets import Description, TargetSpec
from penstock.benchmark.targets.http_client import HttpClient, HttpTarget
from penstock.benchmark.targets.http_messages import parse_url, request_bytes
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_FIELD = re.compile(r"\{\{(?P<itself>[A-Za-z_][\w.-]*)\}\}|\{(?P<name>[A-Za-z_][\w.-]*)\}")


class BodyTemplate:
    """A body with holes: literal texts, and between them (name, whether inside quotes)."""

    def __init__(self, text: str) -> None:
        self._texts: list[bytes] = []
        self._holes: list[tuple[str, bool]] = []
        piece, start, in_quotes = "", 0, False
        for match in _FIELD.finditer(text):
            piece += text[start : match.start()]
            start = match.end()
            if match["itself"]:
                piece += "{" + match["itself"] + "}"
                continue
            # Escaped quotes do not delimit strings.
            in_quotes ^= re.sub(r"\\.", "", piece, flags=re.DOTALL).count('"') % 2 == 1
            self._texts.append(piece.encode())
            self._holes.append((match["name"], in_quotes))
            piece = ""
        self._texts.append((piece + text[start:]).encode())
        self.is_json = _is_json(b"0".join(self._texts))

    @property
    def fields(self) -> tuple[str, ...]:
        """Each name once, in the order of the body."""
        return tuple(dict.fromkeys(name for name, _ in self._holes))

    def fill(self, values: Mapping[str, object]) -> bytes:
        if missing := [name for name in self.fields if name not in values]:
            problem = f"the body needs it; the input has {', '.join(values) or 'none'}"
            raise ConfigError([f"field '{name}': {problem}" for name in missing])
        parts = [self._texts[0]]
        for (name, in_quotes), text in zip(self._holes, self._texts[1:], strict=True):
            parts += (self._written(name, values[name], in_quotes), text)
        return b"".join(parts)

    def _written(self, name: str, value: object, in_quotes: bool) -> bytes:
        if not self.is_json and isinstance(value, str | bytes):
            return value.encode() if isinstance(value, str) else value
        try:
            encoded = msgspec.json.encode(value, enc_hook=_from_numpy)
        except (TypeError, ValueError) as error:
            raise ConfigError([f"field '{name}': cannot be written as JSON: {error}"]) from None
        if not (self.is_json and in_quotes):
            return encoded
        if encoded.startswith(b'"'):
            return encoded[1:-1]
        return msgspec.json.encode(encoded.decode())[1:-1]


def _is_json(body: bytes) -> bool:
    """Whether it is a JSON object or list; a field alone may be anything."""
    try:
        return isinstance(msgspec.json.decode(body), dict | list)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _from_numpy(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


class PlainHttp(HttpTarget):
    """Any URL; an answer is good when its status is 2xx."""

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(spec, parse_url(spec.address))
        self._method = spec.method.upper()
        if self._method not in METHODS:
            raise ConfigError([f"method {spec.method}: expected one of {', '.join(METHODS)}"])
        self._template = BodyTemplate(spec.body)
        if spec.body and "content-type" not in map(str.lower, spec.headers):
            kind = "application/json" if self._template.is_json else "text/plain; charset=utf-8"
            self._headers = {"Content-Type": kind, **self._headers}

    async def describe(self) -> tuple[Description, RequestForm]:
        """Connect without a request, since any request may have effects."""
        # A separate client: connecting the other one is timed later.
        probe = HttpClient(self._url, self._spec.timeout_s, 1)
        try:
            await probe.open(1)
        finally:
            await probe.close()
        form = RequestForm("fields", fields=self._template.fields)
        return Description("HTTP", self._spec.address), form

    def encode(self, sample: Sample) -> bytes:
        body = self._template.fill(sample.fields)
        return request_bytes(self._url, self._method, self._url.path, self._headers, body)
