"""A model between two functions behind a real server: users send texts and get texts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http as httpclient
from onnx import TensorProto, helper
from served import Served
from tritonclient.utils import InferenceServerException

CODE = """
import time
from pathlib import Path

import numpy as np

NAMES = (Path(__file__).parent / "names.txt").read_text().split()


def letters(inputs):
    codes = np.frombuffer(inputs["text"][0].lower(), np.uint8).astype(np.int64) - ord("a")
    if len(codes) and not 0 <= codes.min() <= codes.max() < 26:
        raise ValueError("letters only")
    return {"ids": codes, "mask": np.ones(len(codes), np.int64)}


def name(outputs):
    total = int(outputs["total"][0])
    if total == 25:
        raise ValueError("not to be named")
    time.sleep(0.005)
    return {"name": np.array([f"{NAMES[total % 2]} of {len(outputs['each'])}"])}
"""
CONFIG = """
backend: "onnxruntime" max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 20000
  default_queue_policy { default_timeout_microseconds: 60000000 } }
input { name: "text" data_type: TYPE_STRING dims: 1 }
output { name: "name" data_type: TYPE_STRING dims: 1 }
"""
PARAMETERS = {
    "preprocess": "code.py:letters",
    "model_inputs": "ids:INT64[-1], mask:INT64[-1]",
    "postprocess": "code.py:name",
    "model_outputs": "total:INT64[1], each:INT64[-1]",
    "pad": "ids[0]=0, mask[0]=0",
    "pad_buckets": "4,16",
}


def write_model(path: Path) -> None:
    """each = ids x mask, total = their sum."""
    names = ("ids", "mask", "total", "each")
    shapes = [["n", 1] if name == "total" else ["n", "s"] for name in names]
    values = [
        helper.make_tensor_value_info(name, TensorProto.INT64, shape)
        for name, shape in zip(names, shapes, strict=True)
    ]
    nodes = [
        helper.make_node("Mul", ["ids", "mask"], ["each"]),
        helper.make_node("ReduceSum", ["each", "axes"], ["total"], keepdims=1),
    ]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    graph = helper.make_graph(nodes, "letters", values[:2], values[2:], [axes])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpclient.InferenceServerClient]:
    root = tmp_path_factory.mktemp("models")
    version = root / "names" / "1"
    version.mkdir(parents=True)
    (version / "code.py").write_text(CODE)
    (version / "names.txt").write_text("even odd")
    write_model(version / "model.onnx")
    parameters = [
        f'parameters {{ key: "penstock.{key}" value {{ string_value: "{value}" }} }}'
        for key, value in PARAMETERS.items()
    ]
    (root / "names" / "config.pbtxt").write_text("\n".join([CONFIG, *parameters]))
    served = Served(root)
    with httpclient.InferenceServerClient(served.address, concurrency=32) as connected:
        yield connected
    assert served.terminate() == 0


def text_input(*texts: bytes) -> httpclient.InferInput:
    tensor = httpclient.InferInput("text", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, object).reshape(-1, 1))
    return tensor


def test_users_see_what_they_send_and_get(client):
    metadata = client.get_model_metadata("names")
    assert [each["name"] for each in metadata["inputs"]] == ["text"]
    assert metadata["outputs"] == [{"name": "name", "datatype": "BYTES", "shape": [-1, 1]}]


def test_rows_of_one_request(client):
    answer = client.infer("names", [text_input(b"ab", b"abcd", b"bbbbb")])
    assert answer.as_numpy("name").tolist() == [[b"odd of 2"], [b"even of 4"], [b"odd of 5"]]


def test_many_at_once_of_different_lengths_and_only_the_wrong_ones_fail(client):
    texts = [b"b" * (1 + i % 12) for i in range(96)]
    texts[7], texts[50] = b"!", b"z"
    pending = [client.async_infer("names", [text_input(text)]) for text in texts]
    for i, (text, answer) in enumerate(zip(texts, pending, strict=True)):
        if i in (7, 50):
            reason = "letters only" if i == 7 else "not to be named"
            with pytest.raises(InferenceServerException, match=reason):
                answer.get_result()
            continue
        expected = f"{'odd' if len(text) % 2 else 'even'} of {len(text)}"
        assert answer.get_result().as_numpy("name").tolist() == [[expected.encode()]]


def test_its_time_is_that_of_the_output(client):
    client.infer("names", [text_input(b"ab")])
    (found,) = client.get_inference_statistics("names")["model_stats"]
    stats = found["inference_stats"]
    assert stats["compute_output"]["ns"] >= stats["success"]["count"] * 5_000_000
    assert stats["compute_infer"]["ns"] > 0
