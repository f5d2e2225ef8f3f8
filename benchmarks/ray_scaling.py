"""Ray Serve: what its proxies cost, and how two nodes compare with one.

    .bench/ray/bin/python benchmarks/ray_scaling.py                    16 cores, 4 for each node
    .bench/ray/bin/python benchmarks/ray_scaling.py --cores 1 --quick  does it run? two cores
    .bench/ray/bin/python benchmarks/ray_scaling.py --tuned            Ray's settings for throughput

`make verify-ray` makes the environment. Nodes are raylets on this machine; each has CORES CPUs, and
a replica of the model gets all of them. Two parts:

- overhead: a model that computes nothing, one request at a time and 32 at a time, by four ways:
  Ray's proxy to the ingress to the replica; the handle of the replica alone, from this process; our
  own server on a node, placed by Ray (ingress="penstock"); and `penstock serve` without Ray.
- nodes: a model that multiplies matrices with CORES threads, closed loop, on one node and on two,
  by Ray's proxy and by our own servers. Two nodes are to reach 1.8 times one.

With --tuned Ray's proxy and handle are measured with Ray's own settings for throughput: HAProxy in
the place of its Python proxy, and gRPC between deployments.

Load comes from `penstock bench`, in processes beside the cluster; leave cores for it. The results
are written to benchmarks/results/ray_scaling.json after each measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

import penstock
import penstock.ray
from penstock.ray.cluster_messages import ClusterCall, encode_call
from penstock.system.cores import usable_cores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ray_scaling.json"
STORE_BYTES = 200 << 20
# Rows and columns of the matrices, and how many products a request takes.
SIZE, NUM_PRODUCTS = 512, 8
BODY = json.dumps(
    {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}]}
).encode()
CONFIG = """name: "{name}"
backend: "onnxruntime"
max_batch_size: {batch}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}
"""
IDLE, BUSY = "identity", "matrices"
PROXY, HANDLE, OWN, PLAIN = "Ray's proxy", "handle", "our servers on nodes", "penstock serve"
TARGET = 1.8
TUNED = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


@dataclass
class Point:
    """One measurement. Times in milliseconds."""

    part: str
    way: str
    nodes: int
    concurrency: int
    rate_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass
class Run:
    machine: str
    cores: int
    cores_per_node: int
    ray: str
    is_tuned: bool
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        self.points.append(point)
        path = RESULTS.with_stem(f"{RESULTS.stem}_tuned") if self.is_tuned else RESULTS
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        print(point, flush=True)


def write_models(root: Path, threads: int) -> None:
    """Write a model that returns its input, and one that multiplies matrices."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 1]) for name in "XY")
    same = helper.make_node("Identity", ["X"], ["Y"])
    write(root, helper.make_graph([same], IDLE, [x], [y]), 64, 1)
    weights = np.random.default_rng(0).normal(0, 1 / SIZE**0.5, (SIZE, SIZE)).astype(np.float32)
    nodes = [helper.make_node("Mul", ["ONES", "X"], ["v0"])]
    for number in range(NUM_PRODUCTS):
        nodes.append(helper.make_node("MatMul", [f"v{number}", "W"], [f"v{number + 1}"]))
    nodes.append(helper.make_node("ReduceMean", [f"v{NUM_PRODUCTS}"], ["Y"], axes=[0, 1]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1]) for name in "XY")
    constants = {"W": weights, "ONES": np.ones((SIZE, SIZE), np.float32)}
    made = [numpy_helper.from_array(array, key) for key, array in constants.items()]
    write(root, helper.make_graph(nodes, BUSY, [x], [y], made), 0, threads)


