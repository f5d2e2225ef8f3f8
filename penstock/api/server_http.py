"""One question to a running server over HTTP, for commands; problems are ConfigErrors in words.

`client_http` is for programs that ask often.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from penstock.api.client_http import error_text
from penstock.benchmark.targets.http_messages import parse_url
from penstock.errors import CommandLineError, ConfigError

TIMEOUT_S = 10.0
WRONG_PORT = "is this a Penstock server's HTTP port?"
# In the text of a 404 that a Penstock server has sent.
ABSENCES = ("unknown model", "no such model", "no version", "no rollout")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server and the key for it. `scope` is what its routes need, `flag` how the URL is given."""

    url: str
    api_key: str = ""
    scope: str = "metrics"
    flag: str = "--url "

    def ask(
        self, path: str, answer: type[Answer], body: object = None, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """Return the answer to a GET, or to a POST with a body; ConfigError says what failed."""
        try:
            parse_url(self.url)
        except ConfigError as error:
            raise CommandLineError([f"{self.flag}{error}"]) from None
        data = None if body is None else msgspec.json.encode(body)
        try:
            return msgspec.json.decode(self._send(path, data, timeout_s), type=answer)
        except msgspec.DecodeError as error:
            problem = f"this is no Penstock server, or one of another version ({error})"
            raise ConfigError([f"{self.url}: {problem}"]) from None

    def _send(self, path: str, data: bytes | None, timeout_s: float) -> bytes:
        request = urllib.request.Request(self.url.rstrip("/") + path, data)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if self.api_key:
            request.add_header("X-API-Key", self.api_key)
        # No proxy: the server is close, and the key must not leak.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                problem = self._refusal(error.code, error.read())
        except http.client.HTTPException:
            problem = f"what answers speaks no HTTP: {WRONG_PORT}"
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s"
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            problem = f"the server cannot be reached: {reason}"
        raise ConfigError([f"{self.url}: {problem}"])

    def _refusal(self, status: int, body: bytes) -> str:
        text = error_text(status, body)
        if status == 401:
            give = f"give one with the scope '{self.scope}' by --api-key or PENSTOCK_API_KEY"
            return f"{text}; {give}"
        if status == 404 and not any(absence in text for absence in ABSENCES):
            return f"{text}: {WRONG_PORT}"
        return text
