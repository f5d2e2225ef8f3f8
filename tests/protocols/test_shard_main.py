"""A shard and the core on one event loop: what it answers, what it leaves to the core."""

import asyncio
import contextlib
import gzip
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from loop_shards import LoopLife, shard_on_loop

from penstock.config import BatchPolicy, HttpLimits, ModelConfig, TlsConfig
from penstock.errors import ConfigError
from penstock.protocols import access_log, audit_log
from penstock.protocols.gate import Gate, Keys, digest_secret
from penstock.protocols.http import Exchange
from penstock.protocols.key_file import read_keys
from penstock.protocols.line import INLINE_BYTES, MAX_SENT_BYTES, reserve
from penstock.protocols.shard_processes import CoreApi, ShardProcess, shard_spec
from penstock.protocols.v2_http import Models, V2Http
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.management import ManagementApi
from penstock.serving.shards import Shards
from penstock.serving.supervisor import ThreadLife
from penstock.types import TensorSpec
from penstock.wire.frames import VERSION, OpenShard

Until = Callable[..., Any]


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """A connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, *args: Any, **options: Any) -> Answer:
        self.writer.write(message(*args, **options))
        return await self.answer()

    async def answer(self) -> Answer:
        line, *fields = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode().split("\r\n")
        headers = {name.lower(): value for name, value in (f.split(": ", 1) for f in fields)}
        size = int(headers["content-length"])
        return Answer(int(line.split()[1]), headers, await self.reader.readexactly(size))

    async def rest(self) -> bytes:
        return await self.reader.read()


def message(
    path: str, body: bytes = b"", method: str = "", headers: dict[str, str] | None = None
) -> bytes:
    given = {"Host": "127.0.0.1", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    method = method or ("POST" if body else "GET")
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


@dataclass
class Served:
    catalog: Catalog
    management: ManagementApi
    process: ShardProcess
    port: int

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def ask(self, *args: Any, **options: Any) -> Answer:
        async with self.connect() as client:
            return await client.ask(*args, **options)

    async def infer(self, values: bytes, model: str = "echo", **fields: Any) -> Answer:
        """Bytes in, bytes out."""
        head, body = binary(values, **fields)
        return await self.ask(f"/v2/models/{model}/infer", body, headers=head)


def binary(values: bytes, **fields: Any) -> tuple[dict[str, str], bytes]:
    size = {"binary_data_size": len(values)}
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, len(values)], "parameters": size}
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}, **fields}
    head = json.dumps(asked).encode()
    return {"Inference-Header-Content-Length": str(len(head))}, head + values


def model(name: str, size: int = -1, **options: str) -> ModelConfig:
    return ModelConfig(
        name=name,
        version="1",
        backend="null",
        artifact="",
        inputs=(TensorSpec("x", "UINT8", (size,)),),
        outputs=(TensorSpec("y", "UINT8", (size,)),),
        max_batch_size=8,
        batching=BatchPolicy(max_batch_size=8, is_dynamic=True),
        options={f"null.{key}": value for key, value in options.items()},
    )


@asynccontextmanager
async def serving(
    *configs: ModelConfig,
    handler: Callable[[Exchange], None] | None = None,
    gate: Gate | None = None,
    limits: HttpLimits | None = None,
    logs_requests: bool = False,
) -> AsyncIterator[Served]:
    """With `handler` for what the shard does not answer, instead of the core's own."""
    shards = Shards(1)
    catalog = Catalog(ThreadLife, shards=shards)
    await catalog.load(RepositoryScan(list(configs) or [model("echo")]))
    management = ManagementApi(catalog, Control(catalog, ".", is_explicit=True))
    limits = limits or HttpLimits()
    v2 = V2Http(
        Models(management, logs_requests), limits, gate or Gate(), logs_requests=logs_requests
    )
    core = CoreApi(management, handler or v2.handle, shards=shards)
    async with shard_on_loop(core, limits, gate, logs_requests) as shard:
        yield Served(catalog, management, shard.process, shard.port)
    await v2.close()
    await catalog.close()
    shards.close()


