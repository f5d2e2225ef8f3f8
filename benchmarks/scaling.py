"""How the data path scales with cores: `penstock serve --shards N`, in one run with Triton.

    python benchmarks/scaling.py                   about half an hour; wants sixteen cores, a GPU
    python benchmarks/scaling.py --triton HOME     with Triton 2.51 (`gpu/triton_side.py` says where
                                                   it comes from)
    python benchmarks/scaling.py --seconds 500     nothing begins after it; what was found is kept
    python benchmarks/scaling.py --parts v2        only the models that compute nothing
    python benchmarks/scaling.py --quick --tiny --shards 1 2     does it run? two cores, no GPU

Models that compute nothing (`null` backend), so that the way to the worker is what is measured:
small (FP32 [16]) over HTTP as binary tensors and as JSON and over gRPC, and images (FP32
[3, 224, 224], 600 kB each way) as binary tensors and, on their way in, in shared memory. Closed
loop from as many generator processes as half the cores, next to the server: `penstock bench`, or
raw HTTP/2 frames for gRPC (`overhead/h2_load.py`). Every point has a server of its own; CPU time is
that of the server's processes while it was measured. Triton copies the same tensors in its Python
backend, the only one that runs from its wheel, with each number of instances; its best is compared.

Further parts (`scaling_parts.py`): OpenAI streams of Qwen3-0.6B's shape with 256 and 1,024 clients,
ResNet-50 on the GPU in process and over HTTP against offline, and `serving_overhead.py` on two
cores. A part that cannot run says why in its row of the last table. The file is written after each
measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scaling_parts import StreamPlan, TableRow, resnet, streams, tail, two_cores

from penstock.system.cores import usable_cores

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

import triton_side  # noqa: E402

PENSTOCK, TRITON = "penstock", "triton"
IDENTITY = ROOT / "benchmarks" / "rivals" / "apps" / "triton_identity.py"
# Triton's stub looks at no PYTHONPATH. With numpy 2 its tensors are empty.
FIND_NUMPY = """import os, sys

sys.path[:0] = os.environ["BESIDE_TRITON_PACKAGES"].split(os.pathsep)
import numpy

