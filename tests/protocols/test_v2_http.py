"""KServe v2 over HTTP: routes, statuses and texts, with real models behind them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import http.client
import json
import logging
import re
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asgi_client import AsgiClient
from loop_shards import shard_on_loop

import penstock
from penstock import errors
from penstock.config import BatchPolicy, HttpLimits, MemoryPolicy, ModelConfig, QueuePolicy
from penstock.errors import (
    BackendFailed,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    NotReady,
    Overloaded,
    PenstockError,
    TooLarge,
    Unsupported,
)
from penstock.protocols.asgi_http import AsgiHttp
from penstock.protocols.gate import Gate
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.http_server import HttpServer
from penstock.protocols.shard_processes import CoreApi
from penstock.protocols.v2_http import Models, V2Http
from penstock.repository import layout
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.header_forwarding import HeaderForwarding
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi
from penstock.serving.regions import RegionTable
from penstock.serving.shards import Shards
from penstock.serving.supervisor import ThreadLife
from penstock.serving.tracer import Tracer
from penstock.types import DATATYPES, Request, Response, Tensor, TensorSpec
from penstock.wire.statuses import STATUSES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "repository"
HANGS_S = 30.0


def null_model(
    name: str,
    inputs: Mapping[str, tuple[str, tuple[int, ...]]],
    max_batch_size: int = 8,
    version: str = "1",
    **options: str,
) -> ModelConfig:
    """A model whose outputs OUT_<name> repeat its inputs."""
    return ModelConfig(
        name=name,
        version=version,
        backend="null",
        artifact="",
        inputs=tuple(TensorSpec(key, *value) for key, value in inputs.items()),
        outputs=tuple(TensorSpec(f"OUT_{key}", *value) for key, value in inputs.items()),
        max_batch_size=max_batch_size,
        batching=BatchPolicy(max(1, max_batch_size), is_dynamic=max_batch_size > 0),
        options={f"null.{key}": value for key, value in options.items()},
    )


MODELS = [
    null_model("echo", {"x": ("INT32", (4,))}, fail_on="666"),
    null_model("echo", {"x": ("INT32", (4,))}, version="3"),
    null_model("echo", {"x": ("INT32", (4,))}, version="20"),
    null_model("pair", {"a": ("INT32", (1,)), "b": ("FP32", (2,))}),
    null_model("strings", {"s": ("BYTES", (-1,))}),
    null_model("variable", {"v": ("FP32", (-1, -1))}),
    null_model("unbatched", {"u": ("FP64", (-1,))}, max_batch_size=0),
    null_model("types", {name: (name, (2,)) for name in DATATYPES}),
]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of an error, in the only form that errors have."""
        assert self.headers["content-type"] == "application/json"
        [(key, text)] = self.json.items()
        assert key == "error"
        assert isinstance(text, str) and text
        assert not re.search(r"0x[0-9a-f]{6,}|/usr/|File \"|Traceback|memfd", text)
        return text


class Api:
    """A client of the server that all tests of this module share."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, dict(headers or {}))
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, fields, response.read())

    def get(self, path: str) -> Reply:
        return self.ask("GET", path)

    def infer(self, model: str, message: Any, tail: bytes | None = None, **options: Any) -> Reply:
        """POST the message; with a tail, as JSON followed by binary tensors."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        headers = {"Content-Type": "application/json"}
        if tail is not None:
            headers = {"Inference-Header-Content-Length": str(len(body))}
        path = f"/v2/models/{model}/infer"
        return self.ask("POST", path, body + (tail or b""), headers, **options)


class AsgiApi(Api):
    """A client of the same handlers, mounted in an application instead of listening."""

    def __init__(self, client: AsgiClient, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(0)
        self._client = client
        self._loop = loop

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> Reply:
        asking = self._client.ask(method, f"/models{path}", body, headers or {})
        answer = asyncio.run_coroutine_threadsafe(asking, self._loop).result(timeout_s)
        assert answer.is_complete
        return Reply(answer.status, answer.headers, answer.body)


def v2_of(catalog: Any, limits: HttpLimits | None = None) -> tuple[V2Http, ManagementApi]:
    control = Control(catalog, str(EXAMPLES), is_explicit=False)
    management = ManagementApi(catalog, control)
    models = Models(management, handle_generate=GenerateHttp(catalog).handle)
    return V2Http(models, limits or HttpLimits(), Gate()), management


async def run_until(
    stop: threading.Event, started: threading.Event, box: list[Api], how: str
) -> None:
    shards = Shards(1) if how == "shard" else None
    catalog = Catalog(start_life=ThreadLife, shards=shards)
    await catalog.load(RepositoryScan([*MODELS, *layout.read(EXAMPLES).configs]))
    assert not catalog.failures
    v2, management = v2_of(catalog)
    core = CoreApi(management, v2.handle, shards=shards)
    async with shard_on_loop(core) if shards is not None else own_server(v2) as listening:
        mounted = AsgiClient(AsgiHttp(v2, HttpLimits()).answer, "/models")
        asgi = AsgiApi(mounted, asyncio.get_running_loop())
        box.append(asgi if how == "asgi" else Api(listening.port))
        started.set()
        await asyncio.to_thread(stop.wait)
    await v2.close()
    await catalog.close()


@contextlib.asynccontextmanager
async def own_server(v2: V2Http) -> AsyncIterator[SimpleNamespace]:
    """The core's own listener."""
    handlers = {"prepare": v2.prepare, "rejected": v2.rejected}
    server = HttpServer(v2.handle, HttpLimits(), **handlers)
    yield SimpleNamespace(port=await server.start("127.0.0.1", 0))
    await server.close()


@pytest.fixture(scope="module")
def silence() -> Iterator[None]:
    """CPython 3.11 may fail when two threads format a traceback at once (gh-106905): the server's
    thread must not while pytest does."""
    loggers = [logging.getLogger(name) for name in ("asyncio", "penstock.http")]
    for logger in loggers:
        logger.disabled = True
    yield
    for logger in loggers:
        logger.disabled = False


@pytest.fixture(scope="module", params=["core", "shard", "asgi"])
def api(request: pytest.FixtureRequest, silence: None) -> Iterator[Api]:
    stop, started = threading.Event(), threading.Event()
    box: list[Api] = []
    thread = threading.Thread(
        target=lambda: asyncio.run(run_until(stop, started, box, request.param))
    )
    thread.start()
    try:
        assert started.wait(60)
        yield box[0]
    finally:
        stop.set()
        thread.join()


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> Any:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def sized(name: str, datatype: str, shape: list[int], size: int) -> Any:
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}


