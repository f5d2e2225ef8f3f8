"""Messages of an ASGI host: heads, bodies, clients that leave, hosts that do not take more. The
routes themselves are tested over ASGI in test_v2_http.py."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asgi_client import AsgiAnswer, AsgiClient
from test_v2_http import ECHO, null_model, v2_of

from penstock.config import BatchPolicy, HttpLimits
from penstock.protocols import asgi_http
from penstock.protocols.asgi_http import AnswerCut, AsgiHttp, path_in_app, read_head
from penstock.protocols.gate import Gate
from penstock.protocols.http import MAX_UNSENT_BYTES, Exchange
from penstock.protocols.http_reader import LongBody, Rejection
from penstock.protocols.infer_http import InferCall
from penstock.protocols.route import Match
from penstock.protocols.v2_http import V2Http
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.supervisor import ThreadLife

INFER = "/v2/models/{}/infer"
BODY = json.dumps(ECHO).encode()
LIMITS = HttpLimits(max_body_bytes=1 << 20)
ROWS = 65536
MODELS = [
    null_model("echo", {"x": ("INT32", (4,))}),
    # Requests wait for others, which do not come.
    replace(
        null_model("waiting", {"x": ("INT32", (4,))}),
        batching=BatchPolicy(8, is_dynamic=True, max_queue_delay_s=60.0),
    ),
    null_model("large", {"x": ("FP32", (ROWS,))}),
]


@asynccontextmanager
async def mounted(limits: HttpLimits = LIMITS) -> AsyncIterator[tuple[AsgiClient, Catalog]]:
    catalog = Catalog(start_life=ThreadLife)
    await catalog.load(RepositoryScan(MODELS))
    v2, _ = v2_of(catalog, limits)
    try:
        yield AsgiClient(AsgiHttp(v2, limits).answer), catalog
    finally:
        await v2.close()
        await catalog.close()


def scope(path: str, root: str = "", raw: bytes | None = None, **more: Any) -> dict[str, Any]:
    found = {"method": "GET", "path": path, "root_path": root, "headers": [], **more}
    return found if raw is None else {**found, "raw_path": raw}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (scope("/v2/health/live"), b"/v2/health/live"),
        (scope("/m/v2/models/a", "/m"), b"/v2/models/a"),
        # Some hosts have cut the prefix off.
        (scope("/v2/models/a", "/m"), b"/v2/models/a"),
        (scope("/v2/models/a", "/m", b"/m/v2/models/a"), b"/v2/models/a"),
        (scope("/m", "/m"), b"/"),
        (scope("/m/", "/m/"), b"/"),
        (scope("/mv2", "/m"), b"/mv2"),
        # An encoded slash is part of a name; only the raw path tells.
        (scope("/m/v2/models/a/b", "/m", b"/m/v2/models/a%2Fb"), b"/v2/models/a%2Fb"),
        (scope("/v2/models/ä b"), b"/v2/models/%C3%A4%20b"),
        (scope("/ö/v2", "/ö", b"/%c3%b6/v2"), b"/v2"),
        (scope("/v2", "", b"/v2?x=1"), b"/v2"),
    ],
)
def test_paths_are_those_below_the_mount(given: dict[str, Any], path: bytes) -> None:
    assert path_in_app(given) == path


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([(b"content-length", b"1"), (b"Content-Length", b"1")], "content-length is given twice"),
        ([(b"content-length", b"-1")], "Content-Length is not a number"),
    ],
)
def test_ambiguous_heads_are_refused(headers: list[tuple[bytes, bytes]], text: str) -> None:
    with pytest.raises(Rejection, match=text) as caught:
        read_head(scope("/v2", headers=headers))
    assert caught.value.status == 400
    assert caught.value.head is not None


async def test_a_repeated_header_and_a_control_character_get_400() -> None:
    async with mounted() as (client, _):
        twice = [("inference-header-content-length", "1")] * 2
        answer = await client.ask("POST", INFER.format("echo"), b"x", twice)
        assert (answer.status, answer.body) == (
            400,
            b'{"error":"the header inference-header-content-length is given twice"}',
        )
        assert (await client.ask("GET", "/v2/models/%00")).status == 400


async def test_bodies_in_parts_are_joined_whether_announced_or_not() -> None:
    async with mounted() as (client, _):
        parts = [BODY[:7], b"", BODY[7:30], BODY[30:]]
        chunked = await client.ask("POST", INFER.format("echo"), parts)
        length = {"content-length": str(len(BODY))}
        announced = await client.ask("POST", INFER.format("echo"), parts, length)
        assert chunked.status == announced.status == 200
        assert chunked.body == announced.body
        assert json.loads(chunked.body)["outputs"][0]["data"] == [1, 2, 3, 4]


async def test_bodies_that_are_too_large_are_refused_before_and_while_they_are_read() -> None:
    async with mounted() as (client, catalog):
        refused = catalog.find("echo").metrics
        large = {"content-length": str(LIMITS.max_body_bytes + 1)}
        early = await client.ask("POST", INFER.format("echo"), [b"x"], large)
        parts = [b"x" * (1 << 19)] * 3
        late = await client.ask("POST", INFER.format("echo"), parts)
        assert early.status == late.status == 413
        assert early.body == late.body
        assert b"larger than 1048576 bytes" in early.body
        assert refused.statistics()["inference_stats"]["fail"]["count"] == 2


async def test_a_long_body_that_the_gate_refuses_is_not_read() -> None:
    async with mounted(HttpLimits()) as (client, _):
        length = {"content-length": str(4 << 20)}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def unread() -> Any:
                raise AssertionError("the body is read")

            await client.app(scope, unread, send)

        answer = await AsgiClient(app).ask("POST", "/nowhere", [b""], length)
        assert answer.status == 404


def tensor_message(array: np.ndarray) -> tuple[bytes, dict[str, str]]:
    parameters = {"binary_data_size": array.nbytes}
    shape = list(array.shape)
    sent = {"name": "x", "datatype": "FP32", "shape": shape, "parameters": parameters}
    asked = [{"name": "OUT_x", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [sent], "outputs": asked}).encode()
    body = head + array.tobytes()
    sizes = {"inference-header-content-length": str(len(head)), "content-length": str(len(body))}
    return body, sizes


async def test_long_bodies_are_received_into_the_memory_of_the_model() -> None:
    """The second request has a known form, so that rows are reserved for it."""
    async with mounted() as (client, catalog):
        for number in range(3):
            array = np.random.default_rng(number).random((2, ROWS), dtype=np.float32)
            body, headers = tensor_message(array)
            parts = [body[start : start + 10_001] for start in range(0, len(body), 10_001)]
            answer = await client.ask("POST", INFER.format("large"), parts, headers)
            assert answer.status == 200
            size = int(answer.headers["inference-header-content-length"])
            assert answer.body[size:] == array.tobytes()


class HeldBody:
    """Memory of a body, which notes what happens to it."""

    def __init__(self, length: int) -> None:
        self._memory = bytearray(length)
        self.num_received = 0
        self.calls: list[str] = []
        self.buffer = None

    def room(self) -> memoryview:
        return memoryview(self._memory)[self.num_received : self.num_received + 1000]

    def fill(self, num_bytes: int) -> None:
        self.num_received += num_bytes

    def move_out(self) -> None:
        self.calls.append("move out")

    def drop(self) -> None:
        self.calls.append("drop")

    @property
    def whole(self) -> bytes:
        return bytes(self._memory)


class StubRouter:
    """Answers with functions of the test; bodies are received into `HeldBody`."""

    def __init__(self, handle: Callable[[Exchange], None]) -> None:
        self._handle = handle
        self.bodies: list[HeldBody] = []

    def count(self, call: InferCall, exchange: Exchange) -> None: ...

    def refused(self, call: InferCall, received: float, error: object) -> None: ...

    def infer(self, call: InferCall, exchange: Exchange) -> None:
        self._handle(exchange)

    def prepare(self, call: InferCall, json_bytes: int, num_bytes: int) -> LongBody:
        self.bodies.append(HeldBody(num_bytes))
        return self.bodies[-1]

    def other(self, exchange: Exchange, match: Match) -> None:
        self._handle(exchange)

    async def close(self) -> None: ...


def stub(handle: Callable[[Exchange], None]) -> tuple[AsgiClient, StubRouter]:
    router = StubRouter(handle)
    return AsgiClient(AsgiHttp(V2Http(router, LIMITS, Gate()), LIMITS).answer), router


LONG = {"inference-header-content-length": "10", "content-length": "50000"}


@pytest.mark.parametrize(
    ("parts", "status"), [([b"x" * 20_000] * 3, 400), ([b"x" * 20_000] * 2, 400)]
)
async def test_bodies_of_another_length_give_their_memory_back(
    parts: list[bytes], status: int
) -> None:
    client, router = stub(lambda exchange: exchange.reply(200, b"", (b"",)))
    answer = await client.ask("POST", INFER.format("echo"), parts, LONG)
    assert answer.status == status
    assert router.bodies[0].calls == ["drop"]


async def test_a_client_that_leaves_while_it_sends_gives_its_memory_back() -> None:
    client, router = stub(lambda exchange: exchange.reply(200, b"", (b"",)))
    client.gone.set()
    part = b"x" * 20_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def leaves() -> Any:
            event = await receive()
            return {**event, "more_body": True} if event["type"] == "http.request" else event

        await client.app(scope, leaves, send)

    answer = await AsgiClient(app, gone=client.gone).ask("POST", INFER.format("echo"), [part], LONG)
    assert answer.events == []
    assert router.bodies[0].calls == ["drop"]


async def test_a_slow_sender_holds_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_http, "SLOW_BODY_S", 0.01)
    whole: list[bytes] = []

    def handle(exchange: Exchange) -> None:
        assert isinstance(exchange.long, HeldBody)
        whole.append(exchange.long.whole)
        exchange.reply(200, b"", (b"",))

    client, router = stub(handle)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def slow() -> Any:
            await asyncio.sleep(0.03)
            return await receive()

        await client.app(scope, slow, send)

    parts = [b"a" * 25_000, b"b" * 25_000]
    answer = await AsgiClient(app).ask("POST", INFER.format("echo"), parts, LONG)
    assert answer.status == 200
    assert whole == [b"".join(parts)]
    assert router.bodies[0].calls == ["move out", "drop"]


async def test_a_client_that_leaves_cancels_its_request(until: Any) -> None:
    async with mounted() as (client, catalog):
        model = catalog.find("waiting")
        asking = asyncio.create_task(client.ask("POST", INFER.format("waiting"), BODY))
        await until(lambda: model.num_waiting == 1)
        client.gone.set()
        answer = await asking
        assert answer.events == []
        await until(lambda: model.num_waiting == 0)


async def test_cancelling_the_application_cancels_its_request(until: Any) -> None:
    """As hosts do that end the task of a client that has left."""
    async with mounted() as (client, catalog):
        model = catalog.find("waiting")
        asking = asyncio.create_task(client.ask("POST", INFER.format("waiting"), BODY))
        await until(lambda: model.num_waiting == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: model.num_waiting == 0)


class Streamed:
    """A handler that keeps its exchange."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.num_abandoned = 0

    def __call__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.abandon = self.abandon
        exchange.start_stream(
            200, b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
        )

    def abandon(self) -> None:
        self.num_abandoned += 1


