"""Ensembles behind a real server with one shard and with two, as tritonclient asks for them."""

import concurrent.futures
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served
from tritonclient.utils import InferenceServerException
from waiting import wait_until

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if (x == 13).any():
                error = pb_utils.TritonError("13 is unlucky")
                answers.append(pb_utils.InferenceResponse(error=error))
            else:
                y = pb_utils.Tensor("y", (x %s).astype(np.float32))
                answers.append(pb_utils.InferenceResponse([y]))
        return answers
"""
CONFIG = """
max_batch_size: 8 dynamic_batching { } instance_group { kind: KIND_CPU }
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""
# A chain, and a branch beside its end. The first step of `outer` is an ensemble.
ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "PRODUCT" data_type: TYPE_FP32 dims: 2 }
output { name: "SUM" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling {
  step { model_name: "plus" model_version: -1
    input_map { key: "x" value: "IN" } output_map { key: "y" value: "between" } }
  step { model_name: "times" model_version: 1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "PRODUCT" } }
  step { model_name: "plus" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "SUM" } }
}
"""
OUTER = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling {
  step { model_name: "both" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "SUM" value: "sum" } }
  step { model_name: "times" model_version: -1
    input_map { key: "x" value: "sum" } output_map { key: "y" value: "OUT" } }
}
"""
# Its step may name a version.
LESS = """
platform: "ensemble" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling { step { model_name: "minus" model_version: %s
  input_map { key: "x" value: "IN" } output_map { key: "y" value: "OUT" } } }
"""


def add_model(root: Path, name: str, config: str, code: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if code:
        (root / name / "1" / "model.py").write_text(code)


def add_version(root: Path, name: str, number: int, code: str) -> None:
    folder = root / name / str(number)
    folder.mkdir()
    (folder / "model.py").write_text(code)


@pytest.fixture(scope="module", params=["1", "2"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Served, Path]]:
    """In explicit mode, with `outer` loaded, and with it everything that it needs."""
    root = tmp_path_factory.mktemp("repository")
    add_model(root, "plus", 'backend: "python"' + CONFIG, MODEL % "+ 1")
    all_versions = 'backend: "python" version_policy { all { } }' + CONFIG
    add_model(root, "times", all_versions, MODEL % "* 2")
    add_model(root, "both", ENSEMBLE)
    add_model(root, "outer", OUTER)
    add_model(root, "lost", OUTER.replace('"both"', '"nothing"'))
    add_model(
        root, "pair", ENSEMBLE.replace('"times" model_version: 1', '"alone" model_version: -1')
    )
    add_model(root, "alone", 'backend: "python"' + CONFIG, MODEL % "* 3")
    first = 'backend: "python" version_policy { specific { versions: 1 } }'
    add_model(root, "minus", first + CONFIG, MODEL % "- 1")
    add_version(root, "minus", 2, MODEL % "+ 0 - 1")
    add_model(root, "less", LESS % "-1")
    add_model(root, "named", LESS % "1")
    flags = ("--model-control-mode", "explicit", "--load-model", "outer")
    with Served(root, *flags, "--shards", request.param, grpc=True) as served:
        if request.param != "1":
            wait_until(lambda: served.has_shards(int(request.param)))
        yield served, root


def infer(module, client, name: str, value: float, *outputs: str, rows: int = 1):
    """The first element of the last row of each of these outputs, for rows of this value."""
    tensor = module.InferInput("IN", [rows, 2], "FP32")
    tensor.set_data_from_numpy(np.full((rows, 2), value, np.float32))
    wanted = [module.InferRequestedOutput(each) for each in outputs]
    answer = client.infer(name, [tensor], outputs=wanted)
    return [float(answer.as_numpy(each)[-1, 0]) for each in outputs]


def get(served: Served, path: str):
    with urllib.request.urlopen(f"http://{served.address}{path}") as answer:
        return json.loads(answer.read())


def states(client) -> dict[str, str]:
    return {each["name"]: each.get("state", "") for each in client.get_model_repository_index()}


def test_members_are_loaded_with_their_ensembles(server) -> None:
    served, _ = server
    with httpclient.InferenceServerClient(served.address) as client:
        found = states(client)
        ready = sorted(name for name, state in found.items() if state == "READY")
        assert ready == ["both", "outer", "plus", "times"]
        assert client.is_server_ready() and client.is_model_ready("outer")


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_both_protocols_answer(server, module) -> None:
    served, _ = server
    address = served.address if module is httpclient else served.grpc_address
    with module.InferenceServerClient(address) as client:
        for rows in (1, 8):
            assert infer(module, client, "both", 3, "PRODUCT", "SUM", rows=rows) == [8, 5]
        assert infer(module, client, "both", 3, "SUM") == [5]
        assert infer(module, client, "outer", 3, "OUT") == [10]


def test_the_error_of_a_member_is_the_clients_answer(server) -> None:
    served, _ = server
    with httpclient.InferenceServerClient(served.address) as client:
        expected = "in ensemble 'both', model 'times'.*13 is unlucky"
        with pytest.raises(InferenceServerException, match=expected):
            infer(httpclient, client, "both", 12, "PRODUCT")
        with pytest.raises(InferenceServerException, match="unexpected shape for input 'IN'"):
            tensor = httpclient.InferInput("IN", [1, 3], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 3), np.float32))
            client.infer("both", [tensor])


