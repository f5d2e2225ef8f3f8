"""RPCs of Ray's gRPC proxy, answered by an ingress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from ray_doubles import LocalHandle, cluster, run, started_replica
from tritonclient.grpc import service_pb2

from penstock.protocols.gate import Gate
from penstock.protocols.key_file import read_keys
from penstock.ray import replica as replica_module
from penstock.ray.inference_rpcs import (
    MANAGED,
    InferenceRpcs,
    RawMessage,
    add_health_service,
    add_inference_service,
)
from penstock.ray.ingress import ClusterApp, Ingress
from penstock.wire import health_pb


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "replica_name", lambda: "")


class Context:
    """What Ray gives to a method of an ingress."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = list(metadata)
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return list(self._metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def infer_request(model: str = "identity", number: float = 1.0, id: str = "") -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(np.full(16, number, np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


def rpcs_of(app: ClusterApp, gate: Gate | None = None) -> InferenceRpcs:
    return InferenceRpcs(app.models, gate or app.gate)


def test_inference_management_and_health() -> None:
    async def test() -> None:
        async with (
            started_replica("identity") as replica,
            cluster({"identity": LocalHandle([replica])}) as app,
        ):
            rpcs, context = rpcs_of(app), Context()
            data = (await rpcs.infer(infer_request(), context)).SerializeToString()
            answer = service_pb2.ModelInferResponse.FromString(data)
            assert answer.raw_output_contents[0] == np.ones(16, np.float32).tobytes()

            async def ask(name: str, /, **fields: Any) -> Any:
                request = getattr(service_pb2, f"{name}Request")(**fields)
                kind = getattr(service_pb2, f"{name}Response")
                return kind.FromString(
                    await rpcs.manage(name, request.SerializeToString(), context)
                )

            assert (await ask("ServerLive")).live
            assert (await ask("ServerReady")).ready
            assert (await ask("ModelReady", name="identity")).ready
            assert not (await ask("ModelReady", name="nothing")).ready
            assert (await ask("ServerMetadata")).name == "penstock"
            assert (await ask("ModelMetadata", name="identity")).inputs[0].name == "INPUT0"
            assert (await ask("ModelConfig", name="identity")).config.max_batch_size == 64
            assert (await ask("RepositoryIndex")).models[0].state == "READY"
            statistics = await ask("ModelStatistics", name="identity")
            assert statistics.model_stats[0].inference_count == 1
            check = health_pb.HealthCheckRequest().SerializeToString()
            found = health_pb.HealthCheckResponse.FromString(await rpcs.check(check, context))
            assert found.status == health_pb.SERVING
            assert context.code is None

    run(test)


def test_errors_have_statuses_and_are_not_raised(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nsecret = "a secret of some length"\nscopes = ["infer"]\n')

    async def test() -> None:
        async with cluster({"identity": LocalHandle()}) as app:
            rpcs = rpcs_of(app)
            for data, code in (
                (infer_request("nothing"), grpc.StatusCode.NOT_FOUND),
                (infer_request(), grpc.StatusCode.UNAVAILABLE),
                (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
            ):
                context = Context()
                assert await rpcs.infer(data, context) == b""
                assert context.code is code, context.details
                assert context.details
            context = Context(("content-length", "1"), ("content-length", "2"))
            assert await rpcs.infer(infer_request(), context) == b""
            assert context.code is grpc.StatusCode.INVALID_ARGUMENT, context.details
            guarded = rpcs_of(app, Gate(read_keys(keys)))
            context = Context()
            await guarded.infer(infer_request(), context)
            assert context.code is grpc.StatusCode.UNAUTHENTICATED
            context = Context(("x-api-key", "a secret of some length"))
            await guarded.infer(infer_request(), context)
            assert context.code is grpc.StatusCode.UNAVAILABLE
            live = service_pb2.ServerLiveRequest().SerializeToString()
            assert await guarded.manage("ServerLive", live, Context()) != b""
            check = health_pb.HealthCheckRequest().SerializeToString()
            found = health_pb.HealthCheckResponse.FromString(await rpcs.check(check, Context()))
            assert found.status == health_pb.NOT_SERVING

    run(test)


def test_answers_of_a_stream_are_in_order_and_errors_do_not_end_it() -> None:
    async def requests() -> AsyncIterator[bytes]:
        for number in range(100):
            model = "nothing" if number == 5 else "identity"
            yield infer_request(model, number, str(number))
            if number % 7 == 0:
                await asyncio.sleep(0.001)

    async def test() -> None:
        async with (
            started_replica("identity") as replica,
            cluster({"identity": LocalHandle([replica])}) as app,
        ):
            answers = [
                service_pb2.ModelStreamInferResponse.FromString(each)
                async for each in rpcs_of(app).stream(requests(), Context())
            ]
            assert [each.infer_response.id for each in answers] == [str(n) for n in range(100)]
            for number, each in enumerate(answers):
                if number == 5:
                    assert "unknown model" in each.error_message
                else:
                    (raw,) = each.infer_response.raw_output_contents
                    assert raw == np.full(16, number, np.float32).tobytes()

    run(test)


def test_a_stream_that_is_left_cancels_what_runs() -> None:
    async def requests() -> AsyncIterator[bytes]:
        while True:
            yield infer_request()
            await asyncio.sleep(0)

    async def test() -> None:
        async with (
            started_replica("identity") as replica,
            cluster({"identity": LocalHandle([replica])}) as app,
        ):
            before = asyncio.all_tasks()
            answers = rpcs_of(app).stream(requests(), Context())
            await anext(answers)
            await answers.aclose()
            async with asyncio.timeout(5):
                while asyncio.all_tasks() - before:
                    await asyncio.sleep(0.01)

    run(test)


class Registry:
    """A gRPC server that only takes handlers."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self.handlers += handlers


def test_methods_are_registered_for_bytes_and_the_ingress_has_each() -> None:
    registry = Registry()
    add_inference_service(None, registry)
    add_health_service(None, registry)
    assert len(registry.handlers) == 2
    for name in (*MANAGED, "ModelInfer", "ModelStreamInfer", "Check"):
        assert callable(getattr(Ingress, name)), name
    found = registry.handlers[0].service(
        type("Details", (), {"method": "/inference.GRPCInferenceService/ModelInfer"})
    )
    assert found.request_deserializer is None and found.response_serializer is None
    assert RawMessage(b"x").SerializeToString() == b"x"
