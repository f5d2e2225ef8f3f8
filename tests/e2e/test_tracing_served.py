"""Tracing by Triton's settings, over HTTP and gRPC, with one shard and two."""

import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served, null_model
from tritonclient.utils import InferenceServerException
from waiting import wait_until

OFF = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}
CLEARED = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# What Triton's trace_summary.py computes, from one moment to another.
SPANS = [
    ("HTTP_RECV_START", "HTTP_SEND_END"),
    ("HTTP_RECV_START", "HTTP_RECV_END"),
    ("HTTP_SEND_START", "HTTP_SEND_END"),
    ("REQUEST_START", "REQUEST_END"),
    ("QUEUE_START", "COMPUTE_START"),
    ("COMPUTE_START", "COMPUTE_END"),
    ("COMPUTE_START", "COMPUTE_INPUT_END"),
    ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
]


@dataclass
class Traced:
    """A server that traces to a file, and its clients."""

    server: Served
    http: httpclient.InferenceServerClient
    grpc: grpcclient.InferenceServerClient
    path: Path

    def ask(self, count: int, model: str = "a") -> None:
        for number in range(count):
            self.server.post(f"/v2/models/{model}/infer", body_of(number, str(number)))

    def entries(self, name: str = "") -> list[dict[str, Any]]:
        path = Path(f"{self.path}{name}")
        return json.loads(path.read_text()) if path.exists() else []

    def num_written(self) -> int:
        return num_traces(self.server, "written")


def body_of(value: int, name: str = "") -> bytes:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    return json.dumps({"id": name, "inputs": [tensor]}).encode()


def ensemble_model(root: Path, name: str, **members: str) -> None:
    """Add an ensemble of models INT32 [1] -> [1], one after the other."""
    (root / name / "1").mkdir(parents=True)
    tensors = ["x", *(f"after_{number}" for number in range(1, len(members))), "y"]
    steps = [
        f'step {{ model_name: "{member}" model_version: -1 '
        f'input_map {{ key: "x" value: "{taken}" }} output_map {{ key: "y" value: "{made}" }} }}'
        for member, (taken, made) in zip(members, pairwise(tensors), strict=True)
    ]
    (root / name / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 4 '
        'input { name: "x" data_type: TYPE_INT32 dims: 1 } '
        'output { name: "y" data_type: TYPE_INT32 dims: 1 } '
        f"ensemble_scheduling {{ {' '.join(steps)} }}"
    )


def num_traces(server: Served, outcome: str) -> int:
    text = server.get("/metrics")[1].decode()
    start = f'penstock_traces_total{{outcome="{outcome}"}} '
    [line] = [line for line in text.splitlines() if line.startswith(start)]
    return int(line.split()[-1])


def started(root: Path, shards: str, *flags: str) -> Served:
    server = Served(root, "--shards", shards, *flags, grpc=True)
    if shards != "1":
        wait_until(lambda: server.has_shards(int(shards)))
    return server


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def traced(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Traced]:
    root = tmp_path_factory.mktemp("traced")
    null_model(root / "models", "a")
    null_model(root / "models", "b")
    ensemble_model(root / "models", "whole", a="", b="")
    ensemble_model(root / "models", "outer", whole="", a="")
    path = root / "trace.json"
    with started(root / "models", request.param, "--trace-config", f"triton,file={path}") as server:
        http = httpclient.InferenceServerClient(server.address)
        grpc = grpcclient.InferenceServerClient(server.grpc_address)
        yield Traced(server, http, grpc, path)
        http.close()
        grpc.close()


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> None:
    """Each test begins with the settings of the start."""
    if "traced" in request.fixturenames:
        found: Traced = request.getfixturevalue("traced")
        for model in ("a", "b", "outer", None):
            found.http.update_trace_settings(model, CLEARED)


def test_settings_over_http(traced: Traced) -> None:
    expected = OFF | {"trace_file": str(traced.path)}
    assert traced.http.get_trace_settings() == expected
    changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "3", "trace_count": "7"}
    assert traced.http.update_trace_settings("a", changes) == expected | changes
    assert traced.http.get_trace_settings("b") == expected
    assert (
        traced.http.update_trace_settings(settings={"log_frequency": "2"})["log_frequency"] == "2"
    )
    assert traced.http.get_trace_settings("a")["log_frequency"] == "2"
    cleared = traced.http.update_trace_settings("a", {"trace_level": None, "trace_rate": None})
    assert cleared == expected | {"trace_count": "7", "log_frequency": "2"}


