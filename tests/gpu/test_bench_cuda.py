"""The bench on a machine with a GPU: its record says what the GPU did; `make test-gpu`."""

import asyncio
from pathlib import Path

import pytest

from penstock.benchmark import summary, system
from penstock.benchmark.pacer import Closed
from penstock.benchmark.plan import BenchPlan
from penstock.benchmark.run import Conductor
from penstock.benchmark.targets import TargetSpec
from penstock.data import InputSpec

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MODULE = """
from torch import nn

def factory():
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
"""
CONFIG = """
backend: "pytorch" max_batch_size: 256
input { name: "x" data_type: TYPE_FP32 dims: 4096 }
output { name: "y" data_type: TYPE_FP32 dims: 4096 }
instance_group { count: 1 kind: KIND_GPU }
dynamic_batching {}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    version = tmp_path / "mlp" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(MODULE)
    (tmp_path / "mlp" / "config.pbtxt").write_text(CONFIG)
    space: dict[str, object] = {}
    exec(MODULE, space)
    save_file(space["factory"]().state_dict(), version / "model.safetensors")
    return tmp_path / "mlp"


def test_the_environment_names_the_gpu() -> None:
    found = system.environment("models/x")
    assert len(found.gpus) >= 1 and all(found.gpus)
    assert found.versions["NVIDIA driver"]


def test_a_level_records_what_the_gpu_did(model: Path) -> None:
    plan = BenchPlan(
        TargetSpec(str(model)),
        InputSpec(batch_size=64),
        (Closed(8),),
        duration_s=4.0,
        precision=0.0,
        max_warm_up_s=3.0,
    )
    run = asyncio.run(Conductor(plan, lambda _: None, lambda _: None).measure())
    (level,) = run.levels
    assert not run.is_partial
    assert len(level.system) >= 4
    for sample in level.system:
        count = len(run.environment.gpus)
        columns = (sample.gpu_percent, sample.gpu_memory_bytes, sample.gpu_watts, sample.gpu_mhz)
        assert [len(column) for column in columns] == [count] * 4
        assert all(watts > 0 for watts in sample.gpu_watts)
    assert max(max(sample.gpu_percent) for sample in level.system) > 0
    assert any(name.startswith("GPU") for name in summary.figures_of(run, level).utilisation)
