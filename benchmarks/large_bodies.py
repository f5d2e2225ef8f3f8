"""What a megabyte of tensors costs the core process, on its way in and on its way out.

    python benchmarks/large_bodies.py                    about two minutes
    python benchmarks/large_bodies.py --beside FOLDER    in turns with another checkout
    python benchmarks/large_bodies.py --shared-memory    bodies in turns with shared memory
    python benchmarks/large_bodies.py --quick            one round of one second

Images (FP32 [3, 224, 224], 602 kB each way) as binary tensors over HTTP/1.1, 16 connections, a
model that computes nothing (`null`); and FP32 [16] with 64 connections, which must not get slower.
CPU time of the core process while the load runs, by the kernel's counters. Each answer's last bytes
are compared with those that were sent.

With --shared-memory, the same images in bodies, in a file of /dev/shm (as Triton's client has them)
and in a sealed memfd (as `penstock.Client` does), in turns. The worker copies those, so the CPU
time of all processes of the server counts. Writing to shared memory is the client's time anyway.

Goal, set before measuring: images cost at most 180 CPU-us per MB each way, of which one copy in
and one copy out are the kernel's. Before bodies were received into shared memory: 390 to 447.

`measure` can be used by other scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import mmap
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from overhead.process import Launch, cpu_seconds, free_port, running
from rich.console import Console
from rich.table import Table

GOAL_US_PER_MB = 180
ROOT = Path(__file__).resolve().parents[1]
MODEL = """
backend: "null" max_batch_size: 64 dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}
"""


@dataclass(frozen=True, slots=True)
class Point:
    """What is sent: a model with rows of this shape, and how many connections ask it."""

    name: str
    dims: tuple[int, ...]
    connections: int
    # Where tensors are: in the body, in a "file" of shared memory, or in a "memfd".
    memory: str = ""

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.dims:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_values


IMAGES = Point("images", (3, 224, 224), 16)
SHARED = [replace(IMAGES, name=f"images, {kind}", memory=kind) for kind in ("file", "memfd")]
SMALL = Point("small", (16,), 64)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time per request, of the core and of its workers."""

    num_requests: int
    seconds: float
    core_us: float
    workers_us: float
    mb: float

    @property
    def us_per_mb(self) -> float:
        """Of the core, for each of the two ways."""
        return self.core_us / (2 * self.mb)

    @property
    def all_us_per_mb(self) -> float:
        """Of the core and its workers."""
        return (self.core_us + self.workers_us) / (2 * self.mb)


