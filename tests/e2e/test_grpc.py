"""A real server over gRPC, and the clients that people have for it."""

import asyncio
import json
import os
import queue
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import EXAMPLES, Served, null_model
from tritonclient.utils import InferenceServerException

IDENTITY = """
backend: "null" max_batch_size: 8 dynamic_batching {}
input { name: "x" data_type: TYPE_%s dims: -1 }
output { name: "y" data_type: TYPE_%s dims: -1 }
"""


def add_identity(root: Path, name: str, datatype: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(IDENTITY % (datatype, datatype))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example models cannot be linked in, so their like: a `null` model for each need."""
    root = tmp_path_factory.mktemp("repository")
    add_identity(root, "floats", "FP32")
    add_identity(root, "strings", "STRING")
    null_model(root, "slow", a_ms=300)
    null_model(root, "faulty", fail_on=13)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Served]:
    served = Served(repository, grpc=True)
    yield served
    assert served.terminate() == 0


@pytest.fixture
def client(server: Served) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc_address) as connected:
        yield connected


def tensor(values: np.ndarray, datatype: str, name: str = "x") -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, values.shape, datatype)
    made.set_data_from_numpy(values)
    return made


def floats(size: int, value: float = 1.0) -> np.ndarray:
    return np.full((1, size), value, dtype=np.float32)


def number(value: int = 1) -> list[grpcclient.InferInput]:
    """For the `null_model`s."""
    return [tensor(np.array([[value]], np.int32), "INT32")]


def into(answers: queue.Queue) -> Callable[..., None]:
    """A callback for tritonclient, which calls it by keyword."""
    return lambda result, error: answers.put((result, error))


def refusal(client: grpcclient.InferenceServerClient, *arguments, **options) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(*arguments, **options)
    return caught.value.status(), caught.value.message()


def test_tritonclient_sees_a_ready_server_and_its_models(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("floats") and client.is_model_ready("floats", "1")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata().name == "penstock"
    metadata = client.get_model_metadata("floats")
    assert [(x.name, x.datatype, list(x.shape)) for x in metadata.inputs] == [
        ("x", "FP32", [-1, -1])
    ]
    assert client.get_model_config("floats").config.max_batch_size == 8
    (statistics,) = client.get_inference_statistics("floats").model_stats
    assert (statistics.name, statistics.version) == ("floats", "1")
    with pytest.raises(InferenceServerException, match="not supported"):
        client.get_model_repository_index()


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (3, 16), (2, 10_000), (8, 100_000)])
def test_tritonclient_gets_its_own_bits_back(client, shape):
    values = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    asked = [grpcclient.InferRequestedOutput("y")]
    answer = client.infer(
        "floats", [tensor(values, "FP32")], outputs=asked, request_id="seven", model_version="1"
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), values)
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("seven", "floats", "1")


@pytest.mark.parametrize("count", [1, 3000])
def test_strings_of_any_bytes(client, count):
    values = np.array([[b"\xff\x00", b"", "é".encode(), b"x" * count] * count], dtype=np.object_)
    answer = client.infer("strings", [tensor(values, "BYTES")]).as_numpy("y")
    assert answer.tolist() == values.tolist()


def test_typed_contents(server):
    request = grpcclient.service_pb2.ModelInferRequest(model_name="floats")
    item = request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    item.contents.fp32_contents.extend([1, 2, 3])
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = grpcclient.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [1, 2, 3]


def test_the_example_models():
    served = Served(EXAMPLES, grpc=True)
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        image = np.zeros((2, 1, 8, 8), np.float32)
        assert client.infer("digits", [tensor(image, "FP32", "image")]).as_numpy(
            "logits"
        ).shape == (2, 10)
        values = floats(16, 3)
        answer = client.infer("identity", [tensor(values, "FP32", "INPUT0")])
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), values)
    assert served.terminate() == 0


@pytest.mark.parametrize(
    ("model", "name", "datatype", "values", "code"),
    [
        ("none", "x", "FP32", [[1.0]], "NOT_FOUND"),
        ("floats", "z", "FP32", [[1.0]], "INVALID_ARGUMENT"),
        ("floats", "x", "INT32", [[1]], "INVALID_ARGUMENT"),
        ("floats", "x", "FP32", [1.0], "INVALID_ARGUMENT"),
        ("floats", "x", "FP32", [[1.0]] * 9, "INVALID_ARGUMENT"),
        ("faulty", "x", "INT32", [[13]], "INTERNAL"),
    ],
)
def test_wrong_requests_get_the_texts_that_http_gives(
    server, client, model, name, datatype, values, code
):
    kind = np.float32 if datatype == "FP32" else np.int32
    array = np.array(values, dtype=kind)
    status, text = refusal(client, model, [tensor(array, datatype, name)])
    assert status == f"StatusCode.{code}"
    item = {"name": name, "datatype": datatype, "shape": array.shape, "data": values}
    request = urllib.request.Request(
        f"http://{server.address}/v2/models/{model}/infer",
        json.dumps({"inputs": [item]}).encode(),
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as error:
        assert json.loads(error.read())["error"] == text
    if model == "none":
        assert text == "Request for unknown model: 'none' is not found"


def test_a_wrong_size_is_told(client):
    wrong = grpcclient.InferInput("x", [1, 4], "FP32")
    wrong.set_data_from_numpy(floats(4))
    wrong.set_shape([1, 5])
    status, text = refusal(client, "floats", [wrong])
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert "byte size mismatch for input 'x' for model 'floats'. Expected 20, got 16" in text


def test_async_infer(client):
    answers: queue.Queue = queue.Queue()
    for value in range(100):
        inputs = [tensor(floats(16, value), "FP32")]
        client.async_infer("floats", inputs, into(answers), request_id=str(value))
    for _ in range(100):
        result, error = answers.get(timeout=30)
        assert error is None
        value = int(result.get_response().id)
        np.testing.assert_array_equal(result.as_numpy("y"), floats(16, value))


def test_a_cancelled_async_infer(client):
    answers: queue.Queue = queue.Queue()
    call = client.async_infer("slow", number(), into(answers))
    time.sleep(0.05)
    call.cancel()
    assert "Locally cancelled" in str(answers.get(timeout=5)[1])
    assert client.infer("slow", number(5)).as_numpy("y").tolist() == [[5]]


def test_a_deadline(server, client):
    status, _ = refusal(client, "slow", number(), client_timeout=0.05)
    assert status == "StatusCode.DEADLINE_EXCEEDED"
    while b'reason="CANCELED"} 0' in canceled(server):
        time.sleep(0.01)


def canceled(server: Served) -> bytes:
    lines = server.get("/metrics")[1].splitlines()
    (line,) = [x for x in lines if b"slow" in x and b"CANCELED" in x]
    return line


def test_a_stream(client):
    answers: queue.Queue = queue.Queue()
    client.start_stream(into(answers))
    for value in range(50):
        client.async_stream_infer(
            "floats", [tensor(floats(16, value), "FP32")], request_id=str(value)
        )
    client.async_stream_infer("none", [tensor(floats(16), "FP32")])
    seen = set()
    for _ in range(51):
        result, error = answers.get(timeout=30)
        if error is not None:
            assert "Request for unknown model: 'none' is not found" in str(error)
            continue
        value = int(result.get_response().id)
        np.testing.assert_array_equal(result.as_numpy("y"), floats(16, value))
        seen.add(value)
    assert seen == set(range(50))
    client.stop_stream()


def test_the_asyncio_client(server):
    async def scenario() -> None:
        async with aioclient.InferenceServerClient(server.grpc_address) as client:
            answers = await asyncio.gather(
                *(client.infer("floats", [tensor(floats(16, v), "FP32")]) for v in range(50))
            )
            for value, answer in enumerate(answers):
                np.testing.assert_array_equal(answer.as_numpy("y"), floats(16, value))

            async def requests():
                for value in range(10):
                    yield {
                        "model_name": "floats",
                        "inputs": [tensor(floats(20_000, value), "FP32")],
                    }

            received = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                received.append(result.as_numpy("y")[0, 0])
                if len(received) == 10:
                    break
            assert sorted(received) == list(range(10))

    asyncio.run(scenario())


def test_the_standard_health_probe(server):
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "inference.GRPCInferenceService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_a_killed_front_is_replaced_and_http_does_not_notice(server):
    workers = {worker.pid for worker in server.workers()}
    (front,) = server.fronts()
    statuses: list[int] = []
    longest_s = [0.0]
    stop = threading.Event()

    def ask_http() -> None:
        while not stop.is_set():
            began = time.monotonic()
            statuses.append(server.infer("faulty", "x", "INT32", [7])[0])
            longest_s[0] = max(longest_s[0], time.monotonic() - began)

    def ask_grpc() -> None:
        with grpcclient.InferenceServerClient(server.grpc_address) as client:
            while not stop.is_set():
                try:
                    client.infer("floats", [tensor(floats(10_000), "FP32")])
                except InferenceServerException:
                    time.sleep(0.05)

    threads = [threading.Thread(target=each) for each in (ask_http, ask_grpc, ask_grpc)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    os.kill(front.pid, signal.SIGKILL)
    with grpcclient.InferenceServerClient(server.grpc_address) as client:
        deadline = time.monotonic() + 30
        while True:
            try:
                answer = client.infer("floats", [tensor(floats(4, 5), "FP32")])
                break
            except InferenceServerException as error:
                assert error.status() == "StatusCode.UNAVAILABLE"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        np.testing.assert_array_equal(answer.as_numpy("y"), floats(4, 5))
    stop.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}
    assert longest_s[0] < 5
    assert {worker.pid for worker in server.workers()} == workers
    (another,) = server.fronts()
    assert another.pid != front.pid


def test_a_message_beyond_the_limit(tmp_path):
    served = Served(null_model(tmp_path, "m"), "--grpc-max-message-bytes", "4096", grpc=True)
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        inputs = [tensor(np.zeros((1, 2000), np.int32), "INT32")]
        assert refusal(client, "m", inputs)[0] == "StatusCode.RESOURCE_EXHAUSTED"
        assert client.infer("m", number(3)).as_numpy("y").tolist() == [[3]]
    assert served.terminate() == 0


def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest(tmp_path):
    served = Served(null_model(tmp_path, "slow", stall_on=7, stall_ms=1500), grpc=True)
    processes = served.processes()
    assert len(processes) == 2
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        told: queue.Queue = queue.Queue()
        client.start_stream(into(told))
        client.async_infer("slow", number(7), into(answers))
        time.sleep(0.4)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert not client.is_server_ready()
        status, text = refusal(client, "slow", number())
        assert (status, text) == ("StatusCode.UNAVAILABLE", "the server is shutting down")
        result, error = answers.get(timeout=10)
        assert error is None
        assert result.as_numpy("y").tolist() == [[7]]
        assert served.finish(processes) == 0
        assert told.empty(), "an idle stream ends without an error"


def test_the_front_dies_with_the_core(tmp_path):
    served = Served(null_model(tmp_path, "m"), grpc=True)
    processes = served.processes()
    served.process.kill()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert served.finish(processes) == -signal.SIGKILL