def test_settings_over_grpc(traced: Traced) -> None:
    def values(message: Any) -> dict[str, list[str]]:
        return {name: list(each.value) for name, each in message.settings.items()}

    expected = {
        name: value if isinstance(value, list) else [value]
        for name, value in (OFF | {"trace_file": str(traced.path)}).items()
    }
    assert values(traced.grpc.get_trace_settings()) == expected
    changes = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "3"}
    changed = expected | {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["3"]}
    assert values(traced.grpc.update_trace_settings("a", changes)) == changed
    assert values(traced.grpc.get_trace_settings("b")) == expected
    back = traced.grpc.update_trace_settings("a", {"trace_level": [], "trace_rate": None})
    assert values(back) == expected


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        (None, {"trace_file": "/tmp/x"}, "can not be updated through network protocol"),
        (None, {"trace_rate": "x"}, "Unable to parse 'trace_rate', got: x"),
        (None, {"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF'"),
        ("c", {"trace_rate": "1"}, "Request for unknown model"),
    ],
)
def test_both_protocols_refuse(
    traced: Traced, model: str | None, settings: dict[str, Any], problem: str
) -> None:
    for client in (traced.http, traced.grpc):
        with pytest.raises(InferenceServerException, match=problem):
            client.update_trace_settings(model, settings)
    assert traced.http.get_trace_settings()["trace_rate"] == "1000"


@pytest.mark.parametrize("body", [b"[]", b"{", b"7", b'{"trace_level": 5}', b"\xff"])
def test_bodies_that_are_no_settings_are_a_400(traced: Traced, body: bytes) -> None:
    assert traced.server.post("/v2/trace/setting", body)[0] == 400


def test_a_get_changes_nothing(traced: Traced) -> None:
    url = f"http://{traced.server.address}/v2/trace/setting"
    asked = urllib.request.Request(url, b'{"trace_rate": "5"}', method="GET")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.loads(answer.read())["trace_rate"] == "1000"


