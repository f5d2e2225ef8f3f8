"""The bridge: an ASGI application behind the HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.protocols.asgi import AsgiBridge

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def request(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(target: str) -> bytes:
    return request("GET", target)


@asynccontextmanager
async def bridged(serve: Any, app: Any) -> AsyncIterator[Any]:
    bridge = AsgiBridge(app)
    async with serve(bridge.handle) as served:
        try:
            yield served
        finally:
            await bridge.close()


async def show(request: Request) -> Response:
    """What the application sees of a request."""
    return JSONResponse(
        {
            "method": request.method,
            "path": request.url.path,
            "path_param": request.path_params.get("rest"),
            "raw_path": request.scope["raw_path"].decode("latin-1"),
            "query": request.scope["query_string"].decode("latin-1"),
            "parameters": dict(request.query_params),
            "header": request.headers.get("x-mixed"),
            "body": (await request.body()).decode("latin-1"),
        },
        headers={"X-Answer": "yes"},
    )


async def count(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"part %d\n" % number

    return StreamingResponse(parts(), media_type="text/event-stream")


async def hello(request: Request) -> Response:
    return PlainTextResponse("hello")


async def fail(request: Request) -> Response:
    raise ValueError("secret /usr/lib 0xdeadbeef")


async def fail_halfway(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError("secret")

    return StreamingResponse(parts())


APP = Starlette(
    routes=[
        Route("/show/{rest:path}", show, methods=["GET", "POST", "PUT"]),
        Route("/count", count),
        Route("/hello", hello),
        Route("/fail", fail),
        Route("/fail_halfway", fail_halfway),
    ]
)


# Requests.


async def test_the_application_sees_the_whole_request(serve: Any) -> None:
    message = request("POST", "/show/a?b=c&d=%20e", b"a body", "X-Mixed: value")
    async with bridged(serve, APP) as served:
        answer = await served.ask(message)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-answer"] == "yes"
    assert json.loads(answer.body) == {
        "method": "POST",
        "path": "/show/a",
        "path_param": "a",
        "raw_path": "/show/a",
        "query": "b=c&d=%20e",
        "parameters": {"b": "c", "d": " e"},
        "header": "value",
        "body": "a body",
    }


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/show/a%20b", "a b"),
        ("/show/%C3%BC", "ü"),
        ("/show/a%2Fb", "a/b"),
        ("/show/%2e%2e/x", "../x"),
        ("/show/%25", "%"),
        ("/show/%zz", "%zz"),
        ("/show/%ff", "\ufffd"),
        ("/show/%00", "\0"),
        ("/show/a;b", "a;b"),
        ("/show//a", "/a"),
    ],
)
async def test_paths_are_decoded_once_and_kept_raw(serve: Any, target: str, path: str) -> None:
    async with bridged(serve, APP) as served:
        seen = json.loads((await served.ask(get(target))).body)
    assert seen["path_param"] == path
    assert seen["raw_path"] == target


async def test_a_query_is_never_decoded_by_the_bridge(serve: Any) -> None:
    async with bridged(serve, APP) as served:
        seen = json.loads((await served.ask(get("/show/a?%ff&x=%2f&?&=&%00"))).body)
    assert seen["query"] == "%ff&x=%2f&?&=&%00"


async def test_requests_on_one_connection_are_answered_in_order(serve: Any) -> None:
    async with bridged(serve, APP) as served, served.connect() as client:
        await client.send(b"".join(request("PUT", f"/show/{n}", b"%d" % n) for n in range(20)))
        for number in range(20):
            seen = json.loads((await client.answer()).body)
            assert (seen["path_param"], seen["body"]) == (str(number), str(number))


# Answers.


async def test_a_plain_answer_has_its_length(serve: Any) -> None:
    async with bridged(serve, APP) as served:
        answer = await served.ask(get("/hello"))
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.headers["content-length"] == "5"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_streamed_answer_is_chunked_and_the_connection_stays_open(serve: Any) -> None:
    async with bridged(serve, APP) as served, served.connect() as client:
        for _ in range(2):
            await client.send(get("/count"))
            answer = await client.answer()
            assert answer.headers["transfer-encoding"] == "chunked"
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.body == b"part 0\npart 1\npart 2\n"


async def test_a_part_of_a_stream_is_sent_when_it_is_made(serve: Any) -> None:
    may_go_on = asyncio.Event()

    async def slow(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            await may_go_on.wait()
            yield b"two"

        return StreamingResponse(parts())

    async with (
        bridged(serve, Starlette(routes=[Route("/slow", slow)])) as served,
        served.connect() as client,
    ):
        await client.send(get("/slow"))
        await client.head()
        chunks = client.chunks()
        assert await anext(chunks) == b"one"
        may_go_on.set()
        assert [part async for part in chunks] == [b"two"]


async def test_head_gets_the_headers_of_get_and_no_body(serve: Any) -> None:
    async with bridged(serve, APP) as served, served.connect() as client:
        await client.send(request("HEAD", "/hello") + get("/hello"))
        answer = await client.answer("HEAD")
        assert (answer.status, answer.headers["content-length"]) == (200, "5")
        assert (await client.answer()).body == b"hello"


async def test_head_of_a_stream_has_no_body(serve: Any) -> None:
    async with bridged(serve, APP) as served, served.connect() as client:
        await client.send(request("HEAD", "/count") + get("/hello"))
        assert (await client.answer("HEAD")).status == 200
        assert (await client.answer()).body == b"hello"


async def test_unknown_paths_and_methods_are_the_applications_business(serve: Any) -> None:
    async with bridged(serve, APP) as served:
        assert (await served.ask(get("/nowhere"))).status == 404
        assert (await served.ask(request("POST", "/hello"))).status == 405


async def test_a_stream_waits_for_a_client_that_reads_slowly(serve: Any) -> None:
    num_made = 0

    async def endless(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            nonlocal num_made
            while True:
                num_made += 1
                yield bytes(1 << 20)

        return StreamingResponse(parts())

    async with (
        bridged(serve, Starlette(routes=[Route("/endless", endless)])) as served,
        served.connect(receive_bytes=4096) as client,
    ):
        client.writer.transport.pause_reading()
        await client.send(get("/endless"))
        made = -1
        while made != num_made or not num_made:
            made = num_made
            await asyncio.sleep(0.05)
        assert num_made < 100
        client.reset()


# Failures.


@pytest.mark.parametrize("app", ["starlette", "plain"])
async def test_an_exception_before_the_answer_is_a_500_without_details(
    serve: Any, app: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def plain(scope: Message, receive: Any, send: Send) -> None:
        if scope["path"] == "/fail":
            raise ValueError("secret /usr/lib 0xdeadbeef")
        await APP(scope, receive, send)

    async with (
        bridged(serve, APP if app == "starlette" else plain) as served,
        served.connect() as client,
    ):
        await client.send(get("/fail") + get("/hello"))
        answer = await client.answer()
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert (await client.answer()).body == b"hello"
    assert "secret" in caplog.text


async def test_an_exception_behind_the_start_of_an_answer_is_a_500(serve: Any) -> None:
    async def app(scope: Message, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError

    async with bridged(serve, app) as served:
        assert (await served.ask(get("/"))).status == 500


async def test_an_exception_during_a_stream_cuts_the_connection(serve: Any) -> None:
    async with bridged(serve, APP) as served:
        async with served.connect() as client:
            await client.send(get("/fail_halfway"))
            rest = await client.rest()
            assert rest.startswith(b"HTTP/1.1 200 ")
            assert b" 500 " not in rest
            assert not rest.endswith(b"0\r\n\r\n")
        assert (await served.ask(get("/hello"))).body == b"hello"


async def test_an_application_that_answers_nothing_is_a_500(serve: Any) -> None:
    async def app(scope: Message, receive: Any, send: Send) -> None:
        await receive()

    async with bridged(serve, app) as served:
        async with asyncio.timeout(0.5):
            assert (await served.ask(get("/"))).status == 500


async def test_an_application_that_stops_in_a_stream_cuts_the_connection(serve: Any) -> None:
    async def app(scope: Message, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async with bridged(serve, app) as served, served.connect() as client:
        await client.send(get("/"))
        async with asyncio.timeout(0.5):
            assert not (await client.rest()).endswith(b"0\r\n\r\n")


async def test_a_status_without_a_registered_name_can_be_sent(serve: Any) -> None:
    async def odd(request: Request) -> Response:
        return Response(status_code=299)

    async with bridged(serve, Starlette(routes=[Route("/odd", odd)])) as served:
        async with asyncio.timeout(0.5):
            assert (await served.ask(get("/odd"))).status == 299


async def test_an_application_need_not_send_headers(serve: Any) -> None:
    async def app(scope: Message, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    async with bridged(serve, app) as served:
        answer = await served.ask(get("/"))
    assert (answer.status, answer.body) == (200, b"")


# Clients that leave, and the end.


async def test_a_client_that_leaves_cancels_the_application(serve: Any) -> None:
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Message, receive: Any, send: Send) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with bridged(serve, app) as served:
        async with served.connect() as client:
            await client.send(get("/"))
            await running.wait()
        await cancelled.wait()


async def test_a_client_that_leaves_ends_the_stream(serve: Any) -> None:
    ended = asyncio.Event()

    async def endless(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"again\n"
                    await asyncio.sleep(0)
            finally:
                ended.set()

        return StreamingResponse(parts())

    async with bridged(serve, Starlette(routes=[Route("/endless", endless)])) as served:
        async with served.connect() as client:
            await client.send(get("/endless"))
            await client.head()
        await ended.wait()


async def test_an_application_that_waits_for_a_disconnect_is_ended_by_it(serve: Any) -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Message, receive: Any, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        waiting.set()
        try:
            assert (await receive())["type"] == "http.disconnect"
        finally:
            ended.set()

    async with bridged(serve, app) as served:
        async with served.connect() as client:
            await client.send(get("/"))
            await waiting.wait()
        await ended.wait()


async def test_work_behind_the_answer_goes_on_when_the_client_leaves(serve: Any) -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Message, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"early"})
        await may_end.wait()
        ended.set()

    async with bridged(serve, app) as served:
        assert (await served.ask(get("/"))).body == b"early"
        may_end.set()
        await ended.wait()


async def test_close_ends_what_still_runs(serve: Any) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Message, receive: Any, send: Send) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    bridge = AsgiBridge(app)
    async with serve(bridge.handle) as served, served.connect() as client:
        await client.send(get("/"))
        await running.wait()
        await bridge.close()
        assert ended.is_set()
