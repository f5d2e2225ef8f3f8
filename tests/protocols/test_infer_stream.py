"""Streams of requests to models that answer any number of times, as the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_doubles import Core, message, serving
from tritonclient.grpc import service_pb2

from penstock.errors import BackendFailed
from penstock.protocols import infer_stream
from penstock.types import Request, Response, Tensor
from penstock.wire.v2_pb import WANTS_EMPTY_FINAL


def respond(request: Request, *data: bytes, final: bool = True) -> None:
    """Answer with one tensor, or with the mere end of the answers."""
    outputs = [Tensor("y", "BYTES", (len(each) - 4,), each) for each in data]
    request.respond(Response("many", "1", outputs, is_empty=not data), final)


def wanting(id: str) -> Any:
    """A request that wants to hear of the end."""
    asked = message("many", id=id)
    asked.parameters[WANTS_EMPTY_FINAL].bool_param = True
    return asked


def told(answer: Any) -> tuple[str, int, bool]:
    found = answer.infer_response
    is_final = found.parameters["triton_final_response"].bool_param
    return found.id, len(found.raw_output_contents), is_final


async def test_answers_leave_at_once_whatever_waits_before_them(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        for each in (message("wait", id="slow"), wanting("a"), message("many", id="b")):
            await stream.write(each)
        await until(lambda: len(core.waiting) == 3)
        slow, first, second = core.waiting
        respond(second, b"1234", final=False)
        respond(first, b"1234", final=False)
        respond(second)
        respond(first)
        answers = [told(await stream.read()) for _ in range(3)]
        assert answers == [("b", 1, False), ("a", 1, False), ("a", 0, True)]
        slow.respond(Response("wait", "1", slow.inputs))
        assert told(await stream.read()) == ("slow", 1, True)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_stream_ends_with_the_last_answer(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("many"))
        await stream.done_writing()
        await until(lambda: core.waiting)
        (request,) = core.waiting
        respond(request, b"1234", final=False)
        assert told(await stream.read()) == ("", 1, False)
        respond(request)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK


async def test_an_error_is_the_last_answer(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(wanting("a"))
        await until(lambda: core.waiting)
        (request,) = core.waiting
        respond(request, b"1234", final=False)
        request.respond(BackendFailed("why"))
        assert told(await stream.read()) == ("a", 1, False)
        answer = await stream.read()
        assert answer.error_message == "why" and answer.infer_response.id == "a"


async def test_a_client_that_leaves_cancels_what_is_still_answered(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        for _ in range(2):
            await stream.write(message("many"))
        await until(lambda: len(core.waiting) == 2)
        respond(core.waiting[0], b"1234", final=False)
        await stream.read()
        stream.cancel()
        await until(lambda: len(core.cancelled) == 2)


async def test_a_client_that_does_not_read_loses_its_stream(
    until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(infer_stream, "MAX_UNREAD_BYTES", 1 << 20)
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("many"))
        await until(lambda: core.waiting)
        (request,) = core.waiting
        sent = 0
        while not request.is_done:
            respond(request, bytes(1 << 16), final=False)
            sent += 1
            assert sent < 1000
        # No more was kept than the limit, and what the client's windows take.
        assert sent < 100 and core.cancelled == [request]


async def test_outputs_of_many_answers_cannot_be_in_shared_memory():
    core = Core()
    async with serving(core) as client:
        asked = message("many", id="a")
        output = asked.outputs.add(name="y")
        for name, value in (("region", "r"), ("byte_size", 8)):
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(output.parameters[f"shared_memory_{name}"], kind, value)
        stream = client.v2.ModelStreamInfer()
        await stream.write(asked)
        answer = await stream.read()
        assert "outputs in shared memory: decoupled models" in answer.error_message
        assert isinstance(answer, service_pb2.ModelStreamInferResponse) and not core.waiting
