"""`reshape`, ragged batches and optional inputs behind a real server, as Triton's L0_infer_reshape,
L0_batch_input and L0_optional_input ask for them with tritonclient."""

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served
from tritonclient.utils import InferenceServerException

# Batches close at four rows, however long that takes.
FOUR = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }"
# As the densenet_onnx of Triton's example repository: no batch dimension outside, one inside.
IMAGE = """
<ir_version: 8, opset_import: ["" : 17]>
image (float[1, 3, 4, 4] data_0) => (float[1, 3, 1, 1] fc6_1) { fc6_1 = GlobalMaxPool (data_0) }
"""
IMAGE_CONFIG = """
platform: "onnxruntime_onnx" max_batch_size: 0
input { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 4, 4 ]
  reshape { shape: [ 1, 3, 4, 4 ] } }
output { name: "fc6_1" data_type: TYPE_FP32 dims: [ 3 ] reshape { shape: [ 1, 3, 1, 1 ] }
  label_filename: "labels.txt" }
"""
SCALARS = """
<ir_version: 8, opset_import: ["" : 17]>
scalars (float[N] x) => (float[N] y) { y = Add (x, x) }
"""
SCALARS_CONFIG = """
backend: "onnxruntime" max_batch_size: 8 %s
input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { shape: [ ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 1, 1 ] reshape { shape: [ ] } }
"""
# Each request gets what the model saw of the whole batch, as from the models of L0_batch_input.
SEEN = """
<ir_version: 8, opset_import: ["" : 17]>
seen (float[M] x, float[N] counts, float[K] more) => (float[N, M] all, float[N, N] c, float[N, K] m)
<int64[2] row = {1, -1}, int64[2] column = {-1, 1}>
{
    one = Div (counts, counts)
    ones = Reshape (one, column)
    x_row = Reshape (x, row)
    c_row = Reshape (counts, row)
    m_row = Reshape (more, row)
    all = MatMul (ones, x_row)
    c = MatMul (ones, c_row)
    m = MatMul (ones, m_row)
}
"""
SEEN_CONFIG = f"""
backend: "onnxruntime" max_batch_size: 4 {FOUR}
input {{ name: "x" data_type: TYPE_FP32 dims: %s allow_ragged_batch: true }}
output {{ name: "all" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "c" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "m" data_type: TYPE_FP32 dims: -1 }}
batch_input [
  {{ kind: %s target_name: "counts" data_type: TYPE_FP32 source_input: "x" }},
  {{ kind: %s target_name: "more" data_type: TYPE_FP32 source_input: "x" }} ]
"""
DOUBLE = """
<ir_version: 8, opset_import: ["" : 17]>
double (float[M] x) => (float[M] y) { y = Add (x, x) }
"""
DOUBLE_CONFIG = f"""
backend: "onnxruntime" max_batch_size: 4 {FOUR}
input {{ name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }}
output {{ name: "y" data_type: TYPE_FP32 dims: -1 }}
batch_output {{ target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }}
"""
# Answers which inputs a request has, their sum, and how many requests came together.
OPTIONAL = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]
    def answer(self, request, together):
        tensors = request.inputs()
        names = ",".join(sorted(each.name() for each in tensors))
        total = sum(float(each.as_numpy().sum()) for each in tensors)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("names", np.array([[names.encode()]], dtype=object)),
            pb_utils.Tensor("total", np.array([[total, together]], dtype=np.float32)),
        ])
"""
OPTIONAL_CONFIG = """
backend: "python" max_batch_size: 4
dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: %s }
input [ { name: "a" data_type: TYPE_FP32 dims: -1 optional: true },
  { name: "b" data_type: TYPE_FP32 dims: 2 optional: true } ]
output [ { name: "names" data_type: TYPE_STRING dims: 1 },
  { name: "total" data_type: TYPE_FP32 dims: 2 } ]
