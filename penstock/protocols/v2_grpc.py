"""KServe v2 / Triton over gRPC, in its own process: grpc.aio would slow down the core's loop.

Started by `protocols.fronts` as `python -m penstock.protocols.v2_grpc FD PARENT`. Only translates:
messages to requests (`wire.v2_pb`), requests to the core (`protocols.remote`), errors to statuses
by one table. Every call passes the gate. Exits when the core says so or has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from penstock.errors import (
    ConfigError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    NotReady,
    PenstockError,
    Unsupported,
)
from penstock.protocols import audit_log
from penstock.protocols.audit_log import AdminCall
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.http_reader import CREDENTIALS
from penstock.protocols.line import cannot_listen, why_not_listen
from penstock.protocols.remote import Remote, begin, gate_of
from penstock.protocols.route_table import MISSING, RPC_ROUTES, unsupported
from penstock.protocols.tls import TlsFiles
from penstock.types import Parameter, Request, Response
from penstock.wire import frames
from penstock.wire.statuses import status_of
from penstock.wire.v2_pb import Proto, decode_infer, encode_answer, parse, set_parameter

log = logging.getLogger("penstock.grpc")

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
MODEL_READY = f"/{SERVICE.full_name}/ModelReady"
COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}
# A status travels in headers, whose length clients limit.
MAX_DETAILS = 2000
# Requests of one stream in flight; at the limit the stream is not read further.
MAX_STREAM_CALLS = 1024
IS_FINAL = "triton_final_response"
WATCH_S = 0.5
# Time for clients to read their last answers.
STOP_GRACE_S = 2.0

# Fields of answers that hold the core's JSON; in other answers it is the whole message.
FIELDS = {"ModelConfig": b"config", "RepositoryIndex": b"models"}

# gRPC's contexts have no types.
Context: TypeAlias = Any
Metadata = Iterable[tuple[str, str | bytes]]
Answer = Callable[..., Awaitable[Proto]]


@dataclass(frozen=True, slots=True)
class InferWaiter:
    """The sink of one request: `message` resolves to the encoded answer."""

    message: asyncio.Future[Proto]

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if self.message.done():
            return  # The call was cancelled.
        if isinstance(answer, PenstockError):
            self.message.set_exception(answer)
        else:
            self.message.set_result(encode_answer(request, answer))


def check_rpc(gate: Gate, method: str, metadata: Metadata) -> bool:
    """Like `Gate.check_scope`, for a gRPC call; InvalidRequest if a key is given twice. Return
    False if there is no such method."""
    route = RPC_ROUTES.get(method)
    if route is None:
        return False
    headers = headers_of(metadata)
    gate.check_keys(headers, "metadata")
    gate.check_scope(route.scope, headers)
    return True


def headers_of(metadata: Metadata) -> dict[bytes, bytes]:
    """Return the metadata of a gRPC call as headers, with repeated keys joined."""
    headers: dict[bytes, bytes] = {}
    for name, given in metadata:
        header, value = name.encode(), given if isinstance(given, bytes) else given.encode()
        is_repeated = header in headers and header in CREDENTIALS
        headers[header] = headers[header] + b"\n" + value if is_repeated else value
    return headers


class Gated(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods of the port, by path, behind the gate: none can bypass it."""

    def __init__(self, gate: Gate, methods: Mapping[str, grpc.RpcMethodHandler]) -> None:
        self._gate = gate
        self._methods = methods

    def service(self, call: Context) -> grpc.RpcMethodHandler | None:
        try:
            is_known = check_rpc(self._gate, call.method, call.invocation_metadata)
        except (NotAllowed, InvalidRequest) as error:
            if RPC_ROUTES[call.method].scope == "admin":
                caller = self._gate.caller_name(headers_of(call.invocation_metadata))
                denied = AdminCall("grpc", caller, call.method.rpartition("/")[2])
                audit_log.record(denied, error)
            return _refusing(error)
        return self._methods.get(call.method) if is_known else None


