"""A real server over gRPC, and the clients that people have for it."""

import asyncio
import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import EXAMPLES, HeldModel, Served, null_model
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from penstock.protocols.gate import SCOPES

# Requests may wait for as long as the machine makes them.
IDENTITY = """
backend: "null" max_batch_size: 8
dynamic_batching { default_queue_policy { default_timeout_microseconds: 60000000 } }
input { name: "x" data_type: TYPE_%s dims: -1 }
output { name: "y" data_type: TYPE_%s dims: -1 }
"""
ALONE = """
dynamic_batching { priority_levels: 2 default_priority_level: 2
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 60000000 } }
"""
INPUT = grpcclient.service_pb2.ModelInferRequest.InferInputTensor


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
def held(repository: Path) -> HeldModel:
    return HeldModel(repository, "held")


@pytest.fixture(scope="module")
def alone(repository: Path) -> HeldModel:
    """One request at a time."""
    return HeldModel(repository, "alone", config=ALONE, max_batch=1)


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def shards(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Whether the core answers or the processes that share its port."""
    return ("--shards", request.param)


@pytest.fixture(scope="module")
def server(
    repository: Path, held: HeldModel, alone: HeldModel, shards: tuple[str, str]
) -> Iterator[Served]:
    served = Served(repository, *shards, grpc=True)
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
    index = client.get_model_repository_index().models
    assert ("floats", "1", "READY") in [(each.name, each.version, each.state) for each in index]


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
        for module, address in ((grpcclient, served.grpc_address), (httpclient, served.address)):
            with module.InferenceServerClient(address) as asking:
                given = module.InferInput("image", image.shape, "FP32")
                given.set_data_from_numpy(image)
                asked = [module.InferRequestedOutput("logits", class_count=3)]
                answer = asking.infer("digits", [given], outputs=asked)
                classes = answer.as_numpy("logits").tolist()
            if module is grpcclient:
                expected = classes
        assert classes == expected
        assert (len(classes), len(classes[0])) == (2, 3)
        assert all(len(each.split(b":")) == 3 for each in classes[0]), "value, index and label"
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
        assert text.startswith("Request for unknown model: 'none' is not found")


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
        result, error = answers.get(timeout=60)
        assert error is None
        value = int(result.get_response().id)
        np.testing.assert_array_equal(result.as_numpy("y"), floats(16, value))


def test_a_cancelled_async_infer(client, held):
    answers: queue.Queue = queue.Queue()
    held.hold()
    call = client.async_infer("held", number(), into(answers))
    held.wait_until_begun()
    call.cancel()
    assert "Locally cancelled" in str(answers.get(timeout=60)[1])
    held.release()
    assert client.infer("held", number(5)).as_numpy("y").tolist() == [[5]]


def test_a_deadline(server, client, held):
    before = num_canceled(server, "held")
    held.hold()
    give_up(client, server, "held")
    assert num_canceled(server, "held") > before
    held.release()


def give_up(client: grpcclient.InferenceServerClient, server: Served, model: str) -> None:
    """A request whose deadline passes, until the server has noticed. One that is late already may
    never leave the client, so another follows."""
    before = num_canceled(server, model)

    def is_noticed() -> bool:
        status, _ = refusal(client, model, number(2), client_timeout=0.1)
        assert status == "StatusCode.DEADLINE_EXCEEDED"
        return num_canceled(server, model) > before and num_pending(server, model) == 0

    wait_until(is_noticed)


def num_executions(client: grpcclient.InferenceServerClient, model: str) -> int:
    return client.get_inference_statistics(model).model_stats[0].execution_count


def test_a_request_whose_deadline_passes_in_the_queue_is_never_computed(server, client, alone):
    answers: queue.Queue = queue.Queue()
    before = num_executions(client, "alone")
    alone.hold()
    client.async_infer("alone", number(1), into(answers))
    alone.wait_until_begun()
    give_up(client, server, "alone")
    alone.release()
    assert answers.get(timeout=60)[1] is None
    assert client.infer("alone", number(3)).as_numpy("y").tolist() == [[3]]
    assert num_executions(client, "alone") - before == 2


def test_priority_and_timeout_are_those_of_http(server, client, alone, shards):
    answers: queue.Queue = queue.Queue()
    alone.hold()
    client.async_infer("alone", number(1), into(answers), priority=2)
    alone.wait_until_begun()
    for value, priority in ((2, 2), (3, 1)):
        client.async_infer("alone", number(value), into(answers), priority=priority)
        wait_until(lambda value=value: num_pending(server, "alone") == value - 1)
    alone.release()
    order = [answers.get(timeout=60)[0].as_numpy("y")[0, 0] for _ in range(3)]
    assert order == [1, 3, 2], "the urgent one overtakes what waits"

    alone.hold()
    client.async_infer("alone", number(), into(answers))
    alone.wait_until_begun()
    status, text = refusal(client, "alone", number(), timeout=50_000)
    assert (status, "Request timeout expired" in text) == ("StatusCode.UNAVAILABLE", True), text
    if shards[1] == "1":  # Another shard would not know that the worker is busy.
        item = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [1]}
        body = {"inputs": [item], "parameters": {"timeout": 50_000}}
        code, answer = post(server, "/v2/models/alone/infer", body)
        assert (code, answer["error"]) == (503, text)
    alone.release()
    assert answers.get(timeout=60)[1] is None


def post(server: Served, path: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(f"http://{server.address}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def num_canceled(server: Served, model: str) -> int:
    return metric(server, f'"{model}"', 'reason="CANCELED"')


def num_pending(server: Served, model: str) -> int:
    return metric(server, f'"{model}"', "nv_inference_pending_request_count")


def metric(server: Served, *words: str) -> int:
    lines = server.get("/metrics")[1].decode().splitlines()
    (line,) = [line for line in lines if all(word in line for word in words)]
    return int(line.split()[-1])


def test_a_stream(client):
    answers: queue.Queue = queue.Queue()
    client.start_stream(into(answers))
    for value in range(50):
        client.async_stream_infer(
            "floats", [tensor(floats(16, value), "FP32")], request_id=str(value)
        )
    client.async_stream_infer("none", [tensor(floats(16), "FP32")])
    for value in range(50):
        result, error = answers.get(timeout=60)
        assert error is None
        response = result.get_response()
        assert response.id == str(value), "in the order of the requests"
        assert response.parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("y"), floats(16, value))
    _, error = answers.get(timeout=60)
    assert "Request for unknown model: 'none' is not found" in str(error)
    client.stop_stream()


def test_a_stream_that_is_stopped_gets_what_it_asked_for(client):
    answers: queue.Queue = queue.Queue()
    client.start_stream(into(answers))
    client.async_stream_infer("slow", number(5))
    client.stop_stream()
    result, error = answers.get(timeout=60)
    assert error is None
    assert result.as_numpy("y").tolist() == [[5]]


def test_a_stream_that_is_cancelled(client, held):
    answers: queue.Queue = queue.Queue()
    held.hold()
    client.start_stream(into(answers))
    client.async_stream_infer("held", number(5))
    held.wait_until_begun()
    client.stop_stream(cancel_requests=True)
    assert "Locally cancelled" in str(answers.get(timeout=60)[1])
    held.release()
    assert client.infer("held", number(6)).as_numpy("y").tolist() == [[6]]


def test_requests_and_answers_may_be_compressed(tmp_path, shards):
    add_identity(tmp_path, "floats", "FP32")
    values = floats(100_000, 2)
    for flags, is_small in (((), False), (("--grpc-compression", "gzip"), True)):
        served = Served(tmp_path, *flags, *shards, grpc=True)
        with (
            Relay(served.grpc_address) as relay,
            grpcclient.InferenceServerClient(relay.address) as client,
        ):
            for algorithm in ("gzip", "deflate", None):
                answer = client.infer(
                    "floats", [tensor(values, "FP32")], compression_algorithm=algorithm
                )
                np.testing.assert_array_equal(answer.as_numpy("y"), values)
            assert relay.num_bytes["to server"] < 2 * values.nbytes
            assert (relay.num_bytes["to client"] < values.nbytes) is is_small
        assert served.terminate() == 0


class Relay:
    """Passes one connection on, in both directions, and counts the bytes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_bytes = {"to server": 0, "to client": 0}

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with self._listener:
            client, _ = self._listener.accept()
        with client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._pass, args=(server, client, "to client"))
            back.start()
            self._pass(client, server, "to server")
            back.join()

    def _pass(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.num_bytes[name] += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def item(
    name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (1, 2), **contents: list
) -> INPUT:
    made = INPUT(name=name, datatype=datatype, shape=shape)
    if contents:
        made.contents.MergeFrom(grpcclient.service_pb2.InferTensorContents(**contents))
    return made


@pytest.mark.parametrize(
    ("model", "inputs", "raw", "words"),
    [
        ("floats", [item()], [bytes(7)], "input 'x'"),
        ("floats", [item()], [bytes(12)], "input 'x'"),
        ("floats", [item()], [b""], "input 'x'"),
        ("floats", [item(), item()], [bytes(8)] * 2, "'x'"),
        ("floats", [item(), item("z")], [bytes(8)] * 2, "'z'"),
        ("floats", [item(), item("z")], [bytes(8)], "'z'"),
        ("floats", [item(fp32_contents=[1, 2])], [bytes(8)], "contents for 'x'"),
        ("floats", [item(fp32_contents=[1, 2, 3])], [], "input 'x'"),
        ("floats", [item(shape=(-1, 2))], [bytes(8)], "input 'x'"),
        ("floats", [item(shape=(1, -2))], [bytes(8)], "input 'x'"),
        ("floats", [item(shape=(2**4, 2**60 + 2))], [bytes(8)], "input 'x'"),
        ("floats", [item(shape=(2**62, 2))], [bytes(8)], "input 'x'"),
        ("floats", [item(shape=(9, 2))], [bytes(72)], "batch-size must be <= 8"),
        ("floats", [item(shape=())], [bytes(4)], "input 'x'"),
        ("floats", [item(datatype="FP16")], [bytes(4)], "input 'x'"),
        ("floats", [item(datatype="FP16", fp32_contents=[1, 2])], [], "input 'x'"),
        ("floats", [item(datatype="FP8")], [bytes(2)], "input 'x'"),
        ("floats", [item(int_contents=[1, 2])], [], "input 'x'"),
        ("floats", [], [], "got 0 inputs"),
        ("strings", [item(datatype="BYTES")], [b"\1\0\0\0a"], "input 'x'"),
        ("strings", [item(datatype="BYTES")], [b"\xff\xff\xff\xffab"], "input 'x'"),
        ("strings", [item(datatype="BYTES")], [b"\1\0\0\0a\1\0"], "input 'x'"),
        ("strings", [item(datatype="BYTES")], [b"\0\0\0\0" * 3], "input 'x'"),
        ("strings", [item(datatype="BYTES", bytes_contents=[b"a"])], [], "input 'x'"),
    ],
)
def test_malformed_requests_are_told_which_input_is_wrong(server, model, inputs, raw, words):
    request = grpcclient.service_pb2.ModelInferRequest(
        model_name=model, inputs=inputs, raw_input_contents=raw
    )
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = grpcclient.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert words in caught.value.details()
        good = grpcclient.service_pb2.ModelInferRequest(
            model_name="floats", inputs=[item()], raw_input_contents=[bytes(8)]
        )
        assert list(stub.ModelInfer(good).raw_output_contents) == [bytes(8)]


# The repository


@pytest.fixture
def explicit(tmp_path: Path, shards: tuple[str, str]) -> Iterator[Served]:
    for name in ("first", "second"):
        null_model(tmp_path, name)
    null_model(tmp_path, "broken", config="nonsense: 1")
    flags = ("--model-control-mode", "explicit", "--load-model", "first")
    served = Served(tmp_path, *flags, *shards, grpc=True)
    yield served
    assert served.terminate() == 0


def states(client: grpcclient.InferenceServerClient) -> dict[str, str]:
    return {each.name: each.state for each in client.get_model_repository_index().models}


def test_models_are_loaded_and_unloaded(explicit):
    with grpcclient.InferenceServerClient(explicit.grpc_address) as client:
        assert states(client) == {"broken": "", "first": "READY", "second": ""}
        client.load_model("second")
        assert client.is_model_ready("second")
        assert client.infer("second", number(4)).as_numpy("y").tolist() == [[4]]
        client.unload_model("first")
        assert refusal(client, "first", number())[0] == "StatusCode.NOT_FOUND"
        assert not client.is_model_ready("first")
        client.load_model("first")
        client.load_model("first")
        assert client.infer("first", number(5)).as_numpy("y").tolist() == [[5]]
        assert states(client) == {"broken": "", "first": "READY", "second": "READY"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "code"),
    [
        ("nobody", {}, "NOT_FOUND"),
        ("../first", {}, "NOT_FOUND"),
        ("", {}, "NOT_FOUND"),
        ("broken", {}, "INVALID_ARGUMENT"),
        ("second", {"config": "{}"}, "INVALID_ARGUMENT"),
        ("second", {"files": {"file:1/model.onnx": b"x"}, "config": "{}"}, "PERMISSION_DENIED"),
    ],
)
def test_loads_are_refused_with_the_words_of_http(explicit, name, parameters, code):
    with grpcclient.InferenceServerClient(explicit.grpc_address) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.load_model(name, **parameters)
        assert caught.value.status() == f"StatusCode.{code}"
        assert client.is_server_live()
        assert client.infer("first", number(3)).as_numpy("y").tolist() == [[3]]
    if name and "/" not in name:
        with (
            httpclient.InferenceServerClient(explicit.address) as over_http,
            pytest.raises(InferenceServerException) as other,
        ):
            over_http.load_model(name, **parameters)
        assert other.value.message() == caught.value.message()


