"""What each technique gives on a GPU, for one model at a time:

    python benchmarks/gpu/run.py --model resnet50                 about five minutes on an H200
    python benchmarks/gpu/run.py --model bert-large               about four; vit-b about three
    python benchmarks/gpu/run.py --model resnet50 --onnx          from an ONNX file of it
    python benchmarks/gpu/run.py --model resnet50 --device cpu    does it run? tiny, no figures
    python benchmarks/gpu/page.py benchmarks/results/gpu_*.json --html gpu.html

Every technique is a process of its own that loads the model through the `pytorch` backend. Two
figures for each batch size: inputs that are on the device already (back to back, and one by one
with a wait for each), and inputs in the host's memory, copied in and out while others compute. How
far answers are from those of FP32 eager is beside them (of the norm). Random weights of the true
shape: the figures are of speed. The file is written after every technique; what it has is not
measured again (`--again` does). Models are rows of `models.py`, and `bert.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bert
import models
import numpy as np
import torch
from measuring import Arrays, Load, answers, error_of, measured
from models import MODELS, Model, Technique, runs_on
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from penstock.backends import COMPILED, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.kernels import CHOICES, KERNELS
from penstock.types import DATATYPES, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parents[1] / "results"
BERT = "bert-large"
NAMES = sorted({BERT, *(name.replace("_", "-") for name in MODELS)})
# Of a rate; of a technique, where nothing says otherwise.
SECONDS, TINY_SECONDS, ABOUT_S = 1.0, 0.05, 15.0
# More of a technique with these options.
LONGER_S = {"penstock.compile": 60.0, "penstock.fuse": 25.0, "penstock.pack": 10.0}
# Answers of the first technique, by themselves.
REFERENCE = "reference"


class Shard(Protocol):
    """One model: its techniques, how each is loaded, what is sent."""

    techniques: Mapping[str, Technique]
    # Where the version lies, and what answers are compared with.
    folder: Path

    def config(self, technique: Technique) -> ModelConfig: ...
    def loads(self, technique: Technique) -> list[Load]: ...
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
        if not self.is_onnx:
            return config
        # The file's own datatypes: an ONNX file of FP32 takes FP32, whatever it computes in.
        floats = {spec.name: spec for spec in config.inputs}
        declared = tensors(self.model, self.is_tiny)
        return replace(
            config,
            artifact=str(exported(self.model, self.folder, self.is_tiny)),
            inputs=tuple(
                replace(floats[name], datatype=each.datatype) for name, each in declared.items()
            ),
            options={k: text for k, text in config.options.items() if k != "penstock.factory"},
        )

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
            for batch in self.batches
        ]

    def compared(self, load: Load, outputs: Arrays) -> Arrays:
        return outputs


def open_shard(name: str, device: str, *, is_onnx: bool = False) -> Shard:
    if name == BERT:
        if is_onnx:
            sys.exit(f"--onnx: not for {BERT}, whose techniques need its module")
        return bert.Sequences(device, ROOT / ".bench" / "gpu")
    model = MODELS.get(name) or MODELS[name.replace("-", "_")]
    return Images(model, device, is_onnx=is_onnx)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=NAMES, required=True)
    parser.add_argument("--device", default="cuda", help="cpu: tiny, to see whether it runs")
    parser.add_argument(
        "--seconds", type=float, default=400, help="no technique begins after it; less for a call"
    )
    parser.add_argument(
        "--limit", type=float, default=120, help="of one technique; more where compiling is slow"
    )
    parser.add_argument("--only", default="", help="techniques with this in their name")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu_MODEL.json")
    parser.add_argument("--onnx", action="store_true", help="the network from an ONNX file")
    parser.add_argument("--technique", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.technique:
        print(json.dumps(in_this_process(args)))
        return
    run(args)


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    name = f"{args.model}-onnx" if args.onnx else args.model
    out = args.out or folder_of(args.device) / f"gpu_{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(out.read_text()) if out.is_file() else {"model": name}
    known = found.setdefault("techniques", {})
    shard = open_shard(args.model, args.device, is_onnx=args.onnx)
    asked = {
        name: about_s(technique, known.get(name, {}))
        for name, technique in shard.techniques.items()
        if args.only in name and (args.again or "batches" not in known.get(name, {}))
    }
    if args.again or not known:
        forget(shard)
    print(f"{len(asked)} techniques, about {sum(asked.values()):.0f} s", flush=True)
    if asked and next(iter(shard.techniques)) not in asked and not references(shard):
        in_a_child(args, REFERENCE, args.limit)
    for name, about in asked.items():
        left_s = args.seconds - (time.monotonic() - began)
        if left_s <= 0:
            print(f"{name}: no time left; the same command goes on", flush=True)
            continue
        known[name] = in_a_child(args, name, min(args.limit, left_s + 60))
        out.write_text(json.dumps(found, indent=1) + "\n")
        took, problem = known[name]["took_s"], known[name].get("error", "")
        print(f"{name}: {took:.0f} s (about {about:.0f}) {problem[-300:]}", flush=True)
    show(found)


def folder_of(device: str) -> Path:
    """`$OUT`, where a machine hands files back from there."""
    return Path(os.environ.get("OUT", RESULTS if device != "cpu" else ROOT / ".bench" / "gpu"))


def about_s(technique: Technique, before: Mapping[str, Any]) -> float:
    """As long as it took before, or a guess."""
    guess = ABOUT_S + sum(s for option, s in LONGER_S.items() if option in technique.options)
    return float(before.get("took_s", guess))


def forget(shard: Shard) -> None:
    """Kernels that were chosen and compiled: others may be the fastest now."""
    for name in (COMPILED, CHOICES, KERNELS):
        (shard.folder / name).unlink(missing_ok=True)


def keep(shard: Shard, runner: Any) -> None:
    """For the rows that come later, which find the same."""
    for name, content in runner.compiled().items():
        if not (shard.folder / name).exists():
            (shard.folder / name).write_bytes(content)


def references(shard: Shard) -> list[Path]:
    return list(shard.folder.glob("reference_*.npz"))


def in_a_child(args: argparse.Namespace, name: str, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", args.model, "--device", args.device]
    command += ["--onnx"] if args.onnx else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    began = time.monotonic()
    answer: dict[str, Any] = {}
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
        answer = {"error": f"not done in {limit_s:.0f} s"}
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
    shard = open_shard(args.model, device, is_onnx=args.onnx)
    first = next(iter(shard.techniques))
    technique = shard.techniques[first if name == REFERENCE else name]
    config = shard.config(technique)
    began = time.monotonic()
    runners = [backend("pytorch")(config) for _ in range(technique.num_copies)]
    load_s = time.monotonic() - began
    rows = {}
    for load in shard.loads(technique):
        reference = shard.folder / f"reference_{load.name.replace(' ', '_')}.npz"
        began = time.monotonic()
        found = shard.compared(load, [answers(runner, load) for runner in runners][0])
        ready_s = time.monotonic() - began
        if found and name in (first, REFERENCE):
            np.savez(reference, **found)
        row = {"ready_s": ready_s, "error": error_of(found, reference)}
        if name != REFERENCE:
            seconds = TINY_SECONDS if device == "cpu" else SECONDS
            row |= measured(runners, load, technique, seconds)
        rows[load.name] = row
    keep(shard, runners[0])
    built = {key: text for key, text in runners[0].built().items() if key != "gpu_memory_bytes"}
    machine = "CPU, no figures" if device == "cpu" else torch.cuda.get_device_name(device)
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


def exported(model: Model, version: Path, is_tiny: bool) -> Path:
    """An ONNX file with the weights of the version, as torch's exporter writes it."""
    path = version / "model.onnx"
    if not path.is_file():
        network = getattr(models, model.tiny if is_tiny else model.factory)()
        network.load_state_dict(load_file(version / "model.safetensors"))
        inputs = tensors(model, is_tiny)
        example = [
            torch.from_numpy(each.drawn(2, DATATYPES[each.datatype].numpy, seed=0))
            for each in inputs.values()
        ]
        draft = path.with_suffix(".part")
        torch.onnx.export(
            network.eval(),
            tuple(example),
            draft,
            input_names=list(inputs),
            output_names=list(model.outputs),
            opset_version=17,
            dynamo=False,
            dynamic_axes={name: {0: "n"} for name in (*inputs, *model.outputs)},
        )
        draft.rename(path)
    return path


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