X = tensor("x", "INT32", [1, 4], [1, 2, 3, 4])
ECHO = {"inputs": [X]}
INTS = struct.Struct("<4i")


def outputs_of(reply: Reply) -> dict[str, bytes]:
    """The binary outputs of an answer, by name."""
    assert reply.headers["content-type"] == "application/octet-stream"
    length = int(reply.headers["inference-header-content-length"])
    position = length
    outputs: dict[str, bytes] = {}
    for output in json.loads(reply.body[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]] = reply.body[position : position + size]
        position += size
    assert position == len(reply.body)
    return outputs


async def test_answered_requests_are_freed_without_the_garbage_collector() -> None:
    """Otherwise it would have five objects of each to free, which costs 4 % of the CPU time."""

    def num_requests() -> int:
        return sum(type(each) is Request for each in gc.get_objects())

    catalog = Catalog(start_life=ThreadLife)
    await catalog.load(RepositoryScan(MODELS[:1]))
    v2, _ = v2_of(catalog)
    wrong = {"inputs": [tensor("x", "INT32", [1, 1], [1])]}
    statuses: list[int] = []
    gc.collect()
    gc.disable()
    try:
        before = num_requests()
        async with own_server(v2) as listening:
            api = Api(listening.port)
            for message in [ECHO, wrong] * 10:
                reply = await asyncio.to_thread(api.infer, "echo", message)
                statuses.append(reply.status)
            num_kept = num_requests() - before
    finally:
        gc.enable()
        await v2.close()
        await catalog.close()
    # The last ones may still be somewhere.
    assert statuses == [200, 400] * 10 and num_kept <= 2


# Inference.


def test_json_in_json_out(api: Api) -> None:
    reply = api.infer("echo", {**ECHO, "id": "seven"})
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == {
        "model_name": "echo",
        "model_version": "20",
        "id": "seven",
        "outputs": [tensor("OUT_x", "INT32", [1, 4], [1, 2, 3, 4])],
    }


def test_binary_in_binary_out(api: Api) -> None:
    data = INTS.pack(-1, 0, 1, 2**31 - 1)
    reply = api.infer(
        "echo",
        {
            "inputs": [sized("x", "INT32", [1, 4], 16)],
            "parameters": {"binary_data_output": True},
        },
        data,
    )
    assert reply.status == 200
    assert outputs_of(reply) == {"OUT_x": data}


def test_binary_in_json_out(api: Api) -> None:
    reply = api.infer("echo", {"inputs": [sized("x", "INT32", [1, 4], 16)]}, INTS.pack(4, 3, 2, 1))
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["outputs"][0]["data"] == [4, 3, 2, 1]


def test_an_onnx_model_answers_with_the_same_bits(api: Api) -> None:
    data = np.random.default_rng(0).normal(size=(3, 16)).astype("<f4").tobytes()
    message = {
        "inputs": [sized("INPUT0", "FP32", [3, 16], len(data))],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    }
    assert outputs_of(api.infer("identity", message, data)) == {"OUTPUT0": data}


def test_every_datatype_travels_both_ways_as_binary(api: Api) -> None:
    random = np.random.default_rng(1)
    inputs, tails = [], []
    for name, datatype in DATATYPES.items():
        if datatype.itemsize is None:
            tails.append(struct.pack("<I3sI0s", 3, b"\0\xff\0", 0, b""))
        elif name == "BOOL":
            tails.append(b"\0\1")
        else:
            tails.append(random.bytes(2 * datatype.itemsize))
        inputs.append(sized(name, name, [1, 2], len(tails[-1])))
    message = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    outputs = outputs_of(api.infer("types", message, b"".join(tails)))
    assert outputs == {f"OUT_{name}": tail for name, tail in zip(DATATYPES, tails, strict=True)}


def test_outputs_are_selected_in_the_order_asked_for_each_in_its_own_form(api: Api) -> None:
    message = {
        "inputs": [tensor("b", "FP32", [1, 2], [1, 2]), tensor("a", "INT32", [1, 1], [7])],
        "outputs": [
            {"name": "OUT_b", "parameters": {"binary_data": True}},
            {"name": "OUT_a", "parameters": {"binary_data": False}},
        ],
    }
    reply = api.infer("pair", message)
    length = int(reply.headers["inference-header-content-length"])
    first, second = json.loads(reply.body[:length])["outputs"]
    assert (first["name"], first["parameters"]) == ("OUT_b", {"binary_data_size": 8})
    assert (second["name"], second["data"]) == ("OUT_a", [7])
    assert reply.body[length:] == struct.pack("<2f", 1, 2)
    only = api.infer("pair", {**message, "outputs": [{"name": "OUT_a"}]})
    assert [output["name"] for output in only.json["outputs"]] == ["OUT_a"]


def test_a_version_may_be_named_and_the_highest_number_is_the_default(api: Api) -> None:
    for version in ("1", "3", "20"):
        assert api.infer(f"echo/versions/{version}", ECHO).json["model_version"] == version
    assert api.infer("echo", ECHO).json["model_version"] == "20"


