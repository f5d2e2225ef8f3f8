"""Convolutional networks on our engine and on ONNX Runtime's CUDA provider, from the same file, in
one run on one GPU:

    python benchmarks/gpu/beside_onnxruntime.py                     about five minutes on an H200
    python benchmarks/gpu/beside_onnxruntime.py --int8 qdq.onnx     with a Q/DQ file on our engine
    python benchmarks/gpu/beside_onnxruntime.py --device cpu        does it run? tiny, no figures

Needs `onnxruntime-gpu`. Weights are random. The file is FP16, in and out; inputs are on the device.
Our side: fused convolutions and CUDA graphs. Their side: NHWC, bound memory, the better of with and
without CUDA graphs. Each is a process of its own. The error is the distance between both answers,
of their norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import models
import numpy as np
import torch
from measuring import Load, answers, median_s, on_device
from rich.console import Console
from rich.table import Table
from run import RESULTS, ROOT, TINY_SECONDS, without_frames

from penstock.backends import Batch, backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.repository import onnx_file
from penstock.types import DATATYPES

SECONDS = 1.5
# Factories of `models`, whose norms keep values within FP16.
NETWORKS = ("resnet50", "mobilenet_v2", "efficientnet_b0")
TINY = "resnet_tiny"
BATCHES, TINY_BATCHES = (256, 1), (2, 1)
OURS, INT8 = "penstock", "penstock INT8"
THEIRS = "onnxruntime-gpu"
GRAPHS = {"penstock.cuda_graphs": "on"}
PROVIDER = {"penstock.gpu_engine": "onnxruntime", "penstock.memory_format": "channels_last"}
FUSED = {"penstock.dtype": "fp16", "penstock.fuse": "convolutions"}


@dataclass(frozen=True, slots=True)
class Side:
    """An engine with its options. Of the variants of a name, the fastest counts."""

    name: str
    variant: str
    options: Mapping[str, str]


SIDES = {
    "ours": Side(OURS, "fused, graphs", FUSED | GRAPHS),
    "theirs": Side(THEIRS, "NHWC", PROVIDER | {"penstock.cuda_graphs": "off"}),
    "theirs-graphs": Side(THEIRS, "NHWC, graphs", PROVIDER | GRAPHS),
    "int8": Side(INT8, "Q/DQ, graphs", FUSED | GRAPHS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu: tiny, to see whether it runs")
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--int8", type=Path, help="a Q/DQ file for our engine")
    parser.add_argument("--int8-of", default="resnet50", help="the network to compare it with")
    parser.add_argument(
        "--int8-option", action="append", default=[], metavar="KEY=VALUE", help="of our engine"
    )
    parser.add_argument("--limit", type=float, default=180, help="seconds of one process")
    parser.add_argument("--out", type=Path, help="default: gpu_beside_onnxruntime.json")
    parser.add_argument("--case", nargs=2, default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(in_this_process(args, *args.case)))
        return
    found = run(args)
    show(found)
    out = args.out or folder(args.device) / "gpu_beside_onnxruntime.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(out)


def folder(device: str) -> Path:
    """`$OUT`, where a machine hands files back from there."""
    work = ROOT / ".bench" / "gpu"
    return Path(os.environ.get("OUT", work if device == "cpu" else RESULTS))


def run(args: argparse.Namespace) -> dict[str, Any]:
    names = [TINY] if args.device == "cpu" else list(NETWORKS)
    cases = [(name, side) for name in names if args.only in name for side in list(SIDES)[:3]]
    if args.int8 is not None:
        if not args.int8.is_file():
            sys.exit(f"--int8: no such file: {args.int8}")
        cases.append((TINY if args.device == "cpu" else args.int8_of, "int8"))
    if not cases:
        sys.exit(f"--only: no network has '{args.only}' in its name; there are {', '.join(names)}")
    rows: list[dict[str, Any]] = []
    for name, key in cases:
        began = time.monotonic()
        answer = in_a_child(args, name, key)
        side = SIDES[key]
        rows.append({"network": name, "side": side.name, "variant": side.variant, **answer})
        problem = answer.get("problem", "")[-300:]
        print(f"{name}, {side.name}: {time.monotonic() - began:.0f} s {problem}", flush=True)
    return {"rows": rows, "ratios": ratios(rows)}


def in_a_child(args: argparse.Namespace, name: str, side: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", args.device, "--case", name, side]
    command += ["--int8", str(args.int8)] if side == "int8" else []
    command += [f"--int8-option={each}" for each in args.int8_option]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"not done in {args.limit:.0f} s"}
    if ended.returncode:
        return {"problem": without_frames(ended.stderr)[-1500:]}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def in_this_process(args: argparse.Namespace, name: str, key: str) -> dict[str, Any]:
    """In the child: one network on one side, all batch sizes."""
    is_tiny = args.device == "cpu"
    batches = TINY_BATCHES if is_tiny else BATCHES
    path = args.int8 if key == "int8" else exported(name)
    given = dict(each.split("=", 1) for each in args.int8_option) if key == "int8" else {}
    options = {**SIDES[key].options, **given}
    config = configured(path, args.device, max(batches), options)
    if is_tiny:
        # No graphs, and no providers of GPUs: the CPU's.
        options = {k: v for k, v in options.items() if k not in (*PROVIDER, *GRAPHS)}
        engine = "onnxruntime" if key.startswith("theirs") else "pytorch"
        runner = backend(engine)(replace(config, options=options if engine == "pytorch" else {}))
    else:
        runner = backend(config.backend)(config)
    rows = {}
    for batch in batches:
        load = drawn(config, batch)
        began = time.monotonic()
        kept = answers(runner, load)
        ready_s = time.monotonic() - began
        np.savez(path_of_answers(name, key, batch), **kept)
        rows[str(batch)] = {"ready_s": ready_s, "error": error(name, key, batch)}
        rows[str(batch)] |= measured(runner, load, TINY_SECONDS if is_tiny else SECONDS)
    machine = "CPU, no figures" if is_tiny else torch.cuda.get_device_name(args.device)
    built = {k: v for k, v in runner.built().items() if not k.startswith("provider_options")}
    return {"machine": machine, "built": built, "batches": rows}


def measured(runner: Any, load: Load, seconds: float) -> dict[str, float]:
    if getattr(runner, "pipeline", None) is not None:
        return on_device(runner, load, seconds)
    each_s = median_s(lambda: list(runner.start(Batch(load.inputs, load.num_rows)).wait()), seconds)
    return {"waited_ms": each_s * 1e3, "device_per_s": load.num_rows / each_s}


def exported(name: str) -> Path:
    """The network as an ONNX file in FP16, in and out; in FP32 on a CPU, where it is tiny."""
    path = ROOT / ".bench" / "gpu" / "beside_onnxruntime" / name / "1" / "model.onnx"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 32 if name == TINY else 224
    draft = path.with_suffix(".part")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network(name),
            (torch.zeros(2, 3, size, size),),
            draft,
            input_names=["image"],
            output_names=["scores"],
            opset_version=17,
            dynamo=False,
            dynamic_axes={"image": {0: "n"}, "scores": {0: "n"}},
        )
    if name != TINY:
        import onnx
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(draft)), draft)
    draft.rename(path)
    return path


def network(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    made: torch.nn.Module = getattr(models, name)()
    return made.eval()


def configured(path: Path, device: str, max_batch: int, options: Mapping[str, str]) -> ModelConfig:
    """As the file declares its tensors; their first dimension is the batch."""
    signature = onnx_file.read_signature(path)
    inputs, outputs = (
        tuple(replace(spec, shape=spec.shape[1:]) for spec in specs)
        for specs in (signature.inputs, signature.outputs)
    )
    return ModelConfig(
        name=path.parent.parent.name,
        version="1",
        backend="onnxruntime",
        artifact=str(path),
        inputs=inputs,
        outputs=outputs,
        max_batch_size=max_batch,
        batching=BatchPolicy(max_batch, is_dynamic=True),
        device=device if device == "cpu" else f"{device}:0",
        options=dict(options),
    )


def drawn(config: ModelConfig, batch: int) -> Load:
    random = np.random.default_rng(batch)
    inputs = {
        spec.name: random.standard_normal((batch, *spec.shape), np.float32).astype(
            DATATYPES[spec.datatype].numpy
        )
        for spec in config.inputs
    }
    return Load(str(batch), inputs, batch)


def path_of_answers(name: str, key: str, batch: int) -> Path:
    return exported(name).parent / f"answers_{key}_{batch}.npz"


def error(name: str, key: str, batch: int) -> float | None:
    """The distance from our FP16 answers to the same rows, of their norm."""
    ours = path_of_answers(name, "ours", batch)
    if key == "ours" or not ours.is_file():
        return None
    with np.load(ours) as wanted, np.load(path_of_answers(name, key, batch)) as found:
        (first,), (second,) = (
            [each[n].astype(np.float64) for n in each] for each in (wanted, found)
        )
    distance = float(np.linalg.norm(first - second) / np.linalg.norm(first))
    if not np.isfinite(distance):
        sys.exit(f"{name}, {key}, batch {batch}: answers that are not finite")
    return distance


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our sides over the best of theirs: rates, and the time of one batch with a wait for it."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if row["side"] == THEIRS:
            continue
        for batch, figures in row.get("batches", {}).items():
            others = [
                (other["batches"][batch], other["variant"])
                for other in rows
                if other["network"] == row["network"]
                and other["side"] == THEIRS
                and "batches" in other
            ]
            if not others:
                continue
            rate, by_rate = max((each["device_per_s"], name) for each, name in others)
            waited, by_wait = min((each["waited_ms"], name) for each, name in others)
            found.append(
                {
                    "network": row["network"],
                    "side": row["side"],
                    "batch": int(batch),
                    "rate": figures["device_per_s"],
                    "their_rate": rate,
                    "rate_ratio": figures["device_per_s"] / rate,
                    "waited_ms": figures["waited_ms"],
                    "their_waited_ms": waited,
                    "waited_ratio": figures["waited_ms"] / waited,
                    "theirs": by_rate if int(batch) > 1 else by_wait,
                }
            )
    return found


def show(found: dict[str, Any]) -> None:
    machine = next((row["machine"] for row in found["rows"] if "machine" in row), "nothing ran")
    table = Table(title=f"beside ONNX Runtime's CUDA provider, {machine}")
    for head in ("network", "side", "batch", "img/s", "theirs", "ratio", "ms", "theirs", "ratio"):
        table.add_column(head, justify="left" if head in ("network", "side") else "right")
    table.add_column("their best")
    for each in found["ratios"]:
        table.add_row(
            each["network"],
            each["side"],
            str(each["batch"]),
            f"{each['rate']:,.0f}",
            f"{each['their_rate']:,.0f}",
            f"{each['rate_ratio']:.2f}x",
            f"{each['waited_ms']:.3f}",
            f"{each['their_waited_ms']:.3f}",
            f"{each['waited_ratio']:.2f}x",
            each["theirs"],
        )
    Console(width=130).print(table)
    for row in found["rows"]:
        if "problem" in row:
            print(f"{row['network']}, {row['side']}, {row['variant']}: {row['problem'][-600:]}")


if __name__ == "__main__":
    main()
