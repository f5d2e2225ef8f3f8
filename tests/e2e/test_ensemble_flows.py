"""Ensembles that fan out and decide, behind a real server with one shard and with two."""

import concurrent.futures
import json
import threading
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


def parameter(name: str, text: str) -> str:
    return f"parameters {{ key: \"penstock.{name}\" value {{ string_value: '{text}' }} }}\n"


# However busy the machine is.
PATIENT = parameter("max_wait_ms", "0")
# Finds as many crops as the number in the picture says: 0, 1, 2, ... times 10, and its total.
FINDER = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            start, count = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0]
            crops = start + np.arange(int(count), dtype=np.float32)
            crops = np.stack([crops, crops], axis=1)[None]
            names = np.array([b"crop %d" % n for n in crops[0, :, 0]], np.object_).reshape(1, -1, 1)
            outputs = [pb_utils.Tensor("crops", crops), pb_utils.Tensor("names", names)]
            outputs.append(pb_utils.Tensor("count", np.array([[count]], np.int64)))
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
FINDER_CONFIG = """
backend: "python" max_batch_size: 8 instance_group { kind: KIND_CPU }
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "crops" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "names" data_type: TYPE_STRING dims: [ -1, 1 ] }
output { name: "count" data_type: TYPE_INT64 dims: 1 }
"""
# 13 is unlucky.
LABELLER = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            crop = pb_utils.get_input_tensor_by_name(request, "crop").as_numpy()
            names = pb_utils.get_input_tensor_by_name(request, "name").as_numpy()
            if (crop == 13).any():
                error = pb_utils.TritonError("13 is unlucky")
                answers.append(pb_utils.InferenceResponse(error=error))
                continue
            labels = np.array([[name[0] + b"!"] for name in names], np.object_)
            outputs = [pb_utils.Tensor("score", crop.sum(axis=1, keepdims=True))]
            outputs.append(pb_utils.Tensor("label", labels))
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
LABELLER_CONFIG = """
backend: "python" max_batch_size: 16 instance_group { kind: KIND_CPU } dynamic_batching { }
input { name: "crop" data_type: TYPE_FP32 dims: 2 }
input { name: "name" data_type: TYPE_STRING dims: 1 }
output { name: "score" data_type: TYPE_FP32 dims: 1 }
output { name: "label" data_type: TYPE_STRING dims: 1 }
"""
SCALE = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(r, "x").as_numpy() for r in requests]
        outputs = [pb_utils.Tensor("y", (x %s).astype(np.float32)) for x in inputs]
        return [pb_utils.InferenceResponse([y]) for y in outputs]
"""
SCALE_CONFIG = """
backend: "python" max_batch_size: 16 instance_group { kind: KIND_CPU } dynamic_batching { }
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


READ = """
platform: "ensemble" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "SCORES" data_type: TYPE_FP32 dims: [ -1, 1 ] }
output { name: "LABELS" data_type: TYPE_STRING dims: [ -1, 1 ] }
ensemble_scheduling {
  step { model_name: "finder" model_version: -1 input_map { key: "x" value: "IN" }
    output_map { key: "crops" value: "crops" } output_map { key: "names" value: "names" } }
  step { model_name: "labeller" model_version: -1
    input_map { key: "crop" value: "crops" } input_map { key: "name" value: "names" }
    output_map { key: "score" value: "SCORES" } output_map { key: "label" value: "LABELS" } }
}
"""
READ += parameter("fan_out.labeller", "crops, names") + parameter("fan_out_limit", "40")
READ += parameter("fan_out_concurrency", "6")
# Rows whose count is above 2 are doubled, others negated; then those whose count is not 5 get 1
# more.
DECIDE = """
platform: "ensemble" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
ensemble_scheduling {
  step { model_name: "finder" model_version: -1 input_map { key: "x" value: "IN" }
    output_map { key: "count" value: "count" } }
  step { model_name: "double" model_version: -1
    input_map { key: "x" value: "IN" } output_map { key: "y" value: "scaled" } }
  step { model_name: "negate" model_version: -1
    input_map { key: "x" value: "IN" } output_map { key: "y" value: "scaled" } }
  step { model_name: "more" model_version: -1
    input_map { key: "x" value: "scaled" } output_map { key: "y" value: "OUT" } }
}
"""
DECIDE += parameter("if.double", "count > 2") + parameter("if.negate", "count <= 2")
DECIDE += parameter("if.more", "count != 5") + parameter("default.OUT", "scaled")
WRONG = DECIDE.replace("count <= 2", "count < 2")


