"""KServe v2 over gRPC: statuses, texts, streams and health, before a core that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock import errors
from penstock.errors import InvalidRequest, NotFound, Overloaded, PenstockError, Unsupported
from penstock.protocols.v2_grpc import SERVICE, STATUS, Service
from penstock.types import CANCELLED, Request, Response
from penstock.wire import frames

ANSWERED = {
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "ModelInfer",
    "ModelStreamInfer",
}


@pytest.fixture
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """The front runs on the loop of the standard library."""
    return asyncio.new_event_loop


class Core:
    """Models that answer with their input, wait (`wait`), or refuse with the error set for them."""

    def __init__(self) -> None:
        self.errors: dict[str, PenstockError] = {}
        self.waiting: list[Request] = []
        self.cancelled: list[Request] = []
        self.is_ready = True

    def find(self, name: str, version: str = "") -> Model:
        return Model(self, name)

    async def ask(self, kind: frames.AskKind, name: str = "", version: str = "") -> bytes:
        if name in self.errors:
            raise self.errors[name]
        match kind:
            case "server_ready" | "model_ready":
                return b'{"ready":true}' if self.is_ready else b'{"ready":false}'
            case "server_metadata":
                return b'{"name":"penstock","version":"1","extensions":["a","b"]}'
            case "model_metadata":
                return (
                    b'{"name":"m","versions":["1","2"],"platform":"p",'
                    b'"inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}],"outputs":[]}'
                )
            case "model_config":
                return b"\x0a\x01m"
            case "model_statistics":
                raise Unsupported("not yet")


class Model:
    def __init__(self, core: Core, name: str) -> None:
        self.core = core
        self.name = name

    def submit(self, request: Request) -> None:
        if self.name in self.core.errors:
            request.respond(self.core.errors[self.name])
        elif self.name == "wait":
            self.core.waiting.append(request)
        else:
            request.respond(Response(self.name, "1", request.inputs, request.parameters))

    def cancel(self, request: Request) -> None:
        self.core.cancelled.append(request)
        request.respond(CANCELLED)


class Client:
    def __init__(self, channel: grpc.aio.Channel, service: Service) -> None:
        self.channel = channel
        self.service = service
        self.v2 = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def refusal(self, call: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code(), caught.value.details()


@asynccontextmanager
async def serving(core: Core) -> AsyncIterator[Client]:
    service = Service(core)  # type: ignore[arg-type]
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 16)])
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, service)
    finally:
        service.stop()
        await server.stop(0)


def message(model: str = "m", id: str = "", data: bytes = b"12345678") -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[2])
    return service_pb2.ModelInferRequest(
        model_name=model, id=id, inputs=[tensor], raw_input_contents=[data]
    )


def test_every_error_has_a_status():
    def leaves(kind: type[PenstockError]) -> set[type[PenstockError]]:
        return {kind}.union(*(leaves(each) for each in kind.__subclasses__()))

    assert set(STATUS) == leaves(PenstockError) - {PenstockError, errors.ConfigError}
    assert grpc.StatusCode.RESOURCE_EXHAUSTED not in STATUS.values()


async def test_questions():
    async with serving(Core()) as client:
        assert (await client.v2.ServerLive(service_pb2.ServerLiveRequest())).live
        assert (await client.v2.ServerReady(service_pb2.ServerReadyRequest())).ready
        assert (await client.v2.ModelReady(service_pb2.ModelReadyRequest(name="m"))).ready
        server = await client.v2.ServerMetadata(service_pb2.ServerMetadataRequest())
        assert (server.name, list(server.extensions)) == ("penstock", ["a", "b"])
        model = await client.v2.ModelMetadata(service_pb2.ModelMetadataRequest(name="m"))
        assert (model.name, list(model.versions), model.platform) == ("m", ["1", "2"], "p")
        assert [(x.name, x.datatype, list(x.shape)) for x in model.inputs] == [
            ("x", "FP32", [-1, 4])
        ]
        config = await client.v2.ModelConfig(service_pb2.ModelConfigRequest(name="m"))
        assert config.config.name == "m"


async def test_infer_gives_raw_outputs_and_the_id():
    async with serving(Core()) as client:
        answer = await client.v2.ModelInfer(message(id="seven"))
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "seven")
        assert list(answer.raw_output_contents) == [b"12345678"]


@pytest.mark.parametrize("kind", sorted(STATUS, key=lambda kind: kind.__name__))
async def test_errors_of_the_core_become_statuses(kind: type[PenstockError]):
    core = Core()
    core.errors["bad"] = kind("why: é")
    async with serving(core) as client:
        expected = (STATUS[kind], "why: é")
        assert await client.refusal(client.v2.ModelInfer(message("bad"))) == expected
        asked = client.v2.ModelMetadata(service_pb2.ModelMetadataRequest(name="bad"))
        assert await client.refusal(asked) == expected


async def test_a_text_that_is_too_long_for_a_header_is_cut():
    core = Core()
    core.errors["bad"] = InvalidRequest("x" * 1_000_000)
    async with serving(core) as client:
        code, text = await client.refusal(client.v2.ModelInfer(message("bad")))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert set(text) == {"x"}


async def test_what_cannot_be_parsed_is_an_invalid_argument():
    async with serving(Core()) as client:
        for name in ("ModelInfer", "ModelReady"):
            call = client.channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
            code, text = await client.refusal(call(b"\xff\xff"))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert f"failed to parse the {name}Request" in text
        wrong = message()
        wrong.raw_input_contents.append(b"")
        code, text = await client.refusal(client.v2.ModelInfer(wrong))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "expected 1 raw_input_contents" in text


async def test_a_message_that_is_too_long_is_resource_exhausted():
    async with serving(Core()) as client:
        code, _ = await client.refusal(client.v2.ModelInfer(message(data=bytes(1 << 17))))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("name", sorted({*SERVICE.methods_by_name} - ANSWERED))
async def test_every_method_is_answered_or_says_that_it_is_not(name: str):
    async with serving(Core()) as client:
        call = client.channel.unary_unary(f"/{SERVICE.full_name}/{name}")
        code, text = await client.refusal(call(b""))
        assert code == grpc.StatusCode.UNIMPLEMENTED
        assert "not supported by this server" in text


async def test_a_client_that_leaves_cancels(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        call = client.v2.ModelInfer(message("wait"))
        asyncio.ensure_future(call.wait_for_connection())
        await until(lambda: core.waiting)
        call.cancel()
        await until(lambda: core.cancelled)
        assert core.cancelled == core.waiting
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_deadline_that_passes_cancels(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        code, _ = await client.refusal(client.v2.ModelInfer(message("wait"), timeout=0.1))
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: core.cancelled)
        assert core.cancelled == core.waiting


# Streams


async def test_a_stream_answers_in_order_of_completion(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("wait", id="slow"))
        await stream.write(message(id="quick"))
        first = await stream.read()
        assert (first.infer_response.id, first.error_message) == ("quick", "")
        (request,) = core.waiting
        request.respond(Response("wait", "1", request.inputs))
        assert (await stream.read()).infer_response.id == "slow"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK


async def test_errors_of_a_stream_come_as_messages():
    core = Core()
    core.errors["bad"] = NotFound("why")
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("bad", id="one"))
        answer = await stream.read()
        assert (answer.error_message, answer.infer_response.id) == ("why", "one")
        await stream.write(service_pb2.ModelInferRequest(id="two"))
        answer = await stream.read()
        assert answer.error_message == "the request has no inputs"
        await stream.write(message(id="three"))
        assert (await stream.read()).infer_response.id == "three"
        await stream.done_writing()


async def test_errors_of_a_stream_end_it_where_the_client_wants_that(until: Callable[..., Any]):
    core = Core()
    core.errors["bad"] = Overloaded("why")
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer(metadata=[("triton_grpc_error", "true")])
        await stream.write(message("wait"))
        await until(lambda: core.waiting)
        await stream.write(message("bad"))
        code, text = await client.refusal(stream.read())
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "why")
        assert core.cancelled == core.waiting


async def test_the_final_response_is_marked_where_the_client_wants_that():
    async with serving(Core()) as client:
        stream = client.v2.ModelStreamInfer()
        wire = message()
        wire.parameters["triton_enable_empty_final_response"].bool_param = True
        await stream.write(wire)
        answer = (await stream.read()).infer_response
        assert {name: value.bool_param for name, value in answer.parameters.items()} == {
            "triton_final_response": True
        }
        await stream.done_writing()


async def test_a_client_that_leaves_its_stream_cancels_what_runs(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        for _ in range(3):
            await stream.write(message("wait"))
        await until(lambda: len(core.waiting) == 3)
        stream.cancel()
        await until(lambda: len(core.cancelled) == 3)


async def test_a_server_that_stops_lets_streams_finish(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("wait"))
        await until(lambda: core.waiting)
        client.service.stop()
        (request,) = core.waiting
        request.respond(Response("wait", "1", request.inputs))
        assert (await stream.read()).infer_response.model_name == "wait"
        assert await stream.read() is grpc.aio.EOF


# Health


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
async def test_health_follows_readiness(service: str):
    core = Core()
    async with serving(core) as client:
        request = health_pb2.HealthCheckRequest(service=service)
        assert (await client.health.Check(request)).status == 1
        core.is_ready = False
        assert (await client.health.Check(request)).status == 2


async def test_health_of_an_unknown_service_is_not_found():
    async with serving(Core()) as client:
        request = health_pb2.HealthCheckRequest(service="other")
        code, _ = await client.refusal(client.health.Check(request))
        assert code == grpc.StatusCode.NOT_FOUND
        watch = client.health.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watch_tells_of_changes_and_ends_with_the_server():
    core = Core()
    async with serving(core) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        core.is_ready = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        client.service.stop()
        assert await watch.read() is grpc.aio.EOF
