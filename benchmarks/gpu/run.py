"""What each technique gives on a GPU, for one model at a time:

    python benchmarks/gpu/run.py --model resnet50                 under four minutes on an H200
    python benchmarks/gpu/run.py --model resnet50 --device cpu    does it run? tiny, no figures

Every technique is a process of its own that loads the model through the `pytorch` backend. Two
figures for each batch size: inputs that are on the device already (back to back, and one by one
with a wait for each), and inputs in the host's memory, copied in and out while others compute. How
far answers are from those of FP32 eager is beside them (of the norm). Random weights of the true
shape: the figures are of speed. The file is written after every technique; what it has is not
measured again (`--again` does).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import models
import numpy as np
import torch
from models import MODELS, Model, Technique
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.types import DATATYPES, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parents[1] / "results"
# Rows whose answers are compared.
NUM_COMPARED = 8
NUM_SLOTS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--device", default="cuda", help="cpu: tiny, to see whether it runs")
    parser.add_argument("--seconds", type=float, default=240, help="no technique begins after it")
    parser.add_argument("--only", default="", help="techniques with this in their name")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_MODEL.json")
    parser.add_argument("--technique", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.technique:
        print(json.dumps(measured(args.model, args.technique, args.device)))
        return
    run(args)


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    is_real = args.device != "cpu"
    folder = Path(os.environ.get("OUT", RESULTS if is_real else ROOT / ".bench" / "gpu"))
    out = args.out or folder / f"gpu_{args.model}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(out.read_text()) if out.is_file() else {"model": args.model}
    techniques = found.setdefault("techniques", {})
    for name in MODELS[args.model].techniques:
        is_known = name in techniques and "error" not in techniques[name]
        if args.only not in name or (is_known and not args.again):
            continue
        left_s = args.seconds - (time.monotonic() - began)
        if left_s <= 0:
            print(f"{name}: no time left; the same command goes on", flush=True)
            continue
        techniques[name] = in_a_child(args, name, left_s + 60)
        out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
    show(found)


def in_a_child(args: argparse.Namespace, name: str, limit_s: float) -> dict[str, object]:
    command = [sys.executable, __file__, "--model", args.model, "--device", args.device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    try:
        ended = subprocess.run(
            [*command, "--technique", name],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {limit_s:.0f} s"}
    if ended.returncode:
        return {"error": ended.stderr.strip()[-1500:]}
    answer: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def measured(model_name: str, technique_name: str, device: str) -> dict[str, object]:
    """In the child: one technique, all batch sizes."""
    model, is_tiny = MODELS[model_name], device == "cpu"
    technique = model.techniques[technique_name]
    version = made(model, is_tiny)
    batches = (1, 2) if is_tiny else model.batches
    config = configured(model, technique, version, device, max(batches))
    began = time.monotonic()
    runner = backend("pytorch")(config)
    load_s = time.monotonic() - began
    rows = {}
    for batch in batches:
        inputs = {
            spec.name: tensor.drawn(batch, DATATYPES[spec.datatype].numpy, seed=batch)
            for spec, tensor in zip(config.inputs, tensors(model, is_tiny).values(), strict=True)
        }
        began = time.monotonic()
        # The first is tuned and captured, the second replays it.
        answers = [answer(runner, inputs, batch) for _ in range(3)][-1]
        rows[str(batch)] = {
            "ready_s": time.monotonic() - began,
            "error": error_of(answers, version / f"reference_{batch}.npz", technique_name, model),
            **on_device(runner, inputs, batch),
            **from_host(runner, inputs, batch, is_tiny),
        }
    built = {key: text for key, text in runner.built().items() if key != "gpu_memory_bytes"}
    machine = torch.cuda.get_device_name(device) if not is_tiny else "CPU, no figures"
    return {"machine": machine, "load_s": load_s, "built": built, "batches": rows}


def tensors(model: Model, is_tiny: bool) -> dict:
    return dict(model.tiny_inputs if is_tiny and model.tiny_inputs else model.inputs)


def made(model: Model, is_tiny: bool) -> Path:
    """The version's folder: the factories, and weights that are drawn once."""
    factory = model.tiny if is_tiny else model.factory
    version = ROOT / ".bench" / "gpu" / factory / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "module.py").write_bytes(Path(models.__file__).read_bytes())
    weights = version / "model.safetensors"
    if not weights.is_file():
        draft = weights.with_suffix(".part")
        save_file(getattr(models, factory)().state_dict(), draft)
        draft.rename(weights)
    return version