def test_models_without_a_batch_dimension_and_of_variable_shape(api: Api) -> None:
    reply = api.infer("unbatched", {"inputs": [tensor("u", "FP64", [3], [1, 2, 3])]})
    assert reply.json["outputs"] == [tensor("OUT_u", "FP64", [3], [1, 2, 3])]
    reply = api.infer("variable", {"inputs": [tensor("v", "FP32", [2, 1, 2], [1, 2, 3, 4])]})
    assert reply.json["outputs"] == [tensor("OUT_v", "FP32", [2, 1, 2], [1, 2, 3, 4])]
    reply = api.infer("strings", {"inputs": [tensor("s", "BYTES", [1, 2], ["", "ü\0"])]})
    assert reply.json["outputs"] == [tensor("OUT_s", "BYTES", [1, 2], ["", "ü\0"])]


def test_query_strings_and_unknown_headers_are_ignored(api: Api) -> None:
    body = json.dumps(ECHO).encode()
    reply = api.ask("POST", "/v2/models/echo/infer?a=b&c", body, {"X-Anything": "goes"})
    assert reply.status == 200


def test_a_name_may_be_percent_encoded(api: Api) -> None:
    assert api.infer("%65cho", ECHO).status == 200


def test_nan_is_only_answered_as_binary(api: Api) -> None:
    data = struct.pack("<2f", np.nan, np.inf)
    message = {"inputs": [sized("v", "FP32", [1, 1, 2], 8)]}
    assert api.infer("variable", message, data).status == 400
    assert "OUT_v" in api.infer("variable", message, data).error
    message["parameters"] = {"binary_data_output": True}  # type: ignore[assignment]
    assert outputs_of(api.infer("variable", message, data)) == {"OUT_v": data}


def test_strings_that_are_not_utf8_are_only_answered_as_binary(api: Api) -> None:
    data = struct.pack("<I1s", 1, b"\xff")
    message = {"inputs": [sized("s", "BYTES", [1, 1], 5)]}
    assert "OUT_s" in api.infer("strings", message, data).error
    message["parameters"] = {"binary_data_output": True}  # type: ignore[assignment]
    assert outputs_of(api.infer("strings", message, data)) == {"OUT_s": data}


# Requests that do not fit the model.


@pytest.mark.parametrize(
    ("model", "message", "text"),
    [
        ("echo", {"inputs": [{**X, "name": "y"}]}, "unexpected inference input 'y'"),
        ("echo", {"inputs": [X, X]}, "input 'x' already exists in request"),
        ("echo", {"inputs": [tensor("x", "FP32", [1, 4], [1] * 4)]}, "input 'x' data-type is"),
        ("echo", {"inputs": [tensor("x", "INT32", [1, 3], [1] * 3)]}, "shape for input 'x'"),
        ("echo", {"inputs": [tensor("x", "INT32", [4], [1] * 4)]}, "shape for input 'x'"),
        ("echo", {"inputs": [tensor("x", "INT32", [], [1])]}, "shape for input 'x'"),
        ("echo", {"inputs": [tensor("x", "INT32", [1] * 100, [1])]}, "input 'x'"),
        ("echo", {"inputs": [tensor("x", "INT32", [9, 4], [1] * 36)]}, "batch-size must be <= 8"),
        ("echo", {"inputs": [tensor("x", "INT32", [0, 4], [])]}, "batch-size must be"),
        ("echo", {**ECHO, "outputs": [{"name": "z"}]}, "output 'z'"),
        ("echo", {**ECHO, "outputs": [{"name": "OUT_x"}] * 2}, "output 'OUT_x' already exists"),
        (
            "pair",
            {"inputs": [tensor("a", "INT32", [1, 1], [1])]},
            "expected 2 inputs but got 1 inputs for model",
        ),
        (
            "pair",
            {
                "inputs": [
                    tensor("a", "INT32", [1, 1], [1]),
                    tensor("b", "FP32", [2, 2], [1] * 4),
                ]
            },
            "batch size does not match",
        ),
        ("types", {"inputs": [tensor("FP16", "FP16", [1, 2], [1, 2])]}, "input 'FP16'"),
        ("echo", {"inputs": [tensor("x", "INT32", [16, 2**60 + 2], [1])]}, "input 'x'"),
        ("echo", {"inputs": [tensor("x", "INT32", [1, -4], [1])]}, "input 'x'"),
        ("echo", {"inputs": []}, "inputs"),
        ("echo", {}, "inputs"),
        ("echo", b"", "JSON"),
        ("echo", b"null", "JSON"),
        ("echo", b"[" * 100_000, "JSON"),
        ("echo", b"\xff\xfe", "JSON"),
    ],
)
def test_a_request_that_does_not_fit_is_400_and_says_why(
    api: Api, model: str, message: Any, text: str
) -> None:
    reply = api.infer(model, message)
    assert reply.status == 400
    assert text in reply.error
    assert api.infer("echo", ECHO).status == 200


def test_a_binary_tensor_has_exactly_the_bytes_of_its_shape(api: Api) -> None:
    for size in (0, 4, 15, 17, 20):
        reply = api.infer("echo", {"inputs": [sized("x", "INT32", [1, 4], size)]}, bytes(size))
        assert reply.status == 400
        text = f"input byte size mismatch for input 'x' for model 'echo'. Expected 16, got {size}"
        assert text in reply.error


