"""A replica of a model, without Ray around it."""

import asyncio
import json
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import children_running
from ray_doubles import EXAMPLES, run, started_replica
from ray_load import write_pace
from text_server import NAME, write_model
from tritonclient.grpc import service_pb2

import penstock
from penstock.errors import ConfigError, InvalidRequest, NotFound, NotReady, Unsupported
from penstock.ray import cluster_messages as messages
from penstock.ray import replica as replica_module
from penstock.ray.cluster_messages import ClusterAnswer, ClusterCall
from penstock.ray.replica import ModelReplica, read_versions
from penstock.repository import history
from penstock.repository.history import HistoryEvent

BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}
).encode()
INFER = b"/v2/models/identity/infer"


async def http(
    replica: ModelReplica, method: bytes, target: bytes, body: bytes = b""
) -> ClusterAnswer:
    call = ClusterCall("http", memoryview(body), method, target)
    return messages.decode_answer(await replica.call(messages.encode_call(call)))


def num_workers() -> int:
    return len(children_running("penstock.serving.worker"))


def test_it_answers_http_with_real_workers_which_end_with_it() -> None:
    async def test() -> None:
        async with started_replica("identity") as replica:
            assert num_workers() == 1
            await replica.check_health()
            answer = await http(replica, b"POST", INFER, BODY)
            assert answer.status == 200
            assert answer.headers == b"content-type: application/json\r\n"
            assert json.loads(bytes(answer.body))["outputs"][0]["data"] == [1.0] * 16
            assert (await http(replica, b"GET", b"/v2/models/identity")).status == 200
            assert (await http(replica, b"POST", INFER, b"{")).status == 400
            assert (await http(replica, b"GET", b"/v2/models/simple")).status == 404
        assert num_workers() == 0

    run(test)


def test_it_answers_rpcs_and_tells_their_errors() -> None:
    message = service_pb2.ModelInferRequest(model_name="identity", id="7")
    tensor = message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(np.ones(16, np.float32).tobytes())

    async def test() -> None:
        async with started_replica("identity") as replica:

            async def ask() -> bytes:
                call = ClusterCall("infer", memoryview(message.SerializeToString()))
                data = await replica.call(messages.encode_call(call))
                return messages.decode_answer(data).check()

            answer = service_pb2.ModelInferResponse.FromString(await ask())
            assert (answer.id, answer.model_version) == ("7", "1")
            assert answer.raw_output_contents[0] == np.ones(16, np.float32).tobytes()
            tensor.datatype = "INT32"
            with pytest.raises(InvalidRequest, match="INPUT0"):
                await ask()
            message.model_version = "9"
            with pytest.raises(NotFound, match="version 9"):
                await ask()

    run(test)


def test_it_answers_management_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "replica_name", lambda: "r7")

    async def test() -> None:
        async with started_replica("identity") as replica:
            call = ClusterCall("manage", memoryview(b""), action="metadata")
            data = await replica.call(messages.encode_call(call))
            assert json.loads(messages.decode_answer(data).check())["name"] == "identity"
            await http(replica, b"POST", INFER, BODY)
            name, metrics, statistics = await replica.figures()
            assert name == "r7"
            assert json.loads(statistics)["model_stats"][0]["inference_count"] == 1
            assert b'nv_inference_request_success{model="identity",version="1"} 1' in metrics

    run(test)


def test_arrays_are_answered_as_by_a_model_in_process() -> None:
    images = np.random.default_rng(1).random((5, 1, 8, 8), dtype=np.float32)

    async def test() -> None:
        async with started_replica("digits") as replica:
            found = await asyncio.gather(*(replica.infer(images) for _ in range(3)))
            with penstock.load(EXAMPLES / "digits") as model:
                expected = model.infer(images)
            for each in found:
                assert np.array_equal(each["logits"], expected["logits"])
            with pytest.raises(InvalidRequest):
                await replica.infer(images[:, :, :4])

    run(test)


def test_arrays_stay_as_they_were_answered() -> None:
    images = np.random.default_rng(2).random((2, 1, 8, 8), dtype=np.float32)

    async def test() -> None:
        async with started_replica("digits") as replica:
            first = (await replica.infer(images))["logits"]
            before = first.copy()
            for _ in range(5):
                await replica.infer(1 - images)
            assert np.array_equal(first, before)

    run(test)


