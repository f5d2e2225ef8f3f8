"""Decoupled models behind a real server, over gRPC streams: 0 to n responses to a request."""

import http.client
import json
import os
import queue
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served
from tritonclient.utils import InferenceServerException
from waiting import PATIENCE_S, wait_until

STREAM = """
    backend: "python" max_batch_size: 0
    model_transaction_policy { decoupled: true }
    input { name: "IN" data_type: TYPE_INT32 dims: -1 }
    output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
    output { name: "IDX" data_type: TYPE_UINT32 dims: 1 }
    parameters { key: "penstock.spill_bytes" value { string_value: "1048576" } }
"""
# Answers in threads, after `execute` has returned.
STREAM_CODE = """
    import json
    import threading
    from pathlib import Path

    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def response(value, index, size=1):
        out = pb_utils.Tensor("OUT", np.full(size, value, np.int32))
        number = pb_utils.Tensor("IDX", np.array([index], np.uint32))
        return pb_utils.InferenceResponse([out, number], parameters={"index": index})

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                if json.loads(request.parameters()).get("raise"):
                    raise ValueError("raised")
                threading.Thread(target=answer, args=(request,)).start()

    def answer(request):
        said = json.loads(request.parameters())
        sender = request.get_response_sender()
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        is_marked = said.get("marks_last", False)
        for index, value in enumerate(values):
            is_last = is_marked and index == len(values) - 1
            sender.send(response(value, index, said.get("size", 1)), FINAL if is_last else 0)
        if said.get("until_cancelled"):
            while not sender.is_cancelled():
                threading.Event().wait(0.01)
            Path(said["until_cancelled"]).touch()
        if said.get("wrong"):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NONE", values)]))
        if said.get("fail"):
            error = pb_utils.TritonError("failed on purpose")
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)
        elif not (is_marked and len(values)) and not said.get("drop"):
            sender.send(flags=FINAL)
"""
PLAIN = """
    backend: "python" max_batch_size: 4
    input { name: "x" data_type: TYPE_INT32 dims: 1 }
    output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""
PLAIN_CODE = """
    def infer(inputs):
        return {"y": inputs["x"] + 1}
"""
# Adds up what the decoupled model gives it, and lets the plain one add 1.
CALLING_CODE = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    def ask(name, tensor, decoupled):
        request = pb_utils.InferenceRequest(model_name=name, inputs=[tensor])
        return request.exec(decoupled=decoupled)

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(each) for each in requests]

        def answer(self, request):
            (count,) = request.inputs()[0].as_numpy()[0]
            numbers = pb_utils.Tensor("IN", np.arange(count, dtype=np.int32))
            responses = list(ask("stream", numbers, True))
            outs = [pb_utils.get_output_tensor_by_name(each, "OUT") for each in responses]
            total = np.array([[sum(int(each.as_numpy()[0]) for each in outs)]], np.int32)
            response = ask("plain", pb_utils.Tensor("x", total), False)
            (tensor,) = response.output_tensors()
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor.as_numpy())])
"""


def add_model(root: Path, name: str, config: str, code: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(dedent(code))
    (root / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module", params=["1", "2"], ids=["one shard", "two shards"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    add_model(root, "stream", STREAM, STREAM_CODE)
    add_model(root, "plain", PLAIN, PLAIN_CODE)
    add_model(root, "calling", PLAIN, CALLING_CODE)
    with Served(root, "--shards", request.param, grpc=True) as server:
        yield server


class Stream:
    """A client's stream, and what came on it."""

    def __init__(self, served: Served) -> None:
        self._client = grpcclient.InferenceServerClient(served.grpc_address)
        self._got: queue.Queue[object] = queue.Queue()
        self._client.start_stream(lambda result, error: self._got.put(error or result))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, values: list[int], id: str = "", empty: bool = False, **said: object) -> None:
        tensor = grpcclient.InferInput("IN", [len(values)], "INT32")
        tensor.set_data_from_numpy(np.array(values, np.int32))
        self._client.async_stream_infer(
            "stream",
            [tensor],
            request_id=id,
            parameters=said,
            enable_empty_final_response=empty,
        )

    def ask_plain(self, value: int) -> None:
        tensor = grpcclient.InferInput("x", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[value]], np.int32))
        self._client.async_stream_infer("plain", [tensor], request_id=f"plain {value}")

    def get(self) -> object:
        return self._got.get(timeout=PATIENCE_S)

    def answers(self, number: int) -> list[tuple[str, list[int], bool]]:
        """The next answers: id, OUT or nothing, and whether it is the last."""
        found = []
        for _ in range(number):
            result = self.get()
            assert isinstance(result, grpcclient.InferResult), result
            message = result.get_response()
            out = result.as_numpy("OUT")
            is_final = message.parameters["triton_final_response"].bool_param
            found.append((message.id, [] if out is None else out.tolist(), is_final))
        return found

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)