def test_an_unknown_datatype_is_refused_for_binary_data_too(api: Api) -> None:
    for datatype in ("FP8", "int32", ""):
        reply = api.infer("echo", {"inputs": [sized("x", datatype, [1, 4], 16)]}, bytes(16))
        assert reply.status == 400
        assert "'x'" in reply.error


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00\x00",
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 0xFFFFFFFF) + b"abc",
        struct.pack("<I1s", 1, b"a"),
        struct.pack("<I1sI", 1, b"a", 1),
        struct.pack("<III", 0, 0, 0),
        bytes(7),
    ],
)
def test_string_tensors_hold_exactly_their_elements(api: Api, data: bytes) -> None:
    reply = api.infer("strings", {"inputs": [sized("s", "BYTES", [1, 2], len(data))]}, data)
    assert reply.status == 400
    assert "'s'" in reply.error


def test_invalid_utf8_in_a_string_tensor_is_400(api: Api) -> None:
    message = json.dumps({"inputs": [tensor("s", "BYTES", [1, 1], ["@"])]}).encode()
    assert api.infer("strings", message.replace(b"@", b"\xff")).status == 400


def test_a_timeout_that_no_float_can_hold_is_400(api: Api) -> None:
    assert api.infer("echo", {**ECHO, "parameters": {"timeout": 10**400}}).status == 400


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "strings",
            {"inputs": [tensor("s", "BYTES", [1, 1], ["a"])], "parameters": {"free": 2**70}},
        ),
        ("variable", {"inputs": [tensor("v", "FP32", [1, 2**70, 0], [])]}),
        ("unbatched", {"inputs": [tensor("u", "FP64", [0], [])], "parameters": {"free": -(2**70)}}),
    ],
)
def test_numbers_beyond_64_bits_are_400(api: Api, model: str, message: Any) -> None:
    assert api.infer(model, message, timeout_s=HANGS_S).status == 400


async def test_one_bad_request_does_not_take_others_with_it(serve: Any) -> None:
    config = null_model("strings", {"s": ("BYTES", (-1,))})
    config = replace(config, memory=MemoryPolicy(spill_bytes=1 << 16))
    catalog = Catalog(start_life=ThreadLife)
    await catalog.load(RepositoryScan([config]))
    v2, routes = v2_of(catalog)
    good = {"inputs": [tensor("s", "BYTES", [1, 1], ["x" * 10_000])]}
    bad = {**good, "parameters": {"free": 2**70}}
    async with serve(v2.handle) as served:
        try:
            async with asyncio.timeout(HANGS_S):
                for _ in range(10):
                    messages = [
                        infer_bytes(each, "/v2/models/strings/infer") for each in (good, bad)
                    ]
                    first, second = await asyncio.gather(*map(served.ask, messages))
                    assert (first.status, second.status) == (200, 400)
        finally:
            await v2.close()
            await catalog.close()


def test_a_model_that_fails_is_500_with_its_reason_and_lives_on(api: Api) -> None:
    message = {"inputs": [tensor("x", "INT32", [1, 4], [666, 0, 0, 0])]}
    reply = api.infer("echo/versions/1", message)
    assert reply.status == 500
    assert "null.fail_on" in reply.error
    assert api.infer("echo/versions/1", ECHO).status == 200


# The length of the JSON part.


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "+5",
        "abc",
        "",
        "1.5",
        "0x10",
        "1e2",
        "1_0",
        "9999",
        str(2**63),
        str(2**64 + 10),
        "9" * 5000,
    ],
)
def test_a_json_length_that_is_no_length_is_400(api: Api, value: str) -> None:
    body = json.dumps(ECHO).encode()
    headers = {"Inference-Header-Content-Length": value}
    reply = api.ask("POST", "/v2/models/echo/infer", body, headers)
    assert reply.status == 400
    assert "Inference-Header-Content-Length" in reply.error


def test_binary_data_without_a_json_length_is_400(api: Api) -> None:
    body = json.dumps({"inputs": [sized("x", "INT32", [1, 4], 16)]}).encode()
    reply = api.ask("POST", "/v2/models/echo/infer", body + bytes(16))
    assert reply.status == 400
    assert reply.error


def test_a_json_length_that_cuts_the_json_is_400(api: Api) -> None:
    body = json.dumps(ECHO).encode()
    for length in (1, len(body) - 1):
        headers = {"Inference-Header-Content-Length": str(length)}
        assert api.ask("POST", "/v2/models/echo/infer", body, headers).status == 400


@pytest.mark.parametrize(("model", "size", "status"), [("echo", 3, 400), ("identity", 64, 200)])
def test_a_raw_request_must_fill_the_input(api: Api, model: str, size: int, status: int) -> None:
    headers = {"Inference-Header-Content-Length": "0"}
    reply = api.ask("POST", f"/v2/models/{model}/infer", bytes(size), headers)
    assert reply.status == status


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_its_encoding_says_is_400(api: Api, encoding: str) -> None:
    body = json.dumps(ECHO).encode()
    reply = api.ask("POST", "/v2/models/echo/infer", body, {"Content-Encoding": encoding})
    assert reply.status == 400
    assert encoding in reply.error


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "zstd"])
def test_an_encoding_that_is_not_supported_is_415(api: Api, encoding: str) -> None:
    body = json.dumps(ECHO).encode()
    reply = api.ask("POST", "/v2/models/echo/infer", body, {"Content-Encoding": encoding})
    assert reply.status == 415
    assert encoding in reply.error


def test_an_identity_encoding_is_none(api: Api) -> None:
    body = json.dumps(ECHO).encode()
    reply = api.ask("POST", "/v2/models/echo/infer", body, {"Content-Encoding": "identity"})
    assert reply.status == 200


# Names, versions and routes.


def test_an_unknown_model_is_404_with_tritons_words(api: Api) -> None:
    text = "Request for unknown model: 'nope' is not found"
    for reply in (
        api.infer("nope", ECHO),
        api.get("/v2/models/nope"),
        api.get("/v2/models/nope/ready"),
    ):
        assert reply.status == 404
        assert reply.error.startswith(text)
        assert "; loaded: digits, echo, " in reply.error


