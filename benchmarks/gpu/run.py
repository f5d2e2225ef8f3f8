"""What each technique gives on a GPU, for some models or all:

    python benchmarks/gpu/run.py --model all                      five networks
    python benchmarks/gpu/run.py --model resnet50 --model vit-b   some
    python benchmarks/gpu/run.py --model resnet50 --onnx          from an ONNX file of it
    python benchmarks/gpu/run.py --model all --device cpu         does it run? tiny, no figures
    python benchmarks/gpu/page.py benchmarks/results/gpu_*.json --html gpu.html

Every technique is a process of its own that loads the model through the `pytorch` backend. Some are
begun ahead (`--jobs`), and measure one after the other (`gpu_lock.py`, `scheduling.py`). Two
figures for each batch size: inputs that are on the device already (back to back, and one by one
with a wait for each), and inputs in the host's memory, copied in and out while others compute. How
far answers are from those of FP32 eager is beside them (of the norm). Served rows are single rows
of clients, with the GPU's utilisation (`clients.py`). Random weights of the true shape: the figures
are of speed. Each network's file is written after every technique; what it has is not measured
again (`--again` does). Files are in $OUT, where that is set. Models are rows of `models.py`, and
`bert.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bert
import clients
import models
import numpy as np
import onnx_files
import torch
from gpu_lock import GpuLock, end_after, time_kernels_in_turns
from measuring import Arrays, Load, answers, error_of, measured
from models import MODELS, Model, Technique, Tensor, runs_on
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from scheduling import AUTOTUNE, FIRST, Task, kernels_of, run_all, tasks_of

from penstock.backends import COMPILED, backend
from penstock.config import CPU, EACH_GPU, BatchPolicy, ModelConfig
from penstock.kernels import CHOICES, KERNELS
from penstock.types import DATATYPES, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parents[1] / "results"
BERT = "bert-large"
NAMES = sorted({BERT, *(name.replace("_", "-") for name in MODELS)})
ALL = ("resnet50", BERT, "vit-b", "efficientnet-b0", "detector")
WORK = ROOT / ".bench" / "gpu"
# Duration of a measurement, and of one with clients: a GPU reports its use of the last second.
SECONDS, TINY_SECONDS, SERVED_S = 0.4, 0.05, 2.0
# Images that ranges are found with, and rows that clients send in turns.
NUM_CALIBRATED, NUM_ROWS = 4, 16
# Children at a time on a GPU.
NUM_JOBS = 6
# Answers of the first technique, by themselves.
REFERENCE = "reference"
# A child ends itself at its limit; this much later it is ended.
GRACE_S = 30.0


class Shard(Protocol):
    """One model: its techniques, how each is loaded, what is sent."""

    techniques: Mapping[str, Technique]
    # Where the version lies, and what answers are compared with.
    folder: Path

    def config(self, technique: Technique) -> ModelConfig: ...
    def loads(self, technique: Technique) -> list[Load]: ...
    def rows(self, technique: Technique) -> list[Arrays]:
        """What clients send, one row each."""

    def compared(self, load: Load, outputs: Arrays) -> Arrays:
        """Of the answers, what must be the same whatever the technique."""


class Images:
    def __init__(self, model: Model, device: str, *, is_onnx: bool = False) -> None:
        self.is_tiny = device == "cpu"
        self.is_onnx = is_onnx
        self.device = device
        self.model = model
        self.techniques = {n: t for n, t in model.techniques.items() if runs_on(t, device)}
        self.folder = made(model, self.is_tiny)
        self.batches = (1, 2) if self.is_tiny else model.batches

    def config(self, technique: Technique) -> ModelConfig:
        most = max(self.batches)
        config = configured(self.model, technique, self.folder, self.device, most)
        if not self.is_onnx and not technique.is_int8:
            return config
        # The file's own datatypes: an ONNX file of FP32 takes FP32, whatever it computes in.
        floats = {spec.name: spec for spec in config.inputs}
        declared = tensors(self.model, self.is_tiny)
        return replace(
            config,
            artifact=str(self.quantised() if technique.is_int8 else self.exported()),
            inputs=tuple(
                replace(floats[name], datatype=each.datatype) for name, each in declared.items()
            ),
            options={k: text for k, text in config.options.items() if k != "penstock.factory"},
        )

    def exported(self) -> Path:
        """An ONNX file with the weights of the version."""
        network = getattr(models, self.model.tiny if self.is_tiny else self.model.factory)()
        network.load_state_dict(load_file(self.folder / "model.safetensors"))
        inputs, outputs = tensors(self.model, self.is_tiny), outputs_of(self.model, self.is_tiny)
        return onnx_files.exported(network, inputs, outputs, self.folder / "model.onnx")

    def quantised(self) -> Path:
        ((name, each),) = tensors(self.model, self.is_tiny).items()
        images = each.drawn(NUM_CALIBRATED, DATATYPES[each.datatype].numpy, seed=0)
        return onnx_files.quantised_version(self.exported(), images, name)

    def loads(self, technique: Technique) -> list[Load]:
        specs = self.config(technique).inputs
        drawn = tensors(self.model, self.is_tiny).values()
        return [
            Load(
                str(batch),
                {
                    spec.name: tensor.drawn(batch, DATATYPES[spec.datatype].numpy, seed=batch)
                    for spec, tensor in zip(specs, drawn, strict=True)
                },
                batch,
            )
            for batch in (self.batches if not technique.is_fixed else self._ends)
        ]

    @property
    def _ends(self) -> tuple[int, int]:
        return min(self.batches), max(self.batches)

    def rows(self, technique: Technique) -> list[Arrays]:
        specs = self.config(technique).inputs
        drawn = tensors(self.model, self.is_tiny).values()
        return [
            {
                spec.name: tensor.drawn(1, DATATYPES[spec.datatype].numpy, seed)
                for spec, tensor in zip(specs, drawn, strict=True)
            }
            for seed in range(NUM_ROWS)
        ]

    def compared(self, load: Load, outputs: Arrays) -> Arrays:
        return outputs


def open_shard(name: str, device: str, *, is_onnx: bool = False) -> Shard:
    if name == BERT:
        if is_onnx:
            sys.exit(f"--onnx: not for {BERT}, whose techniques need its module")
        return bert.Sequences(device, WORK)
    model = MODELS.get(name) or MODELS[name.replace("-", "_")]
    return Images(model, device, is_onnx=is_onnx)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", choices=["all", *NAMES], action="append", required=True, help="one, or several"
    )
    parser.add_argument("--device", default="cuda", help="cpu: tiny, to see whether it runs")
    parser.add_argument(
        "--seconds", type=float, default=400, help="no technique begins after it; less for a call"
    )
    parser.add_argument(
        "--limit", type=float, default=120, help="of one technique; more where compiling is slow"
    )
    parser.add_argument("--jobs", type=int, help="processes at a time (GPU: 6, CPU: 1)")
    parser.add_argument("--only", default="", help="techniques with this in their name")
    parser.add_argument(
        "--without", action="append", default=[], help="no technique with this in its name"
    )
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_MODEL.json")
    parser.add_argument("--onnx", action="store_true", help="the network from an ONNX file")
    parser.add_argument("--technique", default="", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tuned", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = list(dict.fromkeys(n for m in args.model for n in (ALL if m == "all" else (m,))))
    if args.out and len(names) > 1:
        parser.error("--out: a file is of one model; several are written to $OUT")
    args.model = names
    if args.jobs is None:
        args.jobs = 1 if args.device == CPU else NUM_JOBS
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs}; expected at least 1")
    if args.technique:
        print("\n" + json.dumps(in_this_process(args)))
        return
    run(args)


@dataclass
class Results:
    """The file of one network, and its answers."""

    model: str
    shard: Shard
    paths: Sequence[Path]
    found: dict[str, Any] = field(default_factory=dict)
    # Rows of this run. The answers of others are from a run before.
    measured: set[str] = field(default_factory=set)

    @property
    def known(self) -> dict[str, Any]:
        rows: dict[str, Any] = self.found["techniques"]
        return rows

    def add(self, name: str, row: dict[str, Any]) -> None:
        first = next(iter(self.shard.techniques))
        if name in (first, REFERENCE):
            for path in answers_of(self.shard, name):
                path.replace(path.with_name(f"{REFERENCE}_{path.name.partition('@')[2]}"))
        if name != REFERENCE:
            self.known[name] = row
            self.measured.add(name)
        if references(self.shard):
            self._compare(first)
        order = [*self.shard.techniques, *self.known]
        self.found["techniques"] = {n: self.known[n] for n in order if n in self.known}
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.found, indent=1) + "\n")

    def _compare(self, first: str) -> None:
        """Rows that ended before the reference was there are compared now."""
        for name, row in self.known.items():
            if name not in self.measured:
                continue
            for load, figures in row.get("batches", {}).items():
                path = answers_path(self.shard, name, load)
                reference = self.shard.folder / f"{REFERENCE}_{slug(load)}.npz"
                if name == first and reference.is_file():
                    figures["error"] = 0.0
                elif path.is_file():
                    with np.load(path) as kept:
                        figures["error"] = error_of(dict(kept), reference)
                    path.unlink()


def open_results(args: argparse.Namespace, model: str) -> Results:
    name = f"{model}-onnx" if args.onnx else model
    out = args.out or folder_of(args.device) / f"gpu_{name}.json"
    paths = [out]
    if "OUT" in os.environ and not args.out:
        # $OUT is empty at each call: what is known is kept here too.
        paths.append(WORK / "results" / args.device / out.name)
    known = next((path for path in paths if path.is_file()), None)
    found = json.loads(known.read_text()) if known else {"model": name}
    found.setdefault("techniques", {})
    results = Results(model, open_shard(model, args.device, is_onnx=args.onnx), paths, found)
    if args.again or not results.known:
        forget(results.shard)
    return results


def asked_of(args: argparse.Namespace, results: Results) -> list[Task]:
    known = results.known
    asked = {
        name: technique
        for name, technique in results.shard.techniques.items()
        if args.only in name
        and not any(each in name for each in args.without)
        and (args.again or "batches" not in known.get(name, {}))
    }
    tasks = tasks_of(results.model, asked)
    has_first = next(iter(results.shard.techniques)) in asked
    if asked and not has_first and not references(results.shard):
        tasks.insert(0, Task(results.model, REFERENCE, FIRST))
    return tasks


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    opened = {name: open_results(args, name) for name in args.model}
    tasks = [task for results in opened.values() for task in asked_of(args, results)]
    number = sum(task.name != REFERENCE for task in tasks)
    print(f"{number} techniques, {args.jobs} at a time", flush=True)

    def begin(task: Task) -> dict[str, Any]:
        left_s = args.seconds - (time.monotonic() - began)
        # A minute more than what is left: it would be lost otherwise.
        limit_s = task.limit_s or args.limit
        return in_a_child(args, task, min(limit_s, max(left_s + 60, 60)), args.seconds + limit_s)

    def done(task: Task, row: dict[str, Any]) -> None:
        opened[task.model].add(task.name, row)
        problem = row.get("error", "")[-300:]
        at = time.monotonic() - began
        waited = f", {row['waited_s']:.0f} waited" if "waited_s" in row else ""
        print(
            f"{at:5.0f} s  {task.model}: {task.name}: {row['took_s']:.0f} s{waited} {problem}",
            flush=True,
        )

    left = run_all(tasks, begin, done, args.jobs, began + args.seconds)
    for task in left:
        print(f"{task.model}: {task.name}: no time left; run the same command again", flush=True)
    for results in opened.values():
        show(results.found)


def folder_of(device: str) -> Path:
    """`$OUT`, where a machine hands files back from there."""
    return Path(os.environ.get("OUT", RESULTS if device != "cpu" else WORK))


def forget(shard: Shard) -> None:
    """Kernels that were chosen and compiled: others may be the fastest now. Answers too."""
    for folder in (shard.folder, shard.folder.with_name("int8")):
        for name in (COMPILED, CHOICES, KERNELS):
            (folder / name).unlink(missing_ok=True)
    for path in (*references(shard), *shard.folder.glob("answers_*.npz")):
        path.unlink()


def keep(folder: Path, runner: Any) -> None:
    """For the rows that come later, which find the same. Whole or not at all: others read."""
    for name, content in runner.compiled().items():
        if not (folder / name).exists():
            draft = folder / f"{name}.part"
            draft.write_bytes(content)
            draft.rename(folder / name)


def references(shard: Shard) -> list[Path]:
    return list(shard.folder.glob(f"{REFERENCE}_*.npz"))


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def answers_path(shard: Shard, name: str, load: str) -> Path:
    return shard.folder / f"answers_{slug(name)}@{slug(load)}.npz"


def answers_of(shard: Shard, name: str) -> list[Path]:
    return list(shard.folder.glob(f"answers_{slug(name)}@*.npz"))


def in_a_child(
    args: argparse.Namespace, task: Task, limit_s: float, patience_s: float
) -> dict[str, Any]:
    """`limit_s` is of its own work, `patience_s` of waiting for others too."""
    command = [sys.executable, __file__, "--model", task.model, "--device", args.device]
    command += ["--limit", str(limit_s), *["--onnx"] * args.onnx, *["--keep"] * task.keeps]
    command += ["--tuned"] * bool(task.waits_for)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    began = time.monotonic()
    answer: dict[str, Any] = {}
    try:
        ended = subprocess.run(
            [*command, "--technique", task.name],
            capture_output=True,
            text=True,
            timeout=patience_s + GRACE_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        answer = {"error": f"not done in {patience_s:.0f} s, with waiting for others"}
    else:
        if ended.returncode:
            answer = {"error": without_frames(ended.stderr)[-1500:]}
        else:
            answer = json.loads(ended.stdout.splitlines()[-1])
    return {**answer, "took_s": round(time.monotonic() - began, 1)}


def without_frames(text: str) -> str:
    """C++ tells where it was in more lines than what it was."""
    return "\n".join(line for line in text.strip().splitlines() if not line.startswith("frame #"))


def in_this_process(args: argparse.Namespace) -> dict[str, Any]:
    """In the child: one technique, all batch sizes."""
    name, device = args.technique, args.device
    lock = GpuLock(WORK / "gpu.lock")
    end_after(args.limit, lock)
    time_kernels_in_turns(lock)
    shard = open_shard(args.model[0], device, is_onnx=args.onnx)
    technique = shard.techniques[next(iter(shard.techniques)) if name == REFERENCE else name]
    seconds = TINY_SECONDS if device == CPU else SECONDS
    machine = "CPU, no figures" if device == CPU else torch.cuda.get_device_name(device)
    row: dict[str, Any] = {"machine": machine, "load_s": 0.0, "built": {}, "batches": {}}
    if technique.num_clients:
        row["batches"] = served(shard, technique, device, lock)
        return row | {"waited_s": round(lock.waited_s, 1)}
    for config, loads in loaded_for(shard, technique):
        began, waited_s = time.monotonic(), lock.waited_s
        with calling(lock, technique, is_loading=True):
            runners = [backend("pytorch")(config) for _ in range(technique.num_copies)]
        row["load_s"] += time.monotonic() - began - (lock.waited_s - waited_s)
        for load in loads:
            with_gpu = calling(lock, technique, is_tuned=args.tuned)
            row["batches"][load.name] = ready(shard, name, runners, load, lock, with_gpu)
        if args.keep:
            keep(Path(config.artifact).parent, runners[0])
        with lock.alone():
            for load in loads if name != REFERENCE else ():
                row["batches"][load.name] |= measured(runners, load, technique, seconds)
        built = runners[0].built().items()
        row["built"] = {key: text for key, text in built if key != "gpu_memory_bytes"}
        del runners
    return row | {"waited_s": round(lock.waited_s, 1)}


def ready(
    shard: Shard,
    name: str,
    runners: Sequence[Any],
    load: Load,
    lock: GpuLock,
    with_gpu: AbstractContextManager[None],
) -> dict[str, Any]:
    """First answers, kept for comparing, and how long they took without waiting for others."""
    began, waited_s = time.monotonic(), lock.waited_s
    with with_gpu:
        found = shard.compared(load, [answers(runner, load) for runner in runners][0])
    ready_s = time.monotonic() - began - (lock.waited_s - waited_s)
    if found:
        np.savez(answers_path(shard, name, load.name), **found)
    return {"ready_s": ready_s, "error": None}


def calling(
    lock: GpuLock, technique: Technique, *, is_loading: bool = False, is_tuned: bool = False
) -> AbstractContextManager[None]:
    """How the GPU is held while a model is loaded or called for the first time."""
    kernels = kernels_of(technique)
    if AUTOTUNE in kernels:
        return lock.alone()
    if kernels and kernels[0] == "compile":
        return lock.together()
    # Tuners hold it by themselves while they compile and while they time.
    return nullcontext() if is_loading or (kernels and not is_tuned) else lock.alone()


def loaded_for(shard: Shard, technique: Technique) -> Iterator[tuple[ModelConfig, list[Load]]]:
    """The model for all batch sizes, or for each by itself, without a batch dimension."""
    config, loads = shard.config(technique), shard.loads(technique)
    if not technique.is_fixed:
        yield config, loads
        return
    for load in loads:
        fixed = {
            kind: tuple(replace(each, shape=(load.num_rows, *each.shape)) for each in specs)
            for kind, specs in (("inputs", config.inputs), ("outputs", config.outputs))
        }
        yield replace(config, max_batch_size=0, batching=BatchPolicy(0), **fixed), [load]


def served(shard: Shard, technique: Technique, device: str, lock: GpuLock) -> dict[str, Any]:
    config = replace(shard.config(technique), device=CPU if device == CPU else EACH_GPU)
    most, count, seconds = technique.max_batch, technique.num_clients, SERVED_S
    if device == CPU:
        most, count, seconds = min(most, 2), 4, 0.2
    config = clients.as_served(config, most)
    found = clients.served(config, shard.rows(technique), count, seconds, lock.alone)
    return {f"{count} clients": found}


def tensors(model: Model, is_tiny: bool) -> dict[str, Tensor]:
    return dict(model.tiny_inputs if is_tiny and model.tiny_inputs else model.inputs)


def outputs_of(model: Model, is_tiny: bool) -> dict[str, Tensor]:
    return dict(model.tiny_outputs if is_tiny and model.tiny_outputs else model.outputs)


def made(model: Model, is_tiny: bool) -> Path:
    """The version's folder: the factories, and weights that are drawn once."""
    factory = model.tiny if is_tiny else model.factory
    version = WORK / factory / "1"
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
        outputs=tuple(
            TensorSpec(n, t.datatype, t.shape) for n, t in outputs_of(model, is_tiny).items()
        ),
        max_batch_size=max_batch,
        batching=BatchPolicy(max_batch, is_dynamic=True),
        device=device,
        num_instances=technique.num_slots,
        options=options,
    )


def show(found: dict[str, Any]) -> None:
    table = Table(title=found["model"])
    heads = ("technique", "batch", "waited ms", "device /s", "host-fed /s", "error", "ready s")
    for name in heads:
        table.add_column(name, justify="left" if name == "technique" else "right")
    for name, technique in found["techniques"].items():
        for batch, row in technique.get("batches", {}).items():
            if "served_per_s" in row:
                busy = f"{row['utilization']:.0%}" if "utilization" in row else "-"
                shown = (f"p99 {row['p99_ms']:.1f}", f"GPU {busy}", f"{row['served_per_s']:,.0f}")
                table.add_row(name, batch, *shown)
                continue
            figures = [row.get(key) for key in ("waited_ms", "device_per_s", "host_per_s")]
            shown = ["-" if value is None else f"{value:,.3f}" for value in figures[:1]]
            shown += ["-" if value is None else f"{value:,.0f}" for value in figures[1:]]
            error = "-" if row.get("error") is None else f"{row['error']:.1e}"
            table.add_row(name, batch, *shown, error, f"{row.get('ready_s', 0.0):.1f}")
        if "error" in technique:
            table.add_row(name, "", f"failed: {technique['error'].splitlines()[-1][:60]}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
