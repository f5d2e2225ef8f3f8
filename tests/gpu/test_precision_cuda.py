"""Values that stay in FP32 in a 16-bit ONNX graph, on a GPU, with and without CUDA graphs."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LENGTH, WIDTH, ROWS = 2500, 64, 4
TOLERANCES = {"fp16": 4e-3, "bf16": 3e-2}


class Encoder(torch.nn.Module):
    """Rotary positions, a timestep, a mask, an RMS norm of large values, and mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.scale = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions, steps, mask):
        size = torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        x = self.first(x / size * self.scale)
        angle = positions[:, :, None].float() * self.frequencies
        angle = torch.cat((angle, angle), -1)
        left, right = x.chunk(2, -1)
        x = x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()
        wave = steps * self.frequencies
        x = x + torch.cat((wave.sin(), wave.cos()), -1)[:, None] + 30
        kept = mask[:, :, None].float()
        return self.last((x * kept).sum(1) / kept.sum(1).clamp(min=1e-9))


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mask = np.ones((ROWS, LENGTH), np.int64)
    mask[1, LENGTH // 2 :] = 0
    return {
        "x": (300 * random.standard_normal((ROWS, LENGTH, WIDTH))).astype(np.float32),
        "positions": np.arange(LENGTH)[None].repeat(ROWS, 0),
        "steps": np.array([[999], [501], [3], [0]], np.float32),
        "mask": mask,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, inputs) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("encoder") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Encoder().eval(),
            tuple(map(torch.from_numpy, inputs.values())),
            path,
            input_names=list(inputs),
            output_names=["y"],
            dynamic_axes={name: {0: "n"} for name in (*inputs, "y")},
            opset_version=17,
            dynamo=False,
        )
    return path


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_answers_differ_by_rounding_only(path: Path, inputs, dtype: str, graphs: str) -> None:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    kinds = {"float32": "FP32", "int64": "INT64"}
    specs = [
        TensorSpec(name, kinds[each.dtype.name], each.shape[1:]) for name, each in inputs.items()
    ]
    config = ModelConfig(
        name="encoder",
        version="1",
        backend="onnxruntime",
        artifact=str(path),
        inputs=tuple(specs),
        outputs=(TensorSpec("y", "FP32", (WIDTH,)),),
        batching=BatchPolicy(ROWS, is_dynamic=True),
        max_batch_size=ROWS,
        device="cuda:0",
        options={"penstock.dtype": dtype, "penstock.cuda_graphs": graphs},
    )
    runner = backend("pytorch")(config)
    try:
        for _ in range(3):
            (found,) = runner.start(Batch(inputs, ROWS)).wait()
            largest = np.abs(expected).max()
            assert np.isfinite(found["y"]).all()
            assert np.abs(found["y"] - expected).max() / largest < TOLERANCES[dtype]
    finally:
        runner.close()
