"""The comparison of engines runs on a CPU: tiny networks of every kind, all fused, all right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "engines.py"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--no-compile", *arguments],
        env={**os.environ, "OUT": str(out)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_network_is_fused_and_answers_as_before(tmp_path: Path) -> None:
    ran = run(tmp_path, "--batches", "large")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / "engines.json").read_text())
    assert len(found["rows"]) == 7 and found["left_out"] == []
    for row in found["rows"]:
        assert max(row["error"].values()) < 1e-4, row
        assert set(row["per_s"]) == {"eager", "graph", "penstock"}
    fused = {row["network"]: row["fused"] for row in found["rows"]}
    assert fused["ViT-B/16"].startswith("1 convolutions, 9 linear layers, 5 norms, 2 attentions")
    assert fused["EfficientNet-B0"].startswith("16 convolutions, 1 linear layers:")
    unet = "14 convolutions, 16 linear layers, 17 norms, 4 attentions:"
    assert fused["diffusion UNet"].startswith(unet)
    assert "| ViT-B/16 | 2 |" in ran.stdout


def test_unknown_networks_are_refused(tmp_path: Path) -> None:
    ran = run(tmp_path, "--networks", "ViT-B/16,LeNet")
    assert ran.returncode == 2 and "LeNet: not one of ResNet-50, MobileNetV2" in ran.stderr
