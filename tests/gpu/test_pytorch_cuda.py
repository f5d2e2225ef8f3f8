"""The PyTorch backend on a GPU gives what it gives on the CPU; `make test-gpu`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig, PadAxis, Padding
from penstock.errors import ConfigError
from penstock.serving.proof import prove
from penstock.types import TensorSpec

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MODULE = """
import torch
from torch import nn

def factory():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
"""
ROWS = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "module.py").write_text(MODULE)
    space: dict[str, object] = {}
    exec(MODULE, space)
    torch.manual_seed(0)
    module = space["factory"]()
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(
        module.eval(), (torch.from_numpy(ROWS[:2]),), dynamic_shapes=[{0: batch}]
    )
    torch.export.save(program, tmp_path / "model.pt2")
    return ModelConfig(
        name="mlp",
        version="1",
        backend="pytorch",
        artifact=str(tmp_path / "module.py"),
        inputs=(TensorSpec("input", "FP32", (64,)),),
        outputs=(TensorSpec("y", "FP32", (8,)),),
        max_batch_size=16,
        batching=BatchPolicy(16, is_dynamic=True),
    )


def answer(config: ModelConfig, rows: np.ndarray = ROWS) -> np.ndarray:
    runner = backend("pytorch")(config)
    assert runner.built()["device"].startswith(config.device)
    (outputs,) = runner.start(Batch({"input": rows}, len(rows))).wait()
    return outputs["y"]


# torch's reader of .pt2 warns of its own memory.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("form", ["module.py", "model.pt2"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_the_answers_are_those_of_the_cpu(config, form, device):
    config = replace(config, artifact=str(Path(config.artifact).with_name(form)))
    on_cpu, on_gpu = answer(config), answer(replace(config, device=device))
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)


def test_a_batch_between_two_rungs_gives_its_own_rows(config):
    on_cpu, on_gpu = answer(config, ROWS[:11]), answer(replace(config, device="cuda"), ROWS[:11])
    assert on_gpu.shape == (11, 8)
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_less_precision_is_close(config, dtype, tolerance):
    changed = replace(config, device="cuda", options={"penstock.dtype": dtype})
    np.testing.assert_allclose(answer(changed), answer(config), atol=tolerance)


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ({}, "convolutions"),
        ({"penstock.dtype": "fp32"}, "off"),
        ({"penstock.dtype": "tf32"}, "matrices,convolutions"),
    ],
)
def test_it_says_what_is_rounded_to_tf32(config, options, rounded):
    changed = replace(config, device="cuda", options=options)
    runner = backend("pytorch")(changed)
    assert (runner.built()["tf32"], runner.built()["dtype"]) == (rounded, "float32")
    np.testing.assert_allclose(answer(changed), answer(config), rtol=1e-2, atol=5e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The compiler's own.
def test_compiled_is_the_same(config):
    changed = replace(config, device="cuda", options={"penstock.compile": "default"})
    np.testing.assert_allclose(answer(changed), answer(config), rtol=1e-3, atol=1e-4)


def test_rows_are_proven_apart(config):
    changed = replace(config, device="cuda", options={"penstock.dtype": "fp16"})
    assert prove(changed, backend("pytorch")(changed)).unbatched == ""


def test_padding_is_proven(config, tmp_path):
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "module.py"
    path.write_text(
        "import torch\n"
        "class Mean(torch.nn.Module):\n"
        "    def forward(self, x, mask):\n"
        "        return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)\n"
        "factory = Mean\n"
    )
    masked = replace(
        config,
        artifact=str(path),
        device="cuda",
        inputs=(TensorSpec("x", "FP32", (-1,)), TensorSpec("mask", "INT64", (-1,))),
        outputs=(TensorSpec("y", "FP32", (1,)),),
        padding=Padding((PadAxis("x", 0, 9.0), PadAxis("mask", 0)), (4, 16)),
    )
    assert prove(masked, backend("pytorch")(masked)).unpadded == ""


def test_a_gpu_that_is_not_there_is_named(config):
    with pytest.raises(ConfigError, match="cuda:99"):
        backend("pytorch")(replace(config, device="cuda:99"))
