"""`penstock bench` measures a real Triton as it measures us: figures, counters and verdict."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from benched import bench, throughput
from real_triton import Oracle, triton

pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            output = pb_utils.Tensor("OUTPUT0", tensor.as_numpy())
            answers.append(pb_utils.InferenceResponse([output]))
        return answers
"""
CONFIG = """
name: "echo" backend: "python" max_batch_size: 8 dynamic_batching {}
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
instance_group { count: 1 kind: KIND_CPU }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    root = tmp_path_factory.mktemp("models")
    (root / "echo" / "1").mkdir(parents=True)
    (root / "echo" / "1" / "model.py").write_text(MODEL)
    (root / "echo" / "config.pbtxt").write_text(CONFIG)
    with triton(root, tmp_path_factory.mktemp("work")) as running:
        yield running


@pytest.mark.parametrize("load", ["--concurrency 1,4", "--rate 200"])
@pytest.mark.parametrize("protocol", ["http", "http --tensors json", "grpc"])
def test_triton(server: Oracle, tmp_path: Path, protocol: str, load: str) -> None:
    scheme, *flags = protocol.split()
    places = {
        "http": f"http://127.0.0.1:{server.port}/v2/models/echo",
        "grpc": f"grpc://{server.grpc_address}/echo",
    }
    found = bench(tmp_path, places[scheme], *flags, *load.split(), "--duration", "3s")
    assert found.status == 0, found.errors
    print(found.out)
    assert found.run.target.server.startswith("triton")
    assert found.run.target.max_batch_size == 8
    for level in found.run.levels:
        assert sum(window.num_failed for window in level.windows) == 0
        assert throughput(level) > 50
        assert level.server is not None
        # Triton counts a moment after it answers.
        num_arrived = sum(window.num_arrived for window in level.windows)
        assert level.server.num_success == pytest.approx(num_arrived, rel=0.05, abs=20)
        assert level.server.compute_infer_ns > 0