def write(root: Path, graph: Any, batch: int, threads: int) -> None:
    (root / graph.name / "1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, root / graph.name / "1" / "model.onnx")
    text = CONFIG.format(name=graph.name, batch=batch, threads=threads)
    (root / graph.name / "config.pbtxt").write_text(text)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def cluster(num_nodes: int, cores: int) -> Iterator[int]:
    """Start nodes of this many CPUs, and one more for what is not measured; yield the port of the
    proxy."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="rs-", dir="/tmp")
    Path("/tmp/ray").mkdir(exist_ok=True)
    head = {"num_cpus": cores + 1, "object_store_memory": STORE_BYTES}
    made = Cluster(
        initialize_head=True,
        head_node_args={**head, "include_dashboard": False, "temp_dir": folder},
    )
    for _ in range(num_nodes - 1):
        made.add_node(num_cpus=cores, object_store_memory=STORE_BYTES)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def measure(url: str, model: str, concurrency: int, seconds: float) -> tuple[float, float, float]:
    """Return rate, p50 and p99 of a closed loop, by `penstock bench`."""
    result = penstock.bench(
        url, model=model, concurrency=str(concurrency), duration=seconds, warm_up=2, precision=0.5
    )
    (level,) = result.levels
    latency = level.latency
    p50, p99 = (1e3 * latency[name].value for name in ("p50", "p99"))
    return level.throughput.value, p50, p99


async def measure_handle(
    handle: Any, model: str, concurrency: int, seconds: float
) -> tuple[float, float, float]:
    """Return the same figures of calls of a handle from this process."""
    path = f"/v2/models/{model}/infer".encode()
    call = encode_call(ClusterCall("http", memoryview(BODY), b"POST", path))
    times: list[float] = []
    began = time.perf_counter()
    measured_from, until = began + 2, began + 2 + seconds

    async def client() -> None:
        while (sent := time.perf_counter()) < until:
            await handle.call.remote(call)
            if sent >= measured_from:
                times.append(time.perf_counter() - sent)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    p50, p99 = (float(1e3 * np.percentile(times, each)) for each in (50, 99))
    return len(times) / seconds, p50, p99


class Bench:
    """The parts, on one repository."""

    def __init__(self, run: Run, repository: Path, options: argparse.Namespace) -> None:
        self._run = run
        self._models = repository
        self._cores = options.cores
        self._seconds = options.seconds
        # Our own servers do not depend on it.
        self._is_tuned = options.tuned
        self._levels = (1, 8) if options.quick else (1, 32)

    def overhead(self) -> None:
        from ray import serve

        light = {"ray_actor_options": {"num_cpus": 0.1}}
        model = self._models / IDLE
        with cluster(1, self._cores) as port:
            serve.run(
                penstock.ray.app(
                    model, evidence="off", deployments={"penstock_ingress": light, IDLE: light}
                )
            )
            self._http("overhead", PROXY, 1, f"http://127.0.0.1:{port}", IDLE)
            handle = serve.get_deployment_handle(IDLE, "default")
            # One loop, which stays open: a handle may live on it until Serve ends.
            loop = asyncio.new_event_loop()
            for level in self._levels:
                measuring = measure_handle(handle, IDLE, level, self._seconds)
                figures = loop.run_until_complete(measuring)
                self._run.add(Point("overhead", HANDLE, 1, level, *figures))
        if self._is_tuned:
            return
        with cluster(1, self._cores):
            for url in self._servers(model, 1, 0.1):
                self._http("overhead", OWN, 1, url, IDLE)
        with penstock.serve(model, http_port=0, grpc=False, metrics=False, shards=1) as server:
            self._http("overhead", PLAIN, 1, server.url, IDLE)

    def nodes(self, num_nodes: int) -> None:
        from ray import serve

        model = self._models / BUSY
        given = {
            "penstock_ingress": {"ray_actor_options": {"num_cpus": 0}},
            BUSY: {"num_replicas": num_nodes, "ray_actor_options": {"num_cpus": self._cores}},
        }
        concurrency = 4 * num_nodes
        with cluster(num_nodes, self._cores) as port:
            serve.run(penstock.ray.app(model, evidence="off", deployments=given))
            url = f"http://127.0.0.1:{port}"
            figures = measure(url, BUSY, concurrency, self._seconds)
            self._run.add(Point("nodes", PROXY, num_nodes, concurrency, *figures))
        if self._is_tuned:
            return
        with cluster(num_nodes, self._cores):
            urls = self._servers(model, num_nodes, self._cores)
            self._run.add(self._together(urls, concurrency))

    def _http(self, part: str, way: str, num_nodes: int, url: str, model: str) -> None:
        for level in self._levels:
            figures = measure(url, model, level, self._seconds)
            self._run.add(Point(part, way, num_nodes, level, *figures))

    def _servers(self, model: Path, num_nodes: int, cpus: float) -> list[str]:
        from ray import serve

        app = penstock.ray.app(
            model,
            ingress="penstock",
            ingress_replicas=num_nodes,
            http_port=0,
            evidence="off",
            deployments={"penstock_server": {"ray_actor_options": {"num_cpus": cpus}}},
        )
        handle = serve.run(app, route_prefix=None)
        return [each["url"] for each in handle.broadcast("address").results(timeout_s=60)]

    def _together(self, urls: Sequence[str], concurrency: int) -> Point:
        """Measure several servers at the same time, as behind a load balancer."""
        from concurrent.futures import ThreadPoolExecutor

        each = concurrency // len(urls)
        with ThreadPoolExecutor(len(urls)) as pool:
            found = list(pool.map(lambda url: measure(url, BUSY, each, self._seconds), urls))
        rate = sum(figures[0] for figures in found)
        p50, p99 = (max(figures[i] for figures in found) for i in (1, 2))
        return Point("nodes", OWN, len(urls), concurrency, rate, p50, p99)


def show(run: Run) -> None:
    table = Table(title=f"Ray {run.ray}, {run.cores_per_node} cores per node, {run.machine}")
    for name in ("part", "way", "nodes", "concurrency", "requests/s", "p50 ms", "p99 ms"):
        table.add_column(name)
    for each in run.points:
        figures = (f"{each.rate_per_s:.1f}", f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}")
        table.add_row(each.part, each.way, str(each.nodes), str(each.concurrency), *figures)
    console = Console()
    console.print(table)
    for way in (PROXY, OWN):
        rates = {
            each.nodes: each.rate_per_s
            for each in run.points
            if (each.part, each.way) == ("nodes", way)
        }
        if {1, 2} <= rates.keys():
            ratio = rates[2] / rates[1]
            verdict = "reached" if ratio >= TARGET else "missed"
            console.print(f"{way}: two nodes are {ratio:.2f} x one; {TARGET} x is {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cores", type=int, default=4, help="CPUs of each node")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="short, with few connections")
    parser.add_argument("--parts", nargs="+", default=["overhead", "nodes"])
    parser.add_argument("--tuned", action="store_true", help="Ray's settings for throughput")
    options = parser.parse_args()
    if options.tuned:
        # Before Ray is imported, which reads them.
        os.environ |= TUNED
    if options.quick:
        options.seconds = min(options.seconds, 5.0)
    import ray

    cores = usable_cores()
    if cores < 3 * options.cores + 4 and not options.quick:
        print(
            f"{cores} cores: two nodes of {options.cores}, the load and Ray need more; see --quick"
        )
        return 1
    machine = platform.processor() or platform.machine()
    run = Run(machine, cores, options.cores, ray.__version__, options.tuned)
    folder = Path(tempfile.mkdtemp(prefix="ray-models-"))
    try:
        write_models(folder, options.cores)
        bench = Bench(run, folder, options)
        if "overhead" in options.parts:
            bench.overhead()
        if "nodes" in options.parts:
            for number in (1, 2):
                bench.nodes(number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
