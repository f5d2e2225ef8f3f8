"""What a small ModelInfer over gRPC costs: Penstock beside Triton and other trees of Penstock.

    python benchmarks/grpc_overhead.py                     about three minutes
    python benchmarks/grpc_overhead.py --quick             one round of two seconds per point
    python benchmarks/grpc_overhead.py --tree ../before    also another checkout, in turns

The identity model (FP32 [1, 16], max batch 64) by ONNX Runtime in Penstock and by the Python
backend in Triton, at 1, 8 and 64 calls in flight, over one connection each 32 of them. The
generator (`overhead/h2_load.py`) writes raw HTTP/2 frames, so that it costs less than the server;
it compares every answer. Rounds are interleaved and medians shown. CPU time is that of all
processes of the server while it was measured; it says more than calls/s where the generator and
the server share few cores.

Goal, set before measuring: at most 50 us of CPU a call at 64 in flight, in the core process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from overhead.process import Launch, StartError, cpu_seconds, free_port, running
from overhead.workload import IDENTITY
from rich.console import Console
from rich.table import Table
from rivals import environment
from rivals.triton import Triton, make_repository

HERE = Path(__file__).resolve().parent
IN_FLIGHT = (1, 8, 64)
PER_CONNECTION = 32


@dataclass(frozen=True, slots=True)
class Figures:
    """`core_us` and `all_us` are CPU time per call, of the first process and of all."""

    per_s: float
    p50_ms: float
    p99_ms: float
    core_us: float
    all_us: float
    generator_us: float
    num_failed: int


def main() -> int:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    servers = [f"penstock at {tree}" for tree in args.tree]
    servers = ["penstock", *servers, *([] if args.no_triton else ["triton"])]
    found: dict[str, dict[int, list[Figures]]] = {}
    for number in range(args.rounds):
        for name in list(servers):
            try:
                figures = measure(name, args)
            except (StartError, environment.InstallError, OSError) as error:
                print(f"{name} is left out: {error}", flush=True)
                servers.remove(name)
                continue
            for in_flight, each in figures.items():
                found.setdefault(name, {}).setdefault(in_flight, []).append(each)
                told = f"{each.per_s:,.0f}/s, {each.all_us:.0f} CPU-us"
                print(f"round {number + 1}: {name}, {in_flight} in flight: {told}", flush=True)
    console.print(table_of(found))
    settings = {"cores": os.cpu_count(), "rounds": args.rounds, "seconds": args.seconds}
    results = {
        name: {str(n): [asdict(each) for each in figures] for n, figures in points.items()}
        for name, points in found.items()
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")
    console.print(f"written: {args.output}")
    failed = sum(e.num_failed for points in found.values() for f in points.values() for e in f)
    return 1 if failed or "penstock" not in found else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    parser.add_argument("--seconds", type=float, help="per point (5)")
    parser.add_argument("--rounds", type=int, help="medians of so many are shown (3)")
    parser.add_argument("--tree", action="append", default=[], help="another checkout of Penstock")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument("--in-flight", type=int, nargs="+", default=list(IN_FLIGHT))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (2 if args.quick else 5)
    folder = HERE.parent / ".bench" if args.quick else HERE
    args.output = args.output or folder / "results" / "grpc_overhead.json"
    return args


def launch(name: str, work: Path) -> tuple[Launch, int]:
    """How to start a server, and its gRPC port."""
    port = free_port()
    if name == "triton":
        triton = Triton()
        triton.prepare()
        return triton.serve(make_repository(work, IDENTITY, 1), work, port), port
    tree = HERE.parent if name == "penstock" else Path(name.removeprefix("penstock at ")).resolve()
    http_port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(environment.REPOSITORY)]
    command += [f"--http-port={http_port}", f"--grpc-port={port}", "--no-metrics"]
    env = {"PYTHONPATH": str(tree)}
    return Launch(command, http_port, ["/v2/health/ready"], env, tree), port


def measure(name: str, args: argparse.Namespace) -> dict[int, Figures]:
    with tempfile.TemporaryDirectory() as folder:
        started, port = launch(name, Path(folder))
        with running(started, Path(folder) / "log") as process:
            found = {}
            for in_flight in args.in_flight:
                found[in_flight] = measure_point(process, port, in_flight, args.seconds)
    return found


def measure_point(process: psutil.Process, port: int, in_flight: int, seconds: float) -> Figures:
    num_connections = max(1, in_flight // PER_CONNECTION)
    command = [sys.executable, str(HERE / "overhead" / "h2_load.py"), str(port), IDENTITY.name]
    command += [IDENTITY.input_name, str(seconds), str(num_connections)]
    command += [str(in_flight // num_connections)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe) as generator:
        assert generator.stdin is not None and generator.stdout is not None
        if generator.stdout.readline() != "warm\n":
            raise StartError("the generator could not connect")
        before = cpu_seconds(process)
        generator.stdin.write("go\n")
        generator.stdin.flush()
        told = json.loads(generator.stdout.readline())
        after = cpu_seconds(process)
        generator.stdin.close()
    if not told["num_calls"]:
        raise SystemExit(f"no call was answered; {told['num_failed']} failed")
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    num_calls = told["num_calls"]
    return Figures(
        told["num_calls"] / told["seconds"],
        told["p50_ms"],
        told["p99_ms"],
        used[next(iter(after))] / num_calls * 1e6,
        sum(used.values()) / num_calls * 1e6,
        told["cpu_s"] / num_calls * 1e6,
        told["num_failed"],
    )


def table_of(found: Mapping[str, Mapping[int, Sequence[Figures]]]) -> Table:
    table = Table(title="identity over gRPC: medians", title_justify="left")
    columns = ("calls/s", "p50 ms", "p99 ms", "core CPU-us", "all CPU-us", "generator CPU-us")
    for column in ("server", "in flight", *columns):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, points in found.items():
        for in_flight, figures in points.items():

            def median(field: str, figures: Sequence[Figures] = figures) -> float:
                return statistics.median(getattr(each, field) for each in figures)

            cells = [f"{median('per_s'):,.0f}"]
            cells += [f"{median(field):.2f}" for field in ("p50_ms", "p99_ms")]
            cells += [f"{median(field):.1f}" for field in ("core_us", "all_us", "generator_us")]
            table.add_row(name, str(in_flight), *cells)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
