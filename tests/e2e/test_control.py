"""Loading, unloading, keys, statistics, compression and classes, as tritonclient asks for them."""

import asyncio
import json
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from grpc_load import VERSIONED, VERSIONED_CONFIG, GrpcLoad
from load import Load
from served import EXAMPLES, Served, null_model
from tritonclient.utils import InferenceServerException


@pytest.fixture
def explicit(tmp_path: Path) -> Iterator[tuple[Served, Path]]:
    """A copy of the examples in explicit mode, with `identity` loaded."""
    shutil.copytree(EXAMPLES, tmp_path / "repository")
    flags = ("--model-control-mode", "explicit", "--load-model", "identity")
    served = Served(tmp_path / "repository", *flags)
    yield served, tmp_path / "repository"
    assert served.terminate() == 0


def client_of(served: Served) -> httpclient.InferenceServerClient:
    return httpclient.InferenceServerClient(served.address)


def row(values: np.ndarray | None = None) -> httpclient.InferInput:
    values = np.zeros((1, 16), np.float32) if values is None else values
    tensor = httpclient.InferInput("INPUT0", values.shape, "FP32")
    tensor.set_data_from_numpy(values)
    return tensor


def test_models_are_loaded_and_unloaded_over_the_api(explicit):
    served, _ = explicit
    with client_of(served) as client:
        states = {m["name"]: m.get("state", "") for m in client.get_model_repository_index()}
        assert (states["identity"], states["digits"]) == ("READY", "")
        assert client.is_server_ready(), "what was asked for is ready"
        client.load_model("digits")
        assert client.is_model_ready("digits")
        client.unload_model("identity")
        with pytest.raises(InferenceServerException, match="'identity' is not found"):
            client.infer("identity", [row()])
        client.load_model("identity")
        client.infer("identity", [row()])


def test_a_failed_reload_keeps_the_old_model(explicit):
    served, repository = explicit
    model = repository / "identity" / "1" / "model.onnx"
    whole = model.read_bytes()
    with client_of(served) as client:
        model.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InferenceServerException, match="failed to load 'identity'"):
            client.load_model("identity")
        client.infer("identity", [row()])
        assert client.is_server_ready()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nobody", "..", ".", "%2e%2e", "..%2f..%2fetc", "identity%00", "a" * 300]
)
def test_names_that_are_not_there_are_refused_and_change_nothing(explicit, name):
    served, _ = explicit
    url = f"http://{served.address}/v2/repository/models/{name}/load"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"))
    with caught.value as error:
        assert 400 <= error.code < 500
    assert served.status("/v2/health/ready") == 200


def test_the_control_api_is_off_by_default(tmp_path):
    served = Served(null_model(tmp_path, "model"))
    with client_of(served) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="load / unload is not allowed"):
                change("model")
        assert client.is_model_ready("model")
    assert served.terminate() == 0


# Ways to spell a path that means the same to a careless server.
SPELLINGS = ("{}", "{}%0a", "{}%0d%0a", "{}%00", "{}%20", "{}%09", "{}/", "{}/.", "{}%2f", "{}%23")
SPELLINGS += ("{}%3f", "{};", "{}?", "{}%250a", "/{}", "/.{}", "/v2/health/live/..{}")
SPELLINGS += ("http://localhost{}", "http://localhost{}%0a")