def test_an_unknown_version_is_404_and_lists_those_that_exist(api: Api) -> None:
    for reply in (api.infer("echo/versions/99", ECHO), api.get("/v2/models/echo/versions/99")):
        assert reply.status == 404
        assert "'echo' version 99 is not found" in reply.error
        assert "1, 3, 20" in reply.error


HUGE_VERSION = "9" * 5000
VERSIONS = ["0", "-1", "01", "001", "1e3", "1.0", "+1", "9" * 20, "%D9%A1", "%20", "1%20", "latest"]


@pytest.mark.parametrize("version", [*VERSIONS, pytest.param(HUGE_VERSION, id="5000 digits")])
def test_no_infer_route_takes_a_version_that_is_not_there(api: Api, version: str) -> None:
    reply = api.infer(f"echo/versions/{version}", ECHO)
    assert reply.status == 404
    assert reply.error


@pytest.mark.parametrize("route", ["", "/ready"])
@pytest.mark.parametrize(
    "version",
    [
        *(version for version in VERSIONS if not version.startswith("0") or version == "0"),
        pytest.param("01"),
        pytest.param(
            HUGE_VERSION,
            id="5000 digits",
        ),
    ],
)
def test_no_other_route_takes_a_version_that_is_not_there(
    api: Api, version: str, route: str
) -> None:
    reply = api.get(f"/v2/models/echo/versions/{version}{route}")
    assert reply.status == 404
    assert reply.error


@pytest.mark.parametrize(
    ("method", "route"),
    [("GET", ""), ("GET", "/ready"), ("GET", "/config"), ("GET", "/stats"), ("GET", "/explain")]
    + [("POST", "/infer"), ("POST", "/generate"), ("POST", "/generate_stream")],
)
@pytest.mark.parametrize("version", ["AAA", "1.0", "01", "-1", "99"])
def test_every_route_says_which_version_is_not_found(
    api: Api, method: str, route: str, version: str
) -> None:
    reply = api.ask(method, f"/v2/models/echo/versions/{version}{route}", b"{}")
    assert reply.status == 404
    assert f"'echo' version {version} is not found; loaded: 1, 3, 20" in reply.error


HOSTILE_NAMES = [
    "..",
    ".",
    "%2e%2e",
    "%2e%2e%2fetc",
    "..%2f..%2fetc%2fpasswd",
    "a%2F..%2Fb",
    "%2Fetc%2Fpasswd",
    "..;",
    "%20",
    "%20..",
    "%ff%fe",
    "%ed%a0%80",
    "%zz",
    "%",
    "%F0%9F%98%80",
    "%D0%B5cho",
    "ECHO",
    "a" * 3000,
    "%22%5C%3Cscript%3E",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_404_on_every_route_and_harm_nothing(api: Api, name: str) -> None:
    path = f"/v2/models/{name}"
    replies = [
        api.infer(name, ECHO),
        api.infer(f"{name}/versions/1", ECHO),
        *(api.get(path + rest) for rest in ("", "/ready", "/versions/1", "/versions/1/ready")),
    ]
    for reply in replies:
        assert reply.status == 404
        assert "x-injected" not in reply.headers
        assert reply.error
    assert api.get("/v2/health/ready").status == 200


@pytest.mark.parametrize(
    "name", ["echo%00", "echo%0d%0aX-Injected:%20yes", "%1b[31m", "echo%0A", "echo%7f"]
)
def test_encoded_control_characters_are_400_on_every_route(api: Api, name: str) -> None:
    path = f"/v2/models/{name}"
    for reply in (
        api.infer(name, ECHO),
        api.infer(f"echo/versions/{name}", ECHO),
        *(api.get(path + rest) for rest in ("", "/ready", "/versions/1", "/versions/1/ready")),
    ):
        assert reply.status == 400
        assert "x-injected" not in reply.headers
        assert "control character" in reply.error
    assert api.get("/v2/health/ready").status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/V2", 404),
        ("GET", "//v2", 404),
        ("GET", "/v2/nowhere", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/echo/nowhere", 404),
        ("GET", "/v2/models/echo/versions", 404),
        ("GET", "/v2/models/echo/versions/1/nowhere", 404),
        ("POST", "/v2/models//infer", 404),
        ("POST", "/v2/models/echo//infer", 404),
        ("POST", "/v2/models/echo/infer/", 404),
        ("POST", "/v2/models/echo/INFER", 404),
        ("POST", "/v2%2Fmodels/echo/infer", 404),
        ("GET", "/docs", 404),
        ("GET", "/..%2f..%2fetc%2fpasswd", 404),
        ("POST", "/v2", 405),
        ("POST", "/v2/health/live", 405),
        ("DELETE", "/v2/models/echo", 405),
        ("PUT", "/v2/models/echo/ready", 405),
        ("OPTIONS", "/v2", 405),
        ("TRACE", "/v2", 405),
        ("POST", "/metrics", 405),
        ("GET", "/v2/models/echo/infer", 405),
        ("PUT", "/v2/models/echo/infer", 405),
        ("GET", "/v2/models/nope/versions/1/infer", 405),
    ],
)
def test_wrong_paths_and_methods_are_json_errors(
    api: Api, method: str, path: str, status: int
) -> None:
    reply = api.ask(method, path)
    assert reply.status == status
    assert reply.error


def test_the_error_for_an_unknown_path_is_tritons_and_names_it(api: Api) -> None:
    assert api.get("/v2/nowhere?x=1").error == "Not Found: there is no /v2/nowhere here"
    assert len(api.get("/" + "x" * 5000).error) < 300


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/v2/systemsharedmemory/status", "start it with --shared-memory"),
        ("POST", "/v2/cudasharedmemory/region/r/unregister", "start it with --shared-memory"),
    ],
)
def test_what_is_missing_of_the_protocol_says_so(
    api: Api, method: str, path: str, words: str
) -> None:
    reply = api.ask(method, path)
    assert reply.status == 501
    assert words in reply.error


