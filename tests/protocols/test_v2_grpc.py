"""KServe v2 over gRPC: statuses, texts, streams and health, before models that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_doubles import GATE, SECRETS, Client, Core, message, serving
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from penstock import errors
from penstock.errors import (
    InvalidRequest,
    NotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    PenstockError,
    QuotaExceeded,
)
from penstock.protocols.gate import Gate, Keys, digest_secret
from penstock.protocols.infer_stream import MAX_STREAM_CALLS
from penstock.protocols.route_table import HEALTH, RPC_ROUTES
from penstock.protocols.v2_grpc import SERVICE
from penstock.types import Response
from penstock.wire.statuses import STATUSES

ANSWERED = {
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "TraceSetting",
    "LogSettings",
    "ModelInfer",
    "ModelStreamInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
}
METHODS = [
    *(f"/{SERVICE.full_name}/{name}" for name in SERVICE.methods_by_name),
    *(HEALTH + name for name in ("Check", "Watch")),
]


def test_every_error_has_a_status():
    def leaves(kind: type[PenstockError]) -> set[type[PenstockError]]:
        return {kind}.union(*(leaves(each) for each in kind.__subclasses__()))

    # Those that others add for themselves do not reach a protocol.
    known = {kind for kind in leaves(PenstockError) if kind.__module__ == errors.__name__}
    own = {kind for kind in known if issubclass(kind, errors.ConfigError)}
    # Callers in Python get it, for many prompts at once.
    local = {errors.PromptsFailed}
    assert set(STATUSES) == known - own - local - {PenstockError}
    # Overload of the server is UNAVAILABLE.
    exhausted = {kind for kind, status in STATUSES.items() if status.grpc == "RESOURCE_EXHAUSTED"}
    assert exhausted == {errors.QuotaExceeded, errors.StorageFull}


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


@pytest.mark.parametrize("kind", sorted(STATUSES, key=lambda kind: kind.__name__))
async def test_errors_of_the_core_become_statuses(kind: type[PenstockError]):
    core = Core()
    core.errors["bad"] = kind("why: é")
    async with serving(core) as client:
        expected = (grpc.StatusCode[STATUSES[kind].grpc], "why: é")
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


def test_every_method_is_answered():
    assert {*SERVICE.methods_by_name} == ANSWERED


async def test_shared_memory_is_a_map_of_regions_and_calls_name_them():
    core = Core()
    async with serving(core) as client:
        pb, v2 = service_pb2, client.v2
        status = await v2.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
        assert status.regions["r"].key == "/k" and status.regions["r"].offset == 64
        gpus = await v2.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="g"))
        assert gpus.regions["g"].device_id == 1 and gpus.regions["g"].byte_size == 8
        named = {"name": "r", "key": "/k", "offset": 1, "byte_size": 2}
        await v2.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(**named))
        named = {"name": "g", "raw_handle": b"\0\1", "device_id": 1, "byte_size": 2}
        await v2.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(**named))
        await v2.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
    assert core.asked == [
        ("system_shared_memory_status", "", {}),
        ("cuda_shared_memory_status", "", {"region": "g"}),
        (
            "system_shared_memory_register",
            "",
            {"region": "r", "key": "/k", "offset": 1, "byte_size": 2},
        ),
        (
            "cuda_shared_memory_register",
            "",
            {"region": "g", "raw_handle": "AAE=", "device_id": 1, "byte_size": 2},
        ),
        ("system_shared_memory_unregister", "", {}),
    ]


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
        while not core.waiting:  # One that is late already never leaves the client.
            code, _ = await client.refusal(client.v2.ModelInfer(message("wait"), timeout=0.1))
            assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: core.cancelled == core.waiting)


@pytest.mark.parametrize("error", [NotFound("unknown"), NotReady("could not be loaded")])
async def test_a_model_that_is_not_there_is_not_ready(error: PenstockError):
    core = Core()
    core.errors["none"] = error
    async with serving(core) as client:
        assert not (await client.v2.ModelReady(service_pb2.ModelReadyRequest(name="none"))).ready


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_requests_may_be_compressed_and_the_limit_holds_for_what_they_become(algorithm):
    async with serving(Core()) as client:
        answer = await client.v2.ModelInfer(message(data=bytes(1 << 15)), compression=algorithm)
        assert list(answer.raw_output_contents) == [bytes(1 << 15)]
        bomb = client.v2.ModelInfer(message(data=bytes(1 << 24)), compression=algorithm)
        code, _ = await client.refusal(bomb)
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.v2.ModelInfer(message())).model_name == "m"


# The repository


async def test_the_repository_is_asked_and_changed():
    core = Core()
    async with serving(core) as client:
        index = await client.v2.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True))
        assert [(x.name, x.version, x.state, x.reason) for x in index.models] == [
            ("a", "1", "READY", ""),
            ("b", "", "UNAVAILABLE", "why"),
            ("c", "", "", ""),
        ]
        load = service_pb2.RepositoryModelLoadRequest(model_name="a")
        await client.v2.RepositoryModelLoad(load)
        load.parameters["config"].string_param = "{}"
        load.parameters["file:1/model.onnx"].bytes_param = bytes(10_000)
        await client.v2.RepositoryModelLoad(load)
        unload = service_pb2.RepositoryModelUnloadRequest(model_name="a")
        unload.parameters["unload_dependents"].bool_param = True
        await client.v2.RepositoryModelUnload(unload)
        assert core.asked == [
            ("index", "", {"ready": True}),
            ("load", "a", {}),
            ("load", "a", {"config": "{}"}),
            ("unload", "a", {"unload_dependents": True}),
        ]
        assert core.files == {"file:1/model.onnx": bytes(10_000)}


async def test_there_is_only_one_repository():
    async with serving(Core()) as client:
        for call in (
            client.v2.RepositoryIndex(service_pb2.RepositoryIndexRequest(repository_name="r")),
            client.v2.RepositoryModelLoad(
                service_pb2.RepositoryModelLoadRequest(repository_name="r")
            ),
            client.v2.RepositoryModelUnload(
                service_pb2.RepositoryModelUnloadRequest(repository_name="r")
            ),
        ):
            code, text = await client.refusal(call)
            assert code == grpc.StatusCode.UNIMPLEMENTED
            assert "'repository_name' is not supported" in text


# Keys


async def code_of(client: Client, method: str, secret: str | None) -> grpc.StatusCode:
    """How the call ends; a stream that answers, or waits for more, is well."""
    metadata = [("authorization", f"Bearer {secret}")] if secret else None
    name = method.rpartition("/")[2]
    try:
        if name == "ModelStreamInfer":
            stream = client.channel.stream_stream(method)(metadata=metadata)
            await stream.done_writing()
            await stream.read()
        elif name == "Watch":
            watch = client.channel.unary_stream(method)(b"", metadata=metadata)
            await watch.read()
            watch.cancel()
        else:
            await client.channel.unary_unary(method)(b"", metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", METHODS)
async def test_every_method_asks_for_its_key(method: str):
    scope = RPC_ROUTES[method].scope
    refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    async with serving(Core(), GATE) as client:
        for secret in (None, "nobody's secret"):
            code = await code_of(client, method, secret)
            if scope == "open":
                assert code == grpc.StatusCode.OK
            else:
                assert code == grpc.StatusCode.UNAUTHENTICATED
        for held, secret in SECRETS.items():
            code = await code_of(client, method, secret)
            if held == scope or scope == "open":
                assert code not in refusals
            else:
                assert code == grpc.StatusCode.PERMISSION_DENIED


async def test_a_method_without_a_row_is_unimplemented_with_and_without_a_key():
    async with serving(Core(), GATE) as client:
        for method in ("/inference.GRPCInferenceService/Other", "/other.Service/Method"):
            for secret in (None, SECRETS["infer"]):
                assert await code_of(client, method, secret) == grpc.StatusCode.UNIMPLEMENTED


async def test_what_is_refused_is_refused_with_the_words_of_http():
    with pytest.raises(NotAllowed) as missing:
        GATE.check_scope("infer", {})
    with pytest.raises(NotAllowed) as unknown:
        GATE.check_scope("infer", {b"x-api-key": b"nobody's"})
    with pytest.raises(NotAllowed) as restricted:
        GATE.check_scope("infer", {b"x-api-key": SECRETS["admin"].encode()})
    async with serving(Core(), GATE) as client:
        for metadata, expected in (
            ([], missing),
            ([("x-api-key", "nobody's")], unknown),
            ([("x-api-key", SECRETS["admin"])], restricted),
        ):
            call = client.v2.ModelInfer(message(), metadata=metadata)
            assert (await client.refusal(call))[1] == str(expected.value)
        answer = await client.v2.ModelInfer(message(), metadata=[("x-api-key", SECRETS["infer"])])
        assert answer.model_name == "m"


@pytest.mark.parametrize("gate", [Gate(), GATE], ids=["open", "keys"])
@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_a_key_that_is_given_twice_is_refused(name: str, gate: Gate):
    keys = [(name, f"Bearer {SECRETS[scope]}") for scope in ("infer", "admin")]
    async with serving(Core(), gate) as client:
        for metadata in (keys, keys[::-1], [keys[0]] * 2):
            call = client.v2.RepositoryIndex(
                service_pb2.RepositoryIndexRequest(), metadata=metadata
            )
            assert await client.refusal(call) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the metadata {name} is given twice",
            )
            stream = client.v2.ModelStreamInfer(metadata=metadata)
            assert (await client.refusal(stream.read()))[0] == grpc.StatusCode.INVALID_ARGUMENT


# Streams


@pytest.mark.parametrize(
    ("scopes", "code"),
    [(None, "UNAUTHENTICATED"), ({"metrics"}, "PERMISSION_DENIED")],
)
async def test_a_stream_ends_when_its_key_is_revoked(scopes, code, until: Callable[..., Any]):
    core, digest = Core(), digest_secret(SECRETS["infer"].encode())
    gate = Gate(Keys({digest: frozenset(["infer"])}))
    async with serving(core, gate) as client:
        stream = client.v2.ModelStreamInfer(metadata=[("x-api-key", SECRETS["infer"])])
        await stream.write(message("wait", id="before"))
        await until(lambda: core.waiting)
        left = {} if scopes is None else {digest: frozenset(scopes)}
        gate.keys = Keys(left)
        await stream.write(message(id="after"))
        request = core.waiting[0]
        request.respond(Response("wait", "1", request.inputs, request.parameters))
        assert (await stream.read()).infer_response.id == "before"
        assert (await client.refusal(stream.read()))[0] == grpc.StatusCode[code]


async def test_a_stream_answers_in_order_of_the_requests(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("wait", id="slow"))
        await stream.write(message(id="quick"))
        await stream.write(message("wait", id="last"))
        await until(lambda: len(core.waiting) == 2)
        for request in reversed(core.waiting):
            request.respond(Response("wait", "1", request.inputs))
        answers = [await stream.read() for _ in range(3)]
        assert [each.infer_response.id for each in answers] == ["slow", "quick", "last"]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK


async def test_a_client_that_has_said_all_still_gets_its_answers(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        for number in range(3):
            await stream.write(message("wait", id=str(number)))
        await stream.done_writing()
        await until(lambda: len(core.waiting) == 3)
        for request in core.waiting:
            request.respond(Response("wait", "1", request.inputs))
        assert [each.infer_response.id async for each in stream] == ["0", "1", "2"]
        assert await stream.code() == grpc.StatusCode.OK


async def test_a_stream_of_more_than_may_be_under_way_is_answered(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()

        async def send() -> None:
            for number in range(MAX_STREAM_CALLS + 10):
                await stream.write(message("wait", id=str(number)))
            await stream.done_writing()

        sending = asyncio.ensure_future(send())
        total = MAX_STREAM_CALLS + 10
        await until(lambda: len(core.waiting) == MAX_STREAM_CALLS)
        await asyncio.sleep(0.05)
        assert len(core.waiting) == MAX_STREAM_CALLS
        core.waiting[0].respond(Response("wait", "1", core.waiting[0].inputs))
        await until(lambda: len(core.waiting) == MAX_STREAM_CALLS + 1)
        while len(core.waiting) < total or not core.waiting[-1].is_done:
            for request in core.waiting:
                request.respond(Response("wait", "1", request.inputs))
            await asyncio.sleep(0.01)
        assert [int(each.infer_response.id) async for each in stream] == list(range(total))
        await sending


async def test_messages_that_wait_may_be_answered_at_once(until: Callable[..., Any]):
    """Far more than the stack is deep, behind as many as may be in flight."""
    core, num_quick = Core(), 3000
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()

        async def send() -> None:
            for _ in range(MAX_STREAM_CALLS):
                await stream.write(message("wait"))
            for number in range(num_quick):
                await stream.write(message(id=str(number)))
            await stream.done_writing()

        sending = asyncio.ensure_future(send())
        await until(lambda: len(core.waiting) == MAX_STREAM_CALLS)
        await sending
        for request in core.waiting:
            request.respond(Response("wait", "1", request.inputs))
        ids = [each.infer_response.id async for each in stream]
        assert ids == [""] * MAX_STREAM_CALLS + [str(number) for number in range(num_quick)]
        assert await stream.code() == grpc.StatusCode.OK


async def test_compressed_messages_of_a_stream_are_all_answered():
    """Long ones are inflated in a thread; the last message comes before the first is ready."""
    noise = hashlib.shake_256(b"").digest(30_000)
    async with serving(Core()) as client:
        stream = client.v2.ModelStreamInfer(compression=grpc.Compression.Gzip)
        for number in range(4):
            await stream.write(message(id=str(number), data=noise))
        await stream.done_writing()
        assert [each.infer_response.id async for each in stream] == ["0", "1", "2", "3"]


async def test_a_message_of_a_stream_that_is_too_long_ends_this_stream_alone(
    until: Callable[..., Any],
):
    core = Core()
    async with serving(core) as client:
        stream, other = client.v2.ModelStreamInfer(), client.v2.ModelStreamInfer()
        await other.write(message(id="before"))
        assert (await other.read()).infer_response.id == "before"
        await stream.write(message("wait"))
        await until(lambda: core.waiting)
        await stream.write(message(data=bytes(1 << 17)))
        code, _ = await client.refusal(stream.read())
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: core.cancelled == core.waiting)
        await other.write(message(id="after"))
        assert (await other.read()).infer_response.id == "after"
        await other.done_writing()


async def test_a_stream_whose_deadline_passes_cancels_what_runs(until: Callable[..., Any]):
    core = Core()
    async with serving(core) as client:
        while not core.waiting:  # One that is late already never leaves the client.
            stream = client.v2.ModelStreamInfer(timeout=0.2)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await stream.write(message("wait"))
            code, _ = await client.refusal(stream.read())
            assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: core.cancelled == core.waiting)


async def test_errors_of_a_stream_come_as_messages():
    core = Core()
    core.errors["bad"] = NotFound("why")
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("bad", id="one"))
        answer = await stream.read()
        assert (answer.error_message, answer.infer_response.id) == ("why", "one")
        wrong = message(id="two")
        wrong.raw_input_contents.append(b"one too many")
        await stream.write(wrong)
        answer = await stream.read()
        assert "raw_input_contents" in answer.error_message
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


@pytest.mark.parametrize("asks", [None, False, True])
async def test_every_answer_of_a_stream_is_marked_as_the_final_one(asks: bool | None):
    core = Core()
    core.errors["bad"] = NotFound("why")
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        for model in ("m", "bad"):
            wire = message(model)
            if asks is not None:
                wire.parameters["triton_enable_empty_final_response"].bool_param = asks
            await stream.write(wire)
            answer = await stream.read()
            assert bool(answer.error_message) == (model == "bad")
            marks = answer.infer_response.parameters
            assert {name: value.bool_param for name, value in marks.items()} == {
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
        await client.service.stop()
        await stream.write(message(id="too late"))
        assert (await client.v2.ServerLive(service_pb2.ServerLiveRequest())).live
        (request,) = core.waiting
        request.respond(Response("wait", "1", request.inputs))
        assert (await stream.read()).infer_response.model_name == "wait"
        code, text = await client.refusal(stream.read())
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


async def test_a_stream_whose_client_has_sent_all_ends_without_an_error(
    until: Callable[..., Any],
):
    core = Core()
    async with serving(core) as client:
        stream = client.v2.ModelStreamInfer()
        await stream.write(message("wait"))
        await stream.done_writing()
        await until(lambda: core.waiting)
        assert (await client.v2.ServerLive(service_pb2.ServerLiveRequest())).live
        await client.service.stop()
        (request,) = core.waiting
        request.respond(Response("wait", "1", request.inputs))
        assert (await stream.read()).infer_response.model_name == "wait"
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == grpc.StatusCode.OK


# Health


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
async def test_health_follows_readiness(service: str):
    core = Core()
    async with serving(core) as client:
        request = health_pb2.HealthCheckRequest(service=service)
        assert (await client.health.Check(request)).status == 1
        core.is_ready = False
        assert (await client.health.Check(request)).status == 2


async def test_health_of_a_model_follows_its_readiness():
    core = Core()
    async with serving(core) as client:
        request = health_pb2.HealthCheckRequest(service="m")
        assert (await client.health.Check(request)).status == 1
        watch = client.health.Watch(request)
        assert (await watch.read()).status == 1
        core.is_ready = False
        assert (await client.health.Check(request)).status == 2
        assert (await watch.read()).status == 2
        core.errors["m"] = NotFound("unloaded")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        core.errors["m"] = NotReady("could not be loaded")
        assert (await watch.read()).status == 2
        del core.errors["m"]
        assert (await client.health.Check(request)).status == 2
        watch.cancel()
        assert {each[:2] for each in core.asked} == {("model_ready", "m")}


async def test_health_of_a_model_needs_the_key_for_it():
    async with serving(Core(), GATE) as client:
        request = health_pb2.HealthCheckRequest(service="m")
        code, _ = await client.refusal(client.health.Check(request))
        assert code == grpc.StatusCode.UNAUTHENTICATED
        code, _ = await client.refusal(client.health.Watch(request).read())
        assert code == grpc.StatusCode.UNAUTHENTICATED
        metadata = [("x-api-key", SECRETS["infer"])]
        assert (await client.health.Check(request, metadata=metadata)).status == 1
        assert (await client.health.Check(health_pb2.HealthCheckRequest())).status == 1


async def test_health_of_an_unknown_service_is_not_found():
    core = Core()
    core.errors["other"] = NotFound("unknown")
    async with serving(core) as client:
        request = health_pb2.HealthCheckRequest(service="other")
        code, _ = await client.refusal(client.health.Check(request))
        assert code == grpc.StatusCode.NOT_FOUND
        watch = client.health.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_a_watch_tells_of_changes():
    core = Core()
    async with serving(core) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        core.is_ready = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


@pytest.mark.parametrize("service", ["", "m", "other"])
@pytest.mark.parametrize("drains_first", [True, False])
async def test_a_watch_of_a_server_that_stops_hears_so_before_it_ends(
    service: str, drains_first: bool
):
    core = Core()
    core.errors["other"] = NotFound("unknown")
    async with serving(core) as client:
        watch = client.health.Watch(health_pb2.HealthCheckRequest(service=service))
        is_known = service != "other"
        assert (await watch.read()).status == (
            health_pb2.HealthCheckResponse.SERVING
            if is_known
            else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        )
        if drains_first:
            client.service.drain()
        else:
            await client.service.stop()
        if is_known:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            if drains_first:
                request = health_pb2.HealthCheckRequest(service=service)
                assert (await client.health.Check(request)).status == 2
                again = client.health.Watch(request)
                assert (await again.read()).status == 2
        await client.service.stop()
        code, text = await client.refusal(watch.read())
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


class Tokens:
    """The rates of a shard: every request waits until the test decides."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[QuotaExceeded | None], None]] = []

    def take(self, key: bytes, decided: Callable[[QuotaExceeded | None], None]) -> bool:
        self.waiting.append(decided)
        return False


