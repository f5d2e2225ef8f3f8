"""A v2 model over HTTP: a real Penstock server, and what other servers are known to answer."""

import json
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from e2e.served import Served, null_model
from suites.target import NetworkTargetContract, Sent, assert_good, run

from penstock.benchmark.targets import Counters, Target, TargetSpec
from penstock.benchmark.targets.kinds import open_target
from penstock.config import HttpLimits
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError
from penstock.protocols.http import Exchange as ServerExchange
from penstock.protocols.http_server import HttpServer
from penstock.types import TensorSpec

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("repository")
    null_model(root, "null", fail_on=13)
    (root / "single" / "1").mkdir(parents=True)
    (root / "single" / "config.pbtxt").write_text(
        'backend: "null" input { name: "x" data_type: TYPE_INT32 dims: 1 } '
        'output { name: "y" data_type: TYPE_INT32 dims: 1 }'
    )
    many = 'input { name: "text" data_type: TYPE_STRING dims: [-1] } '
    many += 'input { name: "extra" data_type: TYPE_FP32 dims: [2, -1] optional: true }'
    null_model(root, "many", config=many + " instance_group { count: 2 }")
    null_model(root, "half", config='input { name: "h" data_type: TYPE_FP16 dims: 1 }')
    server = Served(root, "--shared-memory")
    yield server
    assert server.terminate() == 0


def number(value: int) -> Sample:
    return Sample({"x": np.array([[value]], np.int32)})


@asynccontextmanager
async def described(spec: TargetSpec):
    target = open_target(spec)
    try:
        description, form = await target.describe()
        yield target, description, form
    finally:
        await target.close()


class TestBinary(NetworkTargetContract):
    is_binary = True

    @pytest.fixture(autouse=True)
    def _served(self, served: Served) -> None:
        self._port = served.port

    def port(self) -> int:
        return self._port

    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        return TargetSpec(
            f"http://127.0.0.1:{port}/v2/models/null",
            is_binary=self.is_binary,
            max_connections=max_connections,
            timeout_s=20.0,
        )

    def sample(self) -> Sample:
        return number(1)

    def misfit(self) -> Sample:
        return Sample({"x": np.zeros((1, 2), np.int32)})


class TestJson(TestBinary):
    is_binary = False


class TestSharedMemory(TestBinary):
    def spec_at(self, port: int, max_connections: int = 64) -> TargetSpec:
        return msgspec.structs.replace(super().spec_at(port, max_connections), shared_memory=True)

    @asynccontextmanager
    async def opened(self, spec: TargetSpec) -> AsyncIterator[tuple[Target, Any]]:
        """Inputs are placed before the memory is registered."""
        target = open_target(spec)
        try:
            await target.describe()
            item = target.encode(self.sample())
            await target.open(1)
            yield target, item
        finally:
            await target.close()


def regions(served: Served) -> set[str]:
    rows = json.loads(served.get("/v2/systemsharedmemory/status")[1])
    return {row["name"] for row in rows}


def test_memory_is_registered_until_the_target_is_closed(served):
    async def scenario() -> None:
        # Targets whose connections were cut in other tests could not unregister theirs.
        before = regions(served)
        spec = TargetSpec(f"http://{served.address}/v2/models/null", shared_memory=True)
        async with described(spec) as (target, description, _):
            assert description.shared_memory
            assert description.protocol == "v2 HTTP, inputs in shared memory"
            good, bad = target.encode(number(1)), target.encode(number(13))
            assert regions(served) == before
            await target.open(1)
            (region,) = regions(served) - before
            for _ in range(2):
                assert_good(await Sent(target, good).end())
                failed = await Sent(target, bad).end()
                assert "a row starts with 13" in failed.failure, "it was read from the memory"
                await target.cancel()
                await target.open(2)
                assert regions(served) - before == {region}, (
                    "cancelled exchanges do not unregister it"
                )
        assert regions(served) == before

    run(scenario())


def test_texts_are_not_sent_through_shared_memory(served):
    async def scenario() -> None:
        spec = TargetSpec(f"http://{served.address}/v2/models/many", shared_memory=True)
        async with described(spec) as (target, _, _):
            texts = np.array([["a"]], object)
            with pytest.raises(ConfigError, match="input 'text': BYTES cannot be sent"):
                target.encode(Sample({"x": np.array([[1]], np.int32), "text": texts}))

    run(scenario())


