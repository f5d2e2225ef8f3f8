"""Long bodies on their way into shared memory: bit for bit, however they are cut.

Bytes are delivered to connections exactly as a test cuts them; models and workers are real.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import uvloop
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from penstock.config import BatchPolicy, HttpLimits, MemoryPolicy, ModelConfig
from penstock.protocols.gate import Gate, Keys, digest_secret
from penstock.protocols.http import Connection
from penstock.protocols.http_reader import LONG_BYTES
from penstock.protocols.http_server import HEAD_BYTES, HttpServer
from penstock.protocols.tensor_bodies import MAX_BYTES, MAX_HEAD_BYTES, make_body
from penstock.protocols.v2_http import Models, V2Http
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.management import ManagementApi
from penstock.serving.model import Model
from penstock.serving.supervisor import ThreadLife
from penstock.types import DATATYPES, TensorSpec
from penstock.wire.v2 import Codec

Dims = Mapping[str, tuple[str, tuple[int, ...]]]


def echo(name: str, inputs: Dims, max_batch_size: int = 4, **memory: int) -> ModelConfig:
    """A model whose outputs OUT_<name> repeat its inputs."""
    return ModelConfig(
        name=name,
        version="1",
        backend="null",
        artifact="",
        inputs=tuple(TensorSpec(key, *value) for key, value in inputs.items()),
        outputs=tuple(TensorSpec(f"OUT_{key}", *value) for key, value in inputs.items()),
        max_batch_size=max_batch_size,
        batching=BatchPolicy(max(1, max_batch_size), is_dynamic=max_batch_size > 0),
        memory=MemoryPolicy(**memory) if memory else MemoryPolicy(),
    )


MODELS = {
    config.name: config
    for config in (
        echo("one", {"x": ("UINT8", (LONG_BYTES,))}),
        echo("three", {"a": ("UINT8", (9000,)), "b": ("INT32", (2,)), "c": ("FP32", (2500,))}),
        echo("variable", {"v": ("INT16", (-1,))}),
        echo("unbatched", {"u": ("UINT8", (-1,)), "w": ("INT64", (-1,))}, 0, spill_bytes=1 << 20),
        echo("strings", {"s": ("BYTES", (1,))}),
    )
}


class Pipe:
    """A transport whose test delivers the bytes, to whichever protocol the connection chose."""

    def __init__(self, server: HttpServer) -> None:
        self.sent = bytearray()
        self.is_closed = False
        self.protocol: Any = None
        self.connection = Connection(server)
        self.set_protocol(self.connection)
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def deliver(self, data: bytes) -> None:
        while data:
            if isinstance(self.protocol, asyncio.BufferedProtocol):
                buffer = memoryview(self.protocol.get_buffer(-1))
                assert len(buffer), "an empty buffer ends a connection"
                part = data[: len(buffer)]
                buffer[: len(part)] = part
                del buffer
                data = data[len(part) :]
                self.protocol.buffer_updated(len(part))
            else:
                part, data = data, b""
                self.protocol.data_received(part)

    def lose(self) -> None:
        self.protocol.connection_lost(None)

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str) -> object:
        """Without TLS, and without a socket: answers go through `write`."""
        return None if name == "sslcontext" else self

    def fileno(self) -> int:
        return -1

    def write(self, data: bytes) -> None:
        self.sent += data

    def set_write_buffer_limits(self, high: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def answers(self) -> list[tuple[int, dict[str, str], bytes]]:
        """The complete answers so far."""
        found, rest = [], bytes(self.sent)
        while b"\r\n\r\n" in rest:
            head, _, body = rest.partition(b"\r\n\r\n")
            line, *fields = head.decode().split("\r\n")
            headers = dict(field.lower().split(": ", 1) for field in fields)
            length = int(headers["content-length"])
            if len(body) < length:
                break
            found.append((int(line.split()[1]), headers, body[:length]))
            rest = body[length:]
        return found


class Rig:
    """The core's HTTP side and its models, on a loop that only runs during `run`."""

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._runner = asyncio.Runner(loop_factory=loop_factory)
        self.run(self._open())

    def run(self, coroutine: Any) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(60):
                return await coroutine

        return self._runner.run(limited())

    async def _open(self) -> None:
        self.catalog = Catalog(start_life=ThreadLife)
        await self.catalog.load(RepositoryScan(list(MODELS.values())))
        assert not self.catalog.failures
        control = Control(self.catalog, "/nowhere", is_explicit=False)
        self.management = ManagementApi(self.catalog, control)
        self.lifecycle = self.management.lifecycle
        self.v2 = V2Http(Models(self.management), HttpLimits(), Gate())
        limits = HttpLimits()
        self.server = HttpServer(
            self.v2.handle, limits, self.v2.screen, self.lifecycle, self.v2.prepare
        )

    def close(self) -> None:
        async def leave() -> None:
            await self.v2.close()
            await self.catalog.close()

        self.run(leave())
        self._runner.close()

    def model(self, name: str) -> Model:
        found = self.catalog.find(name, "")
        assert isinstance(found, Model)
        return found

    def check_nothing_is_held(self) -> None:
        for name in MODELS:
            memory = self.model(name).memory
            assert memory.pool.num_in_use == 0, name
            assert memory.extents.num_held == 0, name
            assert memory.extents.free_bytes == memory.extents.capacity
            for slab in memory.pool.slabs:
                assert (slab.num_held, slab.num_reserved) == (0, 0)