def test_every_moment_of_a_traced_request_is_in_the_file(traced: Traced) -> None:
    before = len({each["id"] for each in traced.entries()})
    traced.http.update_trace_settings("a", {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"})
    traced.ask(3)
    traced.ask(3, "b")
    x = grpcclient.InferInput("x", [1, 1], "INT32")
    x.set_data_from_numpy(np.array([[1]], np.int32))
    traced.grpc.infer("a", [x], request_id="by grpc")
    entries: list[dict[str, Any]] = []

    def is_written() -> bool:
        entries[:] = traced.entries()
        return len({each["id"] for each in entries}) == before + 4

    wait_until(is_written)
    new = [each for each in entries if each["id"] > before]
    named = [each for each in new if "model_name" in each]
    assert {(each["model_name"], each["model_version"]) for each in named} == {("a", 1)}
    names = {each["id"]: each["request_id"] for each in named}
    assert sorted(names.values()) == ["0", "1", "2", "by grpc"]
    for number, name in names.items():
        moments = {
            moment["name"]: moment["ns"]
            for each in new
            if each["id"] == number
            for moment in each.get("timestamps", ())
        }
        for start, end in SPANS:
            if name == "by grpc":
                start, end = (text.replace("HTTP_RECV", "GRPC_WAITREAD") for text in (start, end))
                start, end = (text.replace("HTTP_SEND", "GRPC_SEND") for text in (start, end))
            assert moments[start] <= moments[end]


def test_members_of_an_ensemble_are_children_in_the_file(traced: Traced) -> None:
    before = len(traced.entries())
    changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    traced.http.update_trace_settings("outer", changes)
    traced.ask(2, "outer")
    entries: list[dict[str, Any]] = []

    def is_written() -> bool:
        entries[:] = traced.entries()[before:]
        return sum(each.get("model_name") == "outer" for each in entries) == 2

    wait_until(is_written)
    named = {each["id"]: each for each in entries if "model_name" in each}
    paths = Counter(path_to(named, each) for each in named)
    assert paths == {
        "outer": 2,
        "outer/whole": 2,
        "outer/whole/a": 2,
        "outer/whole/b": 2,
        "outer/a": 2,
    }
    for number, each in named.items():
        moments = {
            moment["name"]: moment["ns"]
            for entry in entries
            if entry["id"] == number
            for moment in entry.get("timestamps", ())
        }
        assert moments["REQUEST_START"] <= moments["REQUEST_END"]
        assert ("COMPUTE_START" in moments) == (each["model_name"] in ("a", "b"))


def path_to(named: dict[int, dict[str, Any]], number: int) -> str:
    """The models of a trace and of those around it, the outermost first."""
    each = named[number]
    around = f"{path_to(named, each['parent_id'])}/" if "parent_id" in each else ""
    return around + each["model_name"]


def test_a_count_is_exact_and_a_frequency_makes_files(traced: Traced) -> None:
    before = traced.num_written()
    changes = {"trace_level": ["TENSORS"], "trace_rate": "1", "trace_count": "5"}
    traced.http.update_trace_settings(settings={**changes, "log_frequency": "2"})
    traced.ask(20)
    wait_until(lambda: traced.num_written() == before + 5)
    assert traced.http.get_trace_settings()["trace_count"] == "0"
    traced.ask(5)
    assert traced.num_written() == before + 5
    found = [each for name in (".0", ".1", ".2") for each in traced.entries(name)]
    tensors = [each for each in found if "tensor" in each]
    assert Counter(each["activity"] for each in tensors) == {
        "TENSOR_QUEUE_INPUT": 5,
        "TENSOR_BACKEND_OUTPUT": 5,
    }
    data = {each["tensor"]["data"] for each in tensors if each["tensor"]["name"] == "x"}
    assert data == set(map(str, range(5)))


def test_a_sample_is_one_in_so_many(traced: Traced) -> None:
    before = traced.num_written()
    traced.http.update_trace_settings("b", {"trace_level": ["TIMESTAMPS"], "trace_rate": "4"})
    connection = traced.http
    x = httpclient.InferInput("x", [1, 1], "INT32")
    x.set_data_from_numpy(np.array([[1]], np.int32))
    # One connection stays with one shard.
    for _ in range(9):
        connection.infer("b", [x])
    wait_until(lambda: traced.num_written() == before + 3)


def test_the_extension_is_listed(traced: Traced) -> None:
    assert "trace" in traced.http.get_server_metadata()["extensions"]


def test_without_a_file_a_level_is_refused(tmp_path: Path) -> None:
    null_model(tmp_path, "a")
    with Served(tmp_path) as server:
        status, answer = server.post("/v2/trace/setting", b'{"trace_level": ["TIMESTAMPS"]}')
        assert status == 400 and b"--trace-config triton,file=FILE" in answer
        assert json.loads(server.get("/v2/trace/setting")[1])["trace_level"] == ["OFF"]


@dataclass
class Receiver:
    """A collector that keeps the spans it gets."""

    spans: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in body["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        outer.spans += scope["spans"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_spans_continue_the_traces_of_clients(tmp_path: Path) -> None:
    """With shards; a client that sends no context is not traced at rate 0."""
    null_model(tmp_path, "a")
    null_model(tmp_path, "b")
    ensemble_model(tmp_path, "whole", a="", b="")
    receiver = Receiver()
    flags = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0",
             f"opentelemetry,url=http://127.0.0.1:{receiver.server.server_port}/v1/traces",
             "opentelemetry,bsp_schedule_delay=10"]  # fmt: skip
    given = [text for flag in flags for text in ("--trace-config", flag)]
    with started(tmp_path, "2", *given) as server:
        server.post("/v2/models/a/infer", body_of(1))
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        url = f"http://{server.address}/v2/models/a/infer"
        with urllib.request.urlopen(urllib.request.Request(url, body_of(2), headers)) as answer:
            assert answer.status == 200
        client = grpcclient.InferenceServerClient(server.grpc_address)
        x = grpcclient.InferInput("x", [1, 1], "INT32")
        x.set_data_from_numpy(np.array([[1]], np.int32))
        client.infer("a", [x], headers=headers)
        client.close()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(urllib.request.Request(url, b'{"inputs": []}', headers))
        wait_until(lambda: sum(s["name"] == "InferRequest" for s in receiver.spans) == 3)
        assert num_traces(server, "written") == 3
        spans = list(receiver.spans)
        receiver.spans.clear()
        url = f"http://{server.address}/v2/models/whole/infer"
        with urllib.request.urlopen(urllib.request.Request(url, body_of(2), headers)) as answer:
            assert answer.status == 200
        wait_until(lambda: any(s["name"] == "InferRequest" for s in receiver.spans))
    roots = [each for each in spans if each["name"] == "InferRequest"]
    assert {each["traceId"] for each in spans} == {TRACE}
    assert {each["parentSpanId"] for each in roots} == {SPAN}
    by_id = {each["spanId"]: each for each in spans}
    assert [each["status"]["message"] for each in roots if "status" in each] == ["InvalidRequest"]
    # A request that is refused has no other span.
    assert len(by_id) == len(spans) == 2 * 7 + 1
    for span in spans:
        if span not in roots:
            around = by_id[span["parentSpanId"]]
            assert int(span["startTimeUnixNano"]) >= int(around["startTimeUnixNano"])
    names = {each["spanId"]: each["name"] for each in receiver.spans}
    around = Counter(
        (each["name"], names.get(each["parentSpanId"]))
        for each in receiver.spans
        if not each["name"].startswith("compute")
    )
    assert around == Counter(
        [
            ("InferRequest", None),
            ("whole", "InferRequest"),
            ("a", "whole"),
            ("b", "whole"),
            ("queue", "a"),
            ("queue", "b"),
        ]
    )
    receiver.server.shutdown()
    receiver.server.server_close()
