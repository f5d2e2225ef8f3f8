"""Quotas of API keys over every protocol: 429 with Retry-After, RESOURCE_EXHAUSTED."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from served import Served, null_model
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow

SLOW, FREE = "0123456789abcdef", "fedcba9876543210"
# One request in 100 seconds: the second is refused, however slow the machine is.
KEYS = f"""
[[key]]
secret = "{SLOW}"
scopes = ["infer"]
requests_per_s = 0.01
[[key]]
secret = "{FREE}"
scopes = ["infer"]
"""


def case_key(index: int) -> str:
    """A key with the rate of `SLOW`."""
    return f"key-of-a-case-{index:02}"


KEYS += "".join(
    f'[[key]]\nsecret = "{case_key(index)}"\nscopes = ["infer"]\nrequests_per_s = 0.01\n'
    for index in range(8)
)


@pytest.fixture(
    params=[("--shards", "1"), ("--shards", "2")],
    ids=["core", "shards"],
)
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    (tmp_path / "keys.toml").write_text(KEYS)
    null_model(tmp_path / "models", "model")
    flags = ("--api-keys", str(tmp_path / "keys.toml"), *request.param)
    server = Served(tmp_path / "models", *flags, grpc=True)
    yield server
    assert server.terminate() == 0


def post(served: Served, path: str, key: str, body: object) -> tuple[int, str, str | None]:
    """The status, the body and Retry-After."""
    request = urllib.request.Request(f"http://{served.address}{path}", json.dumps(body).encode())
    request.add_header("X-API-Key", key)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Retry-After"]


def infer(served: Served, key: str) -> tuple[int, str, str | None]:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    return post(served, "/v2/models/model/infer", key, {"inputs": [tensor]})


def infer_grpc(served: Served, key: str) -> str:
    tensor = grpcclient.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.int32))
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        try:
            client.infer("model", [tensor], headers={"x-api-key": key})
        except InferenceServerException as error:
            return f"{error.status()}: {error.message()}"
    return "OK"


def test_a_key_beyond_its_rate_is_refused_over_every_protocol(served: Served):
    assert infer(served, SLOW)[0] == 200
    status, text, retry_after = infer(served, SLOW)
    assert status == 429 and "may send 0.01 requests/s" in text
    assert 1 <= int(retry_after) <= 100
    refused = infer_grpc(served, SLOW)
    assert refused.startswith("StatusCode.RESOURCE_EXHAUSTED: the API key may send 0.01")
    # Requests for text count too, whether or not there is such a model.
    asked = {"model": "nobody", "prompt": "x"}
    status, text, retry_after = post(served, "/v1/completions", SLOW, asked)
    assert status == 429 and retry_after and "rate_limit_error" in text
    assert post(served, "/v1/completions", FREE, asked)[0] == 404
    for _ in range(3):
        assert infer(served, FREE)[0] == 200
        assert infer_grpc(served, FREE) == "OK"


BAD_SHAPE = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 2], "data": [1]}]}


class Refused(NamedTuple):
    """A request, and the answer while the key may still send."""

    model: str
    body: bytes
    headers: dict[str, str]
    status: int


REFUSED = [
    Refused("model", b"{", {}, 400),
    Refused("model", b"", {}, 400),
    Refused("model", json.dumps(BAD_SHAPE).encode(), {}, 400),
    Refused("model", b"{}", {"Inference-Header-Content-Length": "-1"}, 400),
    Refused("model", b"{}", {"Inference-Header-Content-Length": "0"}, 400),
    Refused("model", b"{}", {"Content-Encoding": "br"}, 415),
    Refused("model", b"{}", {"Content-Encoding": "gzip"}, 400),
    Refused("nobody", b"{}", {}, 404),
]
NO_DATA = {"name": "x", "datatype": "INT32", "shape": [1, 1]}
REFUSED_GRPC = [
    (b"\xff\xff", "INVALID_ARGUMENT"),
    (service_pb2.ModelInferRequest(model_name="model").SerializeToString(), "INVALID_ARGUMENT"),
    (service_pb2.ModelInferRequest(model_name="nobody").SerializeToString(), "NOT_FOUND"),
    (
        service_pb2.ModelInferRequest(model_name="model", inputs=[NO_DATA]).SerializeToString(),
        "INVALID_ARGUMENT",
    ),
]


def test_refused_requests_count(served: Served):
    def send(case: Refused, key: str) -> int:
        url = f"http://{served.address}/v2/models/{case.model}/infer"
        request = urllib.request.Request(url, case.body, {"X-API-Key": key, **case.headers})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        with caught.value as error:
            return error.code

    for index, case in enumerate(REFUSED):
        key = case_key(index)
        assert [send(case, FREE), send(case, FREE)] == [case.status, case.status]
        assert [send(case, key), send(case, key)] == [case.status, 429]
        assert infer_grpc(served, key).startswith("StatusCode.RESOURCE_EXHAUSTED")


def test_refused_requests_over_grpc_count(served: Served):
    with grpc.insecure_channel(served.grpc_address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

        def send(data: bytes, key: str) -> str:
            with pytest.raises(grpc.RpcError) as caught:
                call(data, metadata=[("x-api-key", key)], timeout=60)
            return caught.value.code().name

        for index, (data, code) in enumerate(REFUSED_GRPC):
            key = case_key(index)
            assert [send(data, FREE), send(data, FREE)] == [code, code]
            assert [send(data, key), send(data, key)] == [code, "RESOURCE_EXHAUSTED"]
            for answer in stream(iter([data]), metadata=[("x-api-key", key)], timeout=60):
                found = service_pb2.ModelStreamInferResponse.FromString(answer)
                assert "may send 0.01 requests/s" in found.error_message
            assert infer(served, key)[0] == 429


def test_quotas_change_with_the_key_file(served: Served, tmp_path: Path):
    assert infer(served, SLOW)[0] == 200
    assert infer(served, SLOW)[0] == 429
    (tmp_path / "keys.toml").write_text(KEYS.replace("requests_per_s = 0.01", ""))
    while infer(served, SLOW)[0] == 429:
        pass
    assert infer(served, SLOW)[0] == 200