class Service:
    """GRPCInferenceService and grpc.health.v1.Health. Requests arrive as bytes, so that parse
    errors are answered like any other error."""

    def __init__(self, remote: Remote, gate: Gate) -> None:
        self._remote = remote
        self._gate = gate
        self._is_stopping = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()

    def handler(self) -> Gated:
        unary, watch = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        infer, health = service_pb2.ModelInferResponse, health_pb2.HealthCheckResponse
        both, stream = grpc.stream_stream_rpc_method_handler, service_pb2.ModelStreamInferResponse
        methods = {_path(method): self._unary(method) for method in SERVICE.methods}
        for service, name, kind, call, answer in (
            (SERVICE, "ModelInfer", unary, _guarded("ModelInfer", self._infer_once), infer),
            (SERVICE, "ModelStreamInfer", both, self._stream, stream),
            (HEALTH, "Check", unary, _guarded("Check", self._check), health),
            (HEALTH, "Watch", watch, _guarded("Watch", self._watch), health),
        ):
            path, to_bytes = f"/{service.full_name}/{name}", answer.SerializeToString
            methods[path] = kind(call, response_serializer=to_bytes)
        return Gated(self._gate, methods)

    def use_keys(self, keys: Keys) -> None:
        """Use these keys for new calls, and for new messages of open streams."""
        self._gate.keys = keys

    def stop(self) -> None:
        """End calls that would never end: streams stop reading, watches end."""
        self._is_stopping.set()
        for reader in self._readers:
            reader.cancel()

    # Inference.

    async def _infer(self, data: bytes, caller: bytes, answer: Proto = None) -> Proto:
        """Return the answer to a ModelInferRequest. The core counts all requests, also those that
        cannot be decoded. `answer.id` is set to the request's id as soon as it is known."""
        waiter, name, version = InferWaiter(asyncio.get_running_loop().create_future()), "", ""
        try:
            message = parse(service_pb2.ModelInferRequest, data)
            name, version = message.model_name, message.model_version
            if answer is not None:
                answer.id = message.id
            request = decode_infer(message, waiter, time.monotonic())
        except PenstockError:
            await self._remote.ask("count_request", name, version, key=caller)
            raise
        request.caller = caller
        model = self._remote.find(name, version)
        model.submit(request)
        try:
            return await waiter.message
        except asyncio.CancelledError:
            # The client disconnected, or its deadline passed.
            model.cancel(request)
            raise

    async def _infer_once(self, data: bytes, context: Context) -> Proto:
        return await self._infer(data, _caller(self._gate, context))

    async def _stream(self, messages: AsyncIterator[bytes], context: Context) -> None:
        stream = InferStream(self._infer, context, _caller(self._gate, context), self._gate)
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(stream.read(messages, group))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
                group.create_task(stream.write())
        except* PenstockError as errors:
            stream.refusal = errors.exceptions[0]
        if stream.refusal is not None:
            await _abort(context, stream.refusal)

    # Management.

    def _unary(self, method: Proto) -> grpc.RpcMethodHandler:
        """Return a handler of a method that the core's management API answers."""
        action = RPC_ROUTES[_path(method)].handler
        request_type, answer_type = map(GetMessageClass, (method.input_type, method.output_type))

        async def call(data: bytes, context: Context) -> Proto:
            caller, message = _caller(self._gate, context), parse(request_type, data)
            if action == "live":
                return answer_type(live=True)
            if action in MISSING:
                raise unsupported(action)
            kind = cast(frames.AskKind, action)
            try:
                body = await self._remote.ask(kind, *_arguments(message), caller)
            except (NotFound, NotReady):
                if action not in ("ready", "model_ready"):
                    raise
                return answer_type(ready=False)
            if (name := FIELDS.get(method.name)) is not None:
                body = b'{"%b":%b}' % (name, body)
            return json_format.Parse(body or b"{}", answer_type(), ignore_unknown_fields=True)

        return grpc.unary_unary_rpc_method_handler(
            _guarded(method.name, call), response_serializer=answer_type.SerializeToString
        )

    # Health.

    async def _check(self, data: bytes, context: Context) -> Proto:
        message = parse(health_pb2.HealthCheckRequest, data)
        status = await self._status(message.service, context)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"unknown service '{message.service}'")
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, data: bytes, context: Context) -> None:
        """Send the status now, and whenever it changes."""
        message, last = parse(health_pb2.HealthCheckRequest, data), None
        while not self._is_stopping.is_set():
            status = await self._status(message.service, context)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._is_stopping.wait()

    async def _status(self, service: str, context: Context) -> Proto:
        """Return the status of the server, or of the named model, which requires a key."""
        try:
            if service in ("", SERVICE.full_name):
                await self._remote.ask("ready")
            else:
                check_rpc(self._gate, MODEL_READY, context.invocation_metadata())
                await self._remote.ask("model_ready", service)
        except NotFound:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        except NotReady:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING


