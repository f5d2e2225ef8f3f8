"""A v2 model behind gRPC: Penstock, Triton, MLServer.

Requests are encoded in advance and travel as bytes, so no message is built or parsed per request. A
connection carries a limited number of calls at once; more are opened on demand. Calls use grpc.aio
with done callbacks: 10 % cheaper than its threads and futures.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

import msgspec

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Counters, Description, TargetSpec, shared
from penstock.benchmark.targets.http_messages import hide_password, split_url
from penstock.benchmark.targets.shared import Json, Member, V2Config, V2Metadata
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError
from penstock.repository import pbtxt
from penstock.types import Buffer, Tensor

if TYPE_CHECKING:
    from grpc.aio import Channel, UnaryUnaryCall, UnaryUnaryMultiCallable

SERVICE = "/inference.GRPCInferenceService/"
# Servers allow about a hundred calls per connection; fewer keep frames from queueing.
CALLS_PER_CONNECTION = 32
ASK_TIMEOUT_S = 10.0
OPTIONS = (
    # Otherwise all channels to one server would share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Reconnect soon after a server comes back.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# Tag of ModelInferRequest field 7, raw_input_contents; its length follows.
RAW_CONTENTS = b"\x3a"
# Extracts the cause from gRPC's texts about connections and names.
CONNECTION = re.compile(
    r"ipv[46]:\S+: (?:Failed to connect to remote host: |recvmsg:)?(.+?)(?: \(|$)"
)
RESOLVING = re.compile(r"^errors resolving .*: ([^:\]]+)\]?$")
DEADLINE = "Deadline Exceeded"
NO_SUCH_MODEL = ("NOT_FOUND", "INVALID_ARGUMENT")
NEEDS_KEY = ("UNAUTHENTICATED", "PERMISSION_DENIED")

Value = TypeVar("Value")


class Address(msgspec.Struct, frozen=True):
    """The parts of `grpc://host:port/model[/version]`."""

    server: str
    model: str
    version: str
    is_secure: bool


class GrpcRefused(Exception):
    """The server answered a question with an error."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


