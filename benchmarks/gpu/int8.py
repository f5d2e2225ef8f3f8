"""INT8 beside FP16 on a GPU, from one ONNX file, in one run:

    python benchmarks/gpu/int8.py                          ResNet-50, batches of 256 and 1
    python benchmarks/gpu/int8.py --profile                with the kernels of the largest batch
    python benchmarks/gpu/int8.py --device cpu             does it run? tiny, no figures

The file is quantised as `penstock optimize` does it, with ranges of random images; weights are
random too, so the figures are of speed. Both are loaded through the `pytorch` engine with fused
layers and CUDA graphs, and measured in turns with inputs on the device. The second load shows what
a restart takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from measuring import Load, answers, on_device
from models import GRAPHS, MODELS, Technique
from onnx_files import quantised_version
from run import Images

from penstock.backends import backend
from penstock.config import ModelConfig

HALF_FUSED = Technique({"penstock.dtype": "fp16", "penstock.fuse": "convolutions", **GRAPHS})
NUM_ROUNDS = 3
NUM_CALIBRATED = 8


def opened(config: ModelConfig) -> tuple[Any, float]:
    """A runner, and how long it took."""
    began = time.monotonic()
    runner = backend("pytorch")(config)
    return runner, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="256,1")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    shard = Images(MODELS[args.model], args.device, is_onnx=True)
    shard.batches = (2,) if shard.is_tiny else tuple(map(int, args.batches.split(",")))
    config = shard.config(HALF_FUSED)
    first = shard.loads(HALF_FUSED)
    name = config.inputs[0].name
    images = first[0].inputs[name][:NUM_CALIBRATED]
    # A folder of its own, for its choices of kernels.
    artifact = quantised_version(Path(config.artifact), images, name)
    folder = artifact.parent
    half, _ = opened(config)
    with_bytes, load_s = opened(replace(config, artifact=str(artifact)))
    rows: dict[str, Any] = {}
    for load in first:
        began = time.monotonic()
        wanted = answers(half, load)
        half_s, began = time.monotonic() - began, time.monotonic()
        found = answers(with_bytes, load)
        int8_s = time.monotonic() - began
        rows[load.name] = {
            "fp16_ready_s": half_s,
            "int8_ready_s": int8_s,
            "distance": _distance(found, wanted),
            **in_turns(half, with_bytes, load),
        }
        print(load.name, json.dumps(rows[load.name]), flush=True)
    built = with_bytes.built()
    print({key: built[key] for key in built if key.startswith("fusion")}, flush=True)
    for file, content in with_bytes.compiled().items():
        (folder / file).write_bytes(content)
    if args.profile and not shard.is_tiny:
        profile(with_bytes, first[0])
    again(replace(config, artifact=str(artifact)), first)
    out = Path(os.environ.get("OUT", ".")) / "gpu_int8.json"
    if not shard.is_tiny:
        out.write_text(json.dumps({"model": args.model, "load_s": load_s, "rows": rows}, indent=1))


def again(config: ModelConfig, loads: list[Load]) -> None:
    """A second start in this process: what was chosen is read, nothing is timed."""
    runner, load_s = opened(config)
    began = time.monotonic()
    for load in loads:
        answers(runner, load)
    took = time.monotonic() - began
    print(f"second start: loaded in {load_s:.1f} s, first answers after {took:.1f} s more;"
          f" timed: {runner.built().get('fusion_timed', 'nothing')}")  # fmt: skip


def in_turns(half: Any, with_bytes: Any, load: Load) -> dict[str, Any]:
    rounds = [
        (on_device(half, load, 0.5), on_device(with_bytes, load, 0.5)) for _ in range(NUM_ROUNDS)
    ]
    if not rounds[0][0]:
        return {}
    ratios = [int8["device_per_s"] / fp16["device_per_s"] for fp16, int8 in rounds]
    return {
        "fp16_per_s": statistics.median(fp16["device_per_s"] for fp16, _ in rounds),
        "int8_per_s": statistics.median(int8["device_per_s"] for _, int8 in rounds),
        "fp16_waited_ms": statistics.median(fp16["waited_ms"] for fp16, _ in rounds),
        "int8_waited_ms": statistics.median(int8["waited_ms"] for _, int8 in rounds),
        "fp16_ms": statistics.median(fp16["device_ms"] for fp16, _ in rounds),
        "int8_ms": statistics.median(int8["device_ms"] for _, int8 in rounds),
        "ratios": ratios,
    }


def profile(runner: Any, load: Load) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    with watch(activities=[ProfilerActivity.CUDA]) as watched:
        on_device(runner, load, 0.05)
    events = sorted(watched.events(), key=lambda each: each.time_range.start)
    kernels = [each for each in events if each.device_type == torch.autograd.DeviceType.CUDA]
    runs = [n for n, each in enumerate(kernels) if "_pack_int8" in each.name]
    if len(runs) < 3:
        runs = [0, len(kernels)]
    for each in kernels[runs[-2] : runs[-1]]:
        print(f"{each.time_range.elapsed_us():8.1f} {each.name[:60]}")


def _distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    return max(
        float(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name]))
        for name in wanted
    )


if __name__ == "__main__":
    main()
