"""Loads with a configuration and files, as tritonclient sends them over HTTP and gRPC."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from load import Load, Tally
from served import EXAMPLES, Served
from tritonclient.utils import InferenceServerException
from waiting import wait_until

ONNX = (EXAMPLES / "identity" / "1" / "model.onnx").read_bytes()
PLAIN = json.dumps({"backend": "onnxruntime", "max_batch_size": 4})


class Client:
    """The same calls over either protocol."""

    def __init__(self, module: Any, address: str) -> None:
        self.module = module
        self.calls = module.InferenceServerClient(address)
        self.load, self.unload = self.calls.load_model, self.calls.unload_model

    def config(self, name: str) -> dict[str, Any]:
        if self.module is httpclient:
            return self.calls.get_model_config(name)
        return self.calls.get_model_config(name, as_json=True)["config"]

    def versions(self, name: str) -> list[str]:
        if self.module is httpclient:
            return self.calls.get_model_metadata(name)["versions"]
        return list(self.calls.get_model_metadata(name).versions)

    def answer(self, name: str) -> np.ndarray:
        values = np.arange(16, dtype=np.float32)[None]
        tensor = self.module.InferInput("INPUT0", values.shape, "FP32")
        tensor.set_data_from_numpy(values)
        return self.calls.infer(name, [tensor]).as_numpy("OUTPUT0")

    def refusal(self, *args: Any, **parameters: Any) -> str:
        with pytest.raises(InferenceServerException) as refused:
            self.load(*args, **parameters)
        return str(refused.value)


@pytest.fixture(scope="module", params=["http, 1 shard", "grpc, 2 shards"])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def temporary(protocol: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def served(
    protocol: str, temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    shutil.copytree(EXAMPLES / "identity", root / "repository" / "identity")
    flags = ["--model-control-mode", "explicit", "--load-model", "identity", "--allow-load-files"]
    flags += ["--shards", protocol.split()[1], "--max-json-bytes", "2048"]
    environment = {"TMPDIR": str(temporary)}
    with Served(root / "repository", *flags, grpc=True, environment=environment) as running:
        yield running
    assert files_below(temporary) == []


def files_below(folder: Path) -> list[str]:
    """Name all files; folders may vanish meanwhile."""
    return sorted(name for _, _, names in os.walk(folder) for name in names)


@pytest.fixture
def client(served: Served, protocol: str) -> Client:
    if protocol.startswith("http"):
        return Client(httpclient, served.address)
    return Client(grpcclient, served.grpc_address)


def test_a_configuration_lasts_until_the_next_load(client):
    shown = client.config("identity")
    client.load("identity", config=json.dumps(shown))
    assert client.config("identity") == shown, "what /config shows can be loaded"
    client.load("identity", config=PLAIN)
    assert client.config("identity")["max_batch_size"] == 4
    assert client.answer("identity")[0, 3] == 3
    client.load("identity")
    assert client.config("identity") == shown


def test_a_model_can_come_with_its_files(client, temporary):
    large = {"file:7/model.onnx": ONNX, "file:7/other.bin": bytes(3 << 20)}
    client.load("sent", config=PLAIN, files=large)
    assert client.versions("sent") == ["7"]
    assert client.answer("sent")[0, 3] == 3
    client.load("sent", config=PLAIN, files={"file:8/model.onnx": ONNX})
    assert client.versions("sent") == ["8"]
    wait_until(lambda: files_below(temporary) == ["config.pbtxt", "model.onnx"])
    client.unload("sent", unload_dependents=True)
    with pytest.raises(InferenceServerException, match="not found"):
        client.answer("sent")
    assert "no such model" in client.refusal("sent"), "the files were not kept"
    wait_until(lambda: files_below(temporary) == [])


def test_files_replace_all_of_a_model_until_the_next_load(client):
    shown = client.config("identity")
    client.load("identity", config=PLAIN, files={"file:3/model.onnx": ONNX})
    assert client.versions("identity") == ["3"]
    client.load("identity")
    assert client.versions("identity") == ["1"] and client.config("identity") == shown


def test_a_failed_load_keeps_what_is_served(client, served):
    broken = {"file:3/model.onnx": ONNX[:50]}
    assert "failed to load 'identity'" in client.refusal("identity", config=PLAIN, files=broken)
    for config in ('{"max_batch_size": -1}', '"parameters": {{"max_batch_size": "16"}}'):
        assert "failed to load 'identity'" in client.refusal("identity", config=config)
    assert client.versions("identity") == ["1"] and client.answer("identity")[0, 3] == 3
    assert served.status("/v2/health/ready") == 200


def test_changes_under_load_lose_no_request(served):
    counts = []

    def change() -> None:
        with httpclient.InferenceServerClient(served.address) as client:
            for count in (2, 1):
                groups = [{"count": count, "kind": "KIND_CPU"}]
                config = {"max_batch_size": 4, "instance_group": groups}
                client.load_model("identity", config=json.dumps(config))
                counts.append(client.get_model_config("identity")["instance_group"][0]["count"])
            client.load_model("identity", config=PLAIN, files={"file:3/model.onnx": ONNX})
            client.load_model("identity")

    async def scenario() -> Tally:
        async with Load(served.port, 4) as load:
            await asyncio.to_thread(change)
        return load.tally

    tally = asyncio.run(scenario())
    assert counts == [2, 1]
    assert tally.num_wrong == tally.num_cut == 0 and set(tally.statuses) == {200}


def test_what_is_not_allowed_is_refused(client):
    for name in ("file:../model.onnx", "file:1/../../../x.onnx", "file:/etc/x.onnx"):
        assert "expected 'file:<version>/<name>'" in client.refusal(
            "identity", config=PLAIN, files={name: ONNX}
        )
    code = {"file:1/model.py": b"import os\nos._exit(1)\n"}
    told = client.refusal("identity", config='{"backend": "python"}', files=code)
    assert "--allow-load-code" in told
    data = {"file:1/weights.bin": b"import os\nos._exit(1)\n"}
    runs = '{"backend": "python", "default_model_filename": "weights.bin"}'
    assert "--allow-load-code" in client.refusal("identity", config=runs, files=data)
    assert "need 'config'" in client.refusal("identity", files={"file:1/model.onnx": ONNX})
    assert client.answer("identity")[0, 3] == 3


def test_code_is_run_where_the_operator_allows_it(tmp_path: Path):
    code = b"from scale import FACTOR\n\ndef f(x: int) -> int:\n    return x * FACTOR\n"
    files = {"file:1/model.py": code, "file:1/scale.py": b"FACTOR = 3\n"}
    flags = ("--model-control-mode", "explicit", "--allow-load-files", "--allow-load-code")
    with (
        Served(tmp_path, *flags) as running,
        httpclient.InferenceServerClient(running.address) as client,
    ):
        client.load_model("scales", config='{"backend": "python"}', files=files)
        tensor = httpclient.InferInput("x", [1], "INT64")
        tensor.set_data_from_numpy(np.array([5]))
        output = client.get_model_metadata("scales")["outputs"][0]["name"]
        assert client.infer("scales", [tensor]).as_numpy(output).tolist() == [15]


def test_an_upload_over_the_limit_is_refused(served):
    with httpclient.InferenceServerClient(served.address) as client:
        with pytest.raises(InferenceServerException, match="413|too large|larger"):
            client.load_model("x", config=PLAIN, files={"file:1/model.onnx": bytes(64 << 20)})
        assert client.is_server_live()


def test_without_the_flag_no_files_are_taken(tmp_path: Path):
    shutil.copytree(EXAMPLES / "identity", tmp_path / "identity")
    code = "import triton_python_backend_utils\nclass TritonPythonModel: pass\n"
    with Served(tmp_path, "--model-control-mode", "explicit") as running:
        client = Client(httpclient, running.address)
        assert "--allow-load-files" in client.refusal(
            "identity", config=PLAIN, files={"file:1/model.py": code.encode()}
        )
        assert "client" in client.refusal("identity", config='{"name": "client"}')
        client.load("identity", config=PLAIN)
        assert client.answer("identity")[0, 3] == 3
        assert "loaded with a configuration from a client" in running.logged()