class GrpcTarget:
    """`num_connections` are open; `num_waited` exchanges had to wait for a place on one."""

    load_s: float | None = None

    def __init__(self, spec: TargetSpec) -> None:
        # Must precede the import: gRPC would log lost connections into our output.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        self._spec = spec
        self._address = parse_address(spec)
        self._metadata = (("authorization", f"Bearer {spec.api_key}"),) if spec.api_key else None
        self._form: RequestForm | None = None
        self._prefix = cache(self._encode_prefix)
        # One channel for questions; the others, each with CALLS_PER_CONNECTION places for calls.
        self._question_channel: Channel | None = None
        self._channels: list[Channel] = []
        self._places: deque[UnaryUnaryMultiCallable] = deque()
        self._waiting: deque[TimedExchange] = deque()
        # Of an ensemble.
        self._members: list[Member] = []
        # An unreferenced call cancels itself.
        self._calls: set[UnaryUnaryCall] = set()
        self._reading: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self.num_waited = 0

    @property
    def num_connections(self) -> int:
        return len(self._channels)

    async def describe(self) -> tuple[Description, RequestForm]:
        try:
            server = await self._ask("ServerMetadata")
        except GrpcRefused as error:
            raise self._problem(_why_no_server(error)) from None
        metadata = msgspec.convert(await self._ask_model("ModelMetadata"), V2Metadata)
        if not (await self._ask_model("ModelReady"))["ready"]:
            raise self._problem(f"model '{self._address.model}' is not ready")
        fields = (await self._ask_model("ModelConfig", {})).get("config", {})
        config = msgspec.convert(fields, V2Config) if fields else None
        self._members = await shared.find_members(config, self._ask_member)
        self._form = shared.form_of(metadata, config)
        description = Description(
            protocol="v2 gRPC",
            address=self._spec.address,
            model=metadata.name or self._address.model,
            version=self._address.version or _newest(metadata.versions or ()),
            server=f"{server['name']} {server['version']}".strip(),
            backend=metadata.platform,
        )
        if config is not None:
            description.backend = config.backend or config.platform
            description.num_instances = config.num_instances
            description.max_batch_size = config.max_batch_size
            description.config_digest = shared.config_digest(fields)
        return description, self._form

    async def counters(self) -> Counters | None:
        found = await self._count(Member(self._address.model, self._address.version))
        return await shared.add_members(found, self._members, self._count)

    async def _count(self, model: Member) -> Counters | None:
        try:
            answer = await self._ask("ModelStatistics", name=model.name, version=model.version)
        except GrpcRefused:
            return None
        asked = model.version
        entries = {each["version"]: each for each in answer["model_stats"]}
        entries = {name: each for name, each in entries.items() if asked in ("", name)}
        return shared.counters_of(entries[_newest(list(entries))]) if entries else None

    async def _ask_member(self, member: Member) -> V2Config | None:
        try:
            answer = await self._ask("ModelConfig", name=member.name, version=member.version)
        except GrpcRefused:
            return None
        return msgspec.convert(answer["config"], V2Config)

    async def _ask_model(self, method: str, otherwise: Json | None = None) -> Json:
        """Ask about the model; `otherwise` where the server has no such call, such as MLServer."""
        try:
            return await self._ask(method, **self._model())
        except GrpcRefused as error:
            if error.code == "UNIMPLEMENTED" and otherwise is not None:
                return otherwise
            raise self._problem(await self._why_no_model(error)) from None

    async def _why_no_model(self, error: GrpcRefused) -> str:
        if error.code in NEEDS_KEY:
            return _needs_key(error)
        text = error.details or error.code
        # A Penstock server lists its models itself.
        if error.code not in NO_SUCH_MODEL or "loaded:" in text:
            return text
        try:
            index = await self._ask("RepositoryIndex")
        except GrpcRefused:
            return text
        names = ", ".join(sorted({model["name"] for model in index["models"]}))
        return f"{text}; the server has {names or 'none'}"

    async def _ask(self, method: str, channel: Channel | None = None, **fields: str) -> Json:
        import grpc
        from tritonclient.grpc import service_pb2

        if channel is None:
            channel = self._question_channel = self._question_channel or self._channel()
        call = channel.unary_unary(
            SERVICE + method,
            request_serializer=getattr(service_pb2, f"{method}Request").SerializeToString,
            response_deserializer=getattr(service_pb2, f"{method}Response").FromString,
        )
        message = getattr(service_pb2, f"{method}Request")(**fields)
        try:
            answer = await call(message, timeout=ASK_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise GrpcRefused(error.code().name, error.details() or "") from None
        return pbtxt.to_dict(answer)

    def _model(self) -> dict[str, str]:
        return {"name": self._address.model, "version": self._address.version}

    def _problem(self, text: str) -> ConfigError:
        return ConfigError([f"{self._spec.address}: {text}"])

    async def open(self, num_connections: int) -> None:
        self._is_closed = False
        wanted = -(-num_connections // CALLS_PER_CONNECTION)
        while self.num_connections < min(max(1, wanted), self._spec.max_connections):
            self._add_connection()
        try:
            await asyncio.gather(*(self._ask("ServerLive", each) for each in self._channels))
        except GrpcRefused as error:
            raise self._problem(_why_no_server(error)) from None

    def encode(self, sample: Sample) -> bytes:
        assert self._form is not None, "inputs are encoded after `describe`"
        tensors = shared.tensors_of(self._form, sample)
        forms = ((tensor.name, tensor.datatype, tensor.shape) for tensor in tensors)
        parts: list[Buffer] = [self._prefix(*forms)]
        for tensor in tensors:
            parts += (RAW_CONTENTS, _varint(len(tensor.data)), tensor.data)
        return b"".join(parts)

    def send(self, exchange: TimedExchange) -> None:
        if self._is_closed:
            exchange.sent = time.monotonic()
            asyncio.get_running_loop().call_soon(exchange.end, exchange.sent, "cancelled")
            return
        if not self._places and self.num_connections < self._spec.max_connections:
            self._add_connection()
        if self._places:
            self._start(self._places.popleft(), exchange)
        else:
            self.num_waited += 1
            self._waiting.append(exchange)

    async def cancel(self) -> None:
        await self.close()

    async def close(self) -> None:
        self._is_closed = True
        now = time.monotonic()
        while self._waiting:
            exchange = self._waiting.popleft()
            exchange.sent = now
            exchange.end(now, "cancelled")
        for call in list(self._calls):
            call.cancel()
        channels = [each for each in (self._question_channel, *self._channels) if each is not None]
        self._question_channel, self._channels = None, []
        self._places.clear()
        for channel in channels:
            await channel.close()

    def _encode_prefix(self, *forms: tuple[str, str, tuple[int, ...]]) -> bytes:
        """Encode everything of the message except the tensors' contents."""
        from tritonclient.grpc import service_pb2

        model, version = self._address.model, self._address.version
        message = service_pb2.ModelInferRequest(model_name=model, model_version=version)
        for name, datatype, shape in forms:
            message.inputs.add(name=name, datatype=datatype, shape=shape)
        return bytes(message.SerializeToString())

    def _channel(self) -> Channel:
        import grpc

        if self._address.is_secure:
            credentials = grpc.ssl_channel_credentials()
            return grpc.aio.secure_channel(self._address.server, credentials, OPTIONS)
        return grpc.aio.insecure_channel(self._address.server, OPTIONS)

    def _add_connection(self) -> None:
        channel = self._channel()
        self._channels.append(channel)
        # Interleave the places of all connections, so that calls spread evenly.
        places = [channel.unary_unary(SERVICE + "ModelInfer")] * CALLS_PER_CONNECTION
        pairs = zip_longest(self._places, places)
        self._places = deque(place for pair in pairs for place in pair if place is not None)

    def _start(self, place: UnaryUnaryMultiCallable, exchange: TimedExchange) -> None:
        exchange.sent = time.monotonic()
        call = place(exchange.item, timeout=self._spec.timeout_s, metadata=self._metadata)
        self._calls.add(call)
        call.add_done_callback(partial(self._ended, place, exchange))

    def _ended(
        self, place: UnaryUnaryMultiCallable, exchange: TimedExchange, call: UnaryUnaryCall
    ) -> None:
        done, failure = time.monotonic(), None
        self._calls.discard(call)
        if self._is_closed:
            failure = "cancelled"
        else:
            if (code := _at_once(call.code()).name) != "OK":
                details = _at_once(call.details()) or ""
                failure = failure_text(code, details, self._spec.timeout_s)
            elif exchange.expected:
                reading = asyncio.ensure_future(_read(call, exchange, done))
                self._reading.add(reading)
                reading.add_done_callback(self._reading.discard)
            if self._waiting:
                self._start(place, self._waiting.popleft())
            else:
                self._places.append(place)
        if failure is not None or not exchange.expected:
            exchange.end(done, failure)


def parse_address(spec: TargetSpec) -> Address:
    """Parse the target's address; ConfigError lists everything that is wrong."""
    parts, port = split_url(spec.address, "grpc://host:port")
    where = hide_password(spec.address)
    problems: list[str] = []
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or port is None:
        problems.append(f"{where}: expected grpc://host:port/model or grpc://host:port/model/1")
    names = [unquote(name) for name in parts.path.split("/") if name]
    if len(names) > 2 or parts.query or parts.fragment:
        problems.append(f"{where}: expected a model and perhaps a version after the port")
    model, version, *_ = (*names, "", "")
    problems += [f"{where}: {text}" for text in shared.contradictions(spec, model, version)]
    model, version = model or spec.model, version or spec.version
    if not model:
        problems.append(f"{where}: names no model; expected grpc://host:port/model, or --model")
    if problems:
        raise ConfigError(problems)
    return Address(parts.netloc, model, version, parts.scheme == "grpcs")


def failure_text(code: str, details: str, timeout_s: float) -> str:
    """Describe why a call failed, without the addresses in gRPC's own texts."""
    if code == "DEADLINE_EXCEEDED" and details == DEADLINE:
        return f"no answer within {timeout_s:g} s"
    text = shared.in_short(_cause(details))
    return f"{code}: {text}" if text else code


def _cause(details: str) -> str:
    match = CONNECTION.search(details) or RESOLVING.search(details)
    return match[1] if match else details


def _why_no_server(error: GrpcRefused) -> str:
    if error.code in NEEDS_KEY:
        return _needs_key(error)
    if error.code == "UNAVAILABLE":
        hint = "; is this the server's gRPC port?" if "HTTP/2" in error.details else ""
        return f"the server cannot be reached: {_cause(error.details)}{hint}"
    if error.code == "DEADLINE_EXCEEDED":
        return f"the server cannot be reached: no answer within {ASK_TIMEOUT_S:g} s"
    return f"what answers is no v2 server: {error}"


def _needs_key(error: GrpcRefused) -> str:
    return f"{error.details}; give a key with the scope 'infer' by --api-key or PENSTOCK_API_KEY"


def _at_once(answer: Coroutine[object, None, Value]) -> Value:
    """Return the result of a coroutine that never suspends: a question to a call that has ended."""
    try:
        answer.send(None)
    except StopIteration as ended:
        value: Value = ended.value
        return value
    raise AssertionError("the call has not ended")


async def _read(call: UnaryUnaryCall, exchange: TimedExchange, done: float) -> None:
    """End an exchange whose call has ended well, with its answer: gRPC has it a moment later."""
    exchange.answer = _outputs(bytes(await call))
    exchange.end(done, None)


def _outputs(message: bytes) -> list[Tensor]:
    """Return the outputs of an answer, to compare them with recorded ones."""
    from tritonclient.grpc import service_pb2

    answer = service_pb2.ModelInferResponse.FromString(message)
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=False)
    return [Tensor(o.name, o.datatype, tuple(o.shape), data) for o, data in pairs]


def _varint(number: int) -> bytes:
    """Encode a length as a protobuf varint: seven bits per byte, lowest first."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _newest(versions: Sequence[str]) -> str:
    numbers = [version for version in versions if version.isdigit()]
    if numbers:
        return max(numbers, key=int)
    return versions[-1] if versions else ""
