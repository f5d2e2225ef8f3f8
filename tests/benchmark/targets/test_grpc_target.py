"""The v2 gRPC target, against a real Penstock server and small servers of other kinds."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import suites.target
from e2e.served import Served, null_model
from suites.target import NetworkTargetContract
from tritonclient.grpc import service_pb2

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.grpc_target import (
    CALLS_PER_CONNECTION,
    GrpcTarget,
    failure_text,
    parse_address,
)
from penstock.benchmark.targets.in_process import InProcess
from penstock.data import Sample
from penstock.errors import ConfigError
from penstock.types import TensorSpec

SECRET = "0123456789abcdef"
TEXTS = """
backend: "null" max_batch_size: 4
input { name: "words" data_type: TYPE_STRING dims: -1 }
input { name: "mask" data_type: TYPE_FP16 dims: [ 2, -1 ] optional: true }
output { name: "y" data_type: TYPE_STRING dims: -1 }
instance_group { count: 2 kind: KIND_CPU }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    null_model(root, "echo", fail_on=13)
    null_model(root, "slow", stall_on=1, stall_ms=4000)
    (root / "texts" / "1").mkdir(parents=True)
    (root / "texts" / "config.pbtxt").write_text(TEXTS)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Served]:
    served = Served(repository, grpc=True)
    yield served
    assert served.terminate() == 0


def target_of(server: Served, model: str = "echo", **settings: Any) -> GrpcTarget:
    return GrpcTarget(TargetSpec(f"grpc://{server.grpc_address}/{model}", **settings))


def number(value: int = 1) -> Sample:
    return Sample({"x": np.array([[value]], np.int32)})


class Sent:
    """Sends exchanges and waits until all have ended."""

    def __init__(self, target: GrpcTarget, item: Any) -> None:
        self._target = target
        self._item = item
        self.ended: list[TimedExchange] = []
        self._changed = asyncio.Event()

    def send(self, count: int = 1) -> None:
        for _ in range(count):
            self._target.send(TimedExchange(time.monotonic(), self._item, self._finish))

    def _finish(self, exchange: TimedExchange) -> None:
        self.ended.append(exchange)
        self._changed.set()

    async def wait(self, count: int) -> list[TimedExchange]:
        async with asyncio.timeout(60):
            while len(self.ended) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.ended


async def one(target: GrpcTarget, item: Any) -> TimedExchange:
    sent = Sent(target, item)
    sent.send()
    return (await sent.wait(1))[0]


def run(
    target: GrpcTarget, body: Callable[[GrpcTarget], Coroutine[Any, Any, Any]], opens: int = 1
) -> Any:
    async def whole() -> Any:
        try:
            if opens:
                await target.describe()
                await target.open(opens)
            return await body(target)
        finally:
            await target.close()

    return asyncio.run(whole())


def description(target: GrpcTarget) -> Any:
    return run(target, lambda target: target.describe(), opens=0)


def problem(target: GrpcTarget) -> str:
    with pytest.raises(ConfigError) as caught:
        description(target)
    (text,) = caught.value.problems
    return text


class TestContract(NetworkTargetContract):
    num_calls = CALLS_PER_CONNECTION

    @pytest.fixture(autouse=True)
    def _served(self, server: Served) -> None:
        self._port = int(server.grpc_address.rpartition(":")[2])

    def port(self) -> int:
        return self._port

    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        address = f"grpc://127.0.0.1:{port}/echo"
        return TargetSpec(address, max_connections=max_connections, timeout_s=20.0)

    def sample(self) -> Sample:
        return number()

    def misfit(self) -> Sample:
        return Sample({"x": np.zeros((1, 2), np.int32)})

    def test_each_connection_is_one_of_its_own(self) -> None:
        async def scenario() -> None:
            async with self.relayed() as relay:
                target = GrpcTarget(self.spec_at(relay.port))
                try:
                    await target.describe()
                    num_asking = relay.num_accepted
                    await target.open(2 * CALLS_PER_CONNECTION + 1)
                    assert target.num_connections == 3
                    assert relay.num_accepted == num_asking + 3
                finally:
                    await target.close()

        suites.target.run(scenario())


