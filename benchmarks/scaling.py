"""How the data path scales with cores: `penstock serve --shards N`, in one run with Triton.

    python benchmarks/scaling.py                   about ten minutes; wants sixteen cores
    python benchmarks/scaling.py --triton HOME     with Triton 2.51 (`gpu/triton_side.py` says where
                                                   it comes from)
    python benchmarks/scaling.py --quick           one round of two seconds per point

Models that compute nothing (`null` backend), so that the way to the worker is what is measured:
small (FP32 [16]) over HTTP as binary tensors and as JSON and over gRPC, and images (FP32
[3, 224, 224], 600 kB each way) as binary tensors. Closed loop from as many generator processes as
half the cores, next to the server. Every point has a server of its own; CPU time is that of the
server's processes while it was measured. Triton copies the same tensors in its Python backend, the
only one that runs from its wheel, with each number of instances; its best is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

import triton_side  # noqa: E402

PENSTOCK, TRITON = "penstock", "triton"
IDENTITY = ROOT / "benchmarks" / "rivals" / "apps" / "triton_identity.py"
NUM_SHARDS = (1, 2, 4, 8)
CONNECTIONS = 128
# Instances of Triton's Python backend that are tried.
TRITON_INSTANCES = (1, 2, 4, 8)
START_S = 120.0
INSTANCES = 2
MODEL = """
name: "{name}" backend: "{backend}" max_batch_size: 64 dynamic_batching {{ }}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }}
instance_group {{ count: {instances} kind: KIND_CPU }}
"""
DIMS = {"small": "16", "image": "3, 224, 224"}
IMAGE_MB = 3 * 224 * 224 * 4 / 1e6
CPU = re.compile(r'^penstock_process_cpu_seconds{process="(\w+)".*} (\S+)', re.M)


@dataclass(frozen=True, slots=True)
class Point:
    """The requests of one measurement."""

    name: str
    model: str
    tensors: str
    scheme: str = "http"


POINTS = (
    Point("small, binary", "small", "binary"),
    Point("small, JSON", "small", "json"),
    Point("small, gRPC", "small", "binary", "grpc"),
    Point("image, binary", "image", "binary"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """`cpu_us` are microseconds of CPU time per answer, by kind of process."""

    per_s: float
    p50_ms: float
    p99_ms: float
    num_failed: int
    cpu_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """A server to measure. `number` is its shards (Penstock) or instances (Triton)."""

    name: str
    number: int

    @property
    def title(self) -> str:
        return f"{self.name}, {self.number}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    http: int
    grpc: int

    def of(self, point: Point) -> str:
        if point.scheme == "grpc":
            return f"grpc://127.0.0.1:{self.grpc}/{point.model}"
        return f"http://127.0.0.1:{self.http}/v2/models/{point.model}"


def main() -> int:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    sides = [Side(PENSTOCK, number) for number in args.shards]
    if args.triton is not None:
        sides += [Side(TRITON, number) for number in args.instances]
    found: dict[tuple[str, str], list[Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for point in args.points:
                for side in sides:
                    figures = measure(Path(folder), point, side, args)
                    found.setdefault((point.name, side.title), []).append(figures)
                    told = f"{figures.per_s:,.0f}/s, p99 {figures.p99_ms:.2f} ms"
                    print(f"round {number + 1}: {point.name}; {side.title}: {told}", flush=True)
    for point in args.points:
        console.print(table_of(point, found, sides))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {"cores": os.cpu_count(), "rounds": args.rounds, "seconds": args.seconds}
    settings |= {"generators": args.generators, "connections": args.connections}
    results = {"; ".join(key): [asdict(each) for each in figures] for key, figures in found.items()}
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
    parser.add_argument("--shards", type=int, nargs="+", default=list(NUM_SHARDS))
    parser.add_argument("--triton", type=Path, help="folder with pytriton/tritonserver; or `find`")
    parser.add_argument("--instances", type=int, nargs="+", default=list(TRITON_INSTANCES))
    parser.add_argument("--only", default="", help="points with this in their name")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument(
        "--generators", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="half the cores"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="benchmarks/results/scaling.json; with --quick .bench/results/scaling.json",
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.seconds = args.seconds or (2 if args.quick else 6)
    args.points = [point for point in POINTS if args.only in point.name]
    if not args.points:
        parser.error(f"no point has '{args.only}' in its name: {[each.name for each in POINTS]}")
    if args.triton is not None:
        args.triton = triton_side.find_home(None if str(args.triton) == "find" else args.triton)
    default = ROOT / ".bench" if args.quick else ROOT / "benchmarks"
    args.output = args.output or default / "results" / "scaling.json"
    return args


def measure(root: Path, point: Point, side: Side, args: argparse.Namespace) -> Figures:
    with served(root, side, point, args.triton) as server, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "penstock", "bench", server.of(point)]
        command += ["--json", str(path), "--duration", f"{args.seconds}s"]
        command += ["--concurrency", str(args.connections), "--processes", str(args.generators)]
        command += ["--tensors", point.tensors, "--precision", "0", "--warm-up", "2s"]
        is_ours = side.name == PENSTOCK
        before = (cpu_seconds(server.http), num_answers(server.http, point.model))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = (cpu_seconds(server.http), num_answers(server.http, point.model))
        if done.returncode:
            raise SystemExit(f"bench failed: {(done.stdout + done.stderr)[-500:]}")
        (level,) = json.loads(path.read_text())["levels"]
    summary = level["summary"]
    # With the warm-up, which is the same work.
    num_answered = max(1, after[1] - before[1])
    roles = after[0] if is_ours else {}
    return Figures(
        summary["throughput_per_s"]["value"],
        summary["latency_ms"]["p50"]["value"],
        summary["latency_ms"]["p99"]["value"],
        summary["num_failed"],
        {role: (roles[role] - before[0].get(role, 0.0)) / num_answered * 1e6 for role in roles},
    )


def cpu_seconds(port: int) -> dict[str, float]:
    """Return CPU time by kind of process; Triton says nothing of it."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError:
        return {}
    total: dict[str, float] = {}
    for role, seconds in CPU.findall(text):
        total[role] = total.get(role, 0.0) + float(seconds)
    return total