@pytest.mark.parametrize("shards", ["1", "2"])
def test_no_spelling_of_a_path_gets_around_a_scope(tmp_path, shards):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[key]]\nsecret = "only-for-inference"\nscopes = ["infer"]\n'
        '[[key]]\nsecret = "for-the-operator"\nscopes = ["infer", "metrics", "admin"]\n'
    )
    flags = ["--api-keys", str(keys), "--shards", shards, "--model-control-mode", "explicit"]
    served = Served(null_model(tmp_path / "models", "model"), *flags, "--load-model", "*")
    metrics_port = int(served.metrics_url.rpartition(":")[2].partition("/")[0])

    def status(port: int, method: str, target: str, version: str, secret: str) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            lines = [f"{method} {target} HTTP/{version}", "Host: localhost", "Content-Length: 0"]
            lines += [f"X-API-Key: {secret}", "Connection: close", "", ""]
            client.sendall("\r\n".join(lines).encode())
            return int(client.makefile("rb").readline().split()[1])

    model, change = "/v2/models/model", "/v2/repository/models/model"
    restricted = [
        (served.port, "POST", f"{change}/unload"),
        (served.port, "POST", f"{change}/load"),
        (served.port, "POST", "/v2/repository/index"),
        (served.port, "GET", f"{model}/explain"),
        (served.port, "GET", "/metrics"),
        (metrics_port, "GET", "/metrics"),
    ]
    for port, method, path in restricted:
        for spelling in SPELLINGS:
            for version in ("1.0", "1.1"):
                target = spelling.format(path)
                found = status(port, method, target, version, "only-for-inference")
                assert found in (400, 403, 404), f"{target} answers {found}"
        assert status(port, method, path, "1.1", "only-for-inference") == 403
        if not path.endswith("/unload"):
            assert status(port, method, path, "1.1", "for-the-operator") == 200
    assert status(served.port, "GET", f"{model}/ready", "1.1", "only-for-inference") == 200
    assert served.terminate() == 0


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1", "2"])
def test_keys_are_reloaded_without_a_restart(tmp_path, shards):
    path = tmp_path / "keys.toml"

    def write(name: str, *scopes: str) -> dict[str, str]:
        listed = ", ".join(f'"{scope}"' for scope in scopes)
        text = f'[[key]]\nname = "{name}"\nsecret = "secret of {name}"\nscopes = [{listed}]\n'
        (tmp_path / "new.toml").write_text(text)
        (tmp_path / "new.toml").rename(path)
        return {"x-api-key": f"secret of {name}"}

    first = write("one team", "infer")
    flags = ["--api-keys", str(path), "--shards", shards, "--model-control-mode", "explicit"]
    served = Served(null_model(tmp_path / "models", "m"), *flags, "--load-model", "*", grpc=True)
    rpcs = grpcclient.InferenceServerClient(served.grpc_address)
    with client_of(served) as client, rpcs:

        def allows(headers: dict[str, str], *clients: Any) -> bool:
            answers = []
            for each in clients:
                try:
                    answers.append(bool(each.get_model_metadata("m", headers=headers)))
                except InferenceServerException:
                    answers.append(False)
            return all(answers)

        assert allows(first, client, rpcs)
        second = write("another team", "infer", "admin")
        ends = time.monotonic() + 60
        while not allows(second, client, rpcs):
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert not allows(first, client) and not allows(first, rpcs)
        path.write_text("[[key")
        time.sleep(2.5)  # Nothing tells a client that a file was not used.
        assert allows(second, client, rpcs)
        client.unload_model("m", headers=second)
        with pytest.raises(InferenceServerException):
            rpcs.unload_model("m", headers=first)
        rpcs.load_model("m", headers=second)
    log = served.logged()
    assert "the API keys stay as they are: " in log
    assert 'http caller="another team" action=unload model=m result=200' in log
    assert 'grpc caller="another team" action=load model=m result=OK' in log
    assert "action=RepositoryModelUnload result=UNAUTHENTICATED" in log
    assert served.terminate() == 0


def test_keys_open_what_their_scopes_say(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nsecret = "0123456789abcdef"\nscopes = ["infer"]\n')
    served = Served(null_model(tmp_path / "models", "model"), "--api-keys", str(keys))
    headers = {"Authorization": "Bearer 0123456789abcdef"}

    def status(path: str, headers: dict[str, str]) -> int:
        request = urllib.request.Request(f"http://{served.address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                assert json.load(error)["error"]
                return error.code

    assert status("/v2/health/ready", {}) == 200
    assert status("/v2/models/model", {}) == 401
    assert status("/v2/models/model", {"Authorization": "Bearer wrong"}) == 401
    assert status("/v2/models/model", headers) == 200
    assert status("/metrics", headers) == 403
    assert status("/v2/models/model", {**headers, "Host": "evil.example"}) == 403
    assert served.infer("model", "x", "INT32", [1])[0] == 401
    assert served.terminate() == 0


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served(EXAMPLES)
    yield server
    assert server.terminate() == 0


def test_statistics_count_requests_rows_and_batches(served):
    with client_of(served) as client:
        before = client.get_inference_statistics("identity")["model_stats"][0]
        for _ in range(3):
            client.infer("identity", [row(np.zeros((2, 16), np.float32))])
        with pytest.raises(InferenceServerException):
            client.infer("identity", [row(np.zeros((1, 3), np.float32))])
        after = client.get_inference_statistics("identity")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 6
    assert after["execution_count"] - before["execution_count"] == 3
    for name, count in (("success", 3), ("fail", 1), ("queue", 3), ("compute_infer", 3)):
        old, new = before["inference_stats"][name], after["inference_stats"][name]
        assert new["count"] - old["count"] == count
        assert new["ns"] > old["ns"]
    (batch,) = (b for b in after["batch_stats"] if b["batch_size"] == 2)
    assert batch["compute_infer"]["count"] >= 3


def test_configuration_is_given_as_triton_gives_it(served):
    with client_of(served) as client:
        config = client.get_model_config("digits")
    assert config["max_batch_size"] == 64
    assert config["input"][0]["dims"] == [1, 8, 8]
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert "dynamic_batching" in config


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed_both_ways(served, algorithm):
    values = np.zeros((64, 16), np.float32)
    values[:, 3] = np.arange(64)
    with client_of(served) as client:
        answer = client.infer(
            "identity",
            [row(values)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), values)


def test_outputs_may_be_classes_with_labels(served):
    image = np.zeros((2, 1, 8, 8), np.float32)
    tensor = httpclient.InferInput("image", image.shape, "FP32")
    tensor.set_data_from_numpy(image)
    asked = [httpclient.InferRequestedOutput("logits", class_count=3)]
    with client_of(served) as client:
        logits = client.infer("digits", [tensor]).as_numpy("logits")
        classes = client.infer("digits", [tensor], outputs=asked).as_numpy("logits")
    assert classes.shape == (2, 3)
    value, index, label = classes[0, 0].decode().split(":")
    assert int(index) == logits[0].argmax()
    assert float(value) == pytest.approx(logits[0].max(), abs=1e-5)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    assert label == names[int(index)]


def test_a_body_may_be_nothing_but_the_tensor(served):
    values = np.arange(16, dtype=np.float32)
    request = urllib.request.Request(
        f"http://{served.address}/v2/models/identity/infer",
        values.tobytes(),
        {"Inference-Header-Content-Length": "0"},
    )
    with urllib.request.urlopen(request) as answer:
        size = int(answer.headers["Inference-Header-Content-Length"])
        body = answer.read()
    assert json.loads(body[:size])["outputs"][0]["shape"] == [1, 16]
    np.testing.assert_array_equal(np.frombuffer(body[size:], np.float32), values)


def test_the_answer_says_where_the_time_went_when_asked(served):
    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [0] * 16}]}
    url = f"http://{served.address}/v2/models/identity/infer"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Penstock-Timing": "1"})
    with urllib.request.urlopen(asked) as answer:
        timing = answer.headers["Server-Timing"]
    parts = dict(part.split(";dur=") for part in timing.split(", "))
    assert list(parts) == [
        "decode",
        "queue_batch",
        "queue_instance",
        "compute_input",
        "compute_infer",
        "compute_output",
        "total",
    ]
    spans = {name: float(value) for name, value in parts.items()}
    assert sum(spans.values()) - spans["total"] <= spans["total"] + 0.001
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        assert answer.headers["Server-Timing"] is None


