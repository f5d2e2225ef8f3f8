"""A real server as users start it, and the clients they use."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as httpclient
from served import EXAMPLES, HeldModel, Served, null_model


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(EXAMPLES)
    yield served
    assert served.terminate() == 0


@pytest.fixture
def client(server: Served) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.address) as connected:
        yield connected


def identity_input(values: np.ndarray, binary: bool) -> httpclient.InferInput:
    tensor = httpclient.InferInput("INPUT0", values.shape, "FP32")
    tensor.set_data_from_numpy(values, binary_data=binary)
    return tensor


def test_tritonclient_sees_a_ready_server_and_its_models(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("identity") and client.is_model_ready("digits", "1")
    metadata = client.get_model_metadata("digits")
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert client.get_server_metadata()["name"] == "penstock"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_gets_its_own_bits_back(client, binary_in, binary_out):
    values = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    asked = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary_out)]
    answer = client.infer(
        "identity", [identity_input(values, binary_in)], outputs=asked, request_id="seven"
    )
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), values)
    assert answer.get_response()["id"] == "seven"


def test_tritonclient_in_many_threads(server):
    with httpclient.InferenceServerClient(server.address, concurrency=8) as client:
        sent = [np.full((1, 16), i, dtype=np.float32) for i in range(100)]
        pending = [client.async_infer("identity", [identity_input(v, True)]) for v in sent]
        for values, answer in zip(sent, pending, strict=True):
            np.testing.assert_array_equal(answer.get_result().as_numpy("OUTPUT0"), values)


def test_who_serves_gives_way_to_nobody(server):
    """While they start, workers do; afterwards no thread of theirs may."""
    processes = server.workers()
    threads = [thread.id for process in processes for thread in process.threads()]
    assert len(threads) > len(processes) > 1
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}


def test_digits_are_recognised(client):
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:64, None] / 16).astype(np.float32)
    tensor = httpclient.InferInput("image", images.shape, "FP32")
    tensor.set_data_from_numpy(images)
    logits = client.infer("digits", [tensor]).as_numpy("logits")
    assert (logits.argmax(axis=1) == digits.target[:64]).mean() > 0.95


def test_wrong_requests_are_told_what_is_wrong(server):
    body = json.dumps(
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    ).encode()
    request = urllib.request.Request(f"http://{server.address}/v2/models/identity/infer", body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as error:
        assert error.code == 400
        assert json.load(error)["error"] == (
            "unexpected shape for input 'INPUT0' for model 'identity'. Expected [-1,16], got [1,3]"
        )


def test_a_killed_worker_comes_back_and_nothing_is_lost(server, client):
    before = server.workers()
    answers: list[np.ndarray] = []

    def load() -> None:
        with httpclient.InferenceServerClient(server.address, connection_timeout=60) as own:
            for i in range(200):
                values = np.full((1, 16), i, dtype=np.float32)
                answer = own.infer("identity", [identity_input(values, True)])
                np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), values)
                answers.append(values)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(answers) < 20:
        time.sleep(0.001)
    server.kill_workers()
    for thread in threads:
        thread.join()
    assert len(answers) == 400
    assert {w.pid for w in server.workers()}.isdisjoint({w.pid for w in before})


def test_metrics_count_what_was_done(server, client):
    def count(name: str) -> int:
        with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
            text = answer.read().decode()
        return int(re.search(rf'^{name}{{model="identity",version="1"}} (\d+)', text, re.M)[1])

    before = count("nv_inference_count"), count("nv_inference_request_success")
    client.infer("identity", [identity_input(np.zeros((5, 16), dtype=np.float32), True)])
    assert (count("nv_inference_count"), count("nv_inference_request_success")) == (
        before[0] + 5,
        before[1] + 1,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "number"), [("1", signal.SIGTERM), ("2", signal.SIGQUIT)])
def test_a_signal_drains_the_server_and_sighup_does_not(tmp_path, num_shards, number):
    held = HeldModel(tmp_path, "held")
    served = Served(tmp_path, "--shards", num_shards)
    answers: list[tuple[int, dict]] = []
    thread = threading.Thread(
        target=lambda: answers.append(served.infer("held", "x", "INT32", [7]))
    )
    held.hold()
    thread.start()
    held.wait_until_begun()
    processes = served.processes()
    served.process.send_signal(signal.SIGHUP)
    while "SIGHUP" not in served.logged():
        time.sleep(0.01)
    assert served.status("/v2/health/ready") == 200
    served.process.send_signal(number)
    while served.status("/v2/health/ready") == 200:
        time.sleep(0.01)
    assert served.status("/v2/health/ready") == 503
    assert served.status("/v2/health/live") == 200
    assert served.infer("held", "x", "INT32", [8]) == (
        503,
        {"error": "the server is shutting down"},
    )
    held.release()
    thread.join()
    ((status, answer),) = answers
    assert (status, answer["outputs"][0]["data"]) == (200, [7])
    assert served.finish(processes) == 0


def test_a_full_stdout_does_not_end_the_server(tmp_path):
    """/dev/full takes no byte. The log says where the server listens."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        str(null_model(tmp_path, "m")),
        "--no-grpc",
    ]
    command += ["--http-port", "0", "--no-metrics"]
    with open("/dev/full", "w") as full, (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=full, stderr=log, text=True)
        try:
            while "cannot be shown on stdout" not in (tmp_path / "log").read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
        finally:
            process.terminate()
            code = process.wait(60)
    assert code == 0, (tmp_path / "log").read_text()