@pytest.mark.parametrize("kind", ["http", "rpc", "arrays"])
def test_a_cancelled_call_cancels_its_request(tmp_path: Path, kind: str) -> None:
    write_pace(tmp_path, "pace", 2.0)
    body = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1],"data":[1]}]}'
    message = service_pb2.ModelInferRequest(model_name="pace")
    message.inputs.add(name="X", datatype="FP32", shape=[1])
    message.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    rpc = messages.encode_call(ClusterCall("infer", memoryview(message.SerializeToString())))

    def call(replica: ModelReplica) -> Coroutine[Any, Any, object]:
        match kind:
            case "http":
                return http(replica, b"POST", b"/v2/models/pace/infer", body)
            case "rpc":
                return replica.call(rpc)
            case _:
                return replica.infer({"X": np.ones(1, np.float32)})

    async def test() -> None:
        async with started_replica("pace", tmp_path, drain_s=0.2) as replica:
            calls = [asyncio.create_task(call(replica)) for _ in range(2)]
            # Both are queued in their first step; the second waits behind the first.
            await asyncio.sleep(0)
            calls[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls[1]
            statistics = await http(replica, b"GET", b"/v2/models/pace/stats")
            (found,) = json.loads(bytes(statistics.body))["model_stats"]
            assert found["inference_stats"]["fail"]["count"] == 1
            calls[0].cancel()

    run(test)


def test_texts_leave_in_parts(tmp_path: Path) -> None:
    write_model(tmp_path)
    asked = {"model": NAME, "prompt": "one two", "max_tokens": 12, "temperature": 0, "stream": True}

    async def test() -> None:
        async with started_replica(NAME, tmp_path) as replica:
            body = memoryview(json.dumps(asked).encode())
            call = ClusterCall("http", body, b"POST", b"/v1/completions")
            parts = [part async for part in replica.stream(messages.encode_call(call))]
            head = messages.decode_answer(parts[0])
            assert (head.status, bytes(head.body)) == (200, b"")
            assert b"text/event-stream" in head.headers
            assert len(parts) > 5
            assert b"".join(parts[1:]).endswith(b"data: [DONE]\n\n")
            wrong = memoryview(b'{"model": "other", "prompt": "x", "stream": true}')
            call = ClusterCall("http", wrong, b"POST", b"/v1/completions")
            parts = [part async for part in replica.stream(messages.encode_call(call))]
            assert messages.decode_answer(parts[0]).status == 404

    run(test)


def test_it_is_not_healthy_without_its_workers() -> None:
    async def test() -> None:
        async with started_replica("identity") as replica:
            for process in children_running("penstock.serving.worker"):
                process.kill()
            async with asyncio.timeout(10):
                while True:
                    try:
                        await replica.check_health()
                    except NotReady as error:
                        assert "identity is not ready" in str(error)
                        return
                    await asyncio.sleep(0.001)

    run(test)


def test_versions_are_read_whichever_are_served(tmp_path: Path) -> None:
    write_pace(tmp_path, "pace", 0.0, versions=3)

    def versions(*asked: str) -> list[str]:
        found = read_versions(str(tmp_path), "pace", asked)
        return [config.version for config in found.configs]

    assert versions() == ["1"]
    assert versions("2") == ["2"]
    assert sorted(versions("1", "3")) == ["1", "3"]
    with pytest.raises(ConfigError, match="9"):
        versions("9")


def test_rollouts_of_servers_of_the_same_repository_are_not_ended(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "identity", tmp_path / "identity")
    event = HistoryEvent("2026-11-18T00:00:00Z", "canary started", "2", ("1",))
    history.append(tmp_path / "identity", event)
    before = history.read(tmp_path / "identity")

    async def test() -> None:
        async with started_replica("identity", tmp_path):
            assert history.read(tmp_path / "identity") == before
        async with penstock.asgi(tmp_path):
            assert history.read(tmp_path / "identity") != before

    run(test)


def test_a_model_that_cannot_be_loaded_fails_the_replica(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "identity", tmp_path / "identity")
    (tmp_path / "identity" / "1" / "model.onnx").write_bytes(b"not a model")

    async def test() -> None:
        with pytest.raises(ConfigError):
            async with started_replica("identity", tmp_path):
                pass
        assert num_workers() == 0

    run(test)


DECOUPLED = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            for number in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_decoupled_model_answers_streams_only(tmp_path: Path) -> None:
    (tmp_path / "many" / "1").mkdir(parents=True)
    (tmp_path / "many" / "1" / "model.py").write_text(DECOUPLED)
    (tmp_path / "many" / "config.pbtxt").write_text(
        """backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
        input { name: "x" data_type: TYPE_INT32 dims: 1 }
        output { name: "y" data_type: TYPE_INT32 dims: 1 }"""
    )

    async def test() -> None:
        async with started_replica("many", tmp_path) as replica:
            body = memoryview(b'{"x": 5}')
            call = ClusterCall("http", body, b"POST", b"/v2/models/many/generate_stream")
            head, *events = [each async for each in replica.stream(messages.encode_call(call))]
            assert messages.decode_answer(head).status == 200
            told = b"".join(events).decode().strip().split("\n\n")
            assert [json.loads(each.removeprefix("data: "))["y"] for each in told] == [5, 6, 7]
            with pytest.raises(Unsupported, match="'many' is decoupled"):
                await replica.infer(np.array([5], np.int32))

    run(test)
