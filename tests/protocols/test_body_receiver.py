"""Connections that receive long bodies into memory of their own, between all other messages."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from typing import Any

import pytest
import uvloop
from long_bodies import Receiver, bytes_of, post
from waiting import until

from penstock.config import HttpLimits
from penstock.protocols import http, listener
from penstock.protocols.body_receiver import BodyReceiver
from penstock.protocols.http_reader import LONG_BYTES

SIZES = [0, 5, LONG_BYTES, LONG_BYTES + 1, 300_000, 7, 2_000_000, LONG_BYTES + 1, 1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every asynchronous test runs on both kinds of event loop."""
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_factory")
        loops = [asyncio.new_event_loop, uvloop.new_event_loop]
        metafunc.parametrize("loop_factory", loops, ids=["asyncio", "uvloop"])


def chunked(body: bytes) -> bytes:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("piece", [1 << 30, 70_001, 1999])
async def test_messages_of_all_sizes_follow_each_other(serve: Any, piece: int) -> None:
    receiver = Receiver()
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        for size in SIZES * 2:
            body = bytes_of(size)
            data = post(body)
            for start in range(0, len(data), piece):
                await client.send(data[start : start + piece])
            assert (await client.answer()).body == body
    assert len(receiver.bodies) == 2 * sum(size > LONG_BYTES for size in SIZES)
    assert all(body.is_dropped for body in receiver.bodies)


async def test_all_kinds_of_bodies_share_a_connection(serve: Any) -> None:
    receiver = Receiver()
    body = bytes_of(400_000)
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        for data in (
            post(body),
            chunked(body),
            post(body, path="/b"),
            chunked(b"few"),
            post(body),
            post(b"few"),
            post(body, "X-Other: head"),
        ):
            await client.send(data)
            assert (await client.answer()).body in (body, b"few")
    assert len(receiver.bodies) == 3


async def test_pipelined_messages_are_answered_in_order(serve: Any) -> None:
    receiver = Receiver()
    bodies = [bytes_of(size) for size in (200_000, 3, 300_001, 20_000, 0, 900_000)]
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        for _ in range(2):
            sending = asyncio.ensure_future(client.send(b"".join(map(post, bodies))))
            for body in bodies:
                assert (await client.answer()).body == body
            await sending


async def test_what_waits_for_another_answer_gets_no_memory(serve: Any) -> None:
    """It might hold it for long."""
    receiver = Receiver()
    receiver.is_holding = True
    body = bytes_of(100_000)
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        await client.send(post(b"first") + post(body))
        await until(lambda: receiver.exchanges)
        receiver.is_holding = False
        receiver.exchanges[0].reply(200, b"", ())
        assert (await client.answer()).body == b""
        assert (await client.answer()).body == body
    assert receiver.bodies == []


async def test_a_client_may_expect_100_continue(serve: Any) -> None:
    receiver = Receiver()
    body = bytes_of(500_000)
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        for _ in range(2):
            data = post(body, "Expect: 100-continue")
            end = data.find(b"\r\n\r\n") + 4
            await client.send(data[:end])
            assert (await client.answer()).status == 100
            await client.send(data[end:])
            assert (await client.answer()).body == body


@pytest.mark.parametrize("num_sent", [0, 1, 99_999, 100_000, 299_999])
async def test_a_truncated_body_gives_its_memory_back(serve: Any, num_sent: int) -> None:
    receiver = Receiver()
    data = post(bytes_of(300_000))
    end = data.find(b"\r\n\r\n") + 4
    async with serve(receiver, prepare=receiver.prepare) as served:
        for leaves in ("aborts", "finishes"):
            async with served.connect() as client:
                # The second time, the head is known.
                await client.send(data[: end + num_sent])
                await until(lambda: receiver.bodies)
                if leaves == "aborts":
                    client.reset()
                else:
                    client.writer.write_eof()
                    assert await client.rest() == b""
                await until(lambda: all(body.is_dropped for body in receiver.bodies))
                receiver.bodies.clear()
        await until(lambda: served.http.num_connections == 0)


