"""KServe v2 over Ray Serve's gRPC proxy: messages pass as bytes, and only the ingress looks into
them, for the name of their model.

Ray calls `add_inference_service` in its proxies (`grpc_servicer_functions`), and then the methods
of the ingress by the names of the RPCs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

import grpc

from penstock.errors import InvalidRequest, NotReady, PenstockError
from penstock.protocols.gate import Gate
from penstock.protocols.http_reader import MessageHead, Rejection, add_header
from penstock.protocols.route_table import HEALTH, INFERENCE
from penstock.protocols.v2_grpc import SERVICE, ManagementRpc
from penstock.ray.cluster_messages import ClusterCall
from penstock.ray.cluster_models import ClusterModels
from penstock.serving.management import ManagementCall
from penstock.wire import health_pb
from penstock.wire.grpc_status import MAX_DETAILS
from penstock.wire.statuses import status_of
from penstock.wire.v2_pb import parse, parse_infer
from penstock.wire.v2_pb_templates import stream_answer, stream_error

# Methods of the service that the application answers; others are UNIMPLEMENTED.
MANAGED = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
)
INFER, STREAM, CHECK = "ModelInfer", "ModelStreamInfer", "Check"
# Requests of one stream in flight.
MAX_STREAMED = 64


class RpcContext(Protocol):
    """The part of `ray.serve.grpc_util.RayServegRPCContext` that is used."""

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]: ...
    def set_code(self, code: Any) -> None: ...
    def set_details(self, details: str) -> None: ...


class RawMessage(bytes):
    """An encoded message, with the one method by which Ray encodes answers."""

    def SerializeToString(self) -> bytes:
        return bytes(self)


def add_inference_service(servicer: object, server: Any) -> None:
    """Register the methods with a proxy of Ray Serve, which replaces their functions; messages are
    left as bytes."""
    unary, both = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    methods = {name: unary(_never) for name in (*MANAGED, INFER)} | {STREAM: both(_never)}
    service = INFERENCE.strip("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


def add_health_service(servicer: object, server: Any) -> None:
    """Register grpc.health.v1.Health, for probes."""
    methods = {CHECK: grpc.unary_unary_rpc_method_handler(_never)}
    service = HEALTH.strip("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))


def _never(request: object, context: object) -> None:
    raise NotImplementedError("Ray Serve calls the ingress instead")


class InferenceRpcs:
    """Answers RPCs for an ingress, behind the gate."""

    def __init__(self, models: ClusterModels, gate: Gate) -> None:
        self._models = models
        self._gate = gate
        names = {method.name: method for method in SERVICE.methods}
        self._managed = {name: ManagementRpc(names[name]) for name in MANAGED}

    async def manage(self, name: str, data: bytes, context: RpcContext) -> RawMessage:
        async def answer() -> RawMessage:
            self._admit(INFERENCE + name, context)
            message = await self._managed[name].answer(data, self._manage, b"")
            return RawMessage(message.SerializeToString())

        return await answered(answer(), context)

    async def infer(self, data: bytes, context: RpcContext) -> RawMessage:
        async def answer() -> RawMessage:
            self._admit(INFERENCE + INFER, context)
            return RawMessage(await self._infer(data))

        return await answered(answer(), context)

    async def check(self, data: bytes, context: RpcContext) -> RawMessage:
        async def answer() -> RawMessage:
            service = parse(health_pb.HealthCheckRequest, data).service
            status = health_pb.SERVING
            try:
                if service in ("", SERVICE.full_name):
                    await self._models.check_ready()
                elif not await self._models.is_ready(service):
                    status = health_pb.NOT_SERVING
            except NotReady:
                status = health_pb.NOT_SERVING
            message = health_pb.HealthCheckResponse(status=status)
            return RawMessage(message.SerializeToString())

        return await answered(answer(), context)

    async def stream(
        self, requests: AsyncIterator[bytes], context: RpcContext
    ) -> AsyncIterator[RawMessage]:
        """Answer the requests of a stream, which run concurrently, in their order."""
        try:
            self._admit(INFERENCE + STREAM, context)
        except PenstockError as error:
            tell_status(context, error)
            return
        running: deque[asyncio.Task[RawMessage]] = deque()
        slots = asyncio.Semaphore(MAX_STREAMED)
        arrived = asyncio.Event()

        async def read() -> None:
            try:
                async for data in requests:
                    await slots.acquire()
                    running.append(asyncio.create_task(self._streamed(bytes(data))))
                    arrived.set()
            finally:
                arrived.set()

        reading = asyncio.create_task(read())
        try:
            while running or not reading.done():
                if not running:
                    arrived.clear()
                    await arrived.wait()
                    continue
                answer = await running[0]
                running.popleft()
                slots.release()
                yield answer
            reading.result()
        finally:
            for task in (reading, *running):
                task.cancel()

    async def _streamed(self, data: bytes) -> RawMessage:
        id = ""
        try:
            id = parse_infer(data)[0].id
            return RawMessage(b"".join(stream_answer([await self._infer(data)])))
        except PenstockError as error:
            return RawMessage(b"".join(stream_error(id, str(error)[:MAX_DETAILS])))

    async def _infer(self, data: bytes) -> bytes:
        message, _ = parse_infer(data)
        return await self._models.ask(message.model_name, ClusterCall("infer", memoryview(data)))

    async def _manage(self, call: ManagementCall, caller: bytes) -> bytes:
        """Answer for the application, or let a replica answer."""
        models = self._models
        match call.action:
            case "live":
                return b'{"live":true}'
            case "ready":
                await models.check_ready()
                return b'{"ready":true}'
            case "server_metadata":
                return models.describe()
            case "index":
                return await models.index()
            case "statistics":
                return await models.statistics(call.model_name, call.model_version)
        return await models.manage(call.action, call.model_name, call.model_version)

    def _admit(self, path: str, context: RpcContext) -> None:
        headers: dict[bytes, bytes] = {}
        for name, value in context.invocation_metadata():
            data = value if isinstance(value, bytes) else value.encode("latin-1", "replace")
            try:
                add_header(headers, name.lower().encode(), data)
            except Rejection as refusal:
                raise InvalidRequest(str(refusal)) from None
        self._gate.admit_rpc(MessageHead(b"POST", path.encode(), headers))


async def answered(answering: Awaitable[RawMessage], context: RpcContext) -> RawMessage:
    """Return the answer, or an empty one with the status of an error. It is not raised: Ray would
    log its traceback."""
    try:
        return await answering
    except PenstockError as error:
        tell_status(context, error)
        return RawMessage()


def tell_status(context: RpcContext, error: PenstockError) -> None:
    context.set_code(grpc.StatusCode[status_of(error).grpc])
    context.set_details(str(error)[:MAX_DETAILS])
