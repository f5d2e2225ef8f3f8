"""Handlers that are coroutines behind the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.errors import InvalidRequest, NotFound, Overloaded
from penstock.protocols.handler_tasks import HandlerTasks, Reply, RouteCall, RouteHandler
from penstock.protocols.http import Exchange
from penstock.protocols.route_table import find

PATH = "/v2/models/some%20model/ready"


def request(method: str = "GET", body: bytes = b"") -> bytes:
    return (
        f"{method} {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


@asynccontextmanager
async def running(serve: Any, handler: RouteHandler) -> AsyncIterator[Any]:
    tasks = HandlerTasks()

    def handle(exchange: Exchange) -> None:
        match = find(exchange.head.path)
        assert match is not None
        tasks.start(exchange, handler, match)

    async with serve(handle) as served:
        try:
            yield served
        finally:
            await tasks.close()


async def test_a_handler_sees_its_row_the_names_and_the_body(serve: Any) -> None:
    async def show(call: RouteCall) -> Reply:
        seen = [call.match.route.handler, call.match.model_name, bytes(call.body).decode()]
        return Reply(json.dumps(seen).encode())

    async with running(serve, show) as served:
        answer = await served.ask(request(body=b"abc"))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert json.loads(answer.body) == ["model_ready", "some model", "abc"]


async def test_status_and_type_are_the_handlers(serve: Any) -> None:
    async def odd(call: RouteCall) -> Reply:
        return Reply(b"hello", 299, "text/plain")

    async with running(serve, odd) as served, served.connect() as client:
        await client.send(request("HEAD") + request())
        head = await client.answer("HEAD")
        assert (head.status, head.headers["content-length"], head.body) == (299, "5", b"")
        answer = await client.answer()
        assert (answer.headers["content-type"], answer.body) == ("text/plain", b"hello")


async def test_an_empty_answer_has_no_type(serve: Any) -> None:
    async def nothing(call: RouteCall) -> Reply:
        return Reply(b"")

    async with running(serve, nothing) as served:
        answer = await served.ask(request())
    assert (answer.status, answer.body) == (200, b"")
    assert "content-type" not in answer.headers


@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("why"), 400), (NotFound("why"), 404), (Overloaded("why", 2.5), 503)],
)
async def test_a_refusal_has_its_status(serve: Any, error: Exception, status: int) -> None:
    async def refuse(call: RouteCall) -> Reply:
        raise error

    async with running(serve, refuse) as served:
        answer = await served.ask(request())
    assert (answer.status, json.loads(answer.body)) == (status, {"error": "why"})
    assert answer.headers.get("retry-after") == ("3" if status == 503 else None)


async def test_a_bug_is_a_500_without_details_and_the_connection_lives(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    is_broken = True

    async def fail(call: RouteCall) -> Reply:
        if is_broken:
            raise ValueError("secret /usr/lib 0xdeadbeef")
        return Reply(b"well")

    with caplog.at_level(logging.ERROR):
        async with running(serve, fail) as served, served.connect() as client:
            await client.send(request())
            answer = await client.answer()
            assert (answer.status, json.loads(answer.body)) == (500, {"error": "internal error"})
            is_broken = False
            await client.send(request())
            assert (await client.answer()).body == b"well"
    assert "secret" in caplog.text


async def test_requests_on_one_connection_are_answered_in_order(serve: Any) -> None:
    async def echo(call: RouteCall) -> Reply:
        await asyncio.sleep(0)
        return Reply(bytes(call.body))

    async with running(serve, echo) as served, served.connect() as client:
        await client.send(b"".join(request(body=b"%d" % n) for n in range(1, 20)))
        for number in range(1, 20):
            assert (await client.answer()).body == b"%d" % number


async def test_a_client_that_leaves_cancels_the_handler(serve: Any) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(call: RouteCall) -> Reply:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    async with running(serve, wait) as served:
        async with served.connect() as client:
            await client.send(request())
            await started.wait()
        await cancelled.wait()


async def test_close_cancels_what_still_runs(serve: Any) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(call: RouteCall) -> Reply:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with running(serve, wait) as served, served.connect() as client:
        await client.send(request())
        await started.wait()
        # `running` closes the tasks when this block ends.
    assert ended.is_set()


async def test_a_stream_is_sent_as_it_comes_and_ended(serve: Any) -> None:
    closed: list[bool] = []

    async def parts() -> AsyncGenerator[bytes]:
        try:
            for number in range(3):
                yield b"part %d;" % number
        finally:
            closed.append(True)

    async def streaming(call: RouteCall) -> Reply:
        return Reply(b"", 200, "text/event-stream", stream=parts())

    async with running(serve, streaming) as served, served.connect() as client:
        await client.send(request())
        _, headers = await client.head()
        assert headers["content-type"] == "text/event-stream"
        expected = b"".join(b"7\r\npart %d;\r\n" % n for n in range(3)) + b"0\r\n\r\n"
        assert await client.reader.readexactly(len(expected)) == expected
        await client.send(request("HEAD") + request())
        assert (await client.head())[0] == 200
        assert (await client.head())[0] == 200
        assert await client.reader.readexactly(len(expected)) == expected
    assert closed == [True] * 3


@pytest.mark.parametrize("how", ["leaves", "does not read"])
async def test_a_stream_ends_with_its_client(
    serve: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocols.handler_tasks.MAX_BEHIND_BYTES", 1 << 16)
    ended = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        try:
            while True:
                await asyncio.sleep(0)
                yield bytes(1 << 16)
        finally:
            ended.set()

    async def streaming(call: RouteCall) -> Reply:
        return Reply(b"", 200, "text/event-stream", stream=endless())

    async with running(serve, streaming) as served, served.connect() as client:
        await client.send(request())
        assert (await client.head())[0] == 200
        if how == "leaves":
            client.writer.close()
        await ended.wait()


async def test_a_stream_that_fails_is_cut(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> AsyncGenerator[bytes]:
        yield b"first"
        raise RuntimeError("no more")

    async def streaming(call: RouteCall) -> Reply:
        return Reply(b"", 200, "text/event-stream", stream=failing())

    with caplog.at_level(logging.ERROR):
        async with running(serve, streaming) as served, served.connect() as client:
            await client.send(request())
            # The last chunk, of length 0, is missing.
            with contextlib.suppress(ConnectionResetError):
                assert not (await client.reader.read()).endswith(b"0\r\n\r\n")
    assert "no more" in caplog.text
