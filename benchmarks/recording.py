"""What recording and the comparison of live inputs cost a server.

    python benchmarks/recording.py            about three minutes
    python benchmarks/recording.py --quick    one round of one second

Four servers of one model that computes nothing (`null`), loaded in turns over HTTP with binary
tensors: as it comes, with statistics of its inputs in the evidence (drift), with `--record` and its
defaults (1 % of the requests), and with every request recorded. CPU time of all processes of a
server, by the kernel's counters, for FP32 [16] with 64 connections and for images (FP32 [3, 224,
224], 602 kB each way) with 16. The ratio is that of the same round; its median is shown with a 95 %
interval. Before that, the parts alone, by the CPU clock of this thread: what a request costs that
is not sampled, what one costs the event loop that is, and what a worker spends on a row.

Goals, set before measuring: drift at most 1.01, recording by its defaults at most 1.02. A goal is
missed if the whole interval is above it. Recording everything is for debugging; it has no goal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
from large_bodies import IMAGES, MODEL, SMALL, Point, run_load
from overhead.process import Launch, cpu_seconds, free_port, running
from rich.console import Console
from rich.table import Table

from penstock.backends import Batch
from penstock.config import BatchPolicy, ModelConfig, RecordPolicy
from penstock.optimizer.input_record import statistics_of
from penstock.repository import layout, versions
from penstock.serving.input_sketch import InputSketch
from penstock.serving.input_statistics import references
from penstock.serving.metrics import ModelMetrics
from penstock.serving.record_writer import RecordWriter, RingState
from penstock.serving.recording_files import RingPlace, SegmentRing
from penstock.serving.request_recorder import RequestRecorder
from penstock.types import Request, Response, Tensor, TensorSpec

RESULTS = Path(__file__).with_name("results") / "recording.json"
GOALS = {"drift": 1.01, "record 1 %": 1.02}
EVERYTHING = 'parameters { key: "penstock.record_share" value { string_value: "1" } }'


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    has_statistics: bool = False
    records: bool = False
    config: str = ""


VARIANTS = (
    Variant("off"),
    Variant("drift", has_statistics=True),
    Variant("record 1 %", records=True),
    Variant("record all", records=True, config=EVERYTHING),
)


@dataclass(frozen=True, slots=True)
class Running:
    process: psutil.Process
    port: int


@contextlib.contextmanager
def serving(point: Point, variant: Variant, folder: Path) -> Iterator[Running]:
    """Commit a version for the variant, and serve it."""
    draft = folder / "draft" / "model"
    (draft / "1").mkdir(parents=True)
    text = MODEL.format(dims=", ".join(map(str, point.dims))) + variant.config
    (draft / "config.pbtxt").write_text(text)
    config = layout.read(draft).configs[-1]
    evidence: dict[str, object] = {}
    if variant.has_statistics:
        random = np.random.default_rng(0)
        rows = [{"x": random.normal(size=point.dims).astype(np.float32)} for _ in range(100)]
        evidence["input_statistics"] = msgspec.to_builtins(statistics_of(config, rows))
    (folder / "models").mkdir()
    versions.commit(folder / "models", "model", draft / "1", config, evidence)
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(folder / "models"), "--shards=1"]
    command += [f"--http-port={port}", "--no-grpc", "--no-metrics", "--log-level=ERROR"]
    command += ["--record", str(folder / "recordings")] if variant.records else []
    launch = Launch(command, port, ["/v2/health/ready"])
    with running(launch, folder / "log") as process:
        yield Running(process, port)


def cost_us(point: Point, server: Running, seconds: float) -> float:
    """Return the CPU time of a request, in all processes of the server."""
    before = sum(cpu_seconds(server.process).values())
    num_requests, _ = run_load(point, server.port, seconds)
    return (sum(cpu_seconds(server.process).values()) - before) / num_requests * 1e6


def measure(point: Point, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the cost of each variant in each round."""
    costs: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        servers: dict[str, Running] = {}
        for variant in VARIANTS:
            folder = Path(name) / variant.name.replace(" ", "")
            folder.mkdir()
            servers[variant.name] = stack.enter_context(serving(point, variant, folder))
            run_load(point, servers[variant.name].port, 1.0)
        for number in range(rounds):
            names = list(servers)
            # Each variant is first as often as the others.
            for each in names[number % len(names) :] + names[: number % len(names)]:
                costs[each].append(cost_us(point, servers[each], seconds))
    return costs


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median over rounds, and the order statistics that enclose it in 95 of 100 cases."""

    value: float
    low: float
    high: float


def ratio(costs: Mapping[str, list[float]], name: str) -> Ratio:
    pairs = zip(costs[name], costs["off"], strict=True)
    found = sorted(cost / off for cost, off in pairs)
    rank = max(0, int(len(found) / 2 - 0.98 * len(found) ** 0.5))
    return Ratio(statistics.median(found), found[rank], found[-1 - rank])


class NoSink:
    def respond(self, request: Request, answer: object, final: bool) -> None:
        pass


def cost_of_parts(point: Point) -> dict[str, float]:
    """Return CPU-us of: a request that is not sampled, one that is (in the event loop, without the
    writer's thread), and a row that a worker measures."""
    shape, data = (1, *point.dims), bytes(point.num_bytes)
    config = ModelConfig(
        "m", "1", "null", "", (TensorSpec("x", "FP32", point.dims),), (), 64, BatchPolicy(64)
    )
    ring = SegmentRing(Path(), "m", RingPlace())
    ring.policy = policy = RecordPolicy(10**9, 1.0)
    metrics, writer = ModelMetrics("m", "1"), RecordWriter()
    recorder = RequestRecorder(RingState(ring, "m"), writer, metrics, "1", policy, frozenset())
    answer = Response("m", "1", [Tensor("y", "FP32", shape, memoryview(data))])

    def sampled() -> None:
        tensor = Tensor("x", "FP32", shape, memoryview(data))
        request = Request(NoSink(), [tensor], 0.0)
        recorder.see(request)
        request.respond(answer)
        writer.give_back(1 << 60)  # Nothing is written here, so room is never short.

    rare = RequestRecorder(
        RingState(ring, "m"), writer, metrics, "1", replace(policy, share=1e-9), frozenset()
    )
    request = Request(NoSink(), [], 0.0)
    rows = [{"x": np.random.default_rng(0).normal(size=point.dims).astype("f4")} for _ in range(99)]
    evidence = {"input_statistics": msgspec.to_builtins(statistics_of(config, rows))}
    sketch = InputSketch(references(config, evidence), lambda data: None, has_batch=True)
    batch = Batch({"x": np.stack([row["x"] for row in rows[:32]])}, 32)
    return {
        "not sampled": per_call_us(lambda: rare.see(request), 100_000),
        "sampled": per_call_us(sampled, 200),
        "row measured": per_call_us(lambda: sketch.add(sketch.take(batch, 0.0)), 2_000),
    }


def per_call_us(call: Callable[[], object], count: int) -> float:
    """Return the least CPU time of several tries: others only add to it."""
    found = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(count):
            call()
        found.append((time.thread_time() - began) / count * 1e6)
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of one second")
    args = parser.parse_args()
    rounds, seconds = (1, 1.0) if args.quick else (24, 1.0)
    found: dict[str, dict[str, object]] = {}
    is_kept = True
    table = Table("model", "variant", "CPU-us a request", "ratio (95 %)", "goal")
    for point in (SMALL, IMAGES):
        parts = cost_of_parts(point)
        for part, cost in parts.items():
            print(f"{point.name}, {part}: {cost:.2f} CPU-us")
        costs = measure(point, rounds, seconds)
        found[point.name] = {"costs_us": costs, "parts_us": parts}
        for variant in VARIANTS:
            share, goal = ratio(costs, variant.name), GOALS.get(variant.name)
            is_kept = is_kept and (goal is None or share.low <= goal)
            cost = statistics.median(costs[variant.name])
            shown = "" if goal is None else f"{goal:.2f}"
            text = f"{share.value:.3f} ({share.low:.3f}-{share.high:.3f})"
            table.add_row(point.name, variant.name, f"{cost:.1f}", text, shown)
            found[point.name][variant.name] = asdict(share)
    Console().print(table)
    if not args.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print("goals kept" if is_kept else "a goal is missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
