"""Is `penstock bench` right, and is it fast: beside wrk and perf_analyzer on one server.

    python benchmarks/bench_agreement.py            about six minutes
    python benchmarks/bench_agreement.py --quick    one round of two seconds per point

Agreement: a model that takes 5 ms on each of its four instances (`null` backend), closed loop with
1, 4 and 16 connections, binary tensors over HTTP. The three tools measure in turn, for several
rounds; each tool's figure is its median over the rounds, its spread the range. Two tools agree on a
figure when their ranges, widened by 2 %, overlap.

Speed: the identity model of the examples at 64 connections; wrk with one thread, bench with one
process. Stated before measuring: bench is to reach at least half of wrk's requests per second, and
half of wrk's requests per second of the generator's own CPU time.

Everything shares one machine. perf_analyzer is the binary in the wheel of tritonclient 2.51, under
.bench/perf_analyzer (`pytest -m verify tests/e2e/test_perf_analyzer.py` fetches it); without it the
other two are compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
ANALYZER = ROOT / ".bench" / "perf_analyzer"
CONNECTIONS = (1, 4, 16)
SLACK = 0.02
MODEL = """
backend: "null" max_batch_size: 1
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_INT32 dims: 1 }
instance_group { count: 4 kind: KIND_CPU }
parameters { key: "null.a_ms" value { string_value: "5" } }
"""
WRK = """
local head = '%s'
wrk.method = "POST"
wrk.headers["Inference-Header-Content-Length"] = #head
wrk.body = head .. string.rep("\\1", %d)
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('RESULT {"requests":%%d,"us":%%d,"p50":%%d,"p99":%%d,"errors":%%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status + errors.connect + errors.read + errors.write + errors.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a tool says. `cpu_s` is the generator's own CPU time for each second of measuring."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Input:
    model: str
    name: str
    datatype: str
    shape: list[int]
    num_bytes: int


PACED = Input("paced", "x", "INT32", [1, 1], 4)
IDENTITY = Input("identity", "INPUT0", "FP32", [1, 16], 64)
Tool = Callable[[int, Input, int, int], Figures]


def run_wrk(port: int, data: Input, connections: int, seconds: int) -> Figures:
    tensor = {"name": data.name, "datatype": data.datatype, "shape": data.shape}
    tensor["parameters"] = {"binary_data_size": data.num_bytes}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK % (head, data.num_bytes))
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", script.name]
        url = f"http://127.0.0.1:{port}/v2/models/{data.model}/infer"
        output, cpu_s = _timed([*command, url])
    found = json.loads(re.search(r"RESULT (.*)", output)[1])
    if found["errors"]:
        raise SystemExit(f"wrk: {found['errors']} errors")
    took_s = found["us"] / 1e6
    per_s = found["requests"] / took_s
    return Figures(per_s, found["p50"] / 1e3, found["p99"] / 1e3, cpu_s / took_s)


def run_perf_analyzer(port: int, data: Input, connections: int, seconds: int) -> Figures:
    (binary,) = ANALYZER.glob("tritonclient-*.data/data/bin/perf_analyzer")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "report.csv"
        command = [str(binary), "-m", data.model, "-u", f"127.0.0.1:{port}", "-i", "http"]
        # Its window is 1.2 times the interval, and it takes three of them.
        interval_ms = str(int(seconds * 1000 / 3.6))
        command += ["--concurrency-range", str(connections), "--measurement-interval", interval_ms]
        libraries = str(ANALYZER / "nvidia" / "cuda_runtime" / "lib")
        environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        _timed([*command, "-f", str(table)], environment)
        (row,) = csv.DictReader(table.open())
    return Figures(
        float(row["Inferences/Second"]),
        float(row["p50 latency"]) / 1e3,
        float(row["p99 latency"]) / 1e3,
    )


def run_bench(port: int, data: Input, connections: int, seconds: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "penstock", "bench", "--json", str(path)]
        command += [f"http://127.0.0.1:{port}/v2/models/{data.model}"]
        command += ["--concurrency", str(connections), "--duration", f"{seconds}s"]
        _timed([*command, "--precision", "0"])
        (level,) = json.loads(path.read_text())["levels"]
    summary = level["summary"]
    return Figures(
        summary["throughput_per_s"]["value"],
        summary["latency_ms"]["p50"]["value"],
        summary["latency_ms"]["p99"]["value"],
        sum(level["generator"]["cpu_shares"]),
    )