def test_responses_come_as_they_are_sent_and_only_the_last_is_final(served):
    with Stream(served) as stream:
        stream.ask([7, 8, 9], "a", empty=True)
        assert stream.answers(4) == [
            ("a", [7], False), ("a", [8], False), ("a", [9], False), ("a", [], True),
        ]  # fmt: skip
        stream.ask([7, 8], "b", empty=True, marks_last=True)
        assert stream.answers(2) == [("b", [7], False), ("b", [8], True)]
        # Without the parameter, there is no answer that says only that it is the last.
        stream.ask([1], "c")
        stream.ask([], "d")
        stream.ask([], "e", empty=True)
        found = {id: (out, is_final) for id, out, is_final in stream.answers(2)}
        assert found == {"c": ([1], False), "e": ([], True)}


def test_responses_have_parameters(served):
    with Stream(served) as stream:
        stream.ask([5, 5])
        results = [stream.get() for _ in range(2)]
    indices = [each.get_response().parameters["index"].int64_param for each in results]
    assert indices == [0, 1]


def test_models_of_both_kinds_share_a_stream(served):
    with Stream(served) as stream:
        for number in range(20):
            stream.ask([number] * 5, f"stream {number}")
            stream.ask_plain(number)
        order: dict[str, list[int]] = {}
        for _ in range(20 * 6):
            result = stream.get()
            assert isinstance(result, grpcclient.InferResult), result
            plain, out = result.as_numpy("y"), result.as_numpy("IDX")
            value = int(plain[0, 0]) if plain is not None else int(out[0])
            order.setdefault(result.get_response().id, []).append(value)
    assert len(order) == 40
    for number in range(20):
        assert order[f"stream {number}"] == [0, 1, 2, 3, 4]
        assert order[f"plain {number}"] == [number + 1]


def test_responses_of_more_bytes_than_there_is_memory_wait_for_it(served):
    with Stream(served) as stream:
        stream.ask(list(range(50)), size=50_000)
        for number in range(50):
            out = stream.get().as_numpy("OUT")
            assert out.shape == (50_000,) and (out == number).all()
        stream.ask([1], size=1_000_000)
        assert "does not fit the spill segment" in str(stream.get())


def test_calls_with_one_answer_are_refused(served):
    def text_of(client, kind) -> str:
        tensor = kind.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(np.array([1], np.int32))
        with client, pytest.raises(InferenceServerException) as caught:
            client.infer("stream", [tensor])
        return f"{caught.value.status()} {caught.value.message()}"

    expected = "doesn't support models with decoupled transaction policy"
    text = text_of(grpcclient.InferenceServerClient(served.grpc_address), grpcclient)
    assert f"ModelInfer RPC {expected}" in text and "UNIMPLEMENTED" in text
    text = text_of(httpclient.InferenceServerClient(served.address), httpclient)
    assert f"HTTP end point {expected}" in text and text.startswith("501")
    with httpclient.InferenceServerClient(served.address) as client:
        policy = client.get_model_config("stream")["model_transaction_policy"]
    assert policy == {"decoupled": True}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"fail": True}, "failed on purpose"),
        ({"wrong": True}, "no output 'NONE'; it has ['IDX', 'OUT']"),
        ({"drop": True}, "dropped the request without a final response"),
    ],
)
def test_an_error_ends_the_responses_of_its_request_alone(served, said, text):
    with Stream(served) as stream:
        stream.ask([1, 2], "a", empty=True, **said)
        assert stream.answers(2) == [("a", [1], False), ("a", [2], False)]
        assert text in str(stream.get())
        stream.ask([3], "b", marks_last=True)
        assert stream.answers(1) == [("b", [3], True)]


def test_an_exception_of_execute_is_told_to_its_request(served):
    with Stream(served) as stream:
        stream.ask([1], **{"raise": True})
        assert "ValueError: raised" in str(stream.get())
        stream.ask([2], "b", marks_last=True)
        assert stream.answers(1) == [("b", [2], True)]


def test_a_client_that_leaves_cancels_its_request_in_the_model(served, tmp_path):
    mark = tmp_path / "cancelled"
    with Stream(served) as stream:
        stream.ask([1], "a", until_cancelled=str(mark))
        assert stream.answers(1) == [("a", [1], False)]
        assert not mark.exists()
        stream.cancel()
        wait_until(mark.exists)


def test_a_worker_that_is_killed_fails_what_has_begun_and_the_next_goes_on(served, tmp_path):
    with Stream(served) as stream:
        stream.ask([1], "a", until_cancelled=str(tmp_path / "cancelled"))
        assert stream.answers(1) == [("a", [1], False)]
        for worker in served.workers():
            os.kill(worker.pid, signal.SIGKILL)
        assert "was killed by SIGKILL after the first response" in str(stream.get())
        stream.ask([2], "b", marks_last=True)
        assert stream.answers(1) == [("b", [2], True)]