async def test_parts_of_a_stream_leave_as_they_come(until: Any) -> None:
    handler = Streamed()
    client, _ = stub(handler)
    answer = AsgiAnswer()
    answer.is_reading.set()
    asking = asyncio.create_task(client.ask("GET", "/v2", answer=answer))
    await until(lambda: len(answer.events) == 1)
    assert answer.headers == {"content-type": "text/event-stream", "cache-control": "no-cache"}
    assert handler.exchange is not None
    for number, part in enumerate((b"data: a\n\n", b"data: b\n\n")):
        handler.exchange.stream(part)
        await until(lambda number=number: len(answer.parts) == number + 1)
        assert not asking.done()
    handler.exchange.end_stream()
    await asking
    assert answer.parts == [b"data: a\n\n", b"data: b\n\n", b""]
    assert answer.is_complete
    assert handler.num_abandoned == 0


async def test_head_answers_have_no_body() -> None:
    def handle(exchange: Exchange) -> None:
        exchange.reply(200, b"", (b"abc", b"d"))

    client, _ = stub(handle)
    answer = await client.ask("HEAD", "/v2")
    assert (answer.headers, answer.body) == ({"content-length": "4"}, b"")


async def test_a_client_that_leaves_a_stream_abandons_it_once(until: Any) -> None:
    handler = Streamed()
    client, _ = stub(handler)
    asking = asyncio.create_task(client.ask("GET", "/v2"))
    await until(lambda: handler.exchange is not None)
    client.gone.set()
    await asking
    assert handler.num_abandoned == 1
    assert handler.exchange is not None and handler.exchange.is_finished