@pytest.mark.parametrize(
    ("extensions", "problem"),
    [
        (["binary_tensor_data"], "start it with: penstock serve MODEL --shared-memory"),
        (["system_shared_memory"], "needs a Penstock server"),
    ],
)
def test_servers_that_cannot_share_memory_are_refused(extensions, problem):
    async def scenario() -> None:
        server = Other(v2=(200, {"name": "s", "extensions": extensions}))
        async with server.serve() as origin:
            with pytest.raises(ConfigError, match=problem):
                async with described(TargetSpec(f"{origin}/v2/models/m", shared_memory=True)):
                    pass

    run(scenario())


def test_a_server_that_refuses_the_memory_is_told():
    async def scenario() -> None:
        offers = {"name": "s", "extensions": ["binary_tensor_data", "penstock_shared_memory"]}
        metadata = {"name": "m", "inputs": [tensor("x", "INT32", [-1, 1])]}
        answers = {"v2": (200, offers), "m": (200, metadata), "ready": (200, b"")}
        server = Other(**answers, register=(400, {"error": "no such process"}))
        async with (
            server.serve() as origin,
            described(TargetSpec(f"{origin}/v2/models/m", shared_memory=True)) as (target, _, _),
        ):
            target.encode(number(1))
            with pytest.raises(ConfigError, match="the server refused it: no such process"):
                await target.open(1)

    run(scenario())


def test_a_penstock_server_describes_itself(served):
    async def scenario() -> None:
        address = f"http://{served.address}/v2/models/many"
        async with described(TargetSpec(address)) as (_, description, form):
            assert description.protocol == "v2 HTTP, binary"
            assert (description.address, description.model) == (address, "many")
            assert description.version == "1"
            assert description.server.startswith("penstock 0.")
            assert description.backend == "null"
            assert (description.num_instances, description.max_batch_size) == (2, 4)
            assert len(description.config_digest) == 64
            assert form == RequestForm(
                "tensors",
                (
                    TensorSpec("x", "INT32", (1,)),
                    TensorSpec("text", "BYTES", (-1,)),
                    TensorSpec("extra", "FP32", (2, -1), is_optional=True),
                ),
                has_batch=True,
            )
        async with described(TargetSpec(f"http://{served.address}", model="single")) as (
            _,
            _,
            form,
        ):
            assert form == RequestForm("tensors", (TensorSpec("x", "INT32", (1,)),), False)
        for_json = TargetSpec(address, is_binary=False)
        async with described(for_json) as (_, other, _):
            assert other.protocol == "v2 HTTP, JSON"
            assert other.config_digest == description.config_digest

    run(scenario())


@pytest.mark.parametrize("is_binary", [True, False])
def test_a_server_takes_tensors_of_all_kinds(served, is_binary):
    async def scenario() -> None:
        spec = TargetSpec(f"http://{served.address}/v2/models/many/versions/1", is_binary=is_binary)
        async with described(spec) as (target, _, _):
            rows = np.array([[1], [2]], np.int64)
            texts = np.array([["a", "é"], ["", "longer"]], object)
            extra = np.ones((2, 2, 3))
            for tensors in (
                {"x": rows, "text": texts},
                {"text": texts, "extra": extra, "x": rows},
                {"x": np.asfortranarray(rows), "text": texts, "extra": extra.astype(np.float32)},
            ):
                assert_good(await Sent(target, target.encode(Sample(tensors))).end())

    run(scenario())


@pytest.mark.parametrize(
    "model, is_binary, problem",
    [
        ("absent", True, r"no model 'absent'; there is half, many, null, single"),
        ("null/versions/7", True, r"model 'null' cannot be used \(ready\): .*version 7"),
        ("half", False, "input 'h': FP16 cannot be sent as JSON"),
    ],
)
def test_a_model_that_cannot_be_used_is_told(served, model, is_binary, problem):
    async def scenario() -> None:
        address = f"http://{served.address}/v2/models/{model}"
        with pytest.raises(ConfigError, match=problem):
            async with described(TargetSpec(address, is_binary=is_binary)):
                pass

    run(scenario())


