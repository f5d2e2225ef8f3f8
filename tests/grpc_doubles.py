"""A gRPC server before models that the test plays, and a client of it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.config import GrpcConfig, HttpLimits
from penstock.errors import NotReady, PenstockError, QuotaExceeded, Unsupported
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.infer_grpc import InferRpcs, Take, take_always
from penstock.protocols.v2_grpc import GrpcService
from penstock.serving.header_forwarding import HeaderForwarding
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementCall
from penstock.serving.tracer import Tracer
from penstock.types import CANCELLED, Request, Response

SECRETS = {scope: f"the secret for {scope}" for scope in ("infer", "admin", "metrics")}
GATE = Gate(
    Keys(
        {
            hashlib.sha256(secret.encode()).digest(): frozenset((scope,))
            for scope, secret in SECRETS.items()
        }
    )
)


class Core:
    """Models that answer with their input, wait (`wait`), or refuse with the error set for them."""

    def __init__(self) -> None:
        self.errors: dict[str, PenstockError] = {}
        self.waiting: list[Request] = []
        self.cancelled: list[Request] = []
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self.splits: dict[str, object] = {}
        self.tracer = Tracer()
        self.forwarding: dict[str, HeaderForwarding] = {}
        self.counted: list[str] = []
        self.refused: list[PenstockError] = []
        self.catalog = self
        self.files: dict[str, bytes] = {}
        self.lifecycle = Lifecycle()
        self.is_ready = True

    def find(self, name: str, version: str = "") -> Model:
        return Model(self, name)

    def count_request(self, caller: bytes, received: float, name: str, version: str = "") -> None:
        self.counted.append(name)

    def count_refusal(
        self, error: QuotaExceeded, received: float, name: str, version: str = ""
    ) -> None:
        self.refused.append(error)

    async def answer(self, call: ManagementCall) -> bytes:
        kind, name = call.action, call.model_name
        self.asked.append((kind, name, call.parameters))
        self.files |= call.files
        if name in self.errors:
            raise self.errors[name]
        match kind:
            case "live":
                return b'{"live":true}'
            case "ready" | "model_ready":
                if not self.is_ready:
                    raise NotReady("not yet")
                return b'{"ready":true}'
            case "server_metadata":
                return b'{"name":"penstock","version":"1","extensions":["a","b"]}'
            case "metadata":
                return (
                    b'{"name":"m","versions":["1","2"],"platform":"p",'
                    b'"inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}],"outputs":[]}'
                )
            case "config":
                return b'{"name":"m"}'
            case "statistics":
                raise Unsupported("not yet")
            case "index":
                return (
                    b'[{"name":"a","version":"1","state":"READY"},'
                    b'{"name":"b","state":"UNAVAILABLE","reason":"why"},{"name":"c"}]'
                )
            case "load" | "unload":
                return b""
            case "system_shared_memory_status":
                return b'[{"name":"r","key":"/k","offset":64,"byte_size":4}]'
            case "cuda_shared_memory_status":
                return b'[{"name":"g","device_id":1,"byte_size":8}]'
            case _ if "shared_memory" in kind:
                return b""
        raise AssertionError(kind)


class Model:
    def __init__(self, core: Core, name: str) -> None:
        self.core = core
        self.name = name
        # "many" answers when the test says so, any number of times.
        self.config = SimpleNamespace(is_decoupled=name == "many", outputs=())

    def submit(self, request: Request) -> None:
        if self.name in self.core.errors:
            request.respond(self.core.errors[self.name])
        elif self.name in ("wait", "many"):
            self.core.waiting.append(request)
        else:
            request.respond(Response(self.name, "1", request.inputs, request.parameters))

    def cancel(self, request: Request) -> None:
        self.core.cancelled.append(request)
        request.respond(CANCELLED)

    def refused(self, error: PenstockError, received: float) -> None:
        self.core.refused.append(error)


class Client:
    def __init__(self, channel: grpc.aio.Channel, service: GrpcService) -> None:
        self.channel = channel
        self.service = service
        self.v2 = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def refusal(self, call: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code(), caught.value.details()


@asynccontextmanager
async def serving(
    core: Core, gate: Gate | None = None, take: Take = take_always
) -> AsyncIterator[Client]:
    gate = gate or Gate()
    infer = InferRpcs(core, core.lifecycle, gate, take=take)  # type: ignore[arg-type]
    service = GrpcService(infer, lambda call, caller: core.answer(call), gate)
    config = GrpcConfig(max_message_bytes=1 << 16)
    server = GrpcServer(service.methods(), config, gate, HttpLimits())
    port = await server.start("127.0.0.1", 0)
    # Channels with the same arguments would share a connection, also between tests.
    options = [("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            yield Client(channel, service)
    finally:
        await service.stop()
        await service.close()
        await server.close()


def message(model: str = "m", id: str = "", data: bytes = b"12345678") -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[2])
    return service_pb2.ModelInferRequest(
        model_name=model, id=id, inputs=[tensor], raw_input_contents=[data]
    )
