"""The whole sequence on a real GPU, at a small size; `make test-gpu`."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.optimizer.optimization_files import read_optimization
from penstock.repository import layout

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(580),
]

CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        self.last = nn.Linear(256, 10)

    def forward(self, x):
        return {"scores": self.last(torch.relu(self.layers(x)))}


def make():
    torch.manual_seed(0)
    return Net()
"""


def test_a_module_is_optimised_where_it_will_be_served(tmp_path: Path) -> None:
    (tmp_path / "gpu_code.py").write_text(CODE)
    rows = np.random.default_rng(0).standard_normal((800, 256)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=rows)
    # Less memory than any model takes of a GPU, so that nothing ends the sequence but its end.
    command = [sys.executable, "-m", "penstock", "optimize", "gpu_code:make", "--device", "cuda:0"]
    command += [
        "--slo",
        "p99 < 50 ms, memory <= 1MiB at 100/s",
        "--data",
        "data.npz",
        "--out",
        "models",
    ]
    command += ["--accuracy", "agreement drop <= 5 %", "--duration", "2s", "--budget", "3m"]
    ended = subprocess.run(
        [*command, "--name", "net", "--json", "found.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert ended.returncode == 2, ended.stderr
    found = read_optimization(tmp_path / "found.json")
    outcomes = {str(each.candidate): (each.outcome, each.reason) for each in found.tries}
    steps = {step.pass_name for each in found.tries for step in each.candidate.steps}
    assert {"torch-compile", "cuda-graphs", "half"} <= steps, outcomes
    # Sixteen bits first; later steps build on them if they were faster, which a network this small
    # does not always show.
    half = found.tries[1]
    assert [step.pass_name for step in half.candidate.steps] == ["half"], outcomes
    assert half.outcome in ("kept", "equal", "slower"), outcomes
    compiled = [text for text in outcomes if "torch-compile" in text]
    if half.outcome == "kept":
        assert all(text.startswith("half") for text in compiled), outcomes
    assert any("mode=reduce-overhead" in text for text in compiled), outcomes
    assert "failed" not in {outcome for outcome, _ in outcomes.values()}, outcomes
    reasons = {each.pass_name: each.reason for each in found.skipped}
    assert "for CPUs only" in reasons["onnx-export"]
    facts = found.tries[0].facts
    assert facts is not None and facts.built["device"] == "cuda:0"
    (config,) = layout.read(tmp_path / "models").configs
    assert set(config.devices) == {"cuda:0"}
    assert found.after is not None and found.after.gpu_memory_bytes > 1 << 20
    missed = {each.unit for each in found.after.verdicts if each.outcome == "missed"}
    assert missed == {"bytes"}
