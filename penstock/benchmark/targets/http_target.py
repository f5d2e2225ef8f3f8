"""What targets over HTTP share: headers, connections, and questions to the server."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Counters, TargetSpec
from penstock.benchmark.targets.http_client import HttpClient, NoAnswer, ask
from penstock.benchmark.targets.http_connection import Read
from penstock.benchmark.targets.http_messages import HttpAnswer, Url, check_headers, request_bytes
from penstock.errors import ConfigError

MAX_MODELS_TOLD = 20


class HttpTarget:
    """A target adds `describe` and `encode`; `read` makes the reader of each answer."""

    load_s: float | None = None

    def __init__(self, spec: TargetSpec, url: Url, read: Read | None = None) -> None:
        self._spec = spec
        self._url = url
        self._headers = dict(spec.headers)
        if spec.api_key and "authorization" not in map(str.lower, spec.headers):
            self._headers["Authorization"] = f"Bearer {spec.api_key}"
        check_headers(self._headers)
        self._client = HttpClient(url, spec.timeout_s, spec.max_connections, read)

    @property
    def num_connections(self) -> int:
        return self._client.num_connections

    @property
    def num_waited(self) -> int:
        return self._client.num_waited

    async def counters(self) -> Counters | None:
        return None

    async def open(self, num_connections: int) -> None:
        await self._client.open(num_connections)

    def send(self, exchange: TimedExchange) -> None:
        self._client.send(exchange)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, path: str) -> HttpAnswer:
        """Ask the server; ConfigError if it does not answer, or requires a key."""
        origin = self._url.origin
        try:
            answer = await ask(self._url, request_bytes(self._url, "GET", path, self._headers))
        except NoAnswer as error:
            raise ConfigError([f"{origin}: the server cannot be reached: {error}"]) from None
        if answer.status in (401, 403):
            text = f"{answer.error_text}; give a key by --api-key or PENSTOCK_API_KEY"
            raise ConfigError([f"{origin}: {text}"])
        return answer


def list_models(names: Iterable[str], otherwise: str) -> str:
    """List the models of a server, the first ones if there are many."""
    found = sorted(set(names))
    listed = ", ".join(found[:MAX_MODELS_TOLD]) or otherwise
    return listed + (", …" if len(found) > MAX_MODELS_TOLD else "")