def num_answers(port: int, model: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/stats") as answer:
        (entry,) = json.load(answer)["model_stats"]
    return int(entry["inference_stats"]["success"]["count"])


@contextmanager
def served(root: Path, side: Side, point: Point, home: Path | None) -> Iterator[Address]:
    repository = root / side.title.replace(", ", "-")
    if not repository.exists():
        write_models(repository, side)
    address = Address(triton_side.free_port(), triton_side.free_port())
    if side.name == TRITON:
        assert home is not None
        server = triton_side.triton(home, repository, root, side.number * len(DIMS), address.grpc)
        address = replace(address, http=server.port)
    else:
        command = [sys.executable, "-m", "penstock", "serve", str(repository), "--no-metrics"]
        is_grpc = point.scheme == "grpc"
        command += [f"--grpc-port={address.grpc}" if is_grpc else "--no-grpc"]
        command += [f"--http-port={address.http}", f"--shards={side.number}"]
        command += ["--log-level=WARNING", "--drain-s=1"]
        server = triton_side.Server(PENSTOCK, command, address.http, root / "penstock.log")
    with server:
        server.wait_until_ready(START_S)
        yield address


def write_models(repository: Path, side: Side) -> None:
    is_triton = side.name == TRITON
    for name, dims in DIMS.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        backend, instances = ("python", side.number) if is_triton else ("null", INSTANCES)
        text = MODEL.format(name=name, dims=dims, instances=instances, backend=backend)
        (version.parent / "config.pbtxt").write_text(text)
        if is_triton:
            shutil.copy(IDENTITY, version / "model.py")


def table_of(
    point: Point, found: Mapping[tuple[str, str], Sequence[Figures]], sides: Sequence[Side]
) -> Table:
    table = Table(title=f"{point.name}: medians", title_justify="left")
    roles = ("core", "shard", "worker")
    for column in ("server", "requests/s", "times", "over Triton", "p50 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for role in roles:
        table.add_column(f"{role} CPU us", justify="right")
    per_mb = point.model == "image"
    if per_mb:
        table.add_column("server CPU us per MB each way", justify="right")
    rates = {side: median(found[point.name, side.title], "per_s") for side in sides}
    best = max((rate for side, rate in rates.items() if side.name == TRITON), default=0.0)
    for side, per_s in rates.items():
        figures = found[point.name, side.title]
        cells = [side.title, f"{per_s:,.0f}", f"{per_s / rates[sides[0]]:.2f}"]
        cells.append(f"{per_s / best:.2f}" if best and side.name == PENSTOCK else "")
        cells += [f"{median(figures, name):.2f}" for name in ("p50_ms", "p99_ms")]
        used = [statistics.median(each.cpu_us.get(role, 0.0) for each in figures) for role in roles]
        is_ours = side.name == PENSTOCK
        cells += [f"{each:.1f}" if is_ours else "" for each in used]
        if per_mb:
            cells.append(f"{(used[0] + used[1]) / (2 * IMAGE_MB):.0f}" if is_ours else "")
        table.add_row(*cells)
    return table


def median(figures: Sequence[Figures], name: str) -> float:
    return statistics.median(getattr(each, name) for each in figures)


if __name__ == "__main__":
    raise SystemExit(main())
