"""The whole sequence as users run it: `penstock optimize` from the eager FP32 module.

    python benchmarks/gpu/optimize.py --model resnet50       at most six minutes on an H200
    python benchmarks/gpu/optimize.py --model bert-large
    python benchmarks/gpu/optimize.py --model resnet50 --onnx     from an ONNX file
    python benchmarks/gpu/optimize.py --model resnet50 --tiny --device cpu    does it run?

Writes the module with random weights of the true shape and seeded rows, runs the command with a
budget of time and an SLO that are fixed below, and tells where the time went, what was chosen, what
each step brought, and what was rejected for which reason. The same command goes on with a run that
was ended. `gpu_optimize_MODEL.json` is what `penstock optimize --json` writes, and a key `run`; the
page lies beside it.

Every request is a row over HTTP from another process of the same machine, so an SLO can only be
proven at rates that this way carries: ResNet-50 takes a byte for each colour, 150 KB an image, and
2,000 of them a second are 0.3 GB/s; ViT-B takes FP32, four times as much.
The rates are such that FP32 eager misses them. What a configuration could do beyond that is
predicted from the times of its batches, and told as such. Random weights say nothing about
accuracy: the budgets below only keep out what is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bert
import models
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from penstock.types import DATATYPES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parents[1] / "results"
FOLDER = ROOT / ".bench" / "gpu" / "optimize"
# With what it takes to start and to write the version, six minutes.
BUDGET_S = 320.0
SEED = 5
# What one process costs on a machine with an H200 beyond what it measures, for an estimate from a
# tiny run: the import of torch, the device's context, the weights.
STARTS_S = {"import torch": 8.0, "context": 1.0, "load": 2.0}
MET, MISSED, REFUSED = 0, 2, 3


@dataclass(frozen=True, slots=True)
class Wish:
    slo: str
    accuracy: str
    num_rows: int
    duration: str = "5s"


WISHES = {
    "resnet50": Wish("p99 < 15 ms at 2000/s", "agreement drop <= 10 %", 600),
    "vit-b": Wish("p99 < 15 ms at 2000/s", "agreement drop <= 10 %", 600),
    # The cosine of the answers, which stands for agreement where each token has one.
    "bert-large": Wish("p99 < 130 ms at 3500/s", "agreement drop <= 15 %", 1200),
}
# For a machine without a GPU: everything is tried, since nothing can be kept.
TINY = Wish("p99 < 20 ms at 5000/s", "agreement drop <= 20 %", 600, "1s")

# Module and data.


def written(name: str, is_tiny: bool) -> tuple[str, Path]:
    """The factory as the command takes it, and the data."""
    folder = FOLDER / (f"{name}_tiny" if is_tiny else name)
    folder.mkdir(parents=True, exist_ok=True)
    wish = TINY if is_tiny else WISHES[name]
    if name == "bert-large":
        return _bert(folder, is_tiny, wish.num_rows)
    return _images(folder, name, is_tiny, wish.num_rows)


def _images(folder: Path, name: str, is_tiny: bool, num_rows: int) -> tuple[str, Path]:
    model = models.MODELS.get(name) or models.MODELS.get(name.replace("-", "_"))
    if model is None:
        raise SystemExit(f"{name}: not among the models of benchmarks/gpu/models.py")
    factory = model.tiny if is_tiny else model.factory
    # Under another name, so that it is not taken for the one that is imported here.
    source = Path(models.__file__).read_text()
    (folder / "gpu_images.py").write_text(source)
    tensors = model.tiny_inputs if is_tiny and model.tiny_inputs else model.inputs
    if name == "resnet50":
        factory = f"{factory}_bytes"
        (side,) = {each.shape[-1] for each in tensors.values()}
        tensors = {"image": models.Tensor("UINT8", (side, side, 3), 256)}
    arrays = {
        key: each.drawn(num_rows, DATATYPES[each.datatype].numpy, SEED)
        for key, each in tensors.items()
    }
    np.savez(folder / "rows.npz", **arrays)
    return f"gpu_images:{factory}", folder / "rows.npz"


def _bert(folder: Path, is_tiny: bool, num_rows: int) -> tuple[str, Path]:
    """`bert.write_model` leaves a module that waits for its weights; the factory brings them."""
    scale = bert.TINY if is_tiny else bert.LARGE
    weights = folder / "weights"
    weights.mkdir(exist_ok=True)
    if not (weights / "model.safetensors").is_file():
        bert.write_model(weights, scale)
    source = (weights / "module.py").read_text()
    (folder / "gpu_bert.py").write_text(source + WITH_WEIGHTS)
    lengths = bert.draw_lengths(scale, num_rows, SEED)
    batch = bert.batch_of(scale, lengths, SEED)
    with (folder / "rows.jsonl").open("w") as file:
        for index, length in enumerate(lengths):
            row = {name: array[index, :length].tolist() for name, array in batch.items()}
            print(json.dumps(row), file=file)
    return "gpu_bert:with_weights", folder / "rows.jsonl"


def exported(factory: str, data: Path) -> str:
    """The module as an ONNX file beside its data, as torch's exporter writes it."""
    import torch

    sys.path.insert(0, str(data.parent))
    module, _, name = factory.partition(":")
    network = getattr(importlib.import_module(module), name)().eval()
    if data.suffix == ".npz":
        with np.load(data) as rows:
            example = {key: torch.from_numpy(rows[key][:2]) for key in rows.files}
    else:
        first = json.loads(data.read_text().splitlines()[0])
        example = {key: torch.tensor([values, values]) for key, values in first.items()}
    sizes = {0: "n"} if data.suffix == ".npz" else {0: "n", 1: "length"}
    path = data.with_name("model.onnx")
    torch.onnx.export(
        network,
        tuple(example.values()),
        path,
        input_names=list(example),
        opset_version=17,
        dynamo=False,
        dynamic_axes={key: sizes for key in example},
    )
    return str(path)


