"""Long answers: every byte in order, from memory that is kept exactly as long as it is needed."""

from __future__ import annotations

import asyncio
import inspect
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import uvloop
from waiting import until

from penstock.config import HttpLimits
from penstock.protocols import answer_sender, listener
from penstock.protocols.answer_sender import AnswerSender
from penstock.protocols.http import LONG_ANSWER_BYTES, Exchange
from penstock.types import Buffer

MIB = 1 << 20
# More than the kernel buffers for a client that does not read.
HUGE = 24 * MIB


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every asynchronous test runs on both kinds of event loop."""
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_factory")
        loops = [asyncio.new_event_loop, uvloop.new_event_loop]
        metafunc.parametrize("loop_factory", loops, ids=["asyncio", "uvloop"])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is copied because its client is slow."""
    monkeypatch.setattr(answer_sender, "MAX_KEPT_S", 1e6)


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers]).encode() + b"\r\n\r\n"


class Memory:
    """Answers `/SIZE` with that many bytes of one buffer, which is overwritten as soon as it is
    given back, as a slab's rows are by the next request."""

    def __init__(self, num_parts: int = 3) -> None:
        self.num_parts = num_parts
        self.num_kept = self.num_released = 0

    def __call__(self, exchange: Exchange) -> None:
        size = int(exchange.head.path[1:])
        memory = bytearray(pattern(size))

        def keep() -> Callable[[], None]:
            self.num_kept += 1

            def release() -> None:
                self.num_released += 1
                memory[:] = b"\xee" * size

            return release

        kept_before = self.num_kept
        exchange.reply(200, b"", cut(memory, self.num_parts), keep)
        if self.num_kept == kept_before:
            memory[:] = b"\xee" * size


def pattern(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def cut(memory: bytearray, num_parts: int) -> Sequence[Buffer]:
    view, step = memoryview(memory), max(1, -(-len(memory) // num_parts))
    return [view[start : start + step] for start in range(0, len(memory), step)]


@pytest.mark.parametrize("num_parts", [1, 3, 1500])
async def test_answers_of_all_sizes_arrive_as_they_are(serve: Any, num_parts: int) -> None:
    memory = Memory(num_parts)
    edge = LONG_ANSWER_BYTES
    piece = answer_sender.PIECE_BYTES
    sizes = [1, edge - 1, edge, edge + 1, piece, piece + 1, 4 * MIB, 1, HUGE, edge, 0]
    async with serve(memory) as served, served.connect() as client:
        for size in sizes:
            await client.send(get(f"/{size}"))
            assert (await client.answer()).body == pattern(size)
    assert memory.num_released == memory.num_kept


async def test_pipelined_answers_keep_their_order(serve: Any) -> None:
    memory = Memory()
    sizes = [HUGE, 5, 0, HUGE // 2, edge_plus(), 1, HUGE]
    async with serve(memory) as served, served.connect() as client:
        await client.send(b"".join(get(f"/{size}") for size in sizes))
        await until(lambda: memory.num_kept)
        for size in sizes:
            assert (await client.answer()).body == pattern(size)
    assert memory.num_released == memory.num_kept


def edge_plus() -> int:
    return LONG_ANSWER_BYTES + 1


async def test_memory_is_kept_until_the_client_has_read(serve: Any, patient: None) -> None:
    memory = Memory()
    async with serve(memory) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}"))
        await until(lambda: memory.num_kept)
        await asyncio.sleep(0.2)
        assert memory.num_released == 0
        assert (await client.answer()).body == pattern(HUGE)
        await until(lambda: memory.num_released)
    assert (memory.num_kept, memory.num_released) == (1, 1)


async def test_a_slow_reader_holds_no_memory_and_gets_every_byte(serve: Any) -> None:
    memory = Memory()
    async with serve(memory) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}") + get(f"/{MIB}"))
        await until(lambda: memory.num_kept == memory.num_released == 2)
        assert (await client.answer()).body == pattern(HUGE)
        assert (await client.answer()).body == pattern(MIB)


async def test_memory_comes_back_if_the_client_leaves(serve: Any, patient: None) -> None:
    memory = Memory()
    async with serve(memory) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}"))
        await until(lambda: memory.num_kept)
        client.reset()
        await until(lambda: memory.num_released)
    assert (memory.num_kept, memory.num_released) == (1, 1)


async def test_a_client_that_has_finished_sending_gets_its_answer(
    serve: Any, patient: None
) -> None:
    memory = Memory()
    async with serve(memory) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}"))
        await until(lambda: memory.num_kept)
        client.writer.write_eof()
        await asyncio.sleep(0.05)
        assert (await client.answer()).body == pattern(HUGE)
        assert await client.rest() == b""
    assert memory.num_released == 1