def configured(
    model: Model, technique: Technique, version: Path, device: str, max_batch: int
) -> ModelConfig:
    is_tiny = device == "cpu"
    factory = model.tiny if is_tiny else model.factory
    options = {**technique.options, "penstock.factory": factory}
    if is_tiny:
        options.pop("penstock.cuda_graphs", None)
    inputs = tensors(model, is_tiny)
    return ModelConfig(
        name=version.parent.name,
        version="1",
        backend="pytorch",
        artifact=str(version / "module.py"),
        inputs=tuple(
            TensorSpec(n, technique.floats if t.datatype == "FP32" else t.datatype, t.shape)
            for n, t in inputs.items()
        ),
        outputs=tuple(TensorSpec(n, t.datatype, t.shape) for n, t in model.outputs.items()),
        max_batch_size=max_batch,
        batching=BatchPolicy(max_batch, is_dynamic=True),
        device=device,
        num_instances=NUM_SLOTS,
        options=options,
    )


def answer(runner, inputs, batch: int) -> dict[str, np.ndarray]:
    (outputs,) = runner.start(Batch(inputs, batch)).wait()
    return {name: array[:NUM_COMPARED].copy() for name, array in outputs.items()}


def error_of(answers, reference: Path, technique: str, model: Model) -> float | None:
    """Against the first technique of the model, which is the plain one."""
    if technique == next(iter(model.techniques)):
        np.savez(reference, **answers)
        return 0.0
    if not reference.is_file():
        return None
    wanted = np.load(reference)
    errors = [
        np.linalg.norm(answers[name].astype(np.float64) - wanted[name])
        / np.linalg.norm(wanted[name])
        for name in answers
    ]
    return float(max(errors))


def on_device(runner, inputs, batch: int) -> dict[str, float]:
    """Inputs that are there already. Nothing on a CPU, where there is no way to it."""
    pipeline = runner.pipeline
    if pipeline is None:
        return {}
    there = {name: torch.from_numpy(array).to("cuda") for name, array in inputs.items()}
    torch.cuda.synchronize()
    with torch.inference_mode():
        for _ in range(5):
            pipeline.run(there)
        torch.cuda.synchronize()
        waited = []
        for _ in range(100 if batch < 32 else 10):
            began = time.perf_counter()
            pipeline.run(there)
            torch.cuda.synchronize()
            waited.append(time.perf_counter() - began)
        count = max(10, int(1.0 / statistics.median(waited)))
        begin = pipeline.device.mark("compute")
        for _ in range(count):
            pipeline.run(there)
        end = pipeline.device.mark("compute")
        end.synchronize()
        each_s = begin.elapsed_time(end) / 1e3 / count
    return {
        "device_ms": each_s * 1e3,
        "device_per_s": batch / each_s,
        "waited_ms": statistics.median(waited) * 1e3,
    }


# Memory that the device was told of stays where it is.
PINNED: list[mmap.mmap] = []


def from_host(runner, inputs, batch: int, is_tiny: bool) -> dict[str, float]:
    """Batches in shared memory, as many on their way as there are slots."""
    batches = [Batch(pinned(runner, inputs), batch) for _ in range(NUM_SLOTS)]
    duration_s = 0.1 if is_tiny else 1.5
    began = time.perf_counter()
    begun = deque(runner.start(each) for each in batches)
    num_done = 0
    while begun:
        list(begun.popleft().wait())
        num_done += 1
        if time.perf_counter() - began < duration_s:
            begun.append(runner.start(batches[num_done % NUM_SLOTS]))
    each_s = (time.perf_counter() - began) / num_done
    return {"host_ms": each_s * 1e3, "host_per_s": batch / each_s}


def pinned(runner, inputs) -> dict[str, np.ndarray]:
    arrays = {}
    for name, array in inputs.items():
        memory = mmap.mmap(-1, array.nbytes)
        runner.pin(memoryview(memory))
        PINNED.append(memory)
        arrays[name] = np.frombuffer(memory, array.dtype).reshape(array.shape)
        arrays[name][:] = array
    return arrays


def show(found: dict) -> None:
    table = Table(title=found["model"])
    for name in ("technique", "batch", "device ms", "device /s", "host-fed /s", "error", "ready s"):
        table.add_column(name, justify="left" if name == "technique" else "right")
    for name, technique in found["techniques"].items():
        for batch, row in technique.get("batches", {}).items():
            figures = [row.get(key) for key in ("device_ms", "device_per_s", "host_per_s")]
            shown = ["-" if value is None else f"{value:,.3f}" for value in figures[:1]]
            shown += ["-" if value is None else f"{value:,.0f}" for value in figures[1:]]
            error = "-" if row["error"] is None else f"{row['error']:.1e}"
            table.add_row(name, batch, *shown, error, f"{row['ready_s']:.1f}")
        if "error" in technique:
            table.add_row(name, "", f"failed: {technique['error'].splitlines()[-1][:60]}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
