"""INT8 on a GPU: answers beside the same integers on a CPU, choices kept for the next start."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from suites.int8_networks import IMAGE, ON_GPU, bottlenecks, ranges, residual, rows

from penstock.backends import Batch, Runner, backend
from penstock.config import CPU, BatchPolicy, ModelConfig
from penstock.optimizer.passes.int8_static import quantised
from penstock.types import Array, TensorSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MAX_BATCH = 64


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return configured(residual(), tmp_path_factory.mktemp("int8") / "model.onnx")


def configured(model: ModelProto, path: Path) -> ModelConfig:
    """The network in INT8, on a GPU."""
    onnx.save(quantised(model, ranges(model), ON_GPU), path)
    return ModelConfig(
        name="made",
        version="1",
        backend="pytorch",
        artifact=str(path),
        inputs=(TensorSpec("x", "FP32", IMAGE),),
        outputs=(TensorSpec(model.graph.output[0].name, "FP32", (32,)),),
        max_batch_size=MAX_BATCH,
        batching=BatchPolicy(MAX_BATCH, is_dynamic=True),
        options={"penstock.dtype": "fp16", "penstock.cuda_graphs": "on"},
        device="cuda",
    )


def answer(runner: Runner, images: Array) -> Array:
    for _ in range(3):
        (found,) = runner.start(Batch({"x": images}, len(images))).wait()
    (values,) = found.values()
    return np.array(values)


def batch(count: int) -> Array:
    return np.concatenate([rows(seed) for seed in range(-(-count // 4))])[:count]


@pytest.mark.parametrize("count", [1, 4, MAX_BATCH])
def test_the_gpu_gives_the_same_integers(config: ModelConfig, count: int) -> None:
    there = backend("pytorch")(config)
    here = backend("pytorch")(replace(config, device=CPU, options={}))
    wanted, found = answer(here, batch(count)), answer(there, batch(count))
    # FP16 after the last layer, and values halfway between two levels.
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()
    built = there.built()
    assert "8 layers in INT8" in built["fusion"]
    assert built["cuda_graphs"] != "0"


@pytest.mark.parametrize("kind", ["silu", "LeakyRelu", "HardSwish", "Sigmoid", "Gelu"])
def test_activations_and_residuals_after_them(kind: str, tmp_path: Path) -> None:
    config = configured(bottlenecks(kind), tmp_path / "model.onnx")
    there = backend("pytorch")(config)
    here = backend("pytorch")(replace(config, device=CPU, options={}))
    for count in (1, MAX_BATCH):
        wanted, found = answer(here, batch(count)), answer(there, batch(count))
        assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()
    fusion = there.built()["fusion"]
    assert "7 layers in INT8" in fusion
    # Ours: what torch computes in floats would be the reference.
    assert "triton" in fusion, fusion


def test_a_second_start_times_and_compiles_nothing(config: ModelConfig) -> None:
    first = backend("pytorch")(config)
    wanted = answer(first, batch(MAX_BATCH))
    folder = Path(config.artifact).parent
    for name, content in first.compiled().items():
        (folder / name).write_bytes(content)
    again = backend("pytorch")(config)
    assert np.array_equal(answer(again, batch(MAX_BATCH)), wanted)
    assert again.built()["fusion_timed"] == "0 cases"