async def test_the_connection_closes_after_the_last_byte(serve: Any) -> None:
    memory = Memory()
    async with serve(memory) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}", "Connection: close"))
        assert (await client.answer()).body == pattern(HUGE)
        assert await client.rest() == b""


async def test_a_refusal_waits_behind_a_long_answer(serve: Any) -> None:
    memory = Memory()
    async with serve(memory) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}") + b"nonsense\r\n\r\n")
        assert (await client.answer()).body == pattern(HUGE)
        assert (await client.answer()).status == 400
        assert await client.rest() == b""


async def test_a_client_that_reads_nothing_is_cut_off(
    serve: Any, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SWEEP_S", 0.02)
    memory = Memory()
    limits = HttpLimits(write_timeout_s=0.3)
    async with serve(memory, limits) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}"))
        await until(lambda: memory.num_released)
        assert len(await client.rest()) < HUGE


async def test_a_client_that_reads_slowly_is_not_cut_off(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SWEEP_S", 0.02)
    memory = Memory()
    limits = HttpLimits(write_timeout_s=3.0)
    async with serve(memory, limits) as served, served.connect() as client:
        await client.send(get(f"/{HUGE}"))
        status, headers = await client.head()
        assert (status, headers["content-length"]) == (200, str(HUGE))
        read = b""
        while len(read) < HUGE:
            read += await client.reader.readexactly(min(MIB, HUGE - len(read)))
            await asyncio.sleep(0.02)
        assert read == pattern(HUGE)


async def test_what_nobody_keeps_is_copied_before_the_handler_goes_on(serve: Any) -> None:
    def once(exchange: Exchange) -> None:
        memory = bytearray(pattern(HUGE))
        exchange.reply(200, b"", (memory,))
        memory[:] = b"\xee" * HUGE

    async with serve(once) as served, served.connect() as client:
        for _ in range(2):
            await client.send(get("/"))
            await asyncio.sleep(0.02)
            assert (await client.answer()).body == pattern(HUGE)


async def test_a_head_request_has_no_body(serve: Any) -> None:
    async with serve(Memory()) as served, served.connect() as client:
        await client.send(get(f"/{MIB}").replace(b"GET", b"HEAD") + get("/3"))
        answer = await client.answer("HEAD")
        assert (answer.headers["content-length"], answer.body) == (str(MIB), b"")
        assert (await client.answer()).body == pattern(3)


async def test_nothing_is_written_to_a_closed_transport() -> None:
    """Its descriptor may belong to another connection by then."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
        sender = AnswerSender(transport)
        sender.send([b"a" * MIB * 8], None)
        assert sender.is_busy
        transport.abort()
        sender.flush()
        assert not sender.is_busy
        sender.send([b"b" * MIB], None)
        assert not sender.is_busy
        await asyncio.sleep(0.05)
        received = await asyncio.to_thread(read_all, theirs)
        assert set(received) <= {ord("a")}


def read_all(sock: socket.socket) -> bytes:
    sock.setblocking(True)
    sock.settimeout(10)
    parts = []
    try:
        while part := sock.recv(MIB):
            parts.append(part)
    except OSError:
        pass
    return b"".join(parts)


async def test_long_streams_and_long_answers_share_a_connection(serve: Any) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.start_stream(200, b"")
        for _ in range(10):
            exchange.stream(b"s" * 1000)
        exchange.end_stream()

    memory = Memory()

    def both(exchange: Exchange) -> None:
        (stream if exchange.head.path == b"/s" else memory)(exchange)

    async with serve(both) as served, served.connect() as client:
        # Less than a client of a stream may leave unread.
        await client.send(get(f"/{7 * MIB}") + get("/s") + get("/7"))
        assert (await client.answer()).body == pattern(7 * MIB)
        assert (await client.answer()).body == b"s" * 10_000
        assert (await client.answer()).body == pattern(7)
