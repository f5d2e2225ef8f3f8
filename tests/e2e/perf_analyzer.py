"""The real perf_analyzer: the binary in the wheel of tritonclient 2.51, fetched into .bench/ on
first use."""

import csv
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / ".bench" / "perf_analyzer"
WHEELS = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12")
PLATFORMS = ("manylinux1_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True)
class Report:
    """What it says it has measured: inferences a second for each concurrency, and its own reading
    of the server's counters, for the last of them."""

    throughputs: list[float]
    p99_s: list[float]
    num_requests: int
    server_counts: dict[str, int]


class PerfAnalyzer:
    def __init__(self) -> None:
        """Skips the test, with the reason, where it cannot be had."""
        if not (HOME / "fetched").exists():
            _fetch()
        (self._path,) = HOME.glob("tritonclient-*.data/data/bin/perf_analyzer")
        self._libraries = HOME / "nvidia" / "cuda_runtime" / "lib"
        done = self._run(["--version"])
        if done.returncode != 0:
            hint = " (Debian: apt-get install libb64-0d)" if "libb64" in done.stderr else ""
            pytest.skip(f"perf_analyzer does not run here: {done.stderr.strip()}{hint}")

    def measure(self, model: str, folder: Path, *flags: str) -> Report:
        table = folder / "report.csv"
        done = self._run(["-m", model, "-v", "-f", str(table), *flags])
        assert done.returncode == 0, done.stdout + done.stderr
        with table.open() as file:
            rows = list(csv.DictReader(file))
        server = done.stdout.rpartition("Server:")[2]
        counts = dict(re.findall(r"(Inference|Execution|Successful request) count: (\d+)", server))
        (*_, num_requests) = re.findall(r"Client: \s+Request count: (\d+)", done.stdout)
        return Report(
            [float(row["Inferences/Second"]) for row in rows],
            [float(row["p99 latency"]) / 1e6 for row in rows],
            int(num_requests),
            {name: int(number) for name, number in counts.items()},
        )

    def _run(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self._path), *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(self._libraries)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def _fetch() -> None:
    HOME.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(HOME)]
    pip += ["--only-binary=:all:", "--disable-pip-version-check"]
    pip += [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run([*pip, *WHEELS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"perf_analyzer cannot be fetched: {done.stderr.strip()[-300:]}")
    for wheel in HOME.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(HOME)
        wheel.unlink()
    for path in HOME.glob("tritonclient-*.data/data/bin/*"):
        path.chmod(0o755)
    (HOME / "fetched").touch()