def test_statistics_count_requests_once_and_responses_by_their_number(served):
    def read() -> dict[str, object]:
        (found,) = client.get_inference_statistics("stream")["model_stats"]
        return found

    def counts(found: dict[str, object]) -> list[int]:
        responses = found["response_stats"]
        wanted = (("0", "success"), ("1", "success"), ("2", "empty_response"), ("1", "fail"))
        told = [responses.get(number, {}).get(kind, {}) for number, kind in wanted]
        stats = found["inference_stats"]
        own = [found["inference_count"], stats["success"]["count"], stats["fail"]["count"]]
        return [*own, *(each.get("count", 0) for each in told)]

    with httpclient.InferenceServerClient(served.address) as client, Stream(served) as stream:
        before = counts(read())
        stream.ask([1, 2], "a", empty=True)
        assert len(stream.answers(3)) == 3
        stream.ask([1], "b", fail=True)
        assert stream.answers(1) and "on purpose" in str(stream.get())
        wait_until(lambda: counts(read())[0] == before[0] + 2)
        gained = [new - old for new, old in zip(counts(read()), before, strict=True)]
    assert gained == [2, 1, 1, 2, 1, 1, 1]


def post(served: Served, path: str, body: object) -> tuple[int, str, bytes]:
    """Status, content type and body."""
    url = f"http://{served.address}/v2/models/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def events(body: bytes) -> list[dict[str, object]]:
    parts = body.split(b"\n\n")
    assert parts.pop() == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


SSE = "text/event-stream; charset=utf-8"
NAMED = {"model_name": "stream", "model_version": "1"}


def test_generate_gives_exactly_one_response(served):
    status, kind, body = post(served, "stream/generate", {"IN": 5, "id": "a"})
    assert (status, kind) == (200, "application/json")
    assert json.loads(body) == {"id": "a", **NAMED, "index": 0, "OUT": 5, "IDX": 0}
    said = {"parameters": {"IN": [6], "marks_last": True, "size": 2}}
    assert json.loads(post(served, "stream/versions/1/generate", said)[2])["OUT"] == [6, 6]
    for values in ([], [1, 2, 3]):
        status, _, body = post(served, "stream/generate", {"IN": values})
        assert status == 500
        expected = "generate expects model to produce exactly 1 response"
        assert expected in json.loads(body)["error"]


def test_generate_stream_gives_an_event_for_each_response(served):
    status, kind, body = post(served, "stream/generate_stream", {"IN": [7, 8]})
    assert (status, kind) == (200, SSE)
    assert events(body) == [
        {**NAMED, "index": n, "OUT": out, "IDX": n} for n, out in ((0, 7), (1, 8))
    ]
    assert post(served, "stream/generate_stream", {"IN": []}) == (200, SSE, b"")
    status, kind, body = post(served, "stream/generate_stream", {"IN": [7], "fail": True})
    assert (status, kind) == (200, SSE)
    assert [each.get("error", "") for each in events(body)] == ["", "failed on purpose"]
    status, kind, body = post(served, "stream/generate_stream", {"IN": [], "fail": True})
    assert (status, kind, events(body)) == (500, SSE, [{"error": "failed on purpose"}])


def test_generate_works_for_models_with_one_answer(served):
    expected = {"model_name": "plain", "model_version": "1", "y": 5}
    assert json.loads(post(served, "plain/generate", {"x": 4})[2]) == expected
    assert events(post(served, "plain/generate_stream", {"x": [4]})[2]) == [expected]
    rows = post(served, "plain/generate", {"x": [[1], [2], [3]]})[2]
    assert json.loads(rows)["y"] == [2, 3, 4]


@pytest.mark.parametrize("path", ["stream/generate", "stream/generate_stream", "plain/generate"])
def test_wrong_requests_to_generate_are_refused(served, path):
    for body, text in (
        ({}, "expected 1 inputs but got 0"),
        ({"x": "a", "IN": "a"}, "non-signed-integer"),
    ):
        status, kind, answer = post(served, path, body)
        assert (status, kind) == (400, "application/json")
        assert text in json.loads(answer)["error"]


def test_a_client_that_leaves_generate_stream_cancels_its_request(served, tmp_path):
    mark = tmp_path / "cancelled"
    host, _, port = served.address.partition(":")
    client = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    body = json.dumps({"IN": [1], "until_cancelled": str(mark)})
    client.request("POST", "/v2/models/stream/generate_stream", body)
    answer = client.getresponse()
    assert json.loads(answer.readline().removeprefix(b"data: "))["OUT"] == 1
    assert not mark.exists()
    answer.close()
    client.close()
    wait_until(mark.exists)


def test_models_call_decoupled_models(served):
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        tensor = grpcclient.InferInput("x", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[4]], np.int32))
        # The sum of its responses: 0 + 1 + 2 + 3, and 1 more by the other model.
        assert client.infer("calling", [tensor]).as_numpy("y").tolist() == [[7]]