@pytest.mark.verify
@pytest.mark.timeout(120)
def test_reloading_under_load_loses_nothing_and_stays_fast(explicit):
    served, _ = explicit

    async def scenario() -> tuple[Load, Load]:
        async with Load(served.port, 8) as steady:
            await asyncio.sleep(4)
        async with Load(served.port, 8) as load:
            with client_of(served) as client:
                for _ in range(10):
                    await asyncio.to_thread(client.load_model, "identity")
                    await asyncio.sleep(0.3)
        return steady, load

    steady, load = asyncio.run(scenario())
    before, during = steady.tally.percentile_s(0.99), load.tally.percentile_s(0.99)
    print(
        f"\nsteady p99 {before * 1e3:.2f} ms; during 10 reloads {during * 1e3:.2f} ms, "
        f"{load.tally.num_good} answers, statuses {load.tally.statuses}"
    )
    assert load.tally.num_wrong == load.tally.num_cut == 0
    assert set(load.tally.statuses) == {200}
    assert during <= 2 * before


def write_version(root: Path, version: int) -> None:
    """A version whose answers say which it is; whole, or not there."""
    staged = root / "model" / f".{version}"
    staged.mkdir(parents=True)
    (staged / "model.py").write_text(VERSIONED.format(version=version))
    staged.rename(root / "model" / str(version))


@pytest.mark.verify
@pytest.mark.timeout(120)
def test_new_versions_under_grpc_load_lose_nothing_and_stay_fast(tmp_path):
    """Each reload serves the next version. An answer has the rows of one version only."""
    write_version(tmp_path, 1)
    (tmp_path / "model" / "config.pbtxt").write_text(VERSIONED_CONFIG)

    async def scenario(served: Served) -> tuple[GrpcLoad, GrpcLoad]:
        async with GrpcLoad(served.grpc_address, 8, "model") as steady:
            await asyncio.sleep(4)
        async with GrpcLoad(served.grpc_address, 8, "model") as load:
            for version in range(2, 12):
                write_version(tmp_path, version)
                status, answer = await asyncio.to_thread(
                    served.post, "/v2/repository/models/model/load"
                )
                assert status == 200, answer
                await asyncio.sleep(0.3)
        return steady, load

    flags = ("--model-control-mode", "explicit", "--load-model", "model")
    with Served(tmp_path, *flags, grpc=True) as served:
        steady, load = asyncio.run(scenario(served))
    before, during = steady.tally.percentile_s(0.99), load.tally.percentile_s(0.99)
    tally = load.tally
    print(
        f"\ngRPC: steady p99 {before * 1e3:.2f} ms; during 10 new versions {during * 1e3:.2f} ms, "
        f"{tally.num_sent - tally.num_good} of {tally.num_sent} calls lost, "
        f"{tally.num_mixed} answers of two versions"
    )
    assert tally.codes == {}
    assert tally.num_wrong == tally.num_mixed == 0
    assert tally.versions == {str(version) for version in range(1, 12)}
    assert during <= 2 * before
