"""What a request costs in process: CPU time in the caller of `submit`, and in all threads.

    python benchmarks/in_process.py                    about two minutes
    python benchmarks/in_process.py --beside FOLDER    in turns with another checkout
    python benchmarks/in_process.py --quick            one short round

`penstock.load` of a model that computes nothing (`null`), asked in bursts of 64 requests of one
row: FP32 [16], and images (FP32 [3, 224, 224], 602 kB). Arrays are given as they are, and as rows
of registered memory, where the checkout has it. Every answer of the first bursts, which are not
measured, and the last of each later one is compared with what was sent.

Goal, set before measuring: `submit` of registered rows costs at most 5 us in the caller.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

GOAL_US = 5.0
BURST = 64
NUM_CHECKED = 10
ROOT = Path(__file__).resolve().parents[1]
POINTS = {"small": ((16,), 300), "images": ((3, 224, 224), 25)}
WAYS = ("arrays", "registered")
MODEL = """
backend: "null" max_batch_size: 64 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU-us per request, and requests per second."""

    submit_us: float
    caller_us: float
    all_us: float
    per_s: float


def measure(point: str, way: str, scale: float) -> Cost | None:
    """Ask a model in this process; None if this checkout cannot register memory."""
    import penstock

    dims, num_bursts = POINTS[point]
    num_bursts = max(3, int(num_bursts * scale))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model" / "1").mkdir(parents=True)
        config = MODEL.format(dims=", ".join(map(str, dims)))
        (Path(folder) / "model" / "config.pbtxt").write_text(config)
        with penstock.load(str(Path(folder) / "model")) as model:
            values = np.random.default_rng(0).random((BURST, *dims), dtype=np.float32)
            if way == "arrays":
                rows = [values[index : index + 1] for index in range(BURST)]
            elif hasattr(model, "register"):
                registered = model.register(values)
                rows = [registered[index] for index in range(BURST)]
            else:
                return None
            _ask(model, rows, values, NUM_CHECKED, checks_all=True)
            began, cpu, mine = time.perf_counter(), time.process_time(), time.thread_time()
            submit_s = _ask(model, rows, values, num_bursts)
            spent = time.thread_time() - mine, time.process_time() - cpu
            took_s = time.perf_counter() - began
    count = num_bursts * BURST
    caller_us, all_us = (1e6 * seconds / count for seconds in spent)
    return Cost(1e6 * submit_s / count, caller_us, all_us, count / took_s)


def _ask(model, rows, values, num_bursts: int, checks_all: bool = False) -> float:  # type: ignore[no-untyped-def]
    """Send bursts; return the CPU time in `submit`."""
    submit_s = 0.0
    for _ in range(num_bursts):
        began = time.thread_time()
        futures = [model.submit(row) for row in rows]
        submit_s += time.thread_time() - began
        for index, future in enumerate(futures):
            answer = future.result()["y"]
            if checks_all or index == BURST - 1:
                np.testing.assert_array_equal(answer, values[index : index + 1])
    return submit_s


def measure_in(tree: Path, point: str, way: str, scale: float) -> Cost | None:
    """Measure a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--measure", point, way, "--scale", str(scale)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{tree}: {ended.stderr}")
    found = json.loads(ended.stdout.splitlines()[-1])
    return None if found is None else Cost(**found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (5)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of bursts (1)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the bursts, 1 round")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--measure", nargs=2, metavar=("POINT", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        cost = measure(*args.measure, args.scale)
        print(json.dumps(None if cost is None else asdict(cost)))
        return 0
    if args.quick:
        args.scale, args.rounds = 0.1, 1
    trees = [ROOT] if args.beside is None else [args.beside.resolve(), ROOT]
    found: dict[tuple[str, str, Path], list[Cost]] = {}
    for _ in range(args.rounds):
        for point in POINTS:
            for way in WAYS:
                for tree in trees:
                    cost = measure_in(tree, point, way, args.scale)
                    if cost is not None:
                        found.setdefault((point, way, tree), []).append(cost)
    print_costs(found)
    return 0


def print_costs(found: dict[tuple[str, str, Path], list[Cost]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "given as", "checkout", "submit us", "range", "caller", "all threads", "per s"
    )
    for (point, way, tree), costs in found.items():
        submit = [cost.submit_us for cost in costs]
        table.add_row(
            point,
            way,
            "this" if tree == ROOT else tree.name,
            f"{_median(submit):.1f}",
            f"{min(submit):.1f} to {max(submit):.1f}",
            f"{_median([cost.caller_us for cost in costs]):.1f}",
            f"{_median([cost.all_us for cost in costs]):.1f}",
            f"{_median([cost.per_s for cost in costs]):,.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for point in POINTS:
        if costs := found.get((point, "registered", ROOT)):
            reached = _median([cost.submit_us for cost in costs])
            state = "kept" if reached <= GOAL_US else "missed"
            console.print(f"{point}: goal of {GOAL_US:g} us in the caller {state}, {reached:.1f}")


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    raise SystemExit(main())
