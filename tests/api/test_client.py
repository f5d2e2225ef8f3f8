"""`penstock.Client` against a real server: the same calls over HTTP and gRPC."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefix_proxy import mounted

import penstock
from penstock.api.endpoint import Endpoint, parse_endpoint
from penstock.api.server_handle import ServerHandle
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowed,
    NotFound,
    NotReady,
    Unsupported,
)

SLOW = """
backend: "null"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
parameters { key: "null.stall_on" value { string_value: "7" } }
parameters { key: "null.stall_ms" value { string_value: "4000" } }
"""


@pytest.fixture(scope="module")
def server(examples: Path) -> Iterator[ServerHandle]:
    with penstock.serve(examples, http_port=0, grpc_port=0, metrics=False) as handle:
        yield handle


@pytest.fixture(params=[False, True], ids=["http", "grpc"])
def client(server: ServerHandle, request: pytest.FixtureRequest) -> Iterator[penstock.Client]:
    with server.client("digits", grpc=request.param) as made:
        yield made


def test_arrays_in_and_out(client: penstock.Client) -> None:
    found = client.infer(np.zeros((2, 1, 8, 8)))
    assert found["logits"].shape == (2, 10)
    assert found["logits"].dtype == np.float32
    found["logits"][0, 0] = 1.0  # The answer is the caller's.


def test_texts_in_and_out(client: penstock.Client) -> None:
    found = client.infer(["four", "seven!!"], model="text_length")
    assert [value.tolist() for value in found.values()] == [[[4], [7]]]
    assert client.infer("four", model="text_length").keys() == found.keys()


def test_several_inputs_go_by_name(client: penstock.Client) -> None:
    ones = np.ones((1, 16), np.int32)
    found = client.infer({"INPUT0": ones, "INPUT1": ones}, model="simple")
    assert found["OUTPUT0"].tolist() == (ones + ones).tolist()
    with pytest.raises(InvalidRequest, match="give them by name: INPUT0, INPUT1"):
        client.infer(ones, model="simple")


def test_metadata_models_and_readiness(client: penstock.Client) -> None:
    described = client.metadata()
    assert (described.name, described.versions) == ("digits", ("1",))
    assert described.inputs[0].shape == (-1, 1, 8, 8)
    assert client.models() == ["digits", "identity", "simple", "text_length"]
    assert client.ready() and client.ready("simple")


def test_what_is_wrong_is_an_error_of_its_kind(client: penstock.Client) -> None:
    with pytest.raises(NotFound, match="unknown model: 'digit'"):
        client.infer(np.zeros((1, 1, 8, 8)), model="digit")
    with pytest.raises(InvalidRequest, match="shape"):
        client.infer(np.zeros((1, 3)))
    with pytest.raises(InvalidRequest, match="cannot be given as 'FP32'"):
        client.infer(np.array([["a"]]))


def test_a_server_of_several_models_needs_a_name(server: ServerHandle) -> None:
    with (
        penstock.Client(server.url) as client,
        pytest.raises(InvalidRequest, match="has digits, identity, simple, text_length; say which"),
    ):
        client.infer(np.zeros(1))


def test_the_url_may_name_the_model(server: ServerHandle) -> None:
    for url in (f"{server.url}/v2/models/digits", f"{server.grpc_url}/digits/1"):
        with penstock.Client(url) as client:
            assert client.metadata().name == "digits"


def test_connections_serve_threads_and_survive_a_restart(server: ServerHandle) -> None:
    with server.client("identity") as client:
        width = client.metadata().inputs[0].shape[-1]
        inputs = np.arange(max(width, 1), dtype=np.float32)[None]
        answers: list[dict[str, np.ndarray]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.infer(inputs))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == 8
    assert all((value == inputs).all() for each in answers for value in each.values())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
def test_nobody_there_says_what_to_do(url: str) -> None:
    with penstock.Client(url, model="m", timeout_s=5) as client:
        assert not client.ready()
        with pytest.raises(NotReady, match="no server is listening there; start one"):
            client.infer(np.zeros(1))


def test_keys_and_time_limits(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(SLOW)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nsecret = "s3cret-s3cret-s3cret"\nscopes = ["infer"]\n')
    keys.chmod(0o600)
    options = {"http_port": 0, "grpc_port": 0, "metrics": False, "api_keys": keys}
    with penstock.serve(folder, **options) as server:
        for is_grpc in (False, True):
            with (
                server.client(grpc=is_grpc) as stranger,
                pytest.raises(NotAllowed, match="give a key by api_key="),
            ):
                stranger.metadata()
            url = server.grpc_url if is_grpc else server.url
            hasty = penstock.Client(
                url, model="slow", api_key="s3cret-s3cret-s3cret", timeout_s=0.3
            )
            with hasty, pytest.raises(DeadlineExceeded):
                hasty.infer(np.full((1, 2), 7.0))


@pytest.mark.parametrize("timeout_s", ["a", 0, -1, float("inf"), True])
def test_a_wrong_time_limit_says_what_is_accepted(timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match="number of seconds above 0"):
        penstock.Client("http://127.0.0.1:1", timeout_s=timeout_s)


def test_a_closed_client_says_so(server: ServerHandle) -> None:
    client = penstock.Client(server.url)
    assert client.models()
    client.close()
    client.close()
    with pytest.raises(InvalidRequest, match="is closed"):
        client.models()


def test_text_is_generated_over_http(server: ServerHandle) -> None:
    with server.client("digits", grpc=True) as client, pytest.raises(Unsupported, match="http://"):
        client.generate("a")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", Endpoint("http", "h", 8000)),
        ("https://h:1/v2", Endpoint("https", "h", 1)),
        ("http://[::1]:2/v2/models/a%20b/versions/3", Endpoint("http", "::1", 2, "a b", "3")),
        ("http://h/", Endpoint("http", "h", 8000)),
        ("http://h/models", Endpoint("http", "h", 8000, prefix="/models")),
        ("http://h/a/b/", Endpoint("http", "h", 8000, prefix="/a/b")),
        ("http://h/a/v2", Endpoint("http", "h", 8000, prefix="/a")),
        ("http://h/models/v2/models/m", Endpoint("http", "h", 8000, "m", prefix="/models")),
        ("http://h/a%20b/v2/models/v2", Endpoint("http", "h", 8000, "v2", prefix="/a%20b")),
        ("http://h/api/v1/v2", Endpoint("http", "h", 8000, prefix="/api/v1")),
        ("grpc://h", Endpoint("grpc", "h", 8001)),
        ("grpcs://h:5/m/2", Endpoint("grpcs", "h", 5, "m", "2")),
    ],
)
def test_urls(url: str, expected: Endpoint) -> None:
    assert parse_endpoint(url) == expected


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("localhost:8000", "expected http://host:port or grpc://host:port"),
        ("ftp://h", "expected http://host:port"),
        ("http://h:99999", "invalid host or port"),
        ("http://h/v1/chat", "unknown path; expected http://host:port[/PREFIX]/v2/models/NAME"),
        ("http://h/models/v1", "unknown path; expected"),
        ("http://h/v1/v2x", "unknown path; expected"),
        ("http://h/v2/modles/m", "unknown path; expected"),
        ("http://h/a b", "unknown path; expected"),
        ("http://h/é", "unknown path; expected"),
        ("http://h//a", "unknown path; expected"),
        ("grpc://h/a/b/c", "unknown path; expected grpc://host:port/NAME"),
        ("http://u:p@h", "api_key="),
    ],
)
def test_wrong_urls_say_what_is_accepted(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        penstock.Client(url)


def test_a_server_below_a_prefix(server: ServerHandle) -> None:
    address = server.url.removeprefix("http://")
    with mounted(address, "/some/models") as url:
        for path in ("", "/", "/v2/models/digits"):
            with penstock.Client(url + path, model="digits") as client:
                assert client.ready() and client.ready("digits")
                assert "digits" in client.models()
                assert client.infer(np.zeros((1, 1, 8, 8), np.float32))["logits"].shape == (1, 10)
                assert client.url == url
        with penstock.Client(url) as client, pytest.raises(NotFound, match=re.escape(url)):
            client.metadata("none")
        other = penstock.Client(url.removesuffix("/models"), model="digits")
        with other, pytest.raises(NotFound, match="not below the prefix"):
            other.metadata()