def test_the_control_api_is_off_by_default(server, client):
    with httpclient.InferenceServerClient(server.address) as over_http:
        for change, same in (
            (client.load_model, over_http.load_model),
            (client.unload_model, over_http.unload_model),
        ):
            with pytest.raises(InferenceServerException, match="load / unload is not") as caught:
                change("floats")
            with pytest.raises(InferenceServerException) as other:
                same("floats")
            assert caught.value.status() == "StatusCode.PERMISSION_DENIED"
            assert caught.value.message() == other.value.message()
    assert client.is_model_ready("floats")


def test_shared_memory_that_is_off_says_so(client):
    for call in (
        client.get_system_shared_memory_status,
        client.unregister_system_shared_memory,
        client.get_cuda_shared_memory_status,
        client.unregister_cuda_shared_memory,
        lambda: client.register_system_shared_memory("r", "/r", 64),
        lambda: client.register_cuda_shared_memory("r", b"", 0, 64),
    ):
        words = "not (supported|allowed) by this server"
        with pytest.raises(InferenceServerException, match=words) as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_the_asyncio_client_controls_too(explicit):
    async def scenario() -> None:
        async with aioclient.InferenceServerClient(explicit.grpc_address) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert (await client.get_server_metadata()).name == "penstock"
            assert (await client.get_model_metadata("first")).name == "first"
            assert (await client.get_model_config("first")).config.name == "first"
            await client.load_model("second")
            assert await client.is_model_ready("second")
            await client.unload_model("second")
            assert not await client.is_model_ready("second")
            index = (await client.get_model_repository_index()).models
            assert {each.name for each in index} == {"broken", "first", "second"}
            statistics = (await client.get_inference_statistics()).model_stats
            assert [each.name for each in statistics] == ["first"]

    asyncio.run(scenario())


