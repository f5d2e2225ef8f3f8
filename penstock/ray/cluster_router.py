"""Routes admitted HTTP messages to the replicas of models.

The `Router` of an ingress: the gate, limits and inflating of bodies are `V2Http`'s, the forms of
answers those of the replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from penstock.errors import InvalidRequest, PenstockError, Unsupported
from penstock.protocols.gate import digest_secret, secret_of
from penstock.protocols.handler_tasks import METRICS
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import Refusal, reply_error
from penstock.protocols.http_reader import CREDENTIALS, LongBody
from penstock.protocols.infer_http import InferCall
from penstock.protocols.route import Match
from penstock.protocols.text_answers import salt_of
from penstock.ray.cluster_messages import ClusterAnswer, ClusterCall, decode_answer, encode_call
from penstock.ray.cluster_models import ClusterModels, ModelHandle
from penstock.ray.prefixes import hash_blocks
from penstock.wire import json_errors

NOT_HERE = (
    "models of a Ray application change with the application: promote a version with penstock repo "
    "promote, then run serve.run or serve deploy again"
)
# Headers that do not hold for the message that a replica gets.
HOP = (b"content-encoding", b"content-length", b"transfer-encoding", b"connection")


class TextHead(msgspec.Struct):
    """The fields of a request for text that its way depends on."""

    model: str | None = None
    stream: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    text_input: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: str | None = None

    @property
    def start(self) -> bytes:
        return bytes(self.messages or self.prompt or self.text_input)


class ClusterRouter:
    """Each message is answered in a task, which a client that leaves cancels."""

    def __init__(self, models: ClusterModels) -> None:
        self._models = models
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: Mapping[str, Callable[[Exchange, Match], Awaitable[None]]] = {
            "live": self._live,
            "ready": self._ready,
            "server_metadata": self._server_metadata,
            "statistics": self._statistics,
            "metrics": self._metrics,
            "index": self._index,
            "openai": self._openai,
            "generate": self._generate,
            "generate_stream": self._generate,
        }

    # The protocol of routers.

    def count(self, call: InferCall, exchange: Exchange) -> None:
        """Do nothing: replicas count their requests."""

    def refused(self, call: InferCall, received: float, error: Refusal) -> None:
        """Do nothing: no model has seen it."""

    def prepare(self, call: InferCall, json_bytes: int, num_bytes: int) -> LongBody | None:
        return None

    def infer(self, call: InferCall, exchange: Exchange) -> None:
        handle = self._models.find(call.model_name)
        self._start(exchange, self._pass_on(exchange, handle))

    def other(self, exchange: Exchange, match: Match) -> None:
        name = match.route.handler
        is_change = match.route.scope == "admin" and "POST" in match.route.methods
        if (answer := self._answers.get(name)) is not None:
            self._start(exchange, answer(exchange, match))
        elif is_change or match.route.scope == "shared_memory":
            raise Unsupported(NOT_HERE if is_change else "shared memory is not served over Ray")
        elif match.model_name:
            self._start(exchange, self._pass_on(exchange, self._models.find(match.model_name)))
        else:
            raise Unsupported(f"{exchange.head.path.decode('latin-1')} is not served over Ray")

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, exchange: Exchange, answering: Awaitable[None]) -> None:
        task = asyncio.get_running_loop().create_task(_guarded(exchange, answering))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.abandon = task.cancel

    # Answers of one replica.

    async def _pass_on(
        self, exchange: Exchange, handle: ModelHandle, text: TextHead | None = None
    ) -> None:
        data = encode_call(to_call(exchange))
        if text is None:
            reply(exchange, decode_answer(await handle.call(data)))
            return
        salt = salt_of(exchange.head.headers, text.cache_salt or "")
        prefix = hash_blocks(text.start, salt.encode())
        if not text.stream:
            reply(exchange, decode_answer(await handle.call(data, prefix)))
            return
        parts = handle.stream(data, prefix)
        head = decode_answer(await anext(parts))
        exchange.start_stream(head.status, head.headers)
        async for part in parts:
            exchange.stream(part)
        exchange.end_stream()

    async def _openai(self, exchange: Exchange, match: Match) -> None:
        if exchange.head.method != b"POST" and exchange.head.path.startswith(b"/v1/models"):
            if match.model_name:
                await self._pass_on(exchange, self._models.find(match.model_name))
            else:
                await self._list_openai(exchange)
            return
        text = read_text(exchange)
        name = text.model or self._only_text()
        is_text = name in self._models.texts
        await self._pass_on(exchange, self._models.find(name), text if is_text else None)

    async def _generate(self, exchange: Exchange, match: Match) -> None:
        text = read_text(exchange)
        text.stream = match.route.handler == "generate_stream"
        await self._pass_on(exchange, self._models.find(match.model_name), text)

    def _only_text(self) -> str:
        texts = self._models.texts
        if len(texts) != 1:
            loaded = ", ".join(sorted(texts)) or "none"
            raise InvalidRequest(f"model: expected one of those that are loaded: {loaded}", "model")
        return next(iter(texts))

    # Answers of all models.

    async def _list_openai(self, exchange: Exchange) -> None:
        rows: list[object] = []
        for answer in await self._models.ask_each(to_call(exchange)):
            rows += msgspec.json.decode(answer.body)["data"] if answer.status == 200 else ()
        exchange.reply_json(msgspec.json.encode({"object": "list", "data": rows}))

    async def _live(self, exchange: Exchange, match: Match) -> None:
        exchange.reply_json(b'{"live":true}')

    async def _ready(self, exchange: Exchange, match: Match) -> None:
        await self._models.check_ready()
        exchange.reply_json(b'{"ready":true}')

    async def _server_metadata(self, exchange: Exchange, match: Match) -> None:
        exchange.reply_json(self._models.describe())

    async def _index(self, exchange: Exchange, match: Match) -> None:
        exchange.reply_json(await self._models.index())

    async def _statistics(self, exchange: Exchange, match: Match) -> None:
        found = await self._models.statistics(match.model_name, match.model_version)
        exchange.reply_json(found)

    async def _metrics(self, exchange: Exchange, match: Match) -> None:
        headers = f"Content-Type: {METRICS}\r\n".encode()
        exchange.reply(200, headers, (await self._models.metrics(),))


async def _guarded(exchange: Exchange, answering: Awaitable[None]) -> None:
    """Answer errors in the form of the path's protocol; a stream that has begun is cut."""
    try:
        await answering
    except PenstockError as error:
        if exchange.is_streaming:
            exchange.abort()
        else:
            reply_error(exchange, error)
    except Exception:  # The protocol edge.
        exchange.reply_bug()


def to_call(exchange: Exchange) -> ClusterCall:
    """Return an admitted message as a replica gets it. Instead of its API key it has the key's
    digest, which still separates prefix caches."""
    head = exchange.head
    headers = {name: value for name, value in head.headers.items() if name not in HOP}
    secret = secret_of(headers)
    for name in CREDENTIALS:
        headers.pop(name, None)
    if secret is not None:
        headers[CREDENTIALS[-1]] = digest_secret(secret).hex().encode()
    target = head.path + b"?" + head.query if head.query else head.path
    return ClusterCall("http", memoryview(exchange.body), head.method, target, headers)


def read_text(exchange: Exchange) -> TextHead:
    try:
        return msgspec.json.decode(exchange.body or b"{}", type=TextHead)
    except json_errors.UNREADABLE as error:
        text = json_errors.explain(exchange.body, error)
        raise InvalidRequest(f"failed to parse the request JSON: {text}") from None


def reply(exchange: Exchange, answer: ClusterAnswer) -> None:
    if answer.error:
        answer.check()
    exchange.reply(answer.status, answer.headers, (answer.body,))