class InferStream:
    """One ModelStreamInfer: requests run concurrently, answers leave in order, as in Triton."""

    def __init__(self, infer: Answer, context: Context, caller: bytes, gate: Gate) -> None:
        self._infer = infer
        self._context = context
        self._caller = caller
        self._gate = gate
        # Why the stream ends before its client ends it.
        self.refusal: BaseException | None = None
        self._slots = asyncio.Semaphore(MAX_STREAM_CALLS)
        # In request order; None is the end.
        self._answers: asyncio.Queue[asyncio.Task[Proto] | None] = asyncio.Queue()
        metadata = dict(context.invocation_metadata() or ())
        # An error ends the stream, as in Triton.
        self._ends_by_error = metadata.get("triton_grpc_error") == "true"

    async def read(self, messages: AsyncIterator[bytes], group: asyncio.TaskGroup) -> None:
        try:
            async for data in messages:
                # NotAllowed once the key is no longer allowed to send requests.
                self._gate.check_caller("infer", self._caller)
                await self._slots.acquire()
                self._answers.put_nowait(group.create_task(self._answer(data)))
        except NotAllowed as error:
            # Requests that were read before get their answers.
            self.refusal = error
        finally:
            self._answers.put_nowait(None)

    async def write(self) -> None:
        while (task := await self._answers.get()) is not None:
            await self._context.write(await task)
            self._slots.release()

    async def _answer(self, data: bytes) -> Proto:
        answer = service_pb2.ModelStreamInferResponse()
        response = answer.infer_response
        try:
            response.CopyFrom(await self._infer(data, self._caller, response))
        except PenstockError as error:
            if self._ends_by_error:
                raise
            answer.error_message = str(error)[:MAX_DETAILS]
        except Exception:  # The protocol edge.
            log.exception("while answering a request of a stream")
            answer.error_message = "internal error"
        set_parameter(response.parameters[IS_FINAL], True)
        return answer


async def _abort(context: Context, error: BaseException) -> NoReturn:
    assert isinstance(error, PenstockError)
    await context.abort(grpc.StatusCode[status_of(error).grpc], str(error)[:MAX_DETAILS])
    raise AssertionError("abort raises")


def _refusing(error: PenstockError) -> grpc.RpcMethodHandler:
    """Return a handler that refuses calls of any kind without reading."""

    async def refuse(messages: Proto, context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _path(method: Proto) -> str:
    return f"/{SERVICE.full_name}/{method.name}"


def _guarded(name: str, call: Answer) -> Answer:
    """Wrap a call so that its errors become gRPC statuses."""

    async def run(data: bytes, context: Context) -> Proto:
        try:
            return await call(data, context)
        except PenstockError as error:
            await _abort(context, error)
        except Exception:  # The protocol edge.
            log.exception("while answering %s", name)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    return run


def _caller(gate: Gate, context: Context) -> bytes:
    """Return the caller, as in `Request.caller`."""
    return gate.caller(headers_of(context.invocation_metadata() or ()))


def _arguments(message: Proto) -> tuple[str, str, dict[str, Parameter]]:
    """Return the model, the version and the parameters that a message names."""
    if getattr(message, "repository_name", ""):
        raise Unsupported("'repository_name' is not supported: this server has one repository")
    match message:
        case service_pb2.RepositoryIndexRequest():
            return "", "", {"ready": message.ready}
        case service_pb2.RepositoryModelLoadRequest():
            # Only the names: values may be whole files, and are not used.
            return message.model_name, "", dict.fromkeys(message.parameters, True)
        case service_pb2.RepositoryModelUnloadRequest():
            return message.model_name, "", {}
    return getattr(message, "name", ""), getattr(message, "version", ""), {}


def tls_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Make credentials; ConfigError if the files are unusable. gRPC asks for the current
    certificate before each handshake."""
    files.load()
    config = files.config

    def current() -> object:
        issuers = Path(config.client_ca).read_bytes() if config.client_ca else None
        pair = (Path(config.key).read_bytes(), Path(config.cert).read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=issuers)

    def changed() -> object:
        return None if files.load_if_changed() is None else current()

    return grpc.dynamic_ssl_server_credentials(current(), changed, bool(config.client_ca))


async def serve(remote: Remote, settings: frames.OpenFront) -> None:
    """Listen and answer until the core says Stop, let accepted requests finish, then close."""
    service = Service(remote, gate_of(settings))
    remote.on_keys = service.use_keys
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Otherwise two servers could share a port without noticing.
            ("grpc.so_reuseport", 0),
        ],
        compression=COMPRESSIONS[settings.compression],
    )
    server.add_generic_rpc_handlers([service.handler()])
    port = _listen(server, settings)
    await server.start()
    await remote.serve_until_stopped(port)
    service.stop()
    await server.stop(STOP_GRACE_S)


def _listen(server: grpc.aio.Server, settings: frames.OpenFront) -> int:
    """Return the port; ConfigError if it cannot be bound, or if the TLS files are unusable."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.port}"
    reason = why_not_listen(settings.host, settings.port)
    try:
        if not reason and settings.tls is not None:
            credentials = tls_credentials(TlsFiles(settings.tls, warns=False))
            return int(server.add_secure_port(address, credentials))
        if not reason:
            return int(server.add_insecure_port(address))
    except (RuntimeError, ConfigError) as error:
        reason = str(error)
    raise cannot_listen(host, settings.port, "gRPC", reason)


if __name__ == "__main__":
    begin(serve, asyncio.run)