"""


def add(root: Path, name: str, config: str, text: str) -> None:
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if "backend_utils" in text:
        (folder / "model.py").write_text(text)
    else:
        onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    root = tmp_path_factory.mktemp("repository")
    add(root, "image", IMAGE_CONFIG, IMAGE)
    (root / "image" / "labels.txt").write_text("cat\ndog\nhorse\n")
    add(root, "scalars", SCALARS_CONFIG % FOUR, SCALARS)
    acc, count = "BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ELEMENT_COUNT"
    add(root, "with_zero", SEEN_CONFIG % ("-1", count, f"{acc}_WITH_ZERO"), SEEN)
    add(root, "as_shape", SEEN_CONFIG % ("-1", acc, "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"), SEEN)
    add(root, "flatten", SEEN_CONFIG % ("[-1, -1]", acc, "BATCH_ITEM_SHAPE_FLATTEN"), SEEN)
    add(root, "double", DOUBLE_CONFIG, DOUBLE)
    add(root, "optional", OPTIONAL_CONFIG % "200000", OPTIONAL)
    config = OPTIONAL_CONFIG.replace("optional: true", "allow_ragged_batch: true", 1)
    add(root, "ragged_python", config % "60000000", OPTIONAL)
    served = Served(root, "--shards", request.param, grpc=True)
    yield served
    assert served.terminate() == 0


def floats(*values: object) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ask(served: Served, model: str, *requests: dict[str, np.ndarray]) -> list:
    """All at once, on one connection; the answers in the order of the requests."""
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        answers: queue.Queue = queue.Queue()
        for number, request in enumerate(requests):
            inputs = [grpcclient.InferInput(n, v.shape, "FP32") for n, v in request.items()]
            for tensor, values in zip(inputs, request.values(), strict=True):
                tensor.set_data_from_numpy(values)
            client.async_infer(
                model,
                inputs,
                lambda result, error, number=number: answers.put((number, result, error)),
            )
        found = sorted((answers.get(timeout=60) for _ in requests), key=lambda each: each[0])
    for _, _, error in found:
        if error is not None:
            raise error
    return [result for _, result, _ in found]


def test_an_image_is_classified_without_its_batch_dimension(served: Served):
    image = np.zeros((3, 4, 4), np.float32)
    image[:, 1, 2] = 1, 3, 2
    with httpclient.InferenceServerClient(served.address) as client:
        tensor = httpclient.InferInput("data_0", [3, 4, 4], "FP32")
        tensor.set_data_from_numpy(image)
        wanted = [httpclient.InferRequestedOutput("fc6_1", class_count=2)]
        answer = client.infer("image", [tensor], outputs=wanted).as_numpy("fc6_1")
        metadata = client.get_model_metadata("image")
        written = client.get_model_config("image")["input"][0]
    assert answer.tolist() == [b"3.000000:1:dog", b"2.000000:2:horse"]
    assert metadata["inputs"][0]["shape"] == [3, 4, 4]
    assert metadata["outputs"][0]["shape"] == [3]
    assert written["reshape"] == {"shape": [1, 3, 4, 4]}


def test_the_model_s_own_shape_is_refused(served: Served):
    with pytest.raises(InferenceServerException, match=r"Expected \[3,4,4\], got \[1,3,4,4\]"):
        ask(served, "image", {"data_0": np.zeros((1, 3, 4, 4), np.float32)})


def test_rows_of_scalars_are_batched(served: Served):
    answers = ask(served, "scalars", *({"x": floats([n], [n + 10])} for n in range(2)))
    for number, answer in enumerate(answers):
        assert answer.as_numpy("y").tolist() == [[[2 * number]], [[2 * number + 20]]]
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        [stats] = client.get_inference_statistics("scalars").model_stats
    assert (stats.inference_count, stats.execution_count) == (4, 1)


LENGTHS = (2, 4, 1, 3)
RAGGED = [{"x": floats([n] * n)} for n in LENGTHS]


def test_the_largest_count_of_a_batch_is_a_shape(served: Served):
    for answer in ask(served, "as_shape", *RAGGED):
        assert sorted(answer.as_numpy("all")[0]) == sorted(n for n in LENGTHS for _ in range(n))
        assert sorted(np.diff(answer.as_numpy("c")[0], prepend=0)) == sorted(LENGTHS)
        assert answer.as_numpy("m").shape == (1, 4)


def test_accumulated_counts_are_in_the_order_of_the_elements(served: Served):
    for answer in ask(served, "with_zero", *RAGGED):
        counts = answer.as_numpy("c")[0].astype(int)
        assert answer.as_numpy("m")[0].tolist() == [0, *np.cumsum(counts)]
        assert answer.as_numpy("all")[0].tolist() == [n for n in counts for _ in range(n)]


def test_shapes_of_rows_are_flattened(served: Served):
    shapes = [(4, 1), (1, 2), (1, 2), (2, 2)]
    answers = ask(served, "flatten", *({"x": np.ones((1, *s), np.float32)} for s in shapes))
    for answer in answers:
        found = answer.as_numpy("m")[0].reshape(-1, 2).tolist()
        assert sorted(map(tuple, found)) == sorted(shapes)


def test_outputs_are_divided_by_the_shapes_of_an_input(served: Served):
    for request, answer in zip(RAGGED, ask(served, "double", *RAGGED), strict=True):
        assert np.array_equal(answer.as_numpy("y"), 2 * request["x"])


def test_requests_with_different_optional_inputs_are_not_batched(served: Served):
    a, b = floats([1, 2, 3]), floats([10, 20])
    answers = ask(served, "optional", {"a": a}, {"a": a, "b": b}, {"b": b})
    got = [(each.as_numpy("names")[0, 0], *each.as_numpy("total")[0]) for each in answers]
    assert got == [(b"a", 6, 1), (b"a,b", 36, 1), (b"b", 30, 1)]


def test_requests_with_the_same_optional_inputs_are_batched(served: Served):
    a, b = floats([0]), floats([1, 2])
    answers = ask(served, "ragged_python", {"a": a, "b": b}, {"a": a, "b": 2 * b})
    assert [each.as_numpy("total")[0].tolist() for each in answers] == [[3, 2], [6, 2]]


def test_python_models_get_ragged_requests_one_by_one(served: Served):
    answers = ask(served, "ragged_python", {"a": floats([1, 2, 3])}, {"a": floats([4])})
    assert [each.as_numpy("total")[0].tolist() for each in answers] == [[6, 2], [4, 2]]
