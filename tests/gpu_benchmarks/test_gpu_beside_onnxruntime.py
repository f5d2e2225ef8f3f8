"""Our engine beside ONNX Runtime: whose figures count, and a run without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import beside_onnxruntime

    return beside_onnxruntime


def row(side: str, variant: str, network: str = "net", **batches: tuple[float, float]) -> dict:
    figures = {
        batch[1:]: {"device_per_s": rate, "waited_ms": waited}
        for batch, (rate, waited) in batches.items()
    }
    return {"network": network, "side": side, "variant": variant, "batches": figures}


def test_their_best_counts_for_each_batch(beside) -> None:
    ours = row("penstock", "", b256=(40_000.0, 6.0), b1=(3000.0, 0.3))
    plain = row("onnxruntime-gpu", "plain", b256=(12_000.0, 21.0), b1=(900.0, 1.0))
    graphs = row("onnxruntime-gpu", "graphs", b256=(10_000.0, 25.0), b1=(1300.0, 0.75))
    other = row("onnxruntime-gpu", "plain", "other", b256=(99_999.0, 1.0), b1=(99_999.0, 0.01))
    large, small = beside.ratios([ours, plain, graphs, other])
    assert (large["their_rate"], large["theirs"]) == (12_000.0, "plain")
    assert large["rate_ratio"] == pytest.approx(40 / 12)
    assert (small["their_waited_ms"], small["theirs"]) == (0.75, "graphs")
    assert small["waited_ratio"] == pytest.approx(0.4)


def test_a_side_that_failed_is_left_out(beside) -> None:
    ours = row("penstock", "", b1=(3000.0, 0.3))
    failed = {"network": "net", "side": "onnxruntime-gpu", "variant": "x", "problem": "no GPU"}
    assert beside.ratios([ours, failed]) == []
    plain = row("onnxruntime-gpu", "plain", b1=(900.0, 1.0))
    (found,) = beside.ratios([ours, failed, plain])
    assert found["their_rate"] == 900.0


@pytest.mark.slow
def test_it_runs_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "beside_onnxruntime.py"), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    found = tmp_path / "found.json"
    ended = subprocess.run(
        [*command, "--out", str(found)], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [each.get("problem") for each in rows] == [None] * 3
    # The same network from the same file.
    assert all(each["batches"]["2"]["error"] in (None, pytest.approx(0, abs=2e-2)) for each in rows)
