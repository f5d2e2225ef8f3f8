"""Two models on one GPU: the latency of one while the other has all the work that it can take.

    python benchmarks/gpu/sharing.py                  about two minutes on an H200
    python benchmarks/gpu/sharing.py --seconds 2 --tiny --device cpu     does it run?

The first model gets one row at a time; the second computes large batches back to back. Both run
as in a worker: the backend's own Runner, CUDA graphs, copies. Measured with equal priorities and
with `penstock.stream_priority` high and low, in one process, in two processes, and in two processes
under MPS if `nvidia-cuda-mps-control` is installed. Without the second model, the latency is that
of the first alone. Prints a table and writes `gpu_sharing.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import presence
from rich.console import Console
from rich.table import Table

from penstock.backends import Batch, Runner, backend
from penstock.config import ModelConfig
from penstock.repository import layout

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parents[1] / "results"
# Width and layers of each model, and the rows of its batches.
QUICK, HEAVY = (1024, 24, 1), (4096, 64, 1024)
TINY_QUICK, TINY_HEAVY = (32, 2, 1), (32, 2, 16)
NUM_SLOTS = 2
# One layer many times: the weights are small, and the GPU has as much to do.
MODULE = """
import torch
from torch import nn


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear({width}, {width})

    def forward(self, x):
        for _ in range({num_layers}):
            x = torch.relu(self.layer(x))
        return x


factory = Repeated
"""
MPS = "nvidia-cuda-mps-control"


def written(folder: Path, name: str, sizes: tuple[int, int, int], priority: str) -> Path:
    width, num_layers, num_rows = sizes
    version = folder / f"{name}_{priority}" / "1"
    version.mkdir(parents=True)
    (version / "module.py").write_text(MODULE.format(width=width, num_layers=num_layers))
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    layer = torch.nn.Linear(width, width)
    weights = {f"layer.{name}": each for name, each in layer.state_dict().items()}
    save_file(weights, version / "model.safetensors")
    (version.parent / "config.pbtxt").write_text(
        f'backend: "pytorch" max_batch_size: {num_rows} dynamic_batching {{ }}\n'
        f'input {{ name: "x" data_type: TYPE_FP32 dims: {width} }}\n'
        f'output {{ name: "y" data_type: TYPE_FP32 dims: {width} }}\n'
    )
    return version.parent


def opened(folder: Path, device: str, priority: str) -> tuple[Runner, Batch]:
    config: ModelConfig = layout.read(folder).configs[-1]
    options = dict(config.options)
    if device != "cpu":
        options |= {"penstock.dtype": "fp16", "penstock.cuda_graphs": "on"}
        options |= {"penstock.stream_priority": priority}
    config = replace(config.on([device] * NUM_SLOTS), options=options)
    runner = backend("pytorch")(config)
    rows = np.zeros((config.max_batch_size, *config.inputs[0].shape), np.float32)
    runner.pin(memoryview(rows).cast("B"))
    batch = Batch({"x": rows}, config.max_batch_size)
    for _ in range(3):
        list(runner.start(batch).wait())
    runner.settle()
    return runner, batch


def saturate(runner: Runner, batch: Batch, is_over: threading.Event) -> float:
    """Run batches back to back; return rows a second."""
    began, count = time.perf_counter(), 0
    begun = deque(runner.start(batch) for _ in range(NUM_SLOTS - 1))
    while not is_over.is_set():
        begun.append(runner.start(batch))
        list(begun.popleft().wait())
        count += batch.num_rows
    for each in begun:
        list(each.wait())
    return count / (time.perf_counter() - began)


def probed(runner: Runner, batch: Batch, seconds: float) -> dict[str, Any]:
    """Latencies of one batch after the other, with a pause between them, as a client's would be."""
    found = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        list(runner.start(batch).wait())
        found.append(time.perf_counter() - began)
        time.sleep(0.002)
    p50, p99 = (1e3 * float(np.percentile(found, each)) for each in (50, 99))
    priority = runner.built().get("stream_priority", "none")
    return {"p50_ms": p50, "p99_ms": p99, "requests": len(found), "priority": priority}


# Children: `--child ROLE`, told by the parent when to end.