def test_a_failed_request_is_told_by_status_and_text(served):
    async def scenario() -> None:
        async with described(TargetSpec(f"http://{served.address}/v2/models/null")) as (
            target,
            _,
            _,
        ):
            failures = {
                (await Sent(target, target.encode(number(13))).end()).failure for _ in range(3)
            }
            (failure,) = failures
            assert failure.startswith("status 500: ")
            assert_good(await Sent(target, target.encode(number(1))).end())

    run(scenario())


def test_every_nth_request_asks_where_its_time_went(served):
    async def scenario() -> None:
        address = f"http://{served.address}/v2/models/null"
        for timing_every, expected in ((3, [2, 5]), (1, list(range(7))), (0, [])):
            spec = TargetSpec(address, timing_every=timing_every)
            async with described(spec) as (target, _, _):
                item = target.encode(number(1))
                ended = [await Sent(target, item).end() for _ in range(7)]
                timed = [i for i, exchange in enumerate(ended) if exchange.phases is not None]
                assert timed == expected
                for exchange in (ended[i] for i in timed):
                    assert_good(exchange)
                    assert set(exchange.phases) == {
                        "decode",
                        "queue_batch",
                        "queue_instance",
                        "compute_input",
                        "compute_infer",
                        "compute_output",
                        "total",
                    }
                    assert 0 < exchange.phases["total"] < exchange.done - exchange.sent

    run(scenario())


def test_counters_of_penstock_have_both_waits_and_the_busy_time(served):
    async def scenario() -> None:
        async with described(TargetSpec(f"http://{served.address}/v2/models/null")) as (
            target,
            _,
            _,
        ):
            await Sent(target, target.encode(Sample({"x": np.ones((3, 1), np.int32)}))).end()
            before = await target.counters()
            await Sent(target, target.encode(Sample({"x": np.ones((3, 1), np.int32)}))).end()
            after = await target.counters()
            assert after.num_inferences - before.num_inferences == 3
            assert after.num_executions - before.num_executions == 1
            assert after.busy_ns > before.busy_ns
            assert after.batch_wait_ns + after.instance_wait_ns == pytest.approx(
                after.queue_ns, abs=2
            )

    run(scenario())