def test_the_server_is_called_what_its_operator_says(tmp_path):
    served = Served(null_model(tmp_path, "m"), "--id", "edge 7", grpc=True)
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        assert client.get_server_metadata().name == "edge 7"
    assert json.loads(served.get("/v2")[1])["name"] == "edge 7"
    assert served.terminate() == 0


def test_keys_open_what_their_scopes_say(tmp_path, shards):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[key]]\nsecret = "the {scope} secret key"\nscopes = ["{scope}"]\n'
            for scope in ("infer", "admin", "metrics")
        )
    )
    flags = ("--api-keys", str(keys), "--model-control-mode", "explicit", "--load-model", "m")
    served = Served(null_model(tmp_path / "models", "m"), *flags, *shards, grpc=True)
    headers = {scope: {"authorization": f"Bearer the {scope} secret key"} for scope in SCOPES}
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        assert client.is_server_ready()
        answer = client.infer("m", number(7), headers=headers["infer"])
        assert answer.as_numpy("y").tolist() == [[7]]
        status, text = refusal(client, "m", number())
        assert status == "StatusCode.UNAUTHENTICATED"
        assert "Authorization: Bearer" in text
        wrong = {"x-api-key": "the other secret key"}
        assert refusal(client, "m", number(), headers=wrong)[0] == "StatusCode.UNAUTHENTICATED"
        status, text = refusal(client, "m", number(), headers=headers["metrics"])
        assert status == "StatusCode.PERMISSION_DENIED"
        assert "This protocol is restricted" in text
        with pytest.raises(InferenceServerException, match="no scope 'admin'"):
            client.unload_model("m", headers=headers["infer"])
        client.unload_model("m", headers=headers["admin"])
        assert not client.is_model_ready("m", headers=headers["infer"])
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == 1
    assert served.terminate() == 0


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