async def test_a_body_that_stops_is_refused_as_any_other(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SWEEP_S", 0.02)
    monkeypatch.setattr(http, "SLOW_BODY_S", 0.0)
    receiver = Receiver()
    limits = HttpLimits(body_timeout_s=2.0)
    data = post(bytes_of(300_000))
    async with serve(receiver, limits, receiver.prepare) as served, served.connect() as client:
        await client.send(data[:200_000])
        answer = await client.answer()
        assert answer.status == 408
        assert b"the request body took too long" in answer.body
        assert await client.rest() == b""
    (body,) = receiver.bodies
    assert body.is_moved, "a slow client must not hold shared memory"
    assert body.is_dropped


async def test_a_slow_body_is_moved_out_and_completes(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "SWEEP_S", 0.02)
    receiver = Receiver()
    whole = bytes_of(300_000)
    data = post(whole)
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        await client.send(data[:150_000])
        await until(lambda: receiver.bodies and receiver.bodies[0].is_moved)
        await client.send(data[150_000:])
        assert (await client.answer()).body == whole


async def test_nonsense_after_a_long_body_is_refused(serve: Any) -> None:
    receiver = Receiver()
    body = bytes_of(150_000)
    async with serve(receiver, prepare=receiver.prepare) as served:
        for _ in range(2):
            async with served.connect() as client:
                await client.send(post(body) + b"nonsense\r\n\r\n")
                assert (await client.answer()).body == body
                assert (await client.answer()).status == 400
                assert await client.rest() == b""


async def test_the_server_closes_while_a_body_is_received(serve: Any) -> None:
    receiver = Receiver()
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        await client.send(post(bytes_of(300_000))[:200_000])
        await until(lambda: receiver.bodies and receiver.bodies[0].num_received)
        await served.http.close()
        assert receiver.bodies[0].is_dropped


async def test_a_connection_receives_in_parts_until_its_first_long_body(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again for a body that the parser reads."""
    num_direct = 0
    get_buffer = BodyReceiver.get_buffer

    def spy(self: BodyReceiver, sizehint: int) -> memoryview:
        nonlocal num_direct
        num_direct += 1
        return get_buffer(self, sizehint)

    monkeypatch.setattr(BodyReceiver, "get_buffer", spy)
    receiver = Receiver()
    long, plain = post(bytes_of(900_000)), chunked(bytes_of(900_000))
    was_direct = []
    async with serve(receiver, prepare=receiver.prepare) as served, served.connect() as client:
        for data in (post(b"short"), long, post(b"short"), plain, post(b"short"), long):
            num_direct = 0
            await client.send(data)
            await client.answer()
            was_direct.append(num_direct)
    is_direct = [count > 0 for count in was_direct]
    assert is_direct == [False, True, True, True, False, True]
    assert was_direct[3] < 4, "only its head was read in a small piece"


@pytest.mark.parametrize("num_missing", [0, 1, 100_000])
async def test_a_lost_connection_is_freed_without_the_garbage_collector(
    serve: Any, num_missing: int
) -> None:
    """Thousands of them would keep their memory until it runs."""
    receiver = Receiver()
    data = post(bytes_of(300_000))
    made: list[weakref.ref[BodyReceiver]] = []
    start = BodyReceiver.start

    def spy(self: BodyReceiver) -> None:
        made.append(weakref.ref(self))
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BodyReceiver, "start", spy)
        gc.disable()
        try:
            async with serve(receiver, prepare=receiver.prepare) as served:
                async with served.connect() as client:
                    await client.send(data)
                    await client.answer()
                    await client.send(data[: len(data) - num_missing])
                    if not num_missing:
                        await client.answer()
                    client.reset()
                await until(lambda: served.http.num_connections == 0)
                await until(lambda: made and all(each() is None for each in made))
        finally:
            gc.enable()
