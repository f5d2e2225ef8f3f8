"""ONNX files on a GPU: ONNX's node tests, networks beside ONNX Runtime, and a Triton repository as
it comes; `make test-gpu`."""

import json
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import pytest
from onnx_cases import cases, outcomes

import penstock
from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

# Cases that only a GPU fails, and why.
NOT_ON_GPUS: dict[str, str] = {}
IMAGE, CLASSES, MAX_BATCH = (3, 64, 64), 10, 16
CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 16
input [{ name: "x", data_type: TYPE_FP32, dims: [3, 64, 64] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [10] }]
dynamic_batching { }
instance_group [{ count: 2, kind: KIND_GPU }]
"""


def network() -> "torch.nn.Module":
    """A few residual blocks, enough for every kernel that convolutions can get."""

    class Block(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(width, width, 1, bias=False),
                torch.nn.BatchNorm2d(width),
                torch.nn.ReLU(),
                torch.nn.Conv2d(width, width, 3, padding=1, bias=False),
                torch.nn.BatchNorm2d(width),
            )

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return torch.relu(self.layers(x) + x)

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 7, 2, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
        Block(32),
        Block(32),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(32, CLASSES),
    ).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one model."""
    root = tmp_path_factory.mktemp("repository")
    (root / "net" / "1").mkdir(parents=True)
    (root / "net" / "config.pbtxt").write_text(CONFIG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network(),
            (torch.rand(2, *IMAGE),),
            root / "net" / "1" / "model.onnx",
            input_names=["x"],
            output_names=["y"],
            opset_version=13,
            dynamo=False,
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )
    return root


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).random((rows, *IMAGE), np.float32)


def expected(folder: Path, rows: int) -> np.ndarray:
    path = folder / "net" / "1" / "model.onnx"
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": images(rows)})
    return found


def test_every_node_case() -> None:
    found = outcomes(cases(), "cuda")
    failed = {name: why for name, why in found.items() if why.startswith("FAILED")}
    assert {name: why for name, why in failed.items() if name not in NOT_ON_GPUS} == {}


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"penstock.dtype": "fp32"}, 1e-4),
        ({"penstock.dtype": "fp16"}, 2e-2),
        ({"penstock.dtype": "fp16", "penstock.fuse": "convolutions"}, 2e-2),
        ({"penstock.dtype": "bf16", "penstock.memory_format": "channels_last"}, 5e-2),
    ],
)
def test_answers_are_those_of_onnx_runtime(
    folder: Path, rows: int, options: dict[str, str], tolerance: float
) -> None:
    config = ModelConfig(
        name="net",
        version="1",
        backend="onnxruntime",
        artifact=str(folder / "net" / "1" / "model.onnx"),
        inputs=(TensorSpec("x", "FP32", IMAGE),),
        outputs=(TensorSpec("y", "FP32", (CLASSES,)),),
        max_batch_size=MAX_BATCH,
        batching=BatchPolicy(MAX_BATCH, is_dynamic=True),
        device="cuda:0",
        options={**options, "penstock.cuda_graphs": "on"},
    )
    runner = backend(config.engine)(config)
    (outputs,) = runner.start(Batch({"x": images(rows)}, rows)).wait()
    assert runner.built()["form"] == "ONNX"
    assert runner.built()["cuda_graphs"] not in ("off", "none", "0")
    wanted = expected(folder, rows)
    assert np.abs(outputs["y"] - wanted).max() < tolerance * np.abs(wanted).max()
    runner.close()


def test_a_triton_repository_is_served_unchanged(folder: Path) -> None:
    with penstock.serve(folder, http_port=0, grpc_port=0) as server:
        body = {
            "inputs": [
                {
                    "name": "x",
                    "shape": [3, *IMAGE],
                    "datatype": "FP32",
                    "data": images(3).ravel().tolist(),
                }
            ]
        }
        request = urllib.request.Request(
            f"{server.url}/v2/models/net/infer",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            (output,) = json.load(response)["outputs"]
    found, wanted = np.array(output["data"]).reshape(3, CLASSES), expected(folder, 3)
    assert np.abs(found - wanted).max() < 1e-2 * np.abs(wanted).max()