def test_the_health_of_a_model_is_watched(explicit):
    request = health_pb2.HealthCheckRequest(service="second")
    with (
        grpcclient.InferenceServerClient(explicit.grpc_address) as client,
        grpc.insecure_channel(explicit.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(request, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        client.load_model("second")
        seen = next(watch).status
        if seen == health_pb2.HealthCheckResponse.NOT_SERVING:  # While it loads.
            seen = next(watch).status
        assert seen == health_pb2.HealthCheckResponse.SERVING
        assert stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        client.unload_model("second")
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(request)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch.cancel()


def test_a_message_beyond_the_limit(tmp_path, shards):
    limit = ("--grpc-max-message-bytes", "4096")
    served = Served(null_model(tmp_path, "m"), *limit, *shards, grpc=True)
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        inputs = [tensor(np.zeros((1, 2000), np.int32), "INT32")]
        assert refusal(client, "m", inputs)[0] == "StatusCode.RESOURCE_EXHAUSTED"
        assert client.infer("m", number(3)).as_numpy("y").tolist() == [[3]]
    assert served.terminate() == 0


def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest(tmp_path, shards):
    held = HeldModel(tmp_path, "held")
    served = Served(tmp_path, *shards, grpc=True)
    processes = served.processes()
    assert len(processes) == (2 if shards[1] == "1" else 4), "worker, reaper and shards"
    answers: queue.Queue = queue.Queue()
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        told: queue.Queue = queue.Queue()
        client.start_stream(into(told))
        held.hold()
        client.async_infer("held", number(7), into(answers))
        held.wait_until_begun()
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.is_server_ready())
        status, text = refusal(client, "held", number())
        assert (status, text) == ("StatusCode.UNAVAILABLE", "the server is shutting down")
        held.release()
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.as_numpy("y").tolist() == [[7]]
        assert served.finish(processes) == 0
        _, error = told.get(timeout=60)
        assert (error.status(), error.message()) == (status, text), "an idle stream is told too"


# Many calls, large ones, and clients that go.


def test_large_tensors_in_and_out(client):
    values = np.random.default_rng(2).normal(size=(4, 1 << 20)).astype(np.float32)
    for id in ("", "large"):
        answer = client.infer("floats", [tensor(values, "FP32")], request_id=id)
        np.testing.assert_array_equal(answer.as_numpy("y"), values)
    answers: queue.Queue = queue.Queue()
    client.start_stream(into(answers))
    for row in values:
        client.async_stream_infer("floats", [tensor(row[None], "FP32")])
    for row in values:
        result, error = answers.get(timeout=60)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), row[None])
    client.stop_stream()


