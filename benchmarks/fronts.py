"""What `penstock serve --fronts N` gives: no fronts beside 1, 2 and 4 of them, in turns.

    python benchmarks/fronts.py            about seven minutes; wants twelve cores
    python benchmarks/fronts.py --quick    one round of two seconds per point

Models that compute nothing (`null` backend), so that the way to the batcher is what is measured:
small (FP32 [16]) as binary tensors and as JSON, wide (FP32 [1024]) as JSON, and images (FP32
[3, 224, 224], 600 kB each way) as binary tensors. Closed loop, 128 connections, from as many
generator processes as half the cores. Every point has a server of its own; CPU time is that of the
server's processes while it was measured.

Goals, set before measuring, for four fronts against none on a machine with twelve cores or more:
  * small, binary: at least 1.3 times the requests/s, and the core's CPU time per request lower;
  * JSON of 1,024 numbers: at least 2.5 times;
  * images: at least 1.5 times.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

NUM_FRONTS = (0, 1, 2, 4)
CONNECTIONS = 128
INSTANCES = 2
MODEL = """
backend: "null" max_batch_size: 64 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}
instance_group {{ count: {instances} kind: KIND_CPU }}
"""
DIMS = {"small": "16", "wide": "1024", "image": "3, 224, 224"}
CPU = re.compile(r'^penstock_process_cpu_seconds{process="(\w+)".*} (\S+)', re.M)


@dataclass(frozen=True, slots=True)
class Point:
    """What is sent, and the goal for four fronts against none."""

    name: str
    model: str
    tensors: str
    goal: float | None


POINTS = (
    Point("small, binary", "small", "binary", 1.3),
    Point("small, JSON", "small", "json", None),
    Point("1,024 numbers, JSON", "wide", "json", 2.5),
    Point("image, binary", "image", "binary", 1.5),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """`cpu_us` are microseconds of CPU time per answer, by kind of process."""

    per_s: float
    p50_ms: float
    p99_ms: float
    num_failed: int
    cpu_us: dict[str, float]


def main() -> int:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    found: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for number in range(args.rounds):
            for point in POINTS:
                for num_fronts in args.fronts:
                    figures = measure(Path(folder), point, num_fronts, args)
                    found.setdefault(f"{point.name}; {num_fronts}", []).append(figures)
                    told = f"{figures.per_s:,.0f}/s, p99 {figures.p99_ms:.2f} ms"
                    print(f"round {number + 1}: {point.name}, {num_fronts}: {told}", flush=True)
    for point in POINTS:
        console.print(table_of(point, found, args.fronts))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {"cores": os.cpu_count(), "rounds": args.rounds, "seconds": args.seconds}
    settings |= {"generators": args.generators, "connections": args.connections}
    results = {name: [asdict(each) for each in figures] for name, figures in found.items()}
    args.output.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    num_failed = sum(each.num_failed for figures in found.values() for each in figures)
    console.print(f"written: {args.output}; {num_failed} requests failed")
    return 1 if num_failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    parser.add_argument("--seconds", type=int, help="per point (6)")
    parser.add_argument("--rounds", type=int, help="medians of so many are shown (3)")
    parser.add_argument("--fronts", type=int, nargs="+", default=list(NUM_FRONTS))
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument(
        "--generators", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="half the cores"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="benchmarks/results/fronts.json; with --quick .bench/results/fronts.json",
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (2 if args.quick else 6)
    here = Path(__file__).resolve().parent
    default = here.parent / ".bench" if args.quick else here
    args.output = args.output or default / "results" / "fronts.json"
    return args


def write_models(root: Path) -> None:
    for name, dims in DIMS.items():
        (root / name / "1").mkdir(parents=True)
        config = MODEL.format(dims=dims, instances=INSTANCES)
        (root / name / "config.pbtxt").write_text(config)


def measure(repository: Path, point: Point, num_fronts: int, args: argparse.Namespace) -> Figures:
    with served(repository, num_fronts) as port, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "penstock", "bench", "--json", str(path)]
        command += [f"http://127.0.0.1:{port}/v2/models/{point.model}"]
        command += ["--concurrency", str(args.connections), "--duration", f"{args.seconds}s"]
        command += ["--processes", str(args.generators), "--tensors", point.tensors]
        command += ["--precision", "0", "--warm-up", "2s"]
        before, num_before = cpu_seconds(port), num_answers(port, point.model)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after, num_after = cpu_seconds(port), num_answers(port, point.model)
        if done.returncode:
            raise SystemExit(f"bench failed: {(done.stdout + done.stderr)[-500:]}")
        (level,) = json.loads(path.read_text())["levels"]
    summary = level["summary"]
    # With the warm-up, which is the same work.
    num_answered = max(1, num_after - num_before)
    return Figures(
        summary["throughput_per_s"]["value"],
        summary["latency_ms"]["p50"]["value"],
        summary["latency_ms"]["p99"]["value"],
        summary["num_failed"],
        {role: (after[role] - before[role]) / num_answered * 1e6 for role in after},
    )


def cpu_seconds(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    total: dict[str, float] = {}
    for role, seconds in CPU.findall(text):
        total[role] = total.get(role, 0.0) + float(seconds)
    return total


def num_answers(port: int, model: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/stats") as answer:
        (entry,) = json.load(answer)["model_stats"]
    return int(entry["inference_stats"]["success"]["count"])


@contextmanager
def served(repository: Path, num_fronts: int) -> Iterator[int]:
    command = [sys.executable, "-m", "penstock", "serve", str(repository), "--http-port", "0"]
    flags = ["--no-grpc", "--no-metrics", "--log-level", "WARNING", "--fronts", str(num_fronts)]
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


def table_of(
    point: Point, found: Mapping[str, Sequence[Figures]], num_fronts: Sequence[int]
) -> Table:
    goal = f"; goal for four fronts: {point.goal} times" if point.goal else ""
    table = Table(title=f"{point.name}: medians{goal}", title_justify="left")
    roles = ("core", "http_front", "worker")
    for column in ("fronts", "requests/s", "times", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for role in roles:
        table.add_column(f"{role} CPU us", justify="right")
    base = median(found[f"{point.name}; {num_fronts[0]}"], "per_s")
    for number in num_fronts:
        figures = found[f"{point.name}; {number}"]
        per_s = median(figures, "per_s")
        cells = [str(number), f"{per_s:,.0f}", f"{per_s / base:.2f}"]
        cells += [f"{median(figures, name):.2f}" for name in ("p50_ms", "p99_ms")]
        for role in roles:
            used = statistics.median(each.cpu_us.get(role, 0.0) for each in figures)
            cells.append(f"{used:.1f}")
        table.add_row(*cells)
    return table


def median(figures: Sequence[Figures], name: str) -> float:
    return statistics.median(getattr(each, name) for each in figures)


if __name__ == "__main__":
    raise SystemExit(main())