# What it is


def test_describes_itself(server: Served) -> None:
    told, form = description(target_of(server))
    assert told.protocol == "v2 gRPC"
    assert told.address == f"grpc://{server.grpc_address}/echo"
    assert (told.model, told.version, told.backend) == ("echo", "1", "null")
    assert told.server.startswith("penstock ")
    assert (told.num_instances, told.max_batch_size) == (1, 4)
    assert (form.kind, form.has_batch) == ("tensors", True)
    assert form.inputs == (TensorSpec("x", "INT32", (1,)),)


def test_shapes_are_without_the_batch_and_optional_inputs_are_known(server: Served) -> None:
    told, form = description(target_of(server, "texts/1"))
    assert (told.version, told.num_instances) == ("1", 2)
    assert form.inputs == (
        TensorSpec("words", "BYTES", (-1,)),
        TensorSpec("mask", "FP16", (2, -1), is_optional=True),
    )


def test_digest_of_the_configuration_is_that_of_the_files(server: Served, repository: Path) -> None:
    served, _ = description(target_of(server))
    local, _ = asyncio.run(InProcess(TargetSpec(str(repository / "echo"))).describe())
    assert served.config_digest == local.config_digest != ""


def test_counters_count_what_was_sent(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        before = await target.counters()
        sent = Sent(target, target.encode(number()))
        sent.send(5)
        await sent.wait(5)
        await one(target, target.encode(number(13)))
        after = await target.counters()
        assert before is not None and after is not None
        assert after.num_success - before.num_success == 5
        assert after.num_fail - before.num_fail == 1
        assert after.num_inferences - before.num_inferences >= 5
        assert after.success_ns > before.success_ns
        assert after.busy_ns is not None and before.busy_ns is not None
        assert after.busy_ns > before.busy_ns

    run(target_of(server), body)


# What it sends


def test_bytes_are_the_message_that_protobuf_would_write(server: Served) -> None:
    words = np.array([["a", "bc"]], object)
    mask = np.arange(600, dtype=np.float16).reshape(1, 2, 300)

    async def body(target: GrpcTarget) -> list[bytes]:
        sample = Sample({"mask": mask, "words": words})
        return [
            target.encode(sample),
            target.encode(sample),
            target.encode(Sample({"words": words})),
        ]

    first, again, alone = run(target_of(server, "texts"), body)
    message = service_pb2.ModelInferRequest.FromString(first)
    assert first == again
    assert (message.model_name, message.model_version) == ("texts", "")
    assert [(x.name, x.datatype, list(x.shape)) for x in message.inputs] == [
        ("words", "BYTES", [1, 2]),
        ("mask", "FP16", [1, 2, 300]),
    ]
    assert list(message.raw_input_contents) == [
        b"\x01\x00\x00\x00a\x02\x00\x00\x00bc",
        mask.tobytes(),
    ]
    assert message.SerializeToString() == first
    assert len(service_pb2.ModelInferRequest.FromString(alone).inputs) == 1


def test_input_that_does_not_fit_is_refused_in_words(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        target.encode(Sample({"x": np.zeros((1, 2), np.int32)}))

    with pytest.raises(ConfigError, match=r"input 'x': shape \[1, 2\] does not fit \[-1, 1\]"):
        run(target_of(server), body)


# Exchanges


def test_every_exchange_ends_once_and_in_order_of_time(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        sent = Sent(target, target.encode(number()))
        sent.send(100)
        ended = await sent.wait(100)
        assert len(set(map(id, ended))) == 100
        for exchange in ended:
            assert exchange.failure is None
            assert 0.0 < exchange.due <= exchange.sent <= exchange.done

    run(target_of(server), body)


def test_connections_are_added_as_they_are_needed(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        assert target.num_connections == 1
        sent = Sent(target, target.encode(number()))
        sent.send(2 * CALLS_PER_CONNECTION + 1)
        assert target.num_connections == 3
        await sent.wait(2 * CALLS_PER_CONNECTION + 1)
        sent.send(3 * CALLS_PER_CONNECTION)
        await sent.wait(5 * CALLS_PER_CONNECTION + 1)
        assert target.num_connections == 3
        assert target.num_waited == 0

    run(target_of(server), body, opens=CALLS_PER_CONNECTION)


def test_without_a_place_an_exchange_waits_its_turn(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        sent = Sent(target, target.encode(number()))
        sent.send(CALLS_PER_CONNECTION + 3)
        assert target.num_waited == 3
        ended = await sent.wait(CALLS_PER_CONNECTION + 3)
        assert all(exchange.failure is None for exchange in ended)
        first_done = min(exchange.done for exchange in ended)
        assert sum(exchange.sent >= first_done for exchange in ended) == 3

    run(target_of(server, max_connections=1), body, opens=1000)


def test_a_failure_is_told_by_its_status_and_text(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        failed = await one(target, target.encode(number(13)))
        assert failed.failure == "INTERNAL: null.fail_on: a row starts with N"
        assert failed.done >= failed.sent
        assert (await one(target, target.encode(number()))).failure is None

    run(target_of(server), body)


def test_an_answer_that_takes_too_long_is_none(server: Served) -> None:
    async def body(target: GrpcTarget) -> None:
        late = await one(target, target.encode(number()))
        assert late.failure == "no answer within 0.05 s"

    run(target_of(server, "slow", timeout_s=0.05), body)


def test_closing_cancels_what_is_under_way_and_what_waits(server: Served) -> None:
    async def body(target: GrpcTarget) -> Sent:
        sent = Sent(target, target.encode(number()))
        sent.send(CALLS_PER_CONNECTION + 2)
        await target.close()
        sent.send()
        await sent.wait(CALLS_PER_CONNECTION + 3)
        return sent

    sent = run(target_of(server, "slow", max_connections=1), body)
    assert [exchange.failure for exchange in sent.ended] == ["cancelled"] * (
        CALLS_PER_CONNECTION + 3
    )


def test_what_was_closed_opens_again(server: Served) -> None:
    async def body(target: GrpcTarget) -> TimedExchange:
        await target.close()
        await target.open(1)
        return await one(target, target.encode(number()))

    assert run(target_of(server), body).failure is None


# Other servers


@contextlib.asynccontextmanager
async def answering(port: int = 0, **answers: Any) -> AsyncIterator[int]:
    """A server with these calls of the service, each answered by a message or a status."""

    def handler(answer: Any) -> grpc.RpcMethodHandler:
        async def call(data: bytes, context: Any) -> bytes:
            if isinstance(answer, tuple):
                await context.abort(*answer)
            return answer.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(call)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    methods = {name: handler(answer) for name, answer in answers.items()}
    service = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def metadata(*shapes: list[int]) -> Any:
    message = service_pb2.ModelMetadataResponse(name="m", versions=["2", "10", "9"], platform="p")
    for index, shape in enumerate(shapes):
        message.inputs.add(name=f"x{index}", datatype="FP32", shape=shape)
    return message


SMALL = {
    "ServerLive": service_pb2.ServerLiveResponse(live=True),
    "ServerMetadata": service_pb2.ServerMetadataResponse(name="mlserver", version="1.6"),
    "ModelMetadata": metadata([-1, 4], [-1]),
    "ModelReady": service_pb2.ModelReadyResponse(ready=True),
    "ModelInfer": service_pb2.ModelInferResponse(model_name="m"),
}


def with_server(
    answers: dict[str, Any], body: Callable[[GrpcTarget], Coroutine[Any, Any, Any]]
) -> Any:
    async def whole() -> Any:
        async with answering(**answers) as port:
            target = GrpcTarget(TargetSpec(f"grpc://127.0.0.1:{port}/m"))
            try:
                return await body(target)
            finally:
                await target.close()

    return asyncio.run(whole())


def test_a_server_without_configuration_has_a_batch_where_all_shapes_are_open() -> None:
    told, form = with_server(SMALL, lambda target: target.describe())
    assert (told.server, told.backend, told.version) == ("mlserver 1.6", "p", "10")
    assert (told.max_batch_size, told.num_instances, told.config_digest) == (None, None, "")
    assert form.has_batch
    assert [spec.shape for spec in form.inputs] == [(4,), ()]
    closed = {**SMALL, "ModelMetadata": metadata([-1, 4], [1])}
    _, form = with_server(closed, lambda target: target.describe())
    assert not form.has_batch
    assert [spec.shape for spec in form.inputs] == [(-1, 4), (1,)]


def test_a_server_without_statistics_has_no_counters() -> None:
    assert with_server(SMALL, lambda target: target.counters()) is None


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (
            {
                "ModelMetadata": (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm'"),
                "RepositoryIndex": service_pb2.RepositoryIndexResponse(
                    models=[{"name": "b", "version": "1"}, {"name": "a"}, {"name": "b"}]
                ),
            },
            "Request for unknown model: 'm'; the server has a, b",
        ),
        ({"ModelMetadata": (grpc.StatusCode.NOT_FOUND, "no m")}, "no m"),
        ({"ModelReady": service_pb2.ModelReadyResponse()}, "model 'm' is not ready"),
        ({"ModelConfig": (grpc.StatusCode.INTERNAL, "broken")}, "broken"),
        (
            {"ServerMetadata": (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")},
            "what answers is no v2 server: UNIMPLEMENTED: Method not found!",
        ),
        (
            {"ServerMetadata": (grpc.StatusCode.UNAUTHENTICATED, "who are you")},
            "who are you; give a key with the scope 'infer' by --api-key or PENSTOCK_API_KEY",
        ),
    ],
)
def test_what_a_server_refuses_is_told_in_words(answers: dict[str, Any], text: str) -> None:
    async def body(target: GrpcTarget) -> None:
        with pytest.raises(ConfigError) as caught:
            await target.describe()
        (problem,) = caught.value.problems
        assert problem.startswith("grpc://127.0.0.1:")
        assert problem.endswith(f"/m: {text}")

    with_server({**SMALL, **answers}, body)


def test_after_a_lost_connection_the_next_exchange_makes_a_new_one() -> None:
    async def whole() -> None:
        async with contextlib.AsyncExitStack() as closing:
            async with answering(**SMALL) as port:
                target = GrpcTarget(TargetSpec(f"grpc://127.0.0.1:{port}/m"))
                closing.push_async_callback(target.close)
                await target.describe()
                await target.open(1)
                sample = Sample({"x0": np.zeros((1, 4), np.float32), "x1": np.zeros(1, np.float32)})
                item = target.encode(sample)
                assert (await one(target, item)).failure is None
            failure = (await one(target, item)).failure
            assert failure is not None and failure.startswith("UNAVAILABLE: ")
            await closing.enter_async_context(answering(port, **SMALL))
            async with asyncio.timeout(60):
                while (await one(target, item)).failure is not None:
                    pass

    asyncio.run(whole())


# What goes wrong before anything is sent


def test_a_model_that_is_not_there(server: Served) -> None:
    assert problem(target_of(server, "none")) == (
        f"grpc://{server.grpc_address}/none: Request for unknown model: 'none' is not found; "
        "loaded: echo, slow, texts"
    )
    assert "version 7" in problem(target_of(server, "echo/7"))


def test_nobody_listens() -> None:
    target = GrpcTarget(TargetSpec("grpc://127.0.0.1:9/m"))
    text = "grpc://127.0.0.1:9/m: the server cannot be reached: Connection refused"
    assert problem(target) == text

    async def opened() -> None:
        target = GrpcTarget(TargetSpec("grpc://127.0.0.1:9/m"))
        try:
            await target.open(64)
        finally:
            await target.close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(opened())
    assert caught.value.problems == (text,)


def test_another_protocol_listens(server: Served) -> None:
    text = problem(GrpcTarget(TargetSpec(f"grpc://{server.address}/echo")))
    assert "the server cannot be reached: Failed parsing HTTP/2" in text
    assert text.endswith("is this the server's gRPC port?")


def test_a_key_is_asked_for_and_used(repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsecret = "{SECRET}"\nscopes = ["infer"]\n')
    served = Served(repository, "--api-keys", str(keys), grpc=True)
    try:
        text = problem(target_of(served))
        assert "give a key with the scope 'infer' by --api-key or PENSTOCK_API_KEY" in text

        async def body(target: GrpcTarget) -> None:
            assert (await one(target, target.encode(number()))).failure is None
            assert await target.counters() is not None

        run(target_of(served, api_key=SECRET), body)
    finally:
        assert served.terminate() == 0


@pytest.mark.parametrize(
    ("address", "server", "model", "version"),
    [
        ("grpc://host:8001/m", "host:8001", "m", ""),
        ("grpc://host:8001/m/3/", "host:8001", "m", "3"),
        ("grpc://[::1]:8001/a%20b", "[::1]:8001", "a b", ""),
    ],
)
def test_addresses(address: str, server: str, model: str, version: str) -> None:
    parsed = parse_address(TargetSpec(address))
    assert (parsed.server, parsed.model, parsed.version) == (server, model, version)
    assert not parsed.is_secure
    assert parse_address(TargetSpec(address.replace("grpc:", "grpcs:"))).is_secure


def test_model_and_version_may_be_given_beside_the_address() -> None:
    parsed = parse_address(TargetSpec("grpc://host:1", model="m", version="2"))
    assert (parsed.model, parsed.version) == ("m", "2")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TargetSpec("grpc://host:1"), "names no model"),
        (TargetSpec("grpc://host/m"), "expected grpc://host:port/model"),
        (TargetSpec("grpc://:1/m"), "expected grpc://host:port/model"),
        (TargetSpec("grpc://host:x/m"), "grpc://host:x/m: "),
        (TargetSpec("grpc://host:1/m/1/infer"), "a model and perhaps a version"),
        (TargetSpec("grpc://host:1/m?x=1"), "a model and perhaps a version"),
        (TargetSpec("grpc://host:1/m", model="n"), "names the model 'm', but --model is 'n'"),
        (
            TargetSpec("grpc://host:1/m/1", version="2"),
            "names the version '1', but --version is '2'",
        ),
    ],
)
def test_addresses_that_make_no_sense(spec: TargetSpec, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GrpcTarget(spec)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("code", "details", "text"),
    [
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: "
            "Failed to connect to remote host: Connection refused",
            "UNAVAILABLE: Connection refused",
        ),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:%5B::1%5D:9: "
            "recvmsg:Connection reset by peer (104)",
            "UNAVAILABLE: Connection reset by peer",
        ),
        (
            "UNAVAILABLE",
            "errors resolving a.b:99: [field:hostname lookup error:address lookup failed for "
            "a.b:99: Domain name not found]",
            "UNAVAILABLE: Domain name not found",
        ),
        ("UNAVAILABLE", "Socket closed", "UNAVAILABLE: Socket closed"),
        (
            "UNAVAILABLE",
            "Exceeds maximum queue size: 100 waiting",
            "UNAVAILABLE: Exceeds maximum queue size: N waiting",
        ),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "no answer within 2.5 s"),
        ("DEADLINE_EXCEEDED", "the server's own", "DEADLINE_EXCEEDED: the server's own"),
        ("UNKNOWN", "", "UNKNOWN"),
    ],
)
def test_one_text_for_one_cause(code: str, details: str, text: str) -> None:
    assert failure_text(code, details, 2.5) == text