@pytest.mark.parametrize(
    ("path", "allowed"), [("/v2/models/echo/infer", "POST"), ("/v2/health/live", "GET")]
)
def test_a_wrong_method_is_told_the_right_one(api: Api, path: str, allowed: str) -> None:
    assert allowed in api.ask("DELETE", path).headers["allow"]


@pytest.mark.parametrize("path", ["/v2//", "/v2/models/echo/", "/v2/health/live/"])
def test_a_path_with_one_slash_too_many_is_not_redirected(api: Api, path: str) -> None:
    reply = api.ask("GET", path, headers={"Host": "evil.example"})
    assert "location" not in reply.headers
    assert reply.status == 404


def test_head_of_an_error_has_no_body(api: Api) -> None:
    for path, status in (("/v2/models/nope", 404), ("/v2/models/echo/infer", 405)):
        reply = api.ask("HEAD", path)
        assert (reply.status, reply.body) == (status, b"")


# Metadata, health, metrics.


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
def test_server_metadata(api: Api, path: str) -> None:
    message = api.get(path).json
    assert message["name"] == "penstock"
    assert message["version"] == penstock.__version__
    assert "binary_tensor_data" in message["extensions"]


def test_model_metadata(api: Api) -> None:
    expected = {
        "name": "echo",
        "versions": ["1", "3", "20"],
        "platform": "null",
        "inputs": [{"name": "x", "datatype": "INT32", "shape": [-1, 4]}],
        "outputs": [{"name": "OUT_x", "datatype": "INT32", "shape": [-1, 4]}],
    }
    assert api.get("/v2/models/echo").json == expected
    assert api.get("/v2/models/echo/versions/3").json == expected
    assert api.get("/v2/models/unbatched").json["inputs"][0]["shape"] == [-1]
    assert api.get("/v2/models/identity").json["platform"] == "onnxruntime_onnx"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/echo/ready", {"name": "echo", "ready": True}),
        ("/v2/models/echo/versions/1/ready", {"name": "echo", "ready": True}),
    ],
)
def test_health_and_readiness_have_the_bodies_of_the_protocol(
    api: Api, path: str, body: dict[str, object]
) -> None:
    reply = api.get(path)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == body
    head = api.ask("HEAD", path)
    assert (head.status, head.body) == (200, b"")


def samples(api: Api) -> dict[tuple[str, ...], float]:
    """Metric values of models by name, model, version and, where there is one, reason."""
    reply = api.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    found: dict[tuple[str, ...], float] = {}
    for line in reply.body.decode().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match
            of = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if "model" in of:
                others = [
                    of[label] for label in ("reason", "le", "cause", "process") if label in of
                ]
                found[(match[1], of["model"], of["version"], *others)] = float(match[3])
    return found


def test_metrics_count_requests_rows_batches_and_failures(api: Api) -> None:
    before = samples(api)
    api.infer("pair", {"inputs": []})
    for rows in (1, 3):
        message = {
            "inputs": [
                tensor("a", "INT32", [rows, 1], [1] * rows),
                tensor("b", "FP32", [rows, 2], [1] * 2 * rows),
            ]
        }
        assert api.infer("pair", message).status == 200
    api.infer("pair", {"inputs": [tensor("a", "INT32", [1, 1], [1])]})
    after = samples(api)

    def grown(name: str, *reason: str) -> float:
        key = (name, "pair", "1", *reason)
        return after[key] - before[key]

    assert grown("nv_inference_request_success") == 2
    assert grown("nv_inference_count") == 4
    assert grown("nv_inference_exec_count") == 2
    assert grown("nv_inference_request_failure", "OTHER") == 2
    assert grown("penstock_rejections", "invalid") == 2
    assert grown("nv_inference_request_failure", "BACKEND") == 0
    assert after["nv_inference_pending_request_count", "pair", "1"] == 0


HEADER_BYTES = "Inference-Header-Content-Length"
LIMITS = HttpLimits()


@pytest.mark.parametrize(
    ("headers", "status", "reason", "size"),
    [
        ({"Content-Encoding": "br"}, 415, "unsupported", 9),
        ({"Content-Encoding": "gzip"}, 400, "invalid", 9),
        ({HEADER_BYTES: "abc"}, 400, "invalid", 9),
        ({HEADER_BYTES: "10"}, 400, "invalid", 9),
        ({}, 413, "too_large", LIMITS.max_json_bytes + 1),
    ],
)
def test_requests_that_are_refused_before_they_are_decoded_are_failures_of_their_model(
    api: Api, headers: dict[str, str], status: int, reason: str, size: int
) -> None:
    before = samples(api)
    for path in ("/v2/models/pair/infer", "/v2/models/stranger/infer"):
        assert api.ask("POST", path, b"x" * size, headers).status == status
    after = samples(api)
    for key in ("nv_inference_request_failure", "OTHER"), ("penstock_rejections", reason):
        key = (key[0], "pair", "1", key[1])
        assert after[key] - before[key] == 1


def test_metrics_have_tritons_names(api: Api) -> None:
    names = {key[0] for key in samples(api)}
    phases = ("request", "queue", "compute_input", "compute_infer", "compute_output")
    assert {
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_pending_request_count",
        *(f"nv_inference_{phase}_duration_us" for phase in phases),
    } <= names


def test_unknown_models_do_not_become_metrics(api: Api) -> None:
    before = len(samples(api))
    for number in range(200):
        api.infer(f"stranger{number}", ECHO)
    assert len(samples(api)) == before


# With a model that does what the test says.