async def test_a_client_that_does_not_read_is_cut_off(until: Any) -> None:
    handler = Streamed()
    client, _ = stub(handler)
    answer = AsgiAnswer()
    asking = asyncio.create_task(client.ask("GET", "/v2", answer=answer))
    await until(lambda: handler.exchange is not None)
    assert handler.exchange is not None
    part, num_sent = b"x" * (1 << 20), 0
    while not handler.exchange.is_finished:
        handler.exchange.stream(part)
        num_sent += len(part)
        assert num_sent <= MAX_UNSENT_BYTES + 2 * len(part)
    answer.is_reading.set()
    with pytest.raises(AnswerCut):
        await asking
    assert not answer.is_complete
    assert handler.num_abandoned == 1


async def test_a_client_that_reads_gets_a_stream_of_any_length(until: Any) -> None:
    handler = Streamed()
    client, _ = stub(handler)
    answer = AsgiAnswer()
    answer.is_reading.set()
    before = asyncio.all_tasks()
    asking = asyncio.create_task(client.ask("GET", "/v2", answer=answer))
    await until(lambda: handler.exchange is not None)
    assert handler.exchange is not None
    part, num_parts = b"x" * (1 << 20), 3 * (MAX_UNSENT_BYTES >> 20)
    for number in range(num_parts):
        handler.exchange.stream(part)
        await until(lambda number=number: len(answer.parts) == number + 1)
    handler.exchange.end_stream()
    await asking
    assert answer.is_complete and len(answer.parts) == num_parts + 1
    # What watches the client ends with the answer.
    await until(lambda: asyncio.all_tasks() == before)


