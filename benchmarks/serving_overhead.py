"""What serving costs: Penstock beside Triton, MLServer, LitServe and BentoML on one machine.

    python benchmarks/serving_overhead.py            the whole comparison, about half an hour
    python benchmarks/serving_overhead.py --quick    one round of one second per point

Two models that compute little, so that the server is what is measured: identity (FP32 [-1, 16])
and digits (a small CNN, FP32 [-1, 1, 8, 8] to logits [-1, 10]), max batch 64, at 1, 8 and 64
connections. 1,000 distinct requests with distinct ids; answers are compared with known ones.

Goals, set before measuring:
  * binary tensors, identity: at least 2.5 times the requests/s of Triton with its Python backend
    at 64 connections, and p50 at most 0.7 times Triton's at one connection;
  * JSON to JSON: at least 10 times the requests/s of MLServer, LitServe and BentoML at 64
    connections.

Each alternative runs in a virtual environment of its own under .bench/ (made on first use), in
several settings, and its best one counts per point. Everything listens on 127.0.0.1. wrk shares
the cores with the server, for everyone alike. Errors or wrong answers make the exit status 1.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from overhead import load, plot
from overhead.measure import Plan, measure
from overhead.report import print_report
from overhead.results import Results
from overhead.workload import MODELS
from rich.console import Console
from rivals.bentoml import BentoML
from rivals.environment import BENCH
from rivals.litserve import LitServe
from rivals.mlserver import MLServer
from rivals.penstock import Penstock
from rivals.server import Server
from rivals.triton import Triton

SERVERS: dict[str, type[Server]] = {
    kind.name: kind for kind in (Penstock, Triton, MLServer, LitServe, BentoML)
}
RESULTS = Path(__file__).with_name("results")
CONNECTIONS = [1, 8, 64]


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped too
    console = Console(width=None if sys.stdout.isatty() else 160)
    target = args.output / "serving_overhead.json"
    if args.report_only:
        results = Results.load(target)
    else:
        load.require_wrk()
        results = Results(describe_machine(), describe_settings(args), titles={})
        plan = Plan(
            servers=[SERVERS[name]() for name in args.servers],
            models=[MODELS[name] for name in args.models],
            connections=args.connections,
            rounds=args.rounds,
            seconds=args.seconds,
            max_repeats=0 if args.quick else 2,
        )
        measure(plan, results, lambda text: print(text, flush=True))
        results.save(target)
    print_report(results, console)
    target.with_suffix(".html").write_text(plot.page(results))
    console.print(f"written: {target.name} and {target.stem}.html in {args.output.name}/")
    return 1 if results.failures or "penstock" in results.missing else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, help="per point (5)")
    parser.add_argument("--rounds", type=int, help="repetitions, medians are reported (3)")
    parser.add_argument("--quick", action="store_true", help="1 second, 1 round")
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--connections", nargs="+", type=int, default=CONNECTIONS)
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the results; benchmarks/results for a full run, .bench/results otherwise",
    )
    parser.add_argument(
        "--report-only", action="store_true", help="print and plot the saved results again"
    )
    args = parser.parse_args()
    is_full = not args.quick and args.seconds is None and args.rounds is None
    is_full &= args.servers == list(SERVERS) and args.models == list(MODELS)
    is_full &= args.connections == CONNECTIONS
    args.output = args.output or (RESULTS if is_full else BENCH / "results")
    args.seconds = args.seconds or (1 if args.quick else 5)
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def describe_machine() -> dict[str, str]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    wrk = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": str(psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": platform.system(),
        "python": platform.python_version(),
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "wrk": wrk.partition(" [")[0].removeprefix("wrk ").strip(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def describe_settings(args: argparse.Namespace) -> dict[str, str]:
    return {
        "rounds": str(args.rounds),
        "seconds per point": str(args.seconds),
        "connections": ", ".join(map(str, args.connections)),
        "models": ", ".join(args.models),
    }


if __name__ == "__main__":
    raise SystemExit(main())
