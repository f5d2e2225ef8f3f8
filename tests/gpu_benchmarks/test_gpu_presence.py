"""Without a GPU the benchmarks say so and end with an error; no stored figure is shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
SCRIPTS = {
    "server": ["--model", "resnet50"],
    "llm": [],
    "engines": [],
    "sharing": [],
    "images": [],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_told_without_a_gpu(name: str, tmp_path: Path) -> None:
    results = {path: path.read_bytes() for path in (ROOT / "benchmarks/results").glob("gpu_*")}
    assert results
    ended = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *SCRIPTS[name]],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.rstrip().endswith("has no usable GPU, so nothing was measured")
    assert "Traceback" not in ended.stderr
    assert {path: path.read_bytes() for path in results} == results
    assert list(tmp_path.iterdir()) == []