@pytest.mark.parametrize("size", [1, INLINE_BYTES, INLINE_BYTES + 1, 3_000_000])
async def test_a_request_of_any_size_gets_its_own_bits_back(size: int, until: Until):
    values = bytes(range(256)) * (size // 256 + 1)
    async with serving() as served:
        for _ in range(3):
            answer = await served.infer(values[:size], id="seven")
            assert answer.status == 200
            split = int(answer.headers["inference-header-content-length"])
            assert json.loads(answer.body[:split])["id"] == "seven"
            assert answer.body[split:] == values[:size]
        await until(lambda: served.process.num_running == 0)


async def test_what_the_core_answers_itself_may_be_of_any_size(until: Until):
    def echo(exchange: Exchange) -> None:
        exchange.reply(200, b"", (bytes(exchange.body), exchange.head.query))

    async with serving(handler=echo) as served, served.connect() as client:
        for size in (0, 1, INLINE_BYTES + 1, 5_000_000):
            body = bytes(range(256)) * (size // 256 + 1)
            answer = await client.ask("/v2/logging?where=1", body[:size], "POST")
            assert (answer.status, answer.body) == (200, body[:size] + b"where=1")
        await until(lambda: served.process.num_running == 0)


async def test_a_stream_arrives_as_it_is_made(until: Until):
    asked: list[Exchange] = []

    async with serving(handler=asked.append) as served, served.connect() as client:
        client.writer.write(b"GET /v2/logging HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: bool(asked))
        (exchange,) = asked
        exchange.start_stream(200, b"Content-Type: text/event-stream\r\n")
        exchange.stream(b"one")
        seen = await client.reader.readuntil(b"one\r\n")
        assert seen.startswith(b"HTTP/1.1 200") and b"chunked" in seen
        large = bytes(range(256)) * (INLINE_BYTES // 100)
        exchange.stream(large)
        exchange.stream(b"last")
        exchange.end_stream()
        seen = await client.reader.readuntil(b"4\r\nlast\r\n0\r\n\r\n")
        assert seen.startswith(b"%x\r\n" % len(large) + large)
        # The connection is good for another.
        client.writer.write(b"GET /v2/logging HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(asked) == 2)
        asked[1].reply(200, b"", (b"well",))
        assert (await client.reader.readuntil(b"well")).startswith(b"HTTP/1.1 200")
        await until(lambda: served.process.num_running == 0)


async def test_a_message_is_not_kept_while_its_answer_is_streamed(until: Until):
    asked: list[Exchange] = []
    body = bytes(4 * INLINE_BYTES)

    async with serving(handler=asked.append) as served, served.connect() as client:
        head = f"POST /v2/logging HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}"
        client.writer.write(head.encode() + b"\r\n\r\n" + body)
        await until(lambda: bool(asked))
        assert len(asked[0].body) == len(body)
        asked[0].start_stream(200, b"")
        asked[0].stream(b"one")
        assert (await client.reader.readuntil(b"one")).count(b"Connection: close") == 1
        assert asked[0].body == b""
        asked[0].end_stream()
        # HTTP/1.0 knows the end by the end of the connection.
        assert await client.reader.read() == b""
        await until(lambda: served.process.num_running == 0)


async def test_whoever_leaves_a_stream_is_reported_and_the_rest_goes_nowhere(until: Until):
    asked: list[Exchange] = []
    left: list[str] = []

    async with serving(handler=asked.append) as served:
        async with served.connect() as client:
            client.writer.write(b"GET /v2/logging HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: bool(asked))
            asked[0].abandon = lambda: left.append("left")
            asked[0].start_stream(200, b"")
            asked[0].stream(b"one")
            await client.reader.readuntil(b"one")
        await until(lambda: left == ["left"])
        asked[0].stream(b"two")
        asked[0].end_stream()
        await until(lambda: served.process.num_running == 0)


async def test_the_core_sees_the_message_as_it_came():
    seen: list[Exchange] = []

    def note(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.reply(201, b"", ())

    async with serving(handler=note) as served:
        answer = await served.ask("/v2/models/a%20b?c", b"d", "GET", {"X-Name": "ü"})
        assert (answer.status, answer.body) == (201, b"")
    (exchange,) = seen
    head = exchange.head
    assert (head.method, head.path, head.query) == (b"GET", b"/v2/models/a%20b", b"c")
    assert head.headers[b"x-name"] == "ü".encode()
    assert (head.keep_alive, head.is_http_1_0, exchange.received > 0) == (True, False, True)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_http_1_0_and_head_are_answered_as_they_should_be(method: str):
    async with serving() as served, served.connect() as client:
        client.writer.write(f"{method} /v2 HTTP/1.0\r\n\r\n".encode())
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"Connection: close" in head
        assert (b"penstock" in body) == (method == "GET")


async def test_a_client_that_leaves_is_reported_to_the_core(until: Until):
    left: list[str] = []

    def hold(exchange: Exchange) -> None:
        exchange.abandon = lambda: left.append("left")

    async with serving(handler=hold) as served:
        async with served.connect() as client:
            client.writer.write(message("/v2/logging", bytes(INLINE_BYTES + 1)))
            await until(lambda: served.process.num_running == 1)
        await until(lambda: left)
        await until(lambda: served.process.num_running == 0)
        assert (await served.infer(b"abcd")).status == 200


async def test_an_inference_whose_client_leaves_is_cancelled(until: Until):
    async with serving(model("slow", a_ms="200")) as served:
        head, body = binary(b"abcd")
        (slow,) = served.catalog
        async with served.connect() as first, served.connect() as second:
            for client in (first, second):
                client.writer.write(message("/v2/models/slow/infer", body, headers=head))
            while slow.num_waiting == 0:
                await served.catalog.refresh()
        while slow.metrics.num_failures["CANCELED"] < 2:
            await served.catalog.refresh()
        assert slow.num_waiting == 0 and slow.metrics.num_success == 0


async def test_an_answer_that_breaks_off_cuts_the_connection():
    def cut(exchange: Exchange) -> None:
        exchange.abort()

    async with serving(handler=cut) as served, served.connect() as client:
        client.writer.write(message("/v2"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.answer()


async def test_an_answer_in_parts_arrives_whole():
    def stream(exchange: Exchange) -> None:
        exchange.start_stream(200, b"")
        exchange.stream(b"one ")
        exchange.stream(b"two")
        exchange.end_stream()

    async with serving(handler=stream) as served, served.connect() as client:
        client.writer.write(b"GET /v2/logging HTTP/1.0\r\n\r\n")
        assert (await client.rest()).endswith(b"\r\n\r\none two")


async def test_a_handler_that_raises_is_an_internal_error():
    def broken(exchange: Exchange) -> None:
        raise RuntimeError("a bug")

    logging.getLogger("penstock.shards").disabled = True
    try:
        async with serving(handler=broken) as served:
            answer = await served.ask("/v2")
    finally:
        logging.getLogger("penstock.shards").disabled = False
    assert (answer.status, json.loads(answer.body)) == (500, {"error": "internal error"})


async def test_draining_ends_kept_connections_with_their_next_answer():
    async with serving() as served, served.connect() as first, served.connect() as second:
        assert "connection" not in (await first.ask("/v2/health/ready")).headers
        served.management.lifecycle.drain()
        served.process.drain()
        answer = await first.ask("/v2/health/ready")
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await first.rest() == b""
        head, body = binary(b"abcd")
        answer = await second.ask("/v2/models/echo/infer", body, headers=head)
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert json.loads(answer.body) == {"error": "the server is shutting down"}


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_what_cannot_be_decoded_is_refused_and_counted(encoding: str):
    body = b'{"inputs": 7}'
    headers = {"Content-Encoding": encoding} if encoding else {}
    body = gzip.compress(body) if encoding else body
    async with serving() as served:
        (echo,) = served.catalog
        answer = await served.ask("/v2/models/echo/infer", body, headers=headers)
        assert answer.status == 400
        assert b"failed to parse the request JSON: Expected `array`" in answer.body
        await served.catalog.refresh()
        assert echo.metrics.num_refused["invalid"] == 1
        answer = await served.ask("/v2/models/none/infer", body, headers=headers)
        assert answer.status == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "i" * 2 * MAX_SENT_BYTES},
        {"parameters": {"binary_data_output": True, "p": "v" * 2 * MAX_SENT_BYTES}},
        {"parameters": {"binary_data_output": True, **{f"p{n}": 1 for n in range(20_000)}}},
    ],
    ids=["id", "parameter", "parameters"],
)
async def test_names_may_be_long(fields: dict[str, Any], until: Until):
    async with serving(model("echo", 4)) as served:
        answer = await served.infer(b"abcd", **fields)
        assert (answer.status, answer.body[-4:]) == (200, b"abcd")
        split = int(answer.headers["inference-header-content-length"])
        assert json.loads(answer.body[:split]).get("id", "") == fields.get("id", "")
        await until(lambda: served.process.num_running == 0)


@pytest.mark.parametrize("name", ["n" * 50_000, "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 15_000])
async def test_an_error_that_quotes_a_long_name_is_told(name: str):
    async with serving() as served:
        head, body = binary(b"abcd", outputs=[{"name": name}])
        answer = await served.ask("/v2/models/echo/infer", body, headers=head)
        assert answer.status == 400
        assert name[:10_000] in json.loads(answer.body)["error"]


async def test_a_raw_request_is_answered():
    async with serving() as served:
        headers = {"Inference-Header-Content-Length": "0"}
        answer = await served.ask("/v2/models/echo/infer", b"raw bytes", headers=headers)
        assert (answer.status, answer.body[-9:]) == (200, b"raw bytes")


async def test_the_timing_header_tells_of_the_worker():
    async with serving(model("slow", a_ms="20")) as served:
        head, body = binary(b"abcd")
        path, wanted = "/v2/models/slow/infer", {**head, "Penstock-Timing": "1"}
        assert "server-timing" not in (await served.ask(path, body, headers=head)).headers
        text = (await served.ask(path, body, headers=wanted)).headers["server-timing"]
        spans = {
            name: float(value) for name, value in (part.split(";dur=") for part in text.split(", "))
        }
    assert spans["compute_infer"] >= 20
    assert spans["total"] >= spans["compute_infer"] + spans["decode"] > spans["decode"] > 0


async def test_keys_and_hosts_are_those_of_the_core(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nsecret = "sixteen characters"\nscopes = ["infer"]\n')
    gate = Gate(read_keys(path), frozenset(("127.0.0.1",)))
    known = {"X-API-Key": "sixteen characters"}
    async with serving(gate=gate) as served:
        assert (await served.ask("/v2/health/ready")).status == 200
        assert (await served.ask("/v2/models/echo")).status == 401
        assert (await served.ask("/v2/models/echo", headers=known)).status == 200
        assert (await served.ask("/metrics", headers=known)).status == 403
        answer = await served.ask("/v2/health/ready", headers={"Host": "elsewhere"})
        assert answer.status == 403
        head, body = binary(b"abcd")
        infer = "/v2/models/echo/infer"
        assert (await served.ask(infer, body, headers=head)).status == 401
        assert (await served.ask(infer, body, headers={**head, **known})).status == 200


async def test_refusals_of_a_shard_name_the_key(caplog: pytest.LogCaptureFixture):
    def keys(name: str) -> Keys:
        digests = [digest_secret(secret) for secret in (b"first", b"second")]
        scopes = dict.fromkeys(digests, frozenset(["infer"]))
        return Keys(scopes, dict(zip(digests, (name, ""), strict=True)))

    gate = Gate(keys("team-a"))
    async with serving(gate=gate) as served:

        async def caller(secret: str) -> str:
            path, headers = "/v2/repository/models/echo/load", {"X-API-Key": secret}
            assert (await served.ask(path, b"{}", headers=headers)).status == 403
            return [r for r in caplog.records if r.name == audit_log.log.name][-1].caller

        assert await caller("first") == "team-a"
        unnamed = await caller("second")
        assert unnamed == f"key {digest_secret(b'second').hex()[:8]}"
        gate.keys = keys("team-b")
        served.process.set_keys(gate)
        while await caller("first") != "team-b":
            await asyncio.sleep(0.001)
        gate.keys = keys("")
        served.process.set_keys(gate)
        while await caller("first") != f"key {digest_secret(b'first').hex()[:8]}":
            await asyncio.sleep(0.001)


async def test_the_limits_are_those_of_the_core():
    limits = HttpLimits(max_body_bytes=2000, max_json_bytes=1000)
    async with serving(limits=limits) as served:
        assert (await served.ask("/v2/models/echo/infer", bytes(2001))).status == 413
        answer = await served.ask("/v2/models/echo/infer", bytes(1001))
        assert answer.status == 413 and b"--max-json-bytes" in answer.body


async def test_every_inference_is_in_the_access_log_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger=access_log.log.name)
    gate = Gate(None, frozenset(("127.0.0.1",)))
    async with serving(gate=gate, logs_requests=True) as served:
        head, body = binary(b"abcd", id="seven")
        infer = "/v2/models/echo/infer"
        await served.ask(infer, body, headers=head)
        await served.ask("/v2/models/none/infer", body, headers=head)
        await served.ask(infer, b"{")
        await served.ask(infer, body, headers={**head, "Host": "elsewhere"})
        await served.ask(infer, method="GET")
    told = [r for r in caplog.records if r.name == access_log.log.name]
    assert [(r.protocol, r.status) for r in told] == [
        ("http", status) for status in (200, 404, 400, 403, 405)
    ]
    first = told[0]
    assert (first.model, first.version, first.request_id, first.rows) == ("echo", "1", "seven", 1)
    assert first.total_ms >= first.decode_ms > 0


async def test_a_shard_that_cannot_start_says_why(tmp_path):
    shards = Shards(1)
    catalog = Catalog(ThreadLife, shards=shards)
    management = ManagementApi(catalog, Control(catalog, ".", is_explicit=True))
    tls = TlsConfig(str(tmp_path / "no.pem"), str(tmp_path / "no.key"))
    with contextlib.closing(reserve("127.0.0.1", 0)) as listener:
        spec = shard_spec(OpenShard(VERSION, 0, tls=tls), (listener,), Gate())
        process = ShardProcess(
            CoreApi(management, shards=shards), replace(spec, start_life=LoopLife)
        )
        process.start()
        with pytest.raises(ConfigError, match=r"no\.pem"):
            await process.listening()
        await process.close()
    shards.close()


async def test_new_keys_hold_also_for_heads_that_were_seen_before(until: Until):
    def keys(secret: bytes) -> Keys:
        return Keys({digest_secret(secret): frozenset(["infer"])})

    gate = Gate(keys(b"the first secret"))
    async with serving(gate=gate) as served, served.connect() as client:
        head, body = binary(b"abcd")

        async def status(secret: str) -> int:
            headers = {**head, "X-API-Key": secret}
            return (await client.ask("/v2/models/echo/infer", body, headers=headers)).status

        for _ in range(3):
            assert await status("the first secret") == 200
        gate.keys = keys(b"another secret")
        served.process.set_keys(gate)
        while await status("another secret") != 200:
            await asyncio.sleep(0.001)
        assert await status("the first secret") == 401