assert numpy.__version__ < "2", f"numpy {numpy.__version__}; Triton's stub needs one before 2.0"
"""
NUM_SHARDS = (1, 2, 4, 8)
CONNECTIONS = 128
# Instances of Triton's Python backend that are tried.
TRITON_INSTANCES = (1, 2, 4, 8)
H2_LOAD = ROOT / "benchmarks" / "overhead" / "h2_load.py"
# Connections of each generator of gRPC calls; calls share them.
CONNECTIONS_EACH = 4
START_S = 120.0
WARM_UP_S = 5
RESNET_S = 600.0
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
    goal: str = ""
    # 0: as `--connections` says.
    connections: int = 0
    # Whether only the first side is measured.
    only_one: bool = False
    # Whether requests only name their inputs, in memory that clients and server share.
    is_shared: bool = False


POINTS = (
    Point("small, binary", "small", "binary", goal=">= 160,000/s, >= 3x Triton's"),
    Point("small, JSON", "small", "json"),
    Point("small, gRPC", "small", "binary", "grpc", ">= Triton's"),
    Point("image, binary", "image", "binary", goal=">= 8,000/s"),
    Point("image, shared memory", "image", "binary", is_shared=True),
    Point("CPU, 64 connections", "small", "binary", "http", "<= 15 CPU-us", 64, only_one=True),
)
PINNED_POINTS = (
    Point("two cores, 64", "small", "binary", "http", ">= 2.6x Triton's", 64),
    Point("two cores, 1", "small", "binary", "http", "<= 0.69x Triton's p50", 1),
)
PARTS = ("v2", "streams", "resnet", "cores")


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


class BenchFailed(Exception):
    """The generator ended with an error."""


class Scaling:
    """One run: what was found so far, written after each measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sides = [Side(PENSTOCK, number) for number in args.shards]
        if args.triton is not None:
            self.sides += [Side(TRITON, number) for number in args.instances]
        self.ends = time.monotonic() + args.seconds
        self.found: dict[tuple[str, str], list[Figures]] = {}
        self.others: dict[str, Any] = {}
        self.rows: list[TableRow] = []

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def measure_v2(self, folder: Path) -> None:
        for number in range(self.args.rounds):
            for point in self.args.points:
                for side in self.sides:
                    if point.only_one and side != self.sides[0]:
                        continue
                    if self.left_s <= 0:
                        print("no time left; what was found is kept", flush=True)
                        return
                    try:
                        figures = measure(folder, point, side, self.args)
                    except (BenchFailed, triton_side.StartError) as error:
                        self.rows.append(TableRow(f"{point.name}; {side.title}", tail(str(error))))
                        print(f"{point.name}; {side.title}: {error}", flush=True)
                        continue
                    self.found.setdefault((point.name, side.title), []).append(figures)
                    told = f"{figures.per_s:,.0f}/s, p99 {figures.p99_ms:.2f} ms"
                    print(f"round {number + 1}: {point.name}; {side.title}: {told}", flush=True)
                    self.write()

    def measure_part(self, name: str) -> None:
        if self.left_s <= 0:
            self.rows.append(TableRow(name, "not measured: no time left"))
            return
        args = self.args
        if name == "streams":
            shards = sorted({1, max(args.shards)})
            clients = (4, 8) if args.tiny else (256, 1024)
            plan = StreamPlan(shards, clients, args.duration, args.generators, args.tiny)
            rows = streams(plan, self.others)
        elif name == "resnet":
            limit_s = min(RESNET_S, max(60.0, self.left_s))
            rows = resnet(sorted({1, max(args.shards)}), limit_s, args.tiny)
        elif shutil.which("wrk"):
            rows = two_cores(args.duration, args.rounds)
        else:
            rows = self.measure_pinned()
        for row in rows:
            print(f"{row.title}: {row.found}", flush=True)
        self.rows += rows
        self.write()

    def measure_pinned(self) -> list[TableRow]:
        """Measure two cores without wrk: server and generator on them, in turns with Triton."""
        ours, *theirs = [Side(PENSTOCK, 1), *(s for s in self.sides if s.name == TRITON)]
        rows, args = [], argparse.Namespace(**vars(self.args) | {"generators": 1})
        for point in PINNED_POINTS:
            found: dict[Side, list[Figures]] = {}
            with tempfile.TemporaryDirectory() as folder, pinned_to(2):
                for _ in range(args.rounds):
                    for side in (ours, *theirs):
                        found.setdefault(side, []).append(measure(Path(folder), point, side, args))
            field = "per_s" if point.connections > 1 else "p50_ms"
            best = max if field == "per_s" else min
            own = median(found[ours], field)
            text = f"{own:,.0f}/s" if field == "per_s" else f"p50 {own:.3f} ms"
            if theirs:
                text += f", {own / best(median(found[s], field) for s in theirs):.2f}x Triton's"
            rows.append(TableRow(point.name, f"{text} (penstock bench, no wrk)", point.goal))
        return rows

    def write(self) -> None:
        args = self.args
        settings = {"cores": usable_cores(), "rounds": args.rounds, "duration": args.duration}
        settings |= {"generators": args.generators, "connections": args.connections}
        results = {"; ".join(key): [asdict(f) for f in fs] for key, fs in self.found.items()}
        told = {"settings": settings, "results": results, "others": self.others}
        told["rows"] = [asdict(row) for row in self.rows]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(told, indent=1) + "\n")

    def summarise(self) -> list[TableRow]:
        """Return the rows of the last table that come from models that compute nothing."""
        rows = []
        for point in self.args.points:
            ours = [side for side in self.sides if (point.name, side.title) in self.found]
            ours = [side for side in ours if side.name == PENSTOCK]
            if not ours:
                continue
            rates = {
                s: median(self.found[point.name, s.title], "per_s")
                for s in self.sides
                if (point.name, s.title) in self.found
            }
            best = max(ours, key=lambda side: rates[side])
            figures = self.found[point.name, best.title]
            cpu_us = statistics.median(sum(each.cpu_us.values()) for each in figures)
            text = f"{rates[best]:,.0f}/s with {best.number} shards, {cpu_us:.1f} CPU-us"
            if len(ours) > 1:
                text += f", {rates[best] / rates[ours[0]]:.2f}x of {ours[0].number}"
            theirs = max((rate for s, rate in rates.items() if s.name == TRITON), default=0.0)
            text += f", {rates[best] / theirs:.2f}x Triton's" if theirs else ""
            rows.append(TableRow(point.name, text, point.goal))
        return rows


def main() -> int:
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    scaling = Scaling(args)
    if "v2" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            scaling.measure_v2(Path(folder))
    for name in args.parts:
        if name != "v2":
            scaling.measure_part(name)
    for point in args.points:
        sides = [side for side in scaling.sides if (point.name, side.title) in scaling.found]
        if sides:
            console.print(table_of(point, scaling.found, sides))
    scaling.rows = [*scaling.summarise(), *scaling.rows]
    scaling.write()
    num_failed = sum(each.num_failed for figures in scaling.found.values() for each in figures)
    console.print(f"written: {args.output}; {num_failed} requests failed")
    console.print(last_table(scaling.rows))
    return 1 if num_failed else 0