def test_a_key_is_asked_for_and_sent(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsecret = "{KEY}"\nscopes = ["infer"]\n')
    server = Served(null_model(tmp_path / "repository", "null"), "--api-keys", str(keys))

    async def scenario() -> None:
        address = f"http://{server.address}/v2/models/null"
        with pytest.raises(ConfigError, match="give a key by --api-key"):
            async with described(TargetSpec(address)):
                pass
        async with described(TargetSpec(address, api_key=KEY)) as (target, _, _):
            assert_good(await Sent(target, target.encode(number(1))).end())
            assert await target.counters() is not None

    try:
        run(scenario())
    finally:
        assert server.terminate() == 0


class Other:
    """A server with fixed answers by path: `(status, JSON)`, anything else 404."""

    def __init__(self, **answers: tuple[int, object]) -> None:
        self.answers = answers
        self.bodies: list[tuple[dict[bytes, bytes], bytes]] = []

    def handle(self, exchange: ServerExchange) -> None:
        name = exchange.head.path.decode().rpartition("/")[2]
        if name == "infer":
            self.bodies.append((exchange.head.headers, bytes(exchange.body)))
        status, value = self.answers.get(name, (404, {"error": "Not Found"}))
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        exchange.reply(status, b"", (body,) if status != 204 else ())

    @asynccontextmanager
    async def serve(self):
        server = HttpServer(self.handle, HttpLimits())
        port = await server.start("127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await server.close()


def tensor(name: str, datatype: str, shape: list[int]) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": shape}


TRITON = {"name": "triton", "version": "2.51.0", "extensions": ["binary_tensor_data", "statistics"]}
METADATA = {
    "name": "m",
    "versions": ["1", "2"],
    "platform": "onnxruntime_onnx",
    "inputs": [tensor("a", "FP32", [-1, 3]), tensor("b", "BYTES", [-1, 1])],
    "outputs": [tensor("c", "FP32", [-1, 3])],
}
# As Triton 2.51 writes it, shortened.
CONFIG = {
    "name": "m",
    "platform": "onnxruntime_onnx",
    "backend": "onnxruntime",
    "version_policy": {"latest": {"num_versions": 1}},
    "max_batch_size": 8,
    "input": [{"name": "a", "data_type": "TYPE_FP32", "optional": False}, {"name": "b"}],
    "instance_group": [
        {"name": "m_0", "kind": "KIND_GPU", "count": 2, "gpus": [0, 1]},
        {"name": "m_1", "kind": "KIND_CPU", "count": 1, "gpus": []},
    ],
    "parameters": {},
}
SAMPLE = Sample({"a": np.array([[1, 2, 3]], np.float32), "b": np.array([["word"]], object)})


def triton(**more: tuple[int, object]) -> Other:
    answers = {
        "v2": (200, TRITON),
        "m": (200, METADATA),
        "ready": (200, b""),
        "config": (200, CONFIG),
    }
    return Other(**{**answers, "infer": (200, {"outputs": []}), **more})


def test_triton_is_described_and_asked_in_binary():
    server = triton()

    async def scenario() -> None:
        async with (
            server.serve() as origin,
            described(TargetSpec(f"{origin}/v2/models/m", timing_every=1)) as (target, what, form),
        ):
            assert (what.server, what.backend) == ("triton 2.51.0", "onnxruntime")
            assert (what.num_instances, what.max_batch_size) == (5, 8)
            assert what.version == ""
            assert form.has_batch
            assert [spec.shape for spec in form.inputs] == [(3,), (1,)]
            await Sent(target, target.encode(SAMPLE)).end()
            assert await target.counters() is None

    run(scenario())
    ((headers, body),) = server.bodies
    length = int(headers[b"inference-header-content-length"])
    assert json.loads(body[:length]) == {
        "inputs": [
            {
                "name": "a",
                "datatype": "FP32",
                "shape": [1, 3],
                "parameters": {"binary_data_size": 12},
            },
            {
                "name": "b",
                "datatype": "BYTES",
                "shape": [1, 1],
                "parameters": {"binary_data_size": 8},
            },
        ],
        "parameters": {"binary_data_output": True},
    }
    assert body[length:] == struct.pack("<3fI", 1, 2, 3, 4) + b"word"
    # The header is ours, and Triton is not asked for what it does not know.
    assert b"penstock-timing" not in headers


def test_statistics_of_triton_are_summed_over_versions():
    def entry(count: int, ns: int) -> dict[str, int]:
        return {"count": count, "ns": ns}

    stats = {
        "name": "m",
        "version": "1",
        "inference_count": 12,
        "execution_count": 4,
        "inference_stats": {
            "success": entry(6, 600),
            "fail": entry(1, 5),
            "queue": entry(6, 60),
            "compute_input": entry(6, 6),
            "compute_infer": entry(6, 300),
            "compute_output": entry(6, 12),
            "cache_hit": entry(0, 0),
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": entry(2, 1),
                "compute_infer": entry(2, 50),
                "compute_output": entry(2, 2),
            }
            for size in (2, 4)
        ],
    }
    server = triton(stats=(200, {"model_stats": [stats, stats | {"version": "2"}]}))

    async def scenario() -> None:
        async with (
            server.serve() as origin,
            described(TargetSpec(f"{origin}/v2/models/m")) as (
                target,
                _,
                _,
            ),
        ):
            assert await target.counters() == Counters(
                num_success=12,
                num_fail=2,
                num_inferences=24,
                num_executions=8,
                success_ns=1200,
                queue_ns=120,
                compute_input_ns=12,
                compute_infer_ns=600,
                compute_output_ns=24,
                batch_wait_ns=None,
                instance_wait_ns=None,
                busy_ns=212,
            )

    run(scenario())


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"model_stats": 3}', b'{"model_stats": [{"a": 1'])
def test_statistics_that_say_nothing_are_none(answer):
    server = triton(stats=(200, answer))

    async def scenario() -> None:
        async with (
            server.serve() as origin,
            described(TargetSpec(f"{origin}/v2/models/m")) as (
                target,
                _,
                _,
            ),
        ):
            assert await target.counters() is None

    run(scenario())


def test_mlserver_is_asked_in_json_and_its_first_dimension_is_the_batch():
    server = triton(
        v2=(200, {"name": "mlserver", "version": "1.6.1", "extensions": []}),
        config=(404, {"detail": "Not Found"}),
    )

    async def scenario() -> None:
        async with (
            server.serve() as origin,
            described(TargetSpec(f"{origin}/v2/models/m")) as (
                target,
                what,
                form,
            ),
        ):
            assert what.protocol == "v2 HTTP, JSON"
            assert (what.num_instances, what.max_batch_size) == (None, None)
            assert (what.backend, what.config_digest) == ("onnxruntime_onnx", "")
            assert form.has_batch
            assert_good(await Sent(target, target.encode(SAMPLE)).end())

    run(scenario())
    ((headers, body),) = server.bodies
    assert headers[b"content-type"] == b"application/json"
    assert json.loads(body) == {
        "inputs": [
            tensor("a", "FP32", [1, 3]) | {"data": [1.0, 2.0, 3.0]},
            tensor("b", "BYTES", [1, 1]) | {"data": ["word"]},
        ]
    }


def test_without_a_configuration_fixed_dimensions_are_no_batch():
    fixed = METADATA | {"inputs": [tensor("a", "FP32", [1, 3]), tensor("b", "BYTES", [-1, 1])]}
    server = triton(m=(200, fixed), config=(404, {}))

    async def scenario() -> None:
        async with (
            server.serve() as origin,
            described(TargetSpec(f"{origin}/v2/models/m")) as (
                _,
                _,
                form,
            ),
        ):
            assert not form.has_batch
            assert [spec.shape for spec in form.inputs] == [(1, 3), (-1, 1)]

    run(scenario())


UNKNOWN = (400, {"error": "Request for unknown model: 'm' is not found"})


@pytest.mark.parametrize(
    "answers, problem",
    [
        (
            {"v2": (404, {})},
            r"what answers at http://127.* is no v2 server \(GET /v2: status 404\)",
        ),
        ({"v2": (200, b"<html>")}, "is no v2 server"),
        ({"v2": (200, {"status": "ok"})}, "is no v2 server"),
        ({"v2": (401, {"error": "no"})}, "no; give a key by --api-key or PENSTOCK_API_KEY"),
        ({"m": UNKNOWN}, "model 'm': Request for unknown model: 'm' is not found"),
        ({"m": UNKNOWN, "index": (200, [])}, "no model 'm'; there is no model at all"),
        (
            {"m": UNKNOWN, "index": (200, [{"name": "n"}, {"name": "k", "state": "READY"}])},
            "no model 'm'; there is k, n",
        ),
        (
            {"m": UNKNOWN, "index": (200, [{"name": "m", "state": "UNAVAILABLE"}])},
            r"model 'm' cannot be used \(unavailable\): Request for unknown",
        ),
        ({"ready": (400, b"")}, "model 'm' is not ready: status 400"),
        ({"ready": (503, {"error": "loading"})}, "model 'm' is not ready: loading"),
        ({"m": (200, METADATA | {"inputs": []})}, "model 'm' does not say what inputs it takes"),
        ({"m": (200, b"{}")}, "/v2/models/m: this does not describe a v2 model"),
        (
            {"m": (200, METADATA | {"inputs": [tensor("a", "FP4", [1])]})},
            "input 'a': unknown datatype FP4",
        ),
        (
            {
                "v2": (200, TRITON | {"extensions": []}),
                "m": (200, METADATA | {"inputs": [tensor("a", "BF16", [1])]}),
            },
            "BF16 cannot be sent as JSON, only as binary tensors, which this server does not take",
        ),
    ],
)
def test_what_is_wrong_with_a_server_is_told(answers, problem):
    async def scenario() -> None:
        async with triton(**answers).serve() as origin:
            with pytest.raises(ConfigError, match=problem):
                async with described(TargetSpec(f"{origin}/v2/models/m")):
                    pass

    run(scenario())


def test_headers_go_along_and_a_proxy_may_have_a_prefix():
    server = triton()

    async def scenario() -> None:
        async with server.serve() as origin:
            spec = TargetSpec(f"{origin}/gateway/v2/models/m/infer", headers={"X-Tenant": "a"})
            async with described(spec) as (target, what, _):
                assert what.model == "m"
                assert_good(await Sent(target, target.encode(SAMPLE)).end())

    run(scenario())
    ((headers, _),) = server.bodies
    assert headers[b"x-tenant"] == b"a"


def test_a_header_that_cannot_be_one_is_refused():
    with pytest.raises(ConfigError, match="header 'X\\\\n'"):
        open_target(TargetSpec("http://h/v2/models/m", headers={"X\n": "a"}))
    with pytest.raises(ConfigError, match="'Authorization'"):
        open_target(TargetSpec("http://h/v2/models/m", api_key="a\r\nb"))
