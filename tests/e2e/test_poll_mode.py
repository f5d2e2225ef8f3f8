"""Poll mode and several repositories, from the command line."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from served import EXAMPLES, Served
from tritonclient.utils import InferenceServerException
from waiting import wait_until

IDENTITY = EXAMPLES / "identity"


def add(root: Path, name: str) -> Path:
    """Copy a model as one does by hand: its files come one after the other."""
    shutil.copytree(IDENTITY / "1", root / name / "1")
    return root / name


class Clients:
    """A handful of clients that ask one after the other, and keep what went wrong."""

    def __init__(self, address: str, name: str, number: int = 4) -> None:
        self.errors: list[str] = []
        self.num_answers = 0
        self._address, self._name = address, name
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        values = np.ones((1, 16), np.float32)
        tensor = httpclient.InferInput("INPUT0", values.shape, "FP32")
        tensor.set_data_from_numpy(values)
        with httpclient.InferenceServerClient(self._address) as client:
            while not self._stop.is_set():
                try:
                    client.infer(self._name, [tensor])
                    self.num_answers += 1
                except Exception as error:
                    self.errors.append(str(error))


def test_a_server_follows_its_repositories_and_loses_no_request(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    model = add(one, "stays")
    two.mkdir()
    flags = ("--model-control-mode", "poll", "--repository-poll-secs", "0.2", "--shards", "2")
    with (
        Served(one, str(two), *flags) as served,
        httpclient.InferenceServerClient(served.address) as client,
    ):
        clients = Clients(served.address, "stays")
        try:
            shutil.copytree(model / "1", model / "2")
            wait_until(lambda: client.is_model_ready("stays", "2"))
            add(two, "comes")
            wait_until(lambda: client.is_model_ready("comes"))
            (two / "comes" / "1" / "model.onnx").write_bytes(b"broken")
            index = client.get_model_repository_index
            wait_until(lambda: "comes cannot be loaded" in served.logged())
            assert client.is_model_ready("comes"), "the old one stays"
            shutil.rmtree(two / "comes")
            wait_until(lambda: [each["name"] for each in index()] == ["stays"])
            before = clients.num_answers
            wait_until(lambda: clients.num_answers > before)
        finally:
            clients.stop()
        assert clients.errors == []
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
                change("stays")
        assert client.get_model_repository_index()[0]["state"] == "READY"


def test_models_of_several_repositories_are_chosen_by_pattern(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for root, names in ((one, "red-1 blue-1"), (two, "red-2")):
        for name in names.split():
            add(root, name)
    configs = two / "red-2" / "configs"
    configs.mkdir()
    (configs / "h100.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 5')
    flags = ["--model-repository", str(two), "--model-control-mode", "explicit"]
    flags += ["--load-model", "red-*", "--model-config-name", "h100"]
    with (
        Served(one, *flags) as served,
        httpclient.InferenceServerClient(served.address) as client,
    ):
        index = {each["name"]: each.get("state") for each in client.get_model_repository_index()}
        assert index == {"red-1": "READY", "red-2": "READY", "blue-1": None}
        assert client.get_model_config("red-2")["max_batch_size"] == 5
        add(one, "red-2")
        with pytest.raises(InferenceServerException, match="'red-2' is both in .*one and in .*two"):
            client.load_model("red-2")
        assert client.is_model_ready("red-2")
        client.load_model("blue-1")
        assert client.is_model_ready("blue-1")


def test_a_name_in_two_repositories_ends_the_start(tmp_path):
    for root in ("one", "two"):
        add(tmp_path / root, "both")
    command = [sys.executable, "-m", "penstock", "serve", tmp_path / "one", tmp_path / "two"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != 0
    assert f"'both' is both in {tmp_path / 'one'} and in {tmp_path / 'two'}" in ended.stderr
