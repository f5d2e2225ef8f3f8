"""The benchmark of two models on one GPU, at a tiny size on a CPU: it runs to its end."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "sharing.py"


@pytest.mark.slow
def test_each_way_to_share_has_a_line() -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--device", "cpu", "--seconds", "0.2"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=110).stdout
    for way in ("alone", "one process", "two processes"):
        assert way in told
    assert told.count("high and low") >= 2