class Puppet:
    """A Servable that answers as told, or not at all."""

    config = MODELS[0]
    is_ready = True

    def __init__(self, answer: Response | PenstockError | None = None) -> None:
        self.answer = answer
        self.submitted: asyncio.Queue[Request] = asyncio.Queue()
        self.cancelled: asyncio.Queue[Request] = asyncio.Queue()
        self.refusals: list[PenstockError] = []

    def submit(self, request: Request) -> None:
        self.submitted.put_nowait(request)
        if self.answer is not None:
            request.respond(self.answer)

    def cancel(self, request: Request) -> None:
        self.cancelled.put_nowait(request)

    def refused(self, error: PenstockError, received: float) -> None:
        self.refusals.append(error)


class OneModel:
    """A catalog of one model, which may also fail to be found."""

    is_ready = True
    failures = ()
    shards = None
    splits = ()
    regions = RegionTable()
    tracer = Tracer()
    memory = SimpleNamespace(families=list)
    forwarding: Mapping[str, HeaderForwarding] = {}

    def __init__(self, model: Puppet, error: Exception | None = None) -> None:
        self._model = model
        self._error = error

    def count_request(self, caller: bytes, received: float, name: str, version: str) -> None:
        pass

    def find(self, name: str, version: str = "") -> Puppet:
        if self._error is not None:
            raise self._error
        return self._model

    def versions(self, name: str) -> list[str]:
        return ["1"]

    def pending(self) -> list[Any]:
        raise RuntimeError("secret")


@contextlib.asynccontextmanager
async def puppeteer(
    serve: Any,
    answer: Response | PenstockError | None = None,
    error: Exception | None = None,
    limits: HttpLimits | None = None,
) -> AsyncIterator[tuple[Any, Puppet, Lifecycle]]:
    puppet = Puppet(answer)
    v2, management = v2_of(OneModel(puppet, error), limits)
    async with serve(v2.handle, limits) as served:
        try:
            yield served, puppet, management.lifecycle
        finally:
            await v2.close()


def infer_bytes(message: Any = ECHO, path: str = "/v2/models/m/infer") -> bytes:
    body = json.dumps(message).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        len(body),
        body,
    )


def get_bytes(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


EXPECTED_STATUS = [
    (InvalidRequest("why"), 400),
    (TooLarge("why"), 413),
    (NotFound("why"), 404),
    (NotReady("why"), 503),
    (Overloaded("why"), 503),
    (DeadlineExceeded("why"), 504),
    (Unsupported("why"), 501),
    (BackendFailed("why"), 500),
    (ConfigError(["why"]), 500),
    pytest.param(
        Cancelled("why"),
        499,
    ),
]


@pytest.mark.parametrize(("error", "status"), EXPECTED_STATUS)
async def test_every_error_has_its_status_and_its_text(
    serve: Any, error: PenstockError, status: int
) -> None:
    async with puppeteer(serve, answer=error) as (served, _, _), asyncio.timeout(HANGS_S):
        answer = await served.ask(infer_bytes())
        assert answer.status == status
        assert json.loads(answer.body) == {"error": "why"}
    async with puppeteer(serve, error=error) as (served, _, _), asyncio.timeout(HANGS_S):
        for message in (infer_bytes(), get_bytes("/v2/models/m"), get_bytes("/v2/models/m/ready")):
            answer = await served.ask(message)
            assert answer.status == status
            assert json.loads(answer.body) == {"error": "why"}


def test_no_error_of_a_request_is_without_a_status() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, PenstockError)
    }
    own = {kind for kind in classes if issubclass(kind, ConfigError)}
    # Callers in Python get it, for many prompts at once.
    local = {errors.PromptsFailed}
    assert set(STATUSES) == classes - own - local - {PenstockError}


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.01, "1"), (1.0, "1"), (2.3, "3")])
async def test_overload_says_when_to_come_back(
    serve: Any, retry_after_s: float, header: str
) -> None:
    error = Overloaded("Exceeds maximum queue size", retry_after_s)
    async with puppeteer(serve, answer=error) as (served, _, _):
        answer = await served.ask(infer_bytes())
    assert (answer.status, answer.headers["retry-after"]) == (503, header)


async def test_a_full_queue_is_refused_with_tritons_words_while_others_are_served(
    serve: Any,
) -> None:
    config = null_model("busy", {"x": ("INT32", (4,))}, max_batch_size=1, a_ms="100")
    config = replace(
        config, batching=BatchPolicy(1, True, policies=(QueuePolicy(max_queue_size=1),))
    )
    catalog = Catalog(start_life=ThreadLife)
    await catalog.load(RepositoryScan([config]))
    v2, routes = v2_of(catalog)
    async with serve(v2.handle) as served:
        message = infer_bytes(path="/v2/models/busy/infer")
        answers = await asyncio.gather(*(served.ask(message) for _ in range(8)))
    await v2.close()
    await catalog.close()
    refused = [answer for answer in answers if answer.status != 200]
    assert 1 <= len(refused) < 8
    for answer in refused:
        assert answer.status == 503
        assert "Exceeds maximum queue size" in json.loads(answer.body)["error"]
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_cancels_its_request(serve: Any) -> None:
    async with puppeteer(serve) as (served, puppet, _):
        async with served.connect() as client:
            await client.send(infer_bytes())
            request = await puppet.submitted.get()
        assert await puppet.cancelled.get() is request


async def test_priority_timeout_and_parameters_reach_the_model(serve: Any) -> None:
    parameters = {"priority": 2, "timeout": 1500, "mine": "x"}
    async with puppeteer(serve) as (served, puppet, _), served.connect() as client:
        await client.send(infer_bytes({**ECHO, "id": "7", "parameters": parameters}))
        request = await puppet.submitted.get()
        assert (request.id, request.priority, request.parameters) == ("7", 2, {"mine": "x"})
        assert request.timeout_s == pytest.approx(0.0015)
        request.respond(Response("m", "1", [Tensor("y", "INT8", (1,), b"\x05")]))
        assert json.loads((await client.answer()).body)["outputs"][0]["data"] == [5]