async def test_a_host_that_says_that_the_client_is_gone_ends_the_request() -> None:
    """ASGI 2.4: `send` raises OSError."""
    handler = Streamed()
    client, _ = stub(handler)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def fail(event: Any) -> None:
            raise OSError

        await client.app(scope, receive, fail)

    await AsgiClient(app).ask("GET", "/v2")
    assert handler.num_abandoned == 1


async def test_closing_answers_what_has_no_answer() -> None:
    """Its handlers are gone, and the host waits for the application."""
    held: list[Exchange] = []
    http = AsgiHttp(V2Http(StubRouter(held.append), LIMITS, Gate()), LIMITS)
    asking = asyncio.create_task(AsgiClient(http.answer).ask("GET", "/v2"))
    handler = Streamed()
    streams = AsgiHttp(V2Http(StubRouter(handler), LIMITS, Gate()), LIMITS)
    streaming = asyncio.create_task(AsgiClient(streams.answer).ask("GET", "/v2"))
    await asyncio.sleep(0)
    assert held and handler.exchange is not None
    http.close()
    streams.close()
    async with asyncio.timeout(60):
        answer = await asking
        assert (answer.status, answer.body) == (503, b'{"error":"the server is shutting down"}')
        with pytest.raises(AnswerCut):
            await streaming
    http.close()


async def test_a_bug_of_a_handler_gets_500(caplog: pytest.LogCaptureFixture) -> None:
    def handle(exchange: Exchange) -> None:
        raise struct.error("a bug")

    client, _ = stub(handle)
    answer = await client.ask("GET", "/v2")
    assert (answer.status, answer.body) == (500, b'{"error":"internal error"}')
    assert "a bug" in caplog.text