def add_model(root: Path, name: str, config: str, code: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if code:
        (root / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module", params=["1", "2"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("repository")
    add_model(root, "finder", FINDER_CONFIG + PATIENT, FINDER)
    add_model(root, "labeller", LABELLER_CONFIG + PATIENT, LABELLER)
    for name, how in (("double", "* 2"), ("negate", "* -1"), ("more", "+ 1")):
        add_model(root, name, SCALE_CONFIG + PATIENT, SCALE % how)
    for name, config in (("read", READ), ("again", READ), ("decide", DECIDE), ("wrong", WRONG)):
        add_model(root, name, config)
    flags = ["--model-control-mode", "explicit", "--shards", request.param]
    for name in ("read", "again", "decide"):
        flags += ["--load-model", name]
    with Served(root, *flags, grpc=True) as served:
        if request.param != "1":
            wait_until(lambda: served.has_shards(int(request.param)))
        yield served


def infer(served: Served, module, name: str, rows, *outputs: str):
    """The outputs for rows of two numbers."""
    address = served.address if module is httpclient else served.grpc_address
    array = np.array(rows, np.float32)
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput("IN", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        answer = client.infer(name, [tensor])
        return [answer.as_numpy(each) for each in outputs]


def read(served: Served, start: int, count: int, module=httpclient, name: str = "read") -> None:
    """Ask for crops, and check the answer."""
    scores, labels = infer(served, module, name, [[start, count]], "SCORES", "LABELS")
    assert scores.shape == labels.shape == (1, count, 1)
    assert scores.ravel().tolist() == [2.0 * (start + n) for n in range(count)]
    assert labels.ravel().tolist() == [b"crop %d!" % (start + n) for n in range(count)]


def statistics(served: Served, name: str):
    with httpclient.InferenceServerClient(served.address) as client:
        [found] = client.get_inference_statistics(name)["model_stats"]
        return found


def steps(served: Served, name: str):
    url = f"http://{served.address}/v2/models/{name}/explain"
    with urllib.request.urlopen(url) as answer:
        return json.loads(answer.read())["steps"]


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_each_crop_is_a_request_and_the_answers_come_back_in_order(server, module) -> None:
    for count in (3, 1, 40, 0):
        read(server, 100, count, module)


def test_crops_of_all_users_and_ensembles_share_batches(server) -> None:
    before = statistics(server, "labeller")
    jobs = [(100 * n, n % 23, httpclient, ("read", "again")[n % 2]) for n in range(60)]
    start = threading.Barrier(12)

    def one(job) -> None:
        if job[0] < 1200:
            start.wait()
        read(server, 1000 + job[0], *job[1:])

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(one, jobs))
    after = statistics(server, "labeller")
    crops = sum(job[1] for job in jobs)
    count = after["inference_stats"]["success"]["count"]
    assert count - before["inference_stats"]["success"]["count"] == crops
    assert after["execution_count"] - before["execution_count"] < crops


def test_the_error_of_a_crop_says_which(server) -> None:
    expected = "in ensemble 'read', model 'labeller', row 3: .*13 is unlucky"
    with pytest.raises(InferenceServerException, match=expected):
        read(server, 10, 20)
    read(server, 20, 20)


def test_a_request_with_too_many_crops_is_refused(server) -> None:
    expected = r"'crops' has 41 rows; at most 40 \(penstock.fan_out_limit\)"
    with pytest.raises(InferenceServerException, match=expected) as caught:
        read(server, 100, 41)
    assert caught.value.status() == "413"
    with pytest.raises(InferenceServerException, match=expected) as caught:
        read(server, 100, 41, grpcclient)
    assert "INVALID_ARGUMENT" in caught.value.status()


def decide(rows):
    """What `decide` makes of rows of two numbers."""
    scaled = [[(2 if row[1] > 2 else -1) * each for each in row] for row in rows]
    pairs = zip(rows, scaled, strict=True)
    return [[each + (row[1] != 5) for each in made] for row, made in pairs]


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_a_condition_decides_for_each_row(server, module) -> None:
    for rows in ([[1, 3]], [[1, 2]], [[1, 5]], [[n, n] for n in range(8)]):
        [found] = infer(server, module, "decide", rows, "OUT")
        assert found.tolist() == decide(rows)


def test_what_runs_and_what_does_not_is_counted(server) -> None:
    before = steps(server, "decide")
    infer(server, httpclient, "decide", [[0, n] for n in range(8)], "OUT")
    after = steps(server, "decide")
    changes = [
        (now["num_answered"] - old["num_answered"], now["num_skipped"] - old["num_skipped"])
        for old, now in zip(before, after, strict=True)
    ]
    assert changes == [(8, 0), (5, 3), (3, 5), (7, 1)]
    before = steps(server, "read")
    read(server, 50, 7)
    after = steps(server, "read")
    assert [n["num_answered"] - o["num_answered"] for o, n in zip(before, after, strict=True)] == [
        1,
        7,
    ]


def test_many_clients_decide_at_once(server) -> None:
    rng = np.random.default_rng(3)
    batches = [rng.integers(0, 8, (rng.integers(1, 9), 2)).tolist() for _ in range(60)]

    def one(rows) -> bool:
        [found] = infer(server, httpclient, "decide", rows, "OUT")
        return bool(found.tolist() == decide(rows))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, batches))


def test_conditions_that_leave_a_gap_are_refused_at_load(server) -> None:
    expected = "output: 'OUT' does not exist when count is 2; expected a step that makes it then"
    with (
        httpclient.InferenceServerClient(server.address) as client,
        pytest.raises(InferenceServerException, match=expected),
    ):
        client.load_model("wrong")


def test_clients_see_the_parameters(server) -> None:
    with httpclient.InferenceServerClient(server.address) as client:
        parameters = client.get_model_config("decide")["parameters"]
    assert parameters["penstock.if.more"] == {"string_value": "count != 5"}