@contextmanager
def pinned_to(count: int) -> Iterator[None]:
    """Let this process, and all that it starts, use the first so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def last_table(rows: Sequence[TableRow]) -> Table:
    table = Table(title=f"Scaling on {usable_cores()} cores", title_justify="left")
    for column in ("", "found", "goal"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(escape(row.title), escape(row.found), escape(row.goal))
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of two seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, no figures")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing begins after it")
    parser.add_argument("--duration", type=int, help="seconds of a point (6)")
    parser.add_argument("--rounds", type=int, help="medians of so many are shown (3)")
    parser.add_argument("--shards", type=int, nargs="+", default=list(NUM_SHARDS))
    parser.add_argument("--shard-accept", choices=("load", "all"), default="load")
    parser.add_argument("--triton", type=Path, help="folder with pytriton/tritonserver; or `find`")
    parser.add_argument("--instances", type=int, nargs="+", default=list(TRITON_INSTANCES))
    parser.add_argument("--only", default="", help="points with this in their name")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument(
        "--generators", type=int, default=max(1, usable_cores() // 2), help="half the cores"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="benchmarks/results/scaling.json; with --quick .bench/results/scaling.json",
    )
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.duration = args.duration or (2 if args.quick else 6)
    args.points = [point for point in POINTS if args.only in point.name]
    if not args.points:
        parser.error(f"no point has '{args.only}' in its name: {[each.name for each in POINTS]}")
    if args.triton is not None:
        args.triton = triton_side.find_home(None if str(args.triton) == "find" else args.triton)
    default = ROOT / ".bench" if args.quick else ROOT / "benchmarks"
    args.output = args.output or default / "results" / "scaling.json"
    return args


def measure(root: Path, point: Point, side: Side, args: argparse.Namespace) -> Figures:
    generate = call if point.scheme == "grpc" else request
    with served(root, side, point, args) as server:
        before = (cpu_seconds(server.http), num_answers(server.http, point.model))
        figures = generate(server, point, side, args)
        after = (cpu_seconds(server.http), num_answers(server.http, point.model))
    # With the warm-up, which is the same work.
    num_answered = max(1, after[1] - before[1])
    roles = after[0] if side.name == PENSTOCK else {}
    used = {role: (roles[role] - before[0].get(role, 0.0)) / num_answered * 1e6 for role in roles}
    return replace(figures, cpu_us=used)


def request(server: Address, point: Point, side: Side, args: argparse.Namespace) -> Figures:
    """Send requests over HTTP with `penstock bench`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "penstock", "bench", server.of(point)]
        command += ["--json", str(path), "--duration", f"{args.duration}s"]
        connections = point.connections or args.connections
        command += ["--concurrency", str(connections), "--processes", str(args.generators)]
        # Until as many shards accept as the load needs.
        warm_up_s = WARM_UP_S if side.number > 1 else 2
        command += ["--precision", "0", "--warm-up", f"{warm_up_s}s", "--tensors", point.tensors]
        command += ["--shared-memory"] if point.is_shared else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchFailed(f"bench failed: {(done.stdout + done.stderr)[-500:]}")
        (level,) = json.loads(path.read_text())["levels"]
    summary = level["summary"]
    latencies = summary["latency_ms"]
    p50_ms, p99_ms = (latencies[name]["value"] for name in ("p50", "p99"))
    return Figures(summary["throughput_per_s"]["value"], p50_ms, p99_ms, summary["num_failed"], {})


def call(server: Address, point: Point, side: Side, args: argparse.Namespace) -> Figures:
    """Call over gRPC with `overhead/h2_load.py`: grpcio's client takes more CPU time than the
    servers. The p99 is the highest of the generators'."""
    calls = max(1, args.connections // (args.generators * CONNECTIONS_EACH))
    command = [sys.executable, str(H2_LOAD), str(server.grpc), point.model, "INPUT0"]
    command += [str(args.duration), str(CONNECTIONS_EACH), str(calls)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    pipe = subprocess.PIPE
    generators = [
        subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe)
        for _ in range(args.generators)
    ]
    try:
        if any(each.stdout.readline() != "warm\n" for each in generators if each.stdout):
            raise BenchFailed("a generator could not connect")
        for each in generators:
            print(file=each.stdin, flush=True)
        told = [json.loads(each.stdout.readline()) for each in generators if each.stdout]
    finally:
        for each in generators:
            each.communicate()
    return Figures(
        sum(each["num_calls"] / each["seconds"] for each in told),
        statistics.median(each["p50_ms"] for each in told),
        max(each["p99_ms"] for each in told),
        sum(each["num_failed"] for each in told),
        {},
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
def served(root: Path, side: Side, point: Point, args: argparse.Namespace) -> Iterator[Address]:
    repository = root / side.title.replace(", ", "-")
    if not repository.exists():
        write_models(repository, side)
    address = Address(triton_side.free_port(), triton_side.free_port())
    if side.name == TRITON:
        server = triton_side.triton(
            args.triton, repository, root, side.number * len(DIMS), address.grpc
        )
        address = replace(address, http=server.port)
    else:
        command = [sys.executable, "-m", "penstock", "serve", str(repository), "--no-metrics"]
        is_grpc = point.scheme == "grpc"
        command += [f"--grpc-port={address.grpc}" if is_grpc else "--no-grpc"]
        command += [f"--http-port={address.http}", f"--shards={side.number}"]
        # The generator of calls does not reconnect to another shard.
        accept = "all" if is_grpc else args.shard_accept
        command += ["--log-level=WARNING", "--drain-s=1", f"--shard-accept={accept}"]
        command += ["--shared-memory"] if point.is_shared else []
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
            (version / "model.py").write_text(FIND_NUMPY + IDENTITY.read_text())


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
