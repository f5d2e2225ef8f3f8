"""The profiler on a real GPU; `make test-gpu`. The reading of traces: tests/profiling."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.profiling.peaks import peaks_of
from penstock.profiling.profiler import profile_build
from penstock.profiling.results import Profile

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(300),
]

MODULE = """
import torch
from torch import nn

def factory():
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers)
"""
CONFIG = """
backend: "pytorch" max_batch_size: 64
input { name: "input" data_type: TYPE_FP32 dims: 1024 }
output { name: "y" data_type: TYPE_FP32 dims: 1024 }
"""
GRAPHS = 'parameters { key: "penstock.cuda_graphs" value { string_value: "on" } }'
ROWS = [{"input": row} for row in np.random.default_rng(0).random((64, 1024), np.float32)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peaks")


def profiled(root: Path, cache: Path, config: str) -> Profile:
    version = root / "net" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(MODULE)
    space: dict[str, Any] = {}
    exec(MODULE, space)
    save_file(space["factory"]().state_dict(), version / "model.safetensors")
    (root / "net" / "config.pbtxt").write_text(CONFIG + config)
    return profile_build(root / "net", ROWS, num_runs=5, trace=root / "trace.json", cache=cache)


def test_peaks_by_datatype(cache: Path) -> None:
    found = peaks_of("cuda:0", 1, cache, is_torch=True)
    assert {"fp32", "fp16", "int8"} <= set(found.flops)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert found.flops["fp16"] > found.flops["tf32"] > found.flops["fp32"]
    if torch.cuda.get_device_capability() >= (9, 0):
        assert found.flops["fp8"] > found.flops["bf16"]
    assert found.bytes_per_s > found.host_bytes_per_s > 0


def test_kernels_copies_and_the_limit(tmp_path: Path, cache: Path) -> None:
    group = "instance_group { kind: KIND_GPU gpus: 0 count: 2 }"
    found = profiled(tmp_path, cache, group)
    gpu = found.gpu
    assert gpu is not None
    assert gpu.num_slots == 2
    assert gpu.num_kernels >= 8
    assert 0 < gpu.busy_s < found.profiled_s
    assert gpu.copy_in_s > 0 and gpu.copy_out_s > 0
    assert gpu.hidden is not None and 0 <= gpu.hidden <= 1
    assert found.limit_share is not None and 0 < found.limit_share <= 1
    assert any(each.type == "MatMul" and each.flops for each in found.operators)
    spans = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    named = [span["args"]["name"] for span in spans if span["ph"] == "M"]
    assert named[-3:] == ["GPU: copies in", "GPU: kernels", "GPU: copies out"]


def test_kernels_of_a_graph_are_seen_without_operators(tmp_path: Path, cache: Path) -> None:
    found = profiled(tmp_path, cache, "instance_group { kind: KIND_GPU gpus: 0 }" + GRAPHS)
    assert found.gpu is not None
    assert any("kernel" in each.type for each in found.operators)
    listed_s = sum(each.seconds for each in found.operators)
    assert listed_s == pytest.approx(found.gpu.busy_s, rel=0.5)
