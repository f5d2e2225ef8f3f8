"""Python models behind a real server: text in, each request's own error, a crash survived."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import EXAMPLES, Served
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python" max_batch_size: 4 dynamic_batching {}
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
"""


def add_model(root: Path, name: str, code: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(dedent(code))
    (root / name / "config.pbtxt").write_text(CONFIG)


@pytest.fixture(scope="module")
def client() -> Iterator[httpclient.InferenceServerClient]:
    served = Served(EXAMPLES)
    with httpclient.InferenceServerClient(served.address, concurrency=16) as connected:
        yield connected
    assert served.terminate() == 0


def text_input(*texts: bytes) -> httpclient.InferInput:
    tensor = httpclient.InferInput("TEXT", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, object).reshape(-1, 1))
    return tensor


def test_text_length_counts_characters(client):
    answer = client.infer("text_length", [text_input(b"", "größe".encode(), b"x" * 1000)])
    assert answer.as_numpy("LENGTH").tolist() == [[0], [5], [1000]]


def test_many_texts_at_once_and_only_the_wrong_ones_fail(client):
    texts = [b"x" * i + (b"\xff" if i % 7 == 0 else b"") for i in range(200)]
    pending = [client.async_infer("text_length", [text_input(text)]) for text in texts]
    for i, answer in enumerate(pending):
        if i % 7 == 0:
            with pytest.raises(InferenceServerException, match=f"in position {i}:"):
                answer.get_result()
        else:
            assert answer.get_result().as_numpy("LENGTH").tolist() == [[i]]


def test_simple_answers_like_tritons(client):
    a, b = np.arange(16, dtype=np.int32)[None], np.ones((1, 16), np.int32)
    inputs = [httpclient.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
    for tensor, values in zip(inputs, (a, b), strict=True):
        tensor.set_data_from_numpy(values)
    answer = client.infer("simple", inputs)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), a - b)


def test_prints_and_logs_go_through_and_the_end_is_called(tmp_path):
    code = """
    import sys
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        async def execute(self, requests):
            print("printed", file=sys.stderr)
            pb_utils.Logger.log_info("logged")
            y = requests[0].inputs()[0].as_numpy()
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]

        def finalize(self):
            print("finalized", file=sys.stderr)
    """
    add_model(tmp_path, "noisy", code)
    served = Served(tmp_path)
    assert served.infer("noisy", "x", "INT32", [3])[1]["outputs"][0]["data"] == [3]
    served.process.terminate()
    served.process.wait(timeout=60)
    served.errors.seek(0)
    text = served.errors.read()
    served.finish([])
    assert all(word in text for word in ("printed", "penstock.model_code", "logged", "finalized"))


def test_a_model_that_ends_its_process_is_replaced(tmp_path):
    code = """
    import os

    def infer(inputs):
        if (inputs["x"] == 7).any():
            os._exit(3)
        return {"y": inputs["x"]}
    """
    add_model(tmp_path, "mortal", code)
    served = Served(tmp_path)
    status, answer = served.infer("mortal", "x", "INT32", [7])
    assert status == 500
    assert "twice" in answer["error"]
    assert served.infer("mortal", "x", "INT32", [8])[1]["outputs"][0]["data"] == [8]
    assert served.terminate() == 0


def test_a_model_that_raises_anything_keeps_its_worker(tmp_path):
    code = """
    import sys

    def infer(inputs):
        value = int(inputs["x"].max())
        if value == 1:
            raise SystemExit("gone")
        if value == 2:
            raise KeyboardInterrupt
        if value == 3:
            sys.stderr.close()
            raise ValueError("lone \\ud800")
        return {"y": inputs["x"]}
    """
    add_model(tmp_path, "rude", code)
    served = Served(tmp_path, "--log-format", "json")
    (worker,) = served.workers()
    for value, text in ((1, "sys.exit(gone)"), (2, "KeyboardInterrupt"), (3, "lone \\ud800")):
        for _ in range(3):
            status, answer = served.infer("rude", "x", "INT32", [value])
            assert status == 500 and text in answer["error"]
    assert served.infer("rude", "x", "INT32", [8])[1]["outputs"][0]["data"] == [8]
    assert [each.pid for each in served.workers()] == [worker.pid]
    assert served.terminate() == 0


COUNTS = """
    count = 0
    def infer(inputs):
        global count
        count += 1
        import numpy as np
        return {"y": np.full(SHAPE, count, np.int32)}
    """
TRITONS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_instance_name"]

        def execute(self, requests):
            assert all(request.inputs() == [] for request in requests)
            value = np.full((1, 1), len(self.name), np.int32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]) for _ in requests]
    """


@pytest.mark.parametrize("num_shards", ["1", "2"])
def test_models_without_inputs_are_served(tmp_path: Path, num_shards: str):
    output = 'output { name: "y" data_type: TYPE_INT32 dims: 1 }'
    for name, code, batching in (
        ("whole", COUNTS.replace("SHAPE", "(1,)"), ""),
        ("rows", COUNTS.replace("SHAPE", "(1, 1)"), "max_batch_size: 4 dynamic_batching {}"),
        ("tritons", TRITONS, "max_batch_size: 4"),
    ):
        add_model(tmp_path, name, code)
        (tmp_path / name / "config.pbtxt").write_text(f'backend: "python" {batching} {output}')
    served = Served(tmp_path, "--shards", num_shards, grpc=True)
    with (
        httpclient.InferenceServerClient(served.address) as http,
        grpcclient.InferenceServerClient(served.grpc_address) as grpc,
    ):
        for client in (http, grpc):
            assert client.get_model_metadata("whole")
            first, second = (client.infer("whole", []).as_numpy("y") for _ in range(2))
            assert first.shape == (1,) and second[0] == first[0] + 1
            assert client.infer("rows", []).as_numpy("y").shape == (1, 1)
            assert client.infer("tritons", []).as_numpy("y").tolist() == [[len("tritons_0_0")]]
            tensor = (httpclient if client is http else grpcclient).InferInput("x", [1], "INT32")
            tensor.set_data_from_numpy(np.zeros(1, np.int32))
            with pytest.raises(InferenceServerException, match="unexpected inference input 'x'"):
                client.infer("whole", [tensor])
    assert served.terminate() == 0