async def test_a_request_that_waits_for_a_token_goes_on_or_is_refused(until: Callable[..., Any]):
    core, tokens, error = Core(), Tokens(), QuotaExceeded("too many", 1.0)
    async with serving(core, take=tokens.take) as client:
        infer = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        good, bad, calls = message().SerializeToString(), b"\xff\xff", []
        for number, data in enumerate((good, good, good, bad, bad), 1):
            calls.append(infer(data))
            await until(lambda number=number: len(tokens.waiting) == number)
        assert not core.counted, "no model has heard of them"
        for decided, refusal in zip(tokens.waiting, (None, error, None, None, error), strict=True):
            decided(refusal)
        assert b"12345678" in await calls[0] and b"12345678" in await calls[2]
        # The rate comes first, also for what cannot be decoded.
        for number in (1, 4):
            expected = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
            assert await client.refusal(calls[number]) == expected
        code, _ = await client.refusal(calls[3])
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert core.refused == [error, error]


async def test_requests_of_a_stream_wait_for_tokens_in_order(until: Callable[..., Any]):
    core, tokens, error = Core(), Tokens(), QuotaExceeded("too many", 1.0)
    async with serving(core, take=tokens.take) as client:
        stream = client.v2.ModelStreamInfer(iter([message(id=str(n)) for n in range(3)]))
        await until(lambda: len(tokens.waiting) == 3)
        for number, refusal in ((2, None), (1, error), (0, None)):
            tokens.waiting[number](refusal)
        answers = [each async for each in stream]
        assert [each.infer_response.id for each in answers] == ["0", "1", "2"]
        assert [each.error_message for each in answers] == ["", "too many", ""]


async def test_a_client_that_leaves_while_it_waits_for_a_token_asks_no_model(
    until: Callable[..., Any],
):
    core, tokens = Core(), Tokens()
    async with serving(core, take=tokens.take) as client:
        late = client.v2.ModelInfer(message(), timeout=0.2)
        stream = client.v2.ModelStreamInfer(iter([message()]), timeout=0.2)
        code, _ = await client.refusal(late)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        await until(lambda: len(tokens.waiting) == 2)
        # The server ends both by itself, at the same time as the client.
        await asyncio.sleep(0.5)
        for decided in tokens.waiting:
            decided(None)
        assert core.counted == []