async def test_draining_refuses_inference_and_finishes_what_was_accepted(serve: Any) -> None:
    async with puppeteer(serve) as (served, puppet, lifecycle), served.connect() as client:
        await client.send(infer_bytes())
        request = await puppet.submitted.get()
        lifecycle.drain()
        served.http.lifecycle.drain()
        for message in (
            infer_bytes(),
            get_bytes("/v2/health/ready"),
            get_bytes("/v2/models/m/ready"),
        ):
            answer = await served.ask(message)
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert json.loads(answer.body)["error"]
        assert (await served.ask(get_bytes("/v2/health/live"))).status == 200
        request.respond(Response("m", "1", [Tensor("y", "INT8", (1,), b"\x05")]))
        assert (await client.answer()).status == 200
        assert puppet.submitted.empty()


async def test_a_server_that_loads_is_live_and_not_ready(serve: Any) -> None:
    async with puppeteer(serve) as (served, _, lifecycle):
        lifecycle.is_loading = True
        assert (await served.ask(get_bytes("/v2/health/live"))).status == 200
        answer = await served.ask(get_bytes("/v2/health/ready"))
        assert answer.status == 503
        assert "loading" in json.loads(answer.body)["error"]


async def test_a_model_that_cannot_be_loaded_is_named_and_the_others_serve(serve: Any) -> None:
    catalog = Catalog(start_life=ThreadLife)
    broken = null_model("broken", {"x": ("INT32", (4,))}, a_ms="not a number")
    await catalog.load(RepositoryScan([broken, MODELS[0]]))
    v2, _ = v2_of(catalog)
    async with serve(v2.handle) as served:
        answer = await served.ask(get_bytes("/v2/health/ready"))
        assert answer.status == 503
        assert "broken (parameters.null.a_ms: 'not a number'" in json.loads(answer.body)["error"]
        for path in ("", "/ready", "/config", "/stats", "/explain", "/versions/1"):
            answer = await served.ask(get_bytes(f"/v2/models/broken{path}"))
            assert answer.status == 503
            assert "'not a number' is not a number" in json.loads(answer.body)["error"]
        answer = await served.ask(infer_bytes(path="/v2/models/broken/infer"))
        assert answer.status == 503
        assert "'broken' could not be loaded: " in json.loads(answer.body)["error"]
        assert (await served.ask(get_bytes("/v2/models/echo/ready"))).status == 200
        answer = await served.ask(infer_bytes(path="/v2/models/echo/infer"))
        assert answer.status == 200
    await v2.close()
    await catalog.close()


async def test_the_json_part_is_limited_and_the_binary_part_is_not(serve: Any) -> None:
    limits = HttpLimits(max_json_bytes=300)
    answer = Response("m", "1", [Tensor("y", "INT8", (1,), b"\x05")])
    async with puppeteer(serve, answer=answer, limits=limits) as (served, puppet, _):
        reply = await served.ask(infer_bytes({**ECHO, "id": "i" * 300}))
        assert reply.status == 413
        assert "300 bytes" in json.loads(reply.body)["error"]
        assert puppet.submitted.empty()
        head = json.dumps({"inputs": [sized("x", "INT8", [1000], 1000)]}).encode()
        message = (
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n%b" % (len(head) + 1000, len(head), head)
        )
        assert (await served.ask(message + bytes(1000))).status == 200


async def test_two_json_lengths_are_refused(serve: Any) -> None:
    answer = Response("m", "1", [Tensor("y", "INT8", (1,), b"\x05")])
    head = json.dumps({"inputs": [sized("x", "INT8", [4], 4)]}).encode()
    message = (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
        b"Inference-Header-Content-Length: 2\r\nInference-Header-Content-Length: %d\r\n\r\n%b"
        % (len(head) + 4, len(head), head)
    )
    async with puppeteer(serve, answer=answer) as (served, _, _):
        assert (await served.ask(message + bytes(4))).status == 400


@pytest.mark.parametrize(
    "message",
    [
        infer_bytes(),
        pytest.param(
            get_bytes("/v2/models/m"),
        ),
        pytest.param(
            get_bytes("/metrics"),
        ),
    ],
    ids=["infer", "metadata", "metrics"],
)
async def test_our_own_failure_is_a_500_in_json_without_details(serve: Any, message: bytes) -> None:
    async with puppeteer(serve, error=RuntimeError("secret")) as (served, _, _):
        answer = await served.ask(message)
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert set(json.loads(answer.body)) == {"error"}


async def test_an_answer_that_cannot_be_encoded_is_a_500(serve: Any) -> None:
    broken = Response("m", "1", [Tensor("y", "BYTES", (1,), b"\xff\xff\xff\xff")])
    body = gzip.compress(json.dumps(ECHO).encode())
    packed = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
    packed += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    for message in (infer_bytes(), packed):
        async with puppeteer(serve, answer=broken) as (served, _, _), asyncio.timeout(HANGS_S):
            answer = await served.ask(message)
        assert (answer.status, json.loads(answer.body)) == (500, {"error": "internal error"})


async def test_our_own_failure_behind_compression_is_a_500(serve: Any) -> None:
    body = gzip.compress(json.dumps(ECHO).encode())
    message = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
    message += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    async with puppeteer(serve, error=RuntimeError("secret")) as (served, _, _):
        async with asyncio.timeout(HANGS_S):
            answer = await served.ask(message)
    assert (answer.status, json.loads(answer.body)) == (500, {"error": "internal error"})