def measure(point: Point, seconds: float, tree: Path = ROOT) -> Cost:
    """Start the server of a checkout, load it, and return what a request cost."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        (repository / "model" / "1").mkdir(parents=True)
        config = MODEL.format(dims=", ".join(map(str, point.dims)))
        (repository / "model" / "config.pbtxt").write_text(config)
        port = free_port()
        command = [sys.executable, "-m", "penstock", "serve", str(repository)]
        command += [f"--http-port={port}", "--no-grpc", "--no-metrics", "--log-level=WARNING"]
        command += ["--shared-memory"] if point.memory else []
        environment = {"PYTHONPATH": str(tree)}
        launch = Launch(command, port, ["/v2/health/ready"], environment, tree)
        with running(launch, Path(folder) / "log") as process:
            run_load(point, port, 1.0)  # Heads and forms are known then.
            before = cpu_seconds(process)
            num_requests, took_s = run_load(point, port, seconds)
            spent = {
                pid: total - before.get(pid, 0.0) for pid, total in cpu_seconds(process).items()
            }
            core_s = spent.pop(process.pid)
    per_request = 1e6 / num_requests
    workers_us = sum(spent.values()) * per_request
    return Cost(num_requests, took_s, core_s * per_request, workers_us, point.num_values * 4 / 1e6)


def run_load(point: Point, port: int, seconds: float) -> tuple[int, float]:
    """Ask from one thread per connection; return the number of answers, and the time it took."""
    if not point.memory:
        return _run(point, seconds, lambda number, ends_at: _ask(point, port, ends_at))
    with shared_memory(point, port) as memory:
        return _run(
            point,
            seconds,
            lambda number, ends_at: _ask_by_memory(point, port, ends_at, memory, number),
        )


def _run(point: Point, seconds: float, ask_until: Callable[[int, float], int]) -> tuple[int, float]:
    ends_at = time.monotonic() + seconds
    counts: list[int] = []
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            counts.append(ask_until(number, ends_at))
        except BaseException as error:
            failures.append(error)

    numbers = range(point.connections)
    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(counts), time.monotonic() - began


def _ask(point: Point, port: int, ends_at: float) -> int:
    data = os.urandom(4 * point.num_values)
    message = request(point, data)
    buffer = bytearray(len(data) + 65536)
    count = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while time.monotonic() < ends_at:
            sock.sendall(message)
            size = _receive(sock, buffer)
            if buffer[size - 64 : size] != data[-64:]:
                raise ValueError("an answer has the bytes of another request")
            count += 1
    return count


@contextlib.contextmanager
def shared_memory(point: Point, port: int) -> Iterator[memoryview]:
    """Registered memory with room for an image in and an image out of each connection."""
    num_bytes, token = 2 * point.num_bytes * point.connections, os.urandom(16).hex()
    path = Path("/dev/shm") / f"penstock-{token}"
    if point.memory == "memfd":
        fd = os.memfd_create(path.name, os.MFD_ALLOW_SEALING)
        key = f"memfd:{os.getpid()}:{fd}:{token}"
    else:
        fd, key = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), f"/{path.name}"
    try:
        os.ftruncate(fd, num_bytes)
        if point.memory == "memfd":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        place = {"key": key, "offset": 0, "byte_size": num_bytes}
        _post(port, "/v2/systemsharedmemory/region/images/register", place)
        yield memoryview(mmap.mmap(fd, num_bytes))
        _post(port, "/v2/systemsharedmemory/region/images/unregister", {})
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _post(port: int, path: str, body: object) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60):
        pass


def _ask_by_memory(point: Point, port: int, ends_at: float, memory: memoryview, number: int) -> int:
    """Like `_ask`, with the tensors at the places of this connection in shared memory."""
    start, num_bytes = 2 * number * point.num_bytes, point.num_bytes
    middle, end = start + num_bytes, start + 2 * num_bytes
    memory[start:middle] = os.urandom(num_bytes)
    where = {"shared_memory_region": "images", "shared_memory_byte_size": num_bytes}
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, *point.dims],
        "parameters": {**where, "shared_memory_offset": start},
    }
    answer = {"name": "y", "parameters": {**where, "shared_memory_offset": middle}}
    message = _message(json.dumps({"inputs": [tensor], "outputs": [answer]}).encode())
    buffer, count = bytearray(65536), 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while time.monotonic() < ends_at:
            memory[end - 64 : end] = bytes(64)
            sock.sendall(message)
            _receive(sock, buffer)
            if memory[end - 64 : end] != memory[middle - 64 : middle]:
                raise ValueError("an answer has the bytes of another request")
            count += 1
    return count


def _receive(sock: socket.socket, buffer: bytearray) -> int:
    """Read one answer; return where it ends."""
    view = memoryview(buffer)
    size, end = 0, len(buffer)
    while size < end:
        num_read = sock.recv_into(view[size:end])
        if not num_read:
            raise ConnectionError("the server closed the connection")
        size += num_read
        head_end = buffer.find(b"\r\n\r\n", 0, 4096) if end == len(buffer) else -1
        if head_end >= 0:
            head = bytes(buffer[:head_end]).lower()
            if b" 200 " not in head[:16]:
                raise ValueError(f"the server answered {head[:100]!r}")
            length = head.split(b"\r\ncontent-length: ")[1].partition(b"\r")[0]
            end = head_end + 4 + int(length)
    return end


def request(point: Point, data: bytes) -> bytes:
    """Return the whole HTTP message that asks for these values."""
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, *point.dims],
        "parameters": {"binary_data_size": len(data)},
    }
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    return _message(json.dumps(asked).encode(), data)


def _message(head: bytes, data: bytes = b"") -> bytes:
    lines = (
        "POST /v2/models/model/infer HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + head + data


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="per point (5)")
    parser.add_argument("--rounds", type=int, default=3, help="medians are reported (3)")
    parser.add_argument("--quick", action="store_true", help="1 second, 1 round")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--shared-memory", action="store_true", help="and images in shared memory")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 1.0, 1
    trees = [ROOT] if args.beside is None else [args.beside.resolve(), ROOT]
    turns = [(point, tree) for point in (IMAGES, SMALL) for tree in trees]
    if args.shared_memory:
        turns = [(point, ROOT) for point in (IMAGES, *SHARED)]
    found: dict[tuple[Point, Path], list[Cost]] = {}
    for _ in range(args.rounds):
        for point, tree in turns:
            found.setdefault((point, tree), []).append(measure(point, args.seconds, tree))
    print_costs(found)
    return 0


def print_costs(found: dict[tuple[Point, Path], list[Cost]]) -> None:
    names = ("", "checkout", "requests/s", "core CPU-us", "range", "us per MB each way", "workers")
    table = Table(*names, "us per MB, with workers")
    for (point, tree), costs in found.items():
        core = [cost.core_us for cost in costs]
        is_large = point is not SMALL
        table.add_row(
            point.name,
            "this" if tree == ROOT else tree.name,
            f"{_median([cost.num_requests / cost.seconds for cost in costs]):,.0f}",
            f"{_median(core):.1f}",
            f"{min(core):.1f} to {max(core):.1f}",
            f"{_median([cost.us_per_mb for cost in costs]):.0f}" if is_large else "",
            f"{_median([cost.workers_us for cost in costs]):.1f}",
            f"{_median([cost.all_us_per_mb for cost in costs]):.0f}" if is_large else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    reached = _median([cost.us_per_mb for cost in found[IMAGES, ROOT]])
    state = "kept" if reached <= GOAL_US_PER_MB else "missed"
    console.print(f"goal of {GOAL_US_PER_MB} us per MB each way: {state}, {reached:.0f}")


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    raise SystemExit(main())