@pytest.fixture(scope="module", params=[uvloop.new_event_loop, asyncio.new_event_loop])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


def message(
    model: str, tensors: Sequence[tuple[str, str, Sequence[int], bytes]], id: str = "", *more: str
) -> bytes:
    inputs = [
        {
            "name": name,
            "datatype": datatype,
            "shape": list(shape),
            "parameters": {"binary_data_size": len(data)},
        }
        for name, datatype, shape, data in tensors
    ]
    asked: dict[str, Any] = {"id": id} if id else {}
    asked |= {"inputs": inputs, "parameters": {"binary_data_output": True}}
    head = json.dumps(asked).encode()
    return post(model, head, b"".join(data for *_, data in tensors), *more)


def post(model: str, head: bytes, tail: bytes, *more: str) -> bytes:
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: x",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(tail)}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + head + tail


def outputs(body: bytes, headers: Mapping[str, str]) -> dict[str, bytes]:
    length = int(headers["inference-header-content-length"])
    position, found = length, {}
    for output in json.loads(body[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"].removeprefix("OUT_")] = body[position : position + size]
        position += size
    assert position == len(body)
    return found


class Asked:
    """A message and what must come back."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.model = chance.choice(list(MODELS))
        config = MODELS[self.model]
        rows = chance.choice((1, 1, 2, 4)) if config.max_batch_size else 0
        tensors = []
        for spec in config.inputs:
            # Few sizes, so that forms come again; some around what counts as long.
            shape = [
                chance.choice((0, 1, 8191, 8192, 8193, 40_000, 70_000)) if size < 0 else size
                for size in spec.shape
            ]
            shape = [rows, *shape] if rows else shape
            itemsize = DATATYPES[spec.datatype].itemsize
            if itemsize is None:
                sizes = [chance.choice((0, 5, 20_000)) for _ in range(rows)]
                texts = [chance.randbytes(size) for size in sizes]
                data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
            else:
                data = chance.randbytes(int(np.prod(shape)) * itemsize)
            tensors.append((spec.name, spec.datatype, shape, data))
        chance.shuffle(tensors)
        self.expected = {name: data for name, _, _, data in tensors}
        id = chance.choice(("", f"number {number}"))
        more = chance.choice(((), (), (f"X-Unique: {number}",)))
        self.data = message(self.model, tensors, id, *more)


def pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """Cut data somewhere, often near the end of its head."""
    end = data.find(b"\r\n\r\n") + 4
    points = {0, len(data)}
    for _ in range(chance.choice((0, 1, 2, 5))):
        points.add(chance.randrange(len(data)))
        points.add(min(len(data), max(0, end + chance.randint(-3, 400))))
        points.add(min(len(data), HEAD_BYTES + chance.randint(-2, 2)))
    return [data[a:b] for a, b in itertools.pairwise(sorted(points))]


class Script:
    """What one client does: messages one after the other or pipelined, cut somewhere, and it may
    leave in the middle of the last."""

    def __init__(self, chance: random.Random, rig: Rig, number: int) -> None:
        self.pipe = Pipe(rig.server)
        self.is_pipelined = chance.random() < 0.2
        self.asked = [Asked(chance, number * 100 + n) for n in range(chance.randint(1, 4))]
        self.leaves = chance.random() < 0.2
        parts = [pieces(chance, each.data) for each in self.asked]
        if self.is_pipelined:
            parts = [pieces(chance, b"".join(each.data for each in self.asked))]
        if self.leaves:
            parts[-1] = parts[-1][: len(parts[-1]) // 2]
        self.parts = parts
        self.num_done = 0

    async def play(self, chance: random.Random) -> None:
        for number, parts in enumerate(self.parts):
            for part in parts:
                self.pipe.deliver(part)
                if chance.random() < 0.1:
                    # As the sweep does with a slow client.
                    self.pipe.connection.sweep(self.pipe.connection.since + 0.6)
                await asyncio.sleep(0)
            is_last = number == len(self.parts) - 1
            if is_last and self.leaves:
                self.pipe.lose()
                return
            wanted = len(self.asked) if self.is_pipelined else number + 1
            await until(lambda wanted=wanted: len(self.pipe.answers()) >= wanted)

    def check(self) -> None:
        answers = self.pipe.answers()
        if not self.leaves:
            assert len(answers) == len(self.asked)
        for (status, headers, body), asked in zip(answers, self.asked, strict=False):
            assert status == 200, body[:300]
            assert outputs(body, headers) == asked.expected


@settings(deadline=None, max_examples=at_most(300))
@given(st.integers(0, 2**32))
def test_law_answers_are_bit_for_bit_and_no_memory_is_lost(rig: Rig, seed: int) -> None:
    """Each request has random bytes of its own: memory of another one would show."""
    chance = random.Random(seed)
    scripts = [Script(chance, rig, number) for number in range(chance.randint(1, 8))]

    async def scenario() -> None:
        await asyncio.gather(*(script.play(chance) for script in scripts))
        await rig.catalog.drain()

    rig.run(scenario())
    for script in scripts:
        script.check()
        if not script.leaves:
            script.pipe.lose()
    rig.check_nothing_is_held()


X = ("x", "UINT8", (1, LONG_BYTES), bytes(LONG_BYTES))
THREE = (
    ("a", "UINT8", (1, 9000), bytes(9000)),
    ("b", "INT32", (1, 2), bytes(8)),
    ("c", "FP32", (1, 2500), bytes(10_000)),
)
BAD = {
    "no such model": message("nothing", [X]),
    "wrong datatype": message("one", [("x", "INT8", (1, LONG_BYTES), X[3])]),
    "wrong shape": message("one", [("x", "UINT8", (1, LONG_BYTES - 1), X[3][1:])] * 2),
    "wrong size": message("one", [("x", "UINT8", (1, LONG_BYTES), X[3] + b"more")]),
    "too many rows": message("one", [("x", "UINT8", (9, LONG_BYTES), X[3] * 9)]),
    "twice": message("one", [X, X]),
    "missing": message("three", THREE[:1] + THREE[2:]),
    "more bytes than tensors": post("one", message("one", [X]).split(b"\r\n\r\n")[1], b"more"),
    "no JSON": post("one", b"[", bytes(LONG_BYTES)),
    "not UTF-8": post("one", b'{"inputs": [], "id": "\xff"}', bytes(LONG_BYTES)),
    "shared memory": post(
        "one",
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "UINT8", '
        b'"parameters": {"shared_memory_region": "r"}}]}',
        bytes(LONG_BYTES),
    ),
    "raw, wrong size": post("one", b"", bytes(LONG_BYTES + 1)),
    "raw, three inputs": post("three", b"", bytes(LONG_BYTES + 1)),
    "header of a header": message("one", [X]).replace(b"Content-Length: ", b"Content-Length: 9", 1),
    "negative header": message("one", [X]).replace(b"Content-Length: ", b"Content-Length: -", 1),
    "unknown coding": message("one", [X], "", "Content-Encoding: lzw"),
    "not gzip": message("one", [X], "", "Content-Encoding: gzip"),
    "no route": message("one", [X]).replace(b"/infer", b"/inform"),
    "wrong method": message("one", [X]).replace(b"POST", b"PUT"),
    "wrong string": message("strings", [("s", "BYTES", (1, 1), b"\xff" * LONG_BYTES)]),
}
GOOD = {
    "one": message("one", [X]),
    "three": message("three", THREE),
    "three, another order": message("three", THREE[::-1]),
    "raw": post("one", b"", bytes(range(256)) * (LONG_BYTES // 256)),
    "plain header": message("one", [X], "", "Content-Encoding: identity"),
    "HTTP/1.0": message("one", [X]).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "close": message("one", [X], "", "Connection: close"),
    "upgrade": message("one", [X], "", "Connection: upgrade", "Upgrade: h2c"),
}


async def one_answer(server: HttpServer, data: bytes, sizes: Sequence[int]) -> tuple[Any, bool]:
    """The answer to a message that comes in pieces of these sizes, and whether that was the end."""
    pipe = Pipe(server)
    position = 0
    for size in itertools.chain(sizes, itertools.repeat(len(data))):
        if position >= len(data):
            break
        pipe.deliver(data[position : position + size])
        position += size
        await asyncio.sleep(0)
    await until(pipe.answers)
    (answer,) = pipe.answers()
    pipe.lose()
    return answer, pipe.is_closed


@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_answers_are_those_of_a_server_that_copies(rig: Rig, name: str) -> None:
    data = (BAD | GOOD)[name]
    end = data.find(b"\r\n\r\n") + 4

    async def scenario() -> None:
        plain = HttpServer(rig.v2.handle, HttpLimits(), rig.v2.screen, rig.lifecycle)
        expected = await one_answer(plain, data, [])
        assert (expected[0][0] == 200) == (name in GOOD)
        for sizes in ([], [end], [end, 10], [end + 30], [100, 1000], [len(data) - 1], [9000] * 3):
            for _ in range(2):  # The second time, head and form may be known.
                assert await one_answer(rig.server, data, sizes) == expected

    rig.run(scenario())
    rig.check_nothing_is_held()


def test_the_first_body_of_a_form_is_copied_and_the_next_ones_are_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved = []
    reserve = Model.reserve

    def spy(self: Model, form: object) -> Any:
        reserved.append(reserve(self, form))
        return reserved[-1]

    monkeypatch.setattr(Model, "reserve", spy)
    tensors = [("v", "INT16", (1, 12_345), bytes(24_690))]

    async def scenario() -> None:
        for number in range(3):
            data = message("variable", tensors, f"id {number}", f"X-Trace: {number}")
            (status, headers, body), _ = await one_answer(rig.server, data, [200])
            assert (status, outputs(body, headers)) == (200, {"v": tensors[0][3]})

    rig.run(scenario())
    assert [each is not None for each in reserved] == [True, True]
    rig.check_nothing_is_held()


def test_a_drain_that_begins_during_a_body_refuses_it(rig: Rig) -> None:
    data = message("one", [X])

    async def scenario() -> None:
        await one_answer(rig.server, data, [])
        pipe = Pipe(rig.server)
        pipe.deliver(data[:-1])
        rig.lifecycle.is_draining = True
        try:
            pipe.deliver(data[-1:])
            ((status, headers, body),) = pipe.answers()
        finally:
            rig.lifecycle.is_draining = False
        assert (status, headers["connection"]) == (503, "close")
        assert b"the server is shutting down" in body

    rig.run(scenario())
    rig.check_nothing_is_held()


@pytest.mark.parametrize("name", ["one", "unbatched"])
def test_a_body_may_outlive_its_model(rig: Rig, name: str) -> None:
    config = MODELS[name]
    if name == "one":
        tensors = [("x", "UINT8", (1, LONG_BYTES), random.Random(1).randbytes(LONG_BYTES))]
    else:
        tensors = [
            ("u", "UINT8", (30_000,), random.Random(2).randbytes(30_000)),
            ("w", "INT64", (1000,), random.Random(3).randbytes(8000)),
        ]
    data = message(name, tensors)

    async def scenario() -> None:
        await one_answer(rig.server, data, [])
        old = rig.model(name)
        pipe = Pipe(rig.server)
        pipe.deliver(data[:-5000])
        assert old.memory.pool.num_in_use or old.memory.extents.num_held
        await rig.catalog.load(RepositoryScan([config]))
        assert rig.model(name) is not old
        await until(lambda: not old.is_ready)
        pipe.deliver(data[-5000:])
        await until(pipe.answers)
        ((status, headers, body),) = pipe.answers()
        assert status == 200
        assert outputs(body, headers) == {key: data for key, _, _, data in tensors}
        pipe.lose()
        assert old.memory.extents.num_held == 0

        pipe = Pipe(rig.server)
        pipe.deliver(data[:-5000])
        await rig.catalog.unload(name)
        pipe.deliver(data[-5000:])
        ((status, _, body),) = pipe.answers()
        assert status == 404
        pipe.lose()
        await rig.catalog.load(RepositoryScan([config]))

    rig.run(scenario())
    rig.check_nothing_is_held()


def test_a_key_that_is_revoked_during_a_body_is_refused(rig: Rig) -> None:
    keys = Keys({digest_secret(b"secret"): frozenset(["infer"])})
    data = message("one", [X], "", "X-API-Key: secret")

    async def scenario() -> None:
        gate = Gate(keys)
        v2 = V2Http(Models(rig.management, gate=gate), HttpLimits(), gate)
        server = HttpServer(v2.handle, HttpLimits(), v2.screen, prepare=v2.prepare)
        for _ in range(2):
            assert (await one_answer(server, data, [1000]))[0][0] == 200
        pipe = Pipe(server)
        pipe.deliver(data[:-1])
        assert rig.model("one").memory.pool.num_in_use == 1
        gate.keys = Keys()
        server.forget_heads()
        pipe.deliver(data[-1:])
        ((status, _, _),) = pipe.answers()
        assert status == 401
        pipe.lose()
        # And without a key there is no memory at all.
        pipe = Pipe(server)
        pipe.deliver(data[:-1])
        assert rig.model("one").memory.pool.num_in_use == 0
        pipe.lose()

    rig.run(scenario())
    rig.check_nothing_is_held()


@pytest.mark.parametrize(
    ("json_bytes", "num_bytes", "is_long"),
    [
        (100, 100 + LONG_BYTES, True),
        (100, 99 + LONG_BYTES, False),
        (0, LONG_BYTES, True),
        (MAX_HEAD_BYTES, MAX_HEAD_BYTES + LONG_BYTES, True),
        (MAX_HEAD_BYTES + 1, MAX_HEAD_BYTES + 1 + LONG_BYTES, False),
        (100, MAX_BYTES + 1, False),
    ],
)
def test_only_long_tensors_get_memory(
    rig: Rig, json_bytes: int, num_bytes: int, is_long: bool
) -> None:
    body = make_body(Codec(), rig.model("one"), json_bytes, num_bytes)
    assert (body is not None) == is_long
