"""Python models that load and unload models of their server, with one shard and with two."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from served import Served

CODE = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        try:
            pb_utils.is_model_ready("other")
        except pb_utils.TritonModelException as error:
            self.early = str(error)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        action, *given = json.loads(request.inputs()[0].as_numpy()[0, 0])
        if action == "early":
            told = self.early
        else:
            if len(given) > 2:
                given[2] = {name: text.encode() for name, text in given[2].items()}
            try:
                told = getattr(pb_utils, action)(*given)
            except pb_utils.TritonModelException as error:
                told = str(error)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("told", np.array([[json.dumps(told)]], object))]
        )
"""
HEAD = """
backend: "python" max_batch_size: 8
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "told" data_type: TYPE_STRING dims: 1 }
"""
OTHER = """
backend: "null" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "manager", "--load-model", "again")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, code, config in (
        ("manager", CODE, HEAD),
        ("again", CODE, HEAD),
        ("other", "", OTHER),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(code)
        (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module", params=["1", "2"], ids=["1 shard", "2 shards"])
def served(request: pytest.FixtureRequest, root: Path) -> Iterator[Served]:
    with Served(root, "--shards", request.param, "--allow-load-files", *EXPLICIT) as running:
        yield running


def tell(served: Served, *action: object, model: str = "manager") -> object:
    """Return what the model's call of this function returned, or its error."""
    given = httpclient.InferInput("text", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[json.dumps(action)]], object))
    with httpclient.InferenceServerClient(served.address, network_timeout=60) as client:
        return json.loads(client.infer(model, [given]).as_numpy("told")[0, 0])


def test_models_are_loaded_and_unloaded(served: Served):
    assert tell(served, "is_model_ready", "other") is False
    assert tell(served, "load_model", "other") is None
    assert tell(served, "is_model_ready", "other") is True
    assert tell(served, "is_model_ready", "other", "1") is True
    assert tell(served, "is_model_ready", "other", "2") is False
    assert tell(served, "unload_model", "other") is None
    assert tell(served, "is_model_ready", "other") is False
    assert tell(served, "is_model_ready", "nothing") is False


def test_a_load_can_bring_its_configuration_and_files(served: Served, root: Path):
    config = {"backend": "null", "max_batch_size": 2}
    for kind, key in (("input", "x"), ("output", "y")):
        config[kind] = [{"name": key, "data_type": "TYPE_FP32", "dims": [1]}]
    with httpclient.InferenceServerClient(served.address) as client:
        assert tell(served, "load_model", "other", json.dumps(config)) is None
        assert client.get_model_config("other")["max_batch_size"] == 2
        files = {"file:1/note.txt": "a\nb\n"}
        assert tell(served, "load_model", "sent", json.dumps(config), files) is None
        assert client.is_model_ready("sent")
        for name in ("sent", "other"):
            assert tell(served, "unload_model", name, True) is None


def test_a_failed_load_says_why(served: Served):
    assert "failed to load 'nothing'" in tell(served, "load_model", "nothing")
    assert "config" in tell(served, "load_model", "other", "{")
    files = {"file:1/note.txt": "a"}
    assert "need 'config'" in tell(served, "load_model", "other", "", files)
    assert "expected the name of a model" in tell(served, "load_model", "")


def test_a_model_does_not_unload_itself(served: Served):
    assert "a model cannot unload 'manager'" in tell(served, "unload_model", "manager")
    assert "a model cannot load 'manager'" in tell(served, "load_model", "manager")
    assert tell(served, "is_model_ready", "manager") is True
    # Others may, while it runs.
    assert tell(served, "load_model", "manager", model="again") is None
    assert tell(served, "is_model_ready", "manager") is True


def test_calls_need_a_request(served: Served):
    assert "only while they run a request in a server" in tell(served, "early")


def test_without_explicit_mode_models_are_only_asked_for(root: Path):
    with Served(root) as served:
        assert "--model-control-mode explicit" in tell(served, "load_model", "other")
        assert "--model-control-mode explicit" in tell(served, "unload_model", "other")
        assert tell(served, "is_model_ready", "other") is True