def test_many_clients_share_the_members(server) -> None:
    served, _ = server

    def one(value: int) -> bool:
        with httpclient.InferenceServerClient(served.address) as client:
            found = infer(httpclient, client, "both", value, "PRODUCT", "SUM")
            return found == [2 * (value + 1), value + 2]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(20, 100)))


def test_the_api_describes_an_ensemble(server) -> None:
    served, _ = server
    with httpclient.InferenceServerClient(served.address) as client:
        infer(httpclient, client, "both", 1, "SUM")
        assert client.get_model_metadata("both")["platform"] == "ensemble"
        config = client.get_model_config("both")
        steps = [each["model_name"] for each in config["ensemble_scheduling"]["step"]]
        assert steps == ["plus", "times", "plus"]
        [figures] = client.get_inference_statistics("both")["model_stats"]
        assert figures["inference_stats"]["success"]["count"] >= 1
        assert figures["execution_count"] >= 1
    explained = get(served, "/v2/models/both/explain")
    assert explained["mode"] == "ensemble"
    assert [each["model"] for each in explained["steps"]] == ["plus", "times", "plus"]
    assert explained["steps"][2]["num_answered"] >= 1
    metrics = served.get("/metrics")[1].decode()
    assert 'nv_inference_request_success{model="both",version="1"}' in metrics


def test_a_member_is_reloaded_while_requests_run(server) -> None:
    served, root = server
    if not (root / "times" / "2").exists():
        add_version(root, "times", 2, MODEL % "* 100")
    with httpclient.InferenceServerClient(served.address) as client:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask_outer, served, value) for value in range(20, 80)]
            client.load_model("times")
            found = [each.result() for each in asked]
        # The old version, or the new one.
        assert all(each in (2 * (n + 2), 100 * (n + 2)) for n, each in enumerate(found, 20))
        assert ask_outer(served, 3) == 500
        # A step that names its version keeps it.
        assert infer(httpclient, client, "both", 3, "PRODUCT") == [8]


def ask_outer(served: Served, value: int) -> float:
    with httpclient.InferenceServerClient(served.address) as client:
        [found] = infer(httpclient, client, "outer", value, "OUT")
        return found


def test_without_a_member_the_ensemble_is_not_ready(server) -> None:
    served, _ = server
    with httpclient.InferenceServerClient(served.address) as client:
        client.unload_model("plus")
        assert not client.is_model_ready("both") and not client.is_model_ready("outer")
        assert states(client)["outer"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="model 'plus' is not loaded"):
            infer(httpclient, client, "both", 1, "SUM")
        client.load_model("both")
        assert client.is_model_ready("outer") and states(client)["plus"] == "READY"
        assert infer(httpclient, client, "both", 1, "SUM") == [3]


def test_members_leave_with_the_ensemble_that_brought_them(server) -> None:
    served, _ = server
    with httpclient.InferenceServerClient(served.address) as client:
        client.load_model("pair")
        assert states(client)["alone"] == "READY"
        client.unload_model("pair", unload_dependents=True)
        wait_until(lambda: not states(client)["alone"])
        found = states(client)
        # Others run it.
        assert (found["plus"], found["pair"]) == ("READY", "")


def test_an_ensemble_that_lacks_a_model_cannot_be_loaded(server) -> None:
    served, _ = server
    with httpclient.InferenceServerClient(served.address) as client:
        with pytest.raises(InferenceServerException, match="no such model: 'nothing'"):
            client.load_model("lost")
        assert states(client)["lost"] == "UNAVAILABLE"
        client.unload_model("lost")
        assert client.is_server_ready()


def test_the_steps_of_an_ensemble_are_split_in_a_rollout_of_its_member(server) -> None:
    served, _ = server
    path = "/v2/repository/models/minus"
    start = {"version": "2", "canary": "50%", "step_s": 600, "force": "a test"}
    with httpclient.InferenceServerClient(served.address) as client:
        client.load_model("less")
        assert served.post(f"{path}/promote", json.dumps(start).encode())[0] == 200

        def are_counted() -> bool:
            assert infer(httpclient, client, "less", 7, "OUT") == [6]
            found = get(served, f"{path}/rollout")["figures"]
            names = ("stable_requests", "candidate_requests", "compared_rows")
            return all(found.get(name, 0) > 0 for name in names)

        wait_until(are_counted)
        assert served.post(f"{path}/rollback", b'{"rollout_only": true}')[0] == 200
        assert infer(httpclient, client, "less", 7, "OUT") == [6]


def test_a_promotion_that_would_break_an_ensemble_is_refused(server) -> None:
    served, _ = server
    path = "/v2/repository/models/minus/promote"
    with httpclient.InferenceServerClient(served.address) as client:
        client.load_model("less")
        client.load_model("named")
        for how in ({}, {"canary": "5%"}):
            body = json.dumps({"version": "2", "force": "a test", **how}).encode()
            status, answer = served.post(path, body)
            assert status == 400 and b"ensemble 'named': ensemble_scheduling.step[0]" in answer
        assert infer(httpclient, client, "named", 7, "OUT") == [6]
        client.unload_model("named")
        body = json.dumps({"version": "2", "force": "a test"}).encode()
        assert served.post(path, body)[0] == 200
        assert infer(httpclient, client, "less", 7, "OUT") == [6]