WITH_WEIGHTS = '''

def with_weights():
    """With the benchmark's weights, where they lie beside this; a version brings its own."""
    from pathlib import Path

    module = factory()
    weights = Path(__file__).parent / "weights" / "model.safetensors"
    if weights.is_file():
        from safetensors.torch import load_file

        module.load_state_dict(load_file(weights))
    return module
'''

# The run, watched from outside.


class Processes:
    """Those that a command starts, by what they are, with how long each lived."""

    KINDS: Mapping[str, str] = {
        "penstock.optimizer.trial_child": "trial",
        "penstock.profile": "profile",
        "penstock.serving.worker": "worker",
        "penstock.benchmark.generator": "generator",
        "penstock.serving.model": "worker",
        " serve ": "server",
    }

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        # From its first sight to its last.
        self._seen: dict[tuple[int, float], list[Any]] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def ended(self) -> dict[str, dict[str, float]]:
        self._is_over.set()
        self._thread.join()
        found: dict[str, dict[str, float]] = {}
        for kind, began, last in self._seen.values():
            each = found.setdefault(kind, {"started": 0, "seconds": 0.0})
            each["started"] += 1
            each["seconds"] = round(each["seconds"] + last - began, 1)
        return found

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            try:
                children = self._process.children(recursive=True)
            except psutil.Error:
                return
            for child in children:
                self._see(child)

    def _see(self, child: psutil.Process) -> None:
        now = time.monotonic()
        try:
            key = child.pid, child.create_time()
            if key not in self._seen or self._seen[key][0] == "other":
                began = self._seen[key][1] if key in self._seen else now
                self._seen[key] = [self._kind(" ".join(child.cmdline())), began, now]
        except psutil.Error:
            return
        self._seen[key][2] = now

    def _kind(self, command: str) -> str:
        return next((kind for text, kind in self.KINDS.items() if text in command), "other")


