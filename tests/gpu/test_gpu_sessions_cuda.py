"""One process for all that is asked of a model, on a real GPU: it says what processes of their own
say; `make test-gpu`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served_builds import read

from penstock.optimizer import trials
from penstock.optimizer.gpu_sessions import GpuSession, WarmSpare

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

MODULE = """
from torch import nn


def factory():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
"""
CONFIG = """
backend: "pytorch" max_batch_size: 32 dynamic_batching { }
input { name: "input" data_type: TYPE_FP32 dims: 64 }
output { name: "scores" data_type: TYPE_FP32 dims: 8 }
instance_group { kind: KIND_GPU gpus: 0 }
parameters { key: "penstock.cuda_graphs" value { string_value: "on" } }
"""


@pytest.fixture
def spare() -> Iterator[WarmSpare]:
    spare = WarmSpare()
    yield spare
    spare.close()


def test_one_process_says_what_many_say(tmp_path: Path, spare: WarmSpare) -> None:
    version = tmp_path / "net" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(MODULE)
    space = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).state_dict()
    safetensors.save_file(space, version / "model.safetensors")
    (tmp_path / "net" / "config.pbtxt").write_text(CONFIG)
    build = read(tmp_path / "net")
    drawn = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    rows = [{"input": row} for row in drawn]
    sitting = GpuSession(build, (2, 4), spare)
    try:
        facts = sitting.inspect()
        found = sitting.answers(rows)
        tables = [sitting.times(rows, (count, 4)) for count in (1, 2)]
    finally:
        sitting.close()
    assert facts.built["device"] == "cuda:0" and "slots" not in facts.built
    for one, other in zip(found, trials.answers(build, rows), strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
    for count, table in zip((1, 2), tables, strict=True):
        assert table.num_instances == count
        assert {1, 32} <= set(table.seconds[0])
        assert table.memory_bytes > 0