def child(args: argparse.Namespace) -> None:
    if args.child == "both":
        heavy = opened(args.heavy, args.device, args.low)
        quick = opened(args.quick, args.device, args.high)
        is_over, rates = threading.Event(), []
        thread = threading.Thread(target=lambda: rates.append(saturate(*heavy, is_over)))
        thread.start()
        time.sleep(0.5)
        found = probed(*quick, args.seconds)
        is_over.set()
        thread.join()
        print(json.dumps(found | {"low_rate": rates[0]}))
    elif args.child == "heavy":
        runner, batch = opened(args.heavy, args.device, args.low)
        is_over = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
        print("ready", flush=True)
        print(saturate(runner, batch, is_over), flush=True)
    else:
        print(json.dumps(probed(*opened(args.quick, args.device, args.high), args.seconds)))
    sys.stdout.flush()
    os._exit(0)


def asked(args: argparse.Namespace, role: str, high: str, low: str, **more: Any) -> Any:
    command = [sys.executable, __file__, "--child", role, "--device", args.device]
    command += ["--quick", str(args.quick), "--heavy", str(args.heavy)]
    command += ["--high", high, "--low", low, "--seconds", str(args.seconds)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **more)


def in_one_process(args: argparse.Namespace, high: str, low: str) -> dict[str, Any]:
    process = asked(args, "both", high, low)
    return dict(json.loads(process.communicate()[0].splitlines()[-1]))


def in_two_processes(args: argparse.Namespace, high: str, low: str) -> dict[str, Any]:
    heavy = asked(args, "heavy", high, low, stdin=subprocess.PIPE)
    assert heavy.stdout is not None
    assert heavy.stdout.readline().strip() == "ready", "the second model did not start"
    quick = asked(args, "quick", high, low)
    found = json.loads(quick.communicate()[0].splitlines()[-1])
    rate, _ = heavy.communicate("")
    return {**found, "low_rate": float(rate.split()[-1])}


@contextlib.contextmanager
def mps() -> Iterator[bool]:
    """Start a daemon of our own, and end it; False if there is none to start."""
    if shutil.which(MPS) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="penstock-mps-") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        try:
            started = subprocess.run([MPS, "-d"], check=False)
            yield started.returncode == 0
        finally:
            subprocess.run([MPS], input="quit\n", text=True, check=False, timeout=60)
            for name in names:
                os.environ.pop(name)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    alone = asked(args, "quick", "normal", "normal").communicate()[0]
    found = [{"way": "alone", "priorities": "normal", **json.loads(alone.splitlines()[-1])}]
    ways: dict[str, Any] = {"one process": in_one_process, "two processes": in_two_processes}
    pairs = [("normal", "normal"), ("high", "low")]
    for name, way in ways.items():
        for high, low in pairs:
            one = way(args, high, low)
            found.append({"way": name, "priorities": f"{high} and {low}", **one})
    with mps() as is_running:
        for high, low in pairs if is_running else ():
            one = in_two_processes(args, high, low)
            found.append({"way": "two processes, MPS", "priorities": f"{high} and {low}", **one})
    return found


def show(found: list[dict[str, Any]]) -> None:
    table = Table(title="one row, while another model is saturated", title_justify="left")
    for name in ("", "priorities", "p50 ms", "p99 ms", "requests", "other model rows/s"):
        table.add_column(name)
    for each in found:
        rate = f"{each['low_rate']:,.0f}" if "low_rate" in each else ""
        times = f"{each['p50_ms']:.2f}", f"{each['p99_ms']:.2f}"
        table.add_row(each["way"], each["priorities"], *times, f"{each['requests']:,}", rate)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see whether it runs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, or $OUT")
    for name in ("--child", "--high", "--low"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--quick", "--heavy"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    presence.require_gpu(args.device)
    if args.child:
        child(args)
    with tempfile.TemporaryDirectory(prefix="penstock-sharing-") as folder:
        sizes = (TINY_QUICK, TINY_HEAVY) if args.tiny else (QUICK, HEAVY)
        args.quick = written(Path(folder), "quick", sizes[0], "x")
        args.heavy = written(Path(folder), "heavy", sizes[1], "x")
        found = measured(args)
    show(found)
    if not args.tiny:
        out = args.out or Path(os.environ.get("OUT", RESULTS)) / "gpu_sharing.json"
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