def optimized(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    wish = TINY if args.tiny else WISHES[args.model]
    model, data = written(args.model, args.tiny)
    if args.onnx:
        model = exported(model, data)
    command = [sys.executable, "-m", "penstock", "optimize", model, "--device", args.device]
    command += ["--data", str(data), "--slo", args.slo or wish.slo, "--accuracy", wish.accuracy]
    command += ["--out", str(data.parent / "models"), "--name", args.model]
    command += ["--duration", wish.duration, "--budget", f"{args.seconds:g}s"]
    command += ["--json", str(out), "--html", str(out.with_suffix(".html"))]
    print(" ".join(command[2:]), flush=True)
    paths = [str(data.parent), str(ROOT), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, cwd=data.parent)
    watched = Processes(process.pid)
    status = process.wait()
    took_s = time.monotonic() - began
    processes = watched.ended()
    if status not in (MET, MISSED, REFUSED):
        raise SystemExit(f"penstock optimize ended with {status}")
    found: dict[str, Any] = json.loads(out.read_text())
    found["run"] = {
        "wish": dataclasses.asdict(wish) | {"slo": args.slo or wish.slo},
        "took_s": round(took_s, 1),
        "processes": processes,
        "stages": stages(Path(found["work"]) / "journal.jsonl"),
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def stages(journal: Path) -> dict[str, dict[str, float]]:
    """What was found out, by kind: how often, and how many seconds. What one is asked for another's
    sake (answers for a score) is in both."""
    found: dict[str, dict[str, float]] = {}
    for line in journal.read_text().splitlines():
        record = json.loads(line)
        if "seconds" in record:
            each = found.setdefault(record["kind"], {"times": 0, "seconds": 0.0})
            each["times"] += 1
            each["seconds"] = round(each["seconds"] + record["seconds"], 1)
    return found


# What is shown.


def steps_text(candidate: Mapping[str, Any] | None) -> str:
    listed = [
        step["pass_name"]
        + (
            f"({', '.join(f'{k}={v}' for k, v in step['settings'].items())})"
            * bool(step["settings"])
        )
        for step in (candidate or {"steps": []})["steps"]
    ]
    return " → ".join(listed) or "original"


def show(found: Mapping[str, Any], console: Console) -> None:
    run = found["run"]
    console.print(f"[bold]{found['headline']}[/bold]\nchosen: {steps_text(found['chosen'])}")
    _show(
        console,
        "which step gave what",
        ("step", "highest rate /s", "measured"),
        [
            (
                each["label"],
                _number(each["max_rate"]),
                "served" if each["is_measured"] else "predicted",
            )
            for each in found["phases"]
        ],
    )
    _show(
        console,
        "tried",
        ("candidate", "outcome", "s", "why"),
        [
            (
                steps_text(each["candidate"]),
                each["outcome"],
                _number(each["seconds"]),
                each["reason"],
            )
            for each in found["tries"]
        ],
    )
    _show(
        console,
        "not tried",
        ("pass", "why"),
        [(each["pass_name"], each["reason"]) for each in found["skipped"]],
    )
    _show(
        console,
        "where the time went",
        ("kind", "times", "seconds"),
        [
            (kind, str(each["times"]), f"{each['seconds']:.1f}")
            for kind, each in sorted(run["stages"].items(), key=lambda item: -item[1]["seconds"])
        ],
    )
    console.print(f"{run['took_s']:.0f} s in all")
    estimate(run["processes"], console)


def estimate(processes: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """What the processes that were started here would take to start there. Trials are started while
    the one before is asked, so of their import little is waited for."""
    starts = Counter({kind: int(each["started"]) for kind, each in processes.items()})
    with_torch = starts["trial"] + starts["worker"] + starts["profile"]
    each_s = sum(STARTS_S.values())
    listed = ", ".join(f"{num} {kind}" for kind, num in starts.most_common())
    console.print(f"processes: {listed}")
    hidden_s = STARTS_S["import torch"] * max(0, starts["trial"] - 1)
    console.print(
        f"on an H200, to start those {with_torch} that import torch: {with_torch * each_s:.0f} s "
        f"one after the other, {with_torch * each_s - hidden_s:.0f} s with trials started ahead"
    )


def _show(console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]):
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _number(value: float | str | None) -> str:
    """JSON has no NaN; files have the word."""
    number = math.nan if value is None else float(value)
    return f"{number:,.0f}" if math.isfinite(number) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(WISHES), required=True)
    parser.add_argument("--device", default="cuda:0", help="cpu: only to see whether it runs")
    parser.add_argument("--onnx", action="store_true", help="from an ONNX file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see whether it runs")
    parser.add_argument("--slo", default="", help="another one; the file's unless given")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="the budget of time")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results, or $OUT")
    args = parser.parse_args()
    is_real = args.device != "cpu" and not args.tiny
    folder = Path(os.environ.get("OUT", RESULTS if is_real else FOLDER))
    out = args.out or folder / f"gpu_optimize_{args.model}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    show(optimized(args, out.absolute()), Console(width=140))


if __name__ == "__main__":
    main()