def test_a_thousand_calls_at_a_time_over_several_channels(server):
    """More calls than a connection carries at a time: the rest waits in the client."""

    async def scenario() -> None:
        # Different arguments, or the channels would share a connection.
        channels = [
            grpc.aio.insecure_channel(server.grpc_address, options=[("penstock.client", number)])
            for number in range(5)
        ]
        stubs = [grpcclient.service_pb2_grpc.GRPCInferenceServiceStub(each) for each in channels]

        async def ask(number: int) -> None:
            data = np.full((1, 64), number, np.float32).tobytes()
            request = grpcclient.service_pb2.ModelInferRequest(
                model_name="floats", inputs=[item(shape=(1, 64))], raw_input_contents=[data]
            )
            answer = await stubs[number % 5].ModelInfer(request, timeout=60)
            assert answer.raw_output_contents[0] == data

        await asyncio.gather(*(ask(number) for number in range(1000)))
        for channel in channels:
            await channel.close()

    asyncio.run(scenario())


KILLED = """
import sys, queue
import numpy as np
import tritonclient.grpc as grpcclient

client = grpcclient.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: None)
for value in range(4):
    made = grpcclient.InferInput("x", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[value]], np.int32))
    client.async_stream_infer("held", [made])
print("sent", flush=True)
queue.Queue().get()
"""


def test_a_client_that_is_killed_cancels_its_stream(server, client, held):
    before = num_canceled(server, "held")
    held.hold()
    command = [sys.executable, "-c", KILLED, server.grpc_address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"sent\n"
        held.wait_until_begun()
        process.kill()
    wait_until(lambda: num_canceled(server, "held") > before)
    held.release()
    assert client.infer("held", number(6)).as_numpy("y").tolist() == [[6]]
    wait_until(lambda: num_pending(server, "held") == 0)


def test_pings_of_a_client_that_keeps_its_connection_alive(server, held):
    """More often than grpcio's server allows."""
    keep = grpcclient.KeepAliveOptions(
        keepalive_time_ms=50,
        keepalive_timeout_ms=10_000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )
    with grpcclient.InferenceServerClient(server.grpc_address, keepalive_options=keep) as client:
        answers: queue.Queue = queue.Queue()
        held.hold()
        client.async_infer("held", number(5), into(answers))
        held.wait_until_begun()
        time.sleep(1)
        held.release()
        result, error = answers.get(timeout=60)
        assert error is None and result.as_numpy("y").tolist() == [[5]]