def _timed(command: list[str], environment: dict[str, str] | None = None) -> tuple[str, float]:
    """What it prints, and the CPU time it and its children took."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = os.times()
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stdout + done.stderr)[-500:]}")
    used = after.children_user + after.children_system
    return done.stdout, used - before.children_user - before.children_system


@contextmanager
def served(repository: Path) -> Iterator[int]:
    command = [sys.executable, "-m", "penstock", "serve", str(repository), "--http-port", "0"]
    flags = ["--no-grpc", "--no-metrics"]
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if match := re.search(r"http://127\.0\.0\.1:(\d+)/v2", line):
                yield int(match[1])
                return
        raise SystemExit("the server did not start")
    finally:
        server.terminate()
        server.wait()


def measure_agreement(
    tools: dict[str, Tool], rounds: int, seconds: int
) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "paced" / "1").mkdir(parents=True)
        (Path(folder) / "paced" / "config.pbtxt").write_text(MODEL)
        with served(Path(folder)) as port:
            for number in range(rounds):
                for connections in CONNECTIONS:
                    for name, tool in tools.items():
                        print(f"round {number + 1}: {name}, {connections}", flush=True)
                        figures = tool(port, PACED, connections, seconds)
                        found.setdefault(f"{connections} {name}", []).append(figures)
                        time.sleep(0.5)
    return found


def measure_speed(rounds: int, seconds: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {"wrk": [], "bench": []}
    with served(ROOT / "examples" / "repository") as port:
        for _ in range(rounds):
            found["wrk"].append(run_wrk(port, IDENTITY, 64, seconds))
            found["bench"].append(run_bench(port, IDENTITY, 64, seconds))
    return found


def spread(figures: list[Figures], name: str) -> tuple[float, float, float]:
    values = [getattr(each, name) for each in figures]
    return min(values), statistics.median(values), max(values)


def agrees(ours: tuple[float, float, float], theirs: tuple[float, float, float]) -> bool:
    return ours[0] <= theirs[2] * (1 + SLACK) and theirs[0] <= ours[2] * (1 + SLACK)


def show_agreement(found: dict[str, list[Figures]], names: list[str], console: Console) -> int:
    """Returns how many figures the tools do not agree on."""
    table = Table(title="closed loop, 5 ms model, four instances: median (range)")
    for column in ("connections", "figure", *names, "bench agrees with"):
        table.add_column(column)
    num_apart = 0
    for connections in CONNECTIONS:
        for figure in ("per_s", "p50_ms", "p99_ms"):
            spreads = {name: spread(found[f"{connections} {name}"], figure) for name in names}
            others = [name for name in names if name != "bench"]
            same = [name for name in others if agrees(spreads["bench"], spreads[name])]
            num_apart += len(others) - len(same)
            cells = [f"{m:.4g} ({low:.4g} to {high:.4g})" for low, m, high in spreads.values()]
            table.add_row(str(connections), figure, *cells, ", ".join(same) or "nobody")
    console.print(table)
    return num_apart


def show_speed(found: dict[str, list[Figures]], console: Console) -> None:
    table = Table(title="identity, 64 connections: the generator's speed (medians)")
    for column in ("", "requests/s", "generator CPU", "requests per CPU-second", "p99 ms"):
        table.add_column(column)
    per_cpu = {}
    for name, figures in found.items():
        per_cpu[name] = statistics.median(each.per_s / (each.cpu_s or 1) for each in figures)
        per_s, cpu_s = spread(figures, "per_s")[1], spread(figures, "cpu_s")[1]
        p99 = spread(figures, "p99_ms")[1]
        table.add_row(name, f"{per_s:,.0f}", f"{cpu_s:.2f}", f"{per_cpu[name]:,.0f}", f"{p99:.2f}")
    ratio = spread(found["bench"], "per_s")[1] / spread(found["wrk"], "per_s")[1]
    own = per_cpu["bench"] / per_cpu["wrk"]
    table.add_row("bench / wrk", f"{ratio:.2f}", "", f"{own:.2f}", "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    rounds, seconds = (1, 2) if args.quick else (5, 6)
    tools: dict[str, Tool] = {"wrk": run_wrk, "bench": run_bench}
    if list(ANALYZER.glob("tritonclient-*.data/data/bin/perf_analyzer")):
        tools["perf_analyzer"] = run_perf_analyzer
    console = Console(width=None if sys.stdout.isatty() else 160)
    agreement = measure_agreement(tools, rounds, seconds)
    speed = measure_speed(rounds, seconds)
    num_apart = show_agreement(agreement, list(tools), console)
    show_speed(speed, console)
    console.print(f"figures on which bench and another do not agree: {num_apart}")
    if not args.quick:
        machine = {"cores": psutil.cpu_count(), "rounds": rounds, "seconds": seconds}
        results = {
            name: {point: [asdict(each) for each in figures] for point, figures in found.items()}
            for name, found in (("agreement", agreement), ("speed", speed))
        }
        target = Path(__file__).with_name("results") / "bench_agreement.json"
        target.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
