"""KServe v2 / Triton over gRPC: GRPCInferenceService and grpc.health.v1.Health.

Only translates: messages to requests (`infer_grpc`) and to calls of the management API, JSON to
messages, errors to statuses by one table. Runs on the event loop of the core or of a shard, whose
management calls the core answers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from penstock.errors import (
    SHUTTING_DOWN,
    InvalidRequest,
    NotFound,
    NotReady,
    PenstockError,
    Unsupported,
)
from penstock.protocols.gate import Gate
from penstock.protocols.grpc_call import GrpcCall, RpcHead, UnaryCall
from penstock.protocols.grpc_server import GrpcServer, OpenCall
from penstock.protocols.h2_stream import H2Stream
from penstock.protocols.infer_grpc import InferOnce, InferRpcs
from penstock.protocols.infer_stream import InferStream
from penstock.protocols.reflection_grpc import ReflectionCall
from penstock.protocols.route_table import HEALTH, INFERENCE, REFLECTION, RPC_ROUTES
from penstock.serving.management import ManagementCall
from penstock.types import Buffer, Parameter
from penstock.wire import health_pb, reflection_pb, settings_pb
from penstock.wire.v2_pb import Proto, parse

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
WATCH_S = 0.5
# Time for watches to send their last status.
STOP_S = 1.0
# Fields of answers that hold the management API's JSON; in other answers it is the whole message.
FIELDS = {"ModelConfig": b"config", "RepositoryIndex": b"models"}
# Actions whose JSON is a list of regions, which are a map in a message.
REGION_LISTS = ("system_shared_memory_status", "cuda_shared_memory_status")

# Answers a management call of a client with JSON; the bytes are as in `Request.caller`.
Manages = Callable[[ManagementCall, bytes], Awaitable[bytes]]
# Answers one message.
Answer = Callable[[GrpcCall, Buffer], Awaitable[Proto]]


class GrpcService:
    """The methods of the port, by their paths, and the calls that run as tasks."""

    def __init__(self, infer: InferRpcs, manage: Manages, gate: Gate) -> None:
        self._infer = infer
        self._reflection = reflection_pb.make_reflection()
        self._manage = manage
        self._gate = gate
        self._is_draining, self._is_stopping = asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self._watches: set[asyncio.Task[None]] = set()

    def methods(self) -> dict[str, OpenCall]:
        found: dict[str, OpenCall] = {
            INFERENCE + method.name: partial(TaskCall, self.tasks, self._ask(method))
            for method in SERVICE.methods
        }
        found[INFERENCE + "ModelInfer"] = partial(InferOnce, self._infer)
        found[INFERENCE + "ModelStreamInfer"] = partial(InferStream, self._infer)
        for version in reflection_pb.VERSIONS:
            types = reflection_pb.request_type(version), reflection_pb.response_type(version)
            found[REFLECTION.format(version)] = partial(ReflectionCall, self._reflection, types)
        found[HEALTH + "Check"] = partial(TaskCall, self.tasks, self._check)
        found[HEALTH + "Watch"] = partial(WatchCall, self._watches, self._watch)
        return found

    def drain(self) -> None:
        """Tell those who watch that nothing is served any more."""
        self._is_draining.set()

    async def stop(self) -> None:
        """End calls that would never end: streams stop reading, watches end."""
        self.drain()
        self._is_stopping.set()
        self._infer.stop()
        if self._watches:
            await asyncio.wait(self._watches, timeout=STOP_S)

    async def close(self) -> None:
        tasks = [*self.tasks, *self._watches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Management.

    def _ask(self, method: Proto) -> Answer:
        """Return the implementation of a method that the management API answers."""
        rpc = ManagementRpc(method)

        async def answer(call: GrpcCall, data: Buffer) -> Proto:
            return await rpc.answer(data, self._manage, call.head.caller)

        return answer

    # Health.

    async def _check(self, call: GrpcCall, data: Buffer) -> Proto:
        message = parse(health_pb.HealthCheckRequest, bytes(data))
        status = await self._status(message.service, call)
        if status == health_pb.SERVICE_UNKNOWN:
            raise NotFound(f"unknown service '{message.service}'")
        return health_pb.HealthCheckResponse(status=status)

    async def _watch(self, call: GrpcCall, data: Buffer) -> None:
        """Send the status now, and whenever it changes; the last one is that of a server that is
        shutting down."""
        message, last = parse(health_pb.HealthCheckRequest, bytes(data)), None
        while True:
            is_draining = self._is_draining.is_set()
            if not is_draining or last is None:
                status = await self._status(message.service, call)
            elif last == health_pb.SERVING:
                status = health_pb.NOT_SERVING
            if status != last:
                answer = health_pb.HealthCheckResponse(status=status)
                call.send([answer.SerializeToString()])
                last = status
            if is_draining:
                await self._is_stopping.wait()
                raise NotReady(SHUTTING_DOWN)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._is_draining.wait()

    async def _status(self, service: str, call: GrpcCall) -> int:
        """Return the status of the server, or of the named model, which requires a key."""
        try:
            if service in ("", SERVICE.full_name):
                await self._manage(ManagementCall("ready"), call.head.caller)
            else:
                route = RPC_ROUTES[INFERENCE + "ModelReady"]
                self._gate.check_scope(route.scope, call.stream.head.headers)
                await self._manage(ManagementCall("model_ready", service), call.head.caller)
        except NotFound:
            return health_pb.SERVICE_UNKNOWN
        except NotReady:
            return health_pb.NOT_SERVING
        return health_pb.NOT_SERVING if self._is_draining.is_set() else health_pb.SERVING


class ManagementRpc:
    """A method of the service that the management API answers, whatever carries its messages."""

    def __init__(self, method: Proto) -> None:
        self._name = method.name
        self._action = RPC_ROUTES[INFERENCE + method.name].handler
        types = map(GetMessageClass, (method.input_type, method.output_type))
        self._request_type, self._answer_type = types

    async def answer(self, data: Buffer, manage: Manages, caller: bytes) -> Proto:
        action = self._action
        message = parse(self._request_type, bytes(data))
        asked = ManagementCall(action, *_arguments(message), caller, _files(message))
        try:
            body = await manage(asked, caller)
        except (NotFound, NotReady):
            if action not in ("ready", "model_ready"):
                raise
            return self._answer_type(ready=False)
        if (field := FIELDS.get(self._name)) is not None:
            body = b'{"%b":%b}' % (field, body)
        elif action == "trace":
            body = settings_pb.trace_answer(body)
        elif action == "logging":
            body = settings_pb.log_answer(body)
        elif action in REGION_LISTS:
            rows = {row["name"]: row for row in msgspec.json.decode(body)}
            body = msgspec.json.encode({"regions": rows})
        return json_format.Parse(body or b"{}", self._answer_type(), ignore_unknown_fields=True)


REGION_MESSAGES = tuple(
    getattr(service_pb2, f"{kind}SharedMemory{action}Request")
    for kind in ("System", "Cuda")
    for action in ("Status", "Register", "Unregister")
)


class TaskCall(UnaryCall):
    """A call with one answer that a coroutine makes; it is cancelled if the client leaves."""

    __slots__ = ("_answer", "_task", "_tasks")

    def __init__(
        self,
        tasks: set[asyncio.Task[None]],
        answer: Callable[[GrpcCall, Buffer], Awaitable[Any]],
        server: GrpcServer,
        stream: H2Stream,
        head: RpcHead,
    ) -> None:
        super().__init__(server, stream, head)
        self._answer = answer
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def run(self, data: Buffer) -> None:
        self._task = task = self.server.loop.create_task(self._run(data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, data: Buffer) -> None:
        try:
            answer = await self._answer(self, data)
        except PenstockError as error:
            self.fail(error)
        except Exception:  # The protocol edge.
            self.fail_bug()
        else:
            self.deliver(answer)

    def deliver(self, answer: Proto) -> None:
        self.reply([answer.SerializeToString()])

    def left(self) -> None:
        # A task that fails its own call is not cancelled: it has ended.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


class WatchCall(TaskCall):
    """A call whose coroutine sends its messages itself."""

    __slots__ = ()

    @property
    def is_busy(self) -> bool:
        return False


def _region_arguments(message: Proto) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {"region": message.name} if message.name else {}
    match message:
        case service_pb2.SystemSharedMemoryRegisterRequest():
            place = {"offset": message.offset, "byte_size": message.byte_size}
            return {"region": message.name, "key": message.key, **place}
        case service_pb2.CudaSharedMemoryRegisterRequest():
            handle = base64.b64encode(message.raw_handle).decode()
            place = {"device_id": message.device_id, "byte_size": message.byte_size}
            return {"region": message.name, "raw_handle": handle, **place}
    return found


def _model_parameters(message: Proto) -> dict[str, Parameter]:
    """Return the parameters of a load or unload without the contents of files."""
    found: dict[str, Parameter] = {}
    for name, value in message.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter '{name}' has no value")
        if choice != "bytes_param":
            found[name] = getattr(value, choice)
    return found


def _files(message: Proto) -> dict[str, Buffer]:
    if not isinstance(message, service_pb2.RepositoryModelLoadRequest):
        return {}
    values = message.parameters.items()
    return {name: value.bytes_param for name, value in values if value.HasField("bytes_param")}


def _arguments(message: Proto) -> tuple[str, str, dict[str, Parameter]]:
    """Return the model, the version and the parameters that a message names."""
    if getattr(message, "repository_name", ""):
        raise Unsupported(
            "'repository_name' is not supported: models are found in any of the repositories"
        )
    match message:
        case service_pb2.RepositoryIndexRequest():
            return "", "", {"ready": message.ready}
        case service_pb2.TraceSettingRequest():
            return message.model_name, "", settings_pb.trace_changes(message)
        case service_pb2.LogSettingsRequest():
            return "", "", settings_pb.log_changes(message)
        case service_pb2.RepositoryModelLoadRequest() | service_pb2.RepositoryModelUnloadRequest():
            return message.model_name, "", _model_parameters(message)
    if isinstance(message, REGION_MESSAGES):
        return "", "", _region_arguments(message)
    return getattr(message, "name", ""), getattr(message, "version", ""), {}
