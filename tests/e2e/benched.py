"""`penstock bench` as a subprocess, and the run it wrote."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.benchmark import run_files, stats
from penstock.benchmark.results import BenchRun, Level


@dataclass(frozen=True)
class Benched:
    status: int
    out: str
    errors: str
    run: BenchRun | None


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "bench", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], path: Path) -> Benched:
    out, errors = process.communicate(timeout=600)
    run = run_files.read_run(path) if path.exists() else None
    return Benched(process.returncode, out, errors, run)


def bench(folder: Path, *flags: str) -> Benched:
    path = folder / "run.json"
    path.unlink(missing_ok=True)
    return finish(start(*flags, "--seed", "0", "--json", str(path)), path)


def percentile_s(level: Level, percent: float) -> float:
    return stats.percentile_interval(level.windows, "latency", percent).value


def throughput(level: Level) -> float:
    return stats.throughput_interval(level.windows).value
