"""Linear layers on one GPU, both sides in one run: ViT-B/16 in FP8 beside FP16 and torch.compile;
BERT-large from an ONNX file, packed, in BF16 and FP8; integer weights beside FP16 for a few rows.

    python benchmarks/gpu/linear.py            about two minutes on an H200
    python benchmarks/gpu/linear.py --autotune  torch.compile with max-autotune too; minutes more
    python benchmarks/gpu/linear.py --device cpu  tiny models: does everything run?
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import bert
import models
from measuring import Load, answers, on_device, unpinned

from penstock.backends import backend
from penstock.config import BatchPolicy, ModelConfig
from penstock.kernels import integer_weights
from penstock.optimizer.passes.fp8 import packed_ranges
from penstock.types import TensorSpec

GRAPHS = {"penstock.cuda_graphs": "on"}
FP32 = {"penstock.dtype": "fp32"}
FP16 = {"penstock.dtype": "fp16"}
BF16 = {"penstock.dtype": "bf16"}
PACKED = {"penstock.pack": "tokens"}
BY_ROW = {"penstock.fp8": "rowwise"}
CALIBRATED = {"penstock.fp8": "fp8.json"}
VIT = {
    "FP16": FP16 | GRAPHS,
    "BF16": BF16 | GRAPHS,
    "FP8 by row": BF16 | BY_ROW | GRAPHS,
    "torch.compile, FP16": FP16 | GRAPHS | {"penstock.compile": "default"},
}
AUTOTUNED = {
    "torch.compile max-autotune": FP16 | GRAPHS | {"penstock.compile": "max-autotune"},
}
BERT = {
    "packed BF16": BF16 | PACKED | GRAPHS,
    "packed FP8 by row": BF16 | PACKED | BY_ROW | GRAPHS,
    "packed FP8, calibrated": BF16 | PACKED | CALIBRATED | GRAPHS,
}
LAYERS, ROWS = ((4096, 4096), (4096, 14336), (14336, 4096)), (1, 4, 16, 64)
TINY_LAYERS, TINY_ROWS = ((256, 128),), (1, 4)
# Weights are read from memory, not from a cache that holds them: so many bytes in turns.
BYTES_IN_TURNS = 256 << 20
NUM_REPLAYS = 20
# Of what a runner says of itself.
SHOWN = ("fp8", "fp8_inputs", "products")


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    how: str
    each_ms: float
    # Images or sequences; 0 for single layers.
    per_s: float = 0.0
    error: float | None = None
    note: str = ""

    def __str__(self) -> str:
        rate = f"{self.per_s:10,.0f}" if self.per_s else " " * 10
        error = f"{self.error:.1e}" if self.error is not None else ""
        return f"{self.model:28} {self.how:34} {self.each_ms:9.4f} {rate} {error:>8}  {self.note}"


def device_options(options: Mapping[str, str], device: str) -> dict[str, str]:
    on_gpu = ("penstock.cuda_graphs", "penstock.fp8", "penstock.compile")
    return {key: each for key, each in options.items() if device != "cpu" or key not in on_gpu}


def measured_ms(runner: object, load: Load, seconds: float) -> dict[str, float]:
    found = on_device(runner, load, seconds)
    return found or {
        key.replace("host", "device"): each for key, each in unpinned(runner, load, seconds).items()
    }


def compared(
    config: ModelConfig,
    load: Load,
    techniques: Mapping[str, dict[str, str]],
    args: argparse.Namespace,
) -> Iterator[Measured]:
    """Yield each technique's time, and how far its answers are from FP32."""
    output = config.outputs[0].name
    exact = backend("pytorch")(replace(config, options={**config.options, **FP32}))
    wanted = answers(exact, load)[output]
    exact.close()
    for name, options in techniques.items():
        began = time.perf_counter()
        try:
            chosen = device_options(options, args.device)
            runner = backend("pytorch")(replace(config, options=chosen))
            found = answers(runner, load)[output]
            ready_s = time.perf_counter() - began
            is_token = _tokens(load, len(found))
            gap = np.linalg.norm((found - wanted)[is_token]) / np.linalg.norm(wanted[is_token])
            times = measured_ms(runner, load, args.seconds)
            facts = [f"ready in {ready_s:.0f} s"]
            facts += [text for key, text in runner.built().items() if key in SHOWN]
            yield Measured(
                config.name, name, times["device_ms"], times["device_per_s"], float(gap),
                "; ".join(facts),
            )  # fmt: skip
            runner.close()
        except Exception as error:  # One technique that fails must not hide the others.
            yield Measured(config.name, name, float("nan"), note=f"{type(error).__name__}: {error}")
        if args.device != "cpu":
            torch.cuda.empty_cache()


def _tokens(load: Load, num_rows: int) -> np.ndarray | slice:
    mask = load.inputs.get("attention_mask")
    return slice(None) if mask is None else mask[:num_rows] != 0


def vit(folder: Path, args: argparse.Namespace) -> Iterator[Measured]:
    known = models.MODELS["vit_b"]
    is_tiny = args.device == "cpu"
    factory, inputs = (known.tiny, known.tiny_inputs) if is_tiny else (known.factory, known.inputs)
    assert inputs is not None
    image = inputs["image"]
    num_rows = 4 if is_tiny else 128
    shutil.copy(models.__file__, folder / "module.py")
    from safetensors.torch import save_file

    save_file(getattr(models, factory)().state_dict(), folder / "model.safetensors")
    config = ModelConfig(
        "ViT-B/16, 128 images", "1", "pytorch", str(folder / "module.py"),
        (TensorSpec("image", "FP32", image.shape),), (TensorSpec("scores", "FP32", (1000,)),),
        num_rows, BatchPolicy(num_rows, is_dynamic=True), device=args.device,
    )  # fmt: skip
    key = {"penstock.factory": factory}
    techniques = VIT | (AUTOTUNED if args.autotune else {})
    load = Load("images", {"image": image.drawn(num_rows, "float32", 1)}, num_rows)
    named = {name: options | key for name, options in techniques.items()}
    yield from compared(replace(config, options=key), load, named, args)


def encoder(folder: Path, args: argparse.Namespace) -> Iterator[Measured]:
    scale = bert.TINY if args.device == "cpu" else bert.filling(bert.LARGE, args.device)
    config = bert.write_model(folder, scale)
    space: dict[str, object] = {}
    exec((folder / "module.py").read_text(), space)
    from safetensors.torch import load_file

    module = space["factory"]().eval()  # type: ignore[operator]
    module.load_state_dict(load_file(folder / bert.WEIGHTS))
    names = [spec.name for spec in config.inputs]
    ids = torch.ones(2, 16, dtype=torch.int64)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.module(ids, mask)["logits"]

    sizes = {0: "n", 1: "s"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Logits(), (ids, ids), str(folder / "model.onnx"), dynamo=False, opset_version=17,
            input_names=names, output_names=["logits"],
            dynamic_axes={name: sizes for name in (*names, "logits")},
        )  # fmt: skip
    config = replace(
        config, name="BERT-large, ONNX file", artifact=str(folder / "model.onnx"),
        device=args.device, num_instances=1,
    )  # fmt: skip
    rows = bert.batch_of(scale, bert.draw_lengths(scale, 32, bert.RANGE_SEED), bert.RANGE_SEED)
    lengths = rows["attention_mask"].sum(1)
    given = [
        {name: array[row, : lengths[row]] for name, array in rows.items()}
        for row in range(len(lengths))
    ]
    ranges = packed_ranges(replace(config, options=PACKED), given)
    (folder / "fp8.json").write_text(json.dumps(ranges))
    drawn = bert.draw_lengths(scale, scale.num_tokens // scale.mean_length, bert.SEED)
    full = drawn[np.cumsum(drawn) <= scale.num_tokens]
    inputs = bert.batch_of(scale, full, bert.SEED)
    num_tokens = int(full.sum())
    load = Load("full", inputs, len(full), num_tokens / scale.mean_length, num_tokens)
    yield from compared(config, load, BERT, args)


def weights(args: argparse.Namespace) -> Iterator[Measured]:
    """Single layers: FP16 by cuBLAS, and integer weights, each read from memory."""
    on_cpu = args.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.float16
    for depth, width in TINY_LAYERS if on_cpu else LAYERS:
        made = torch.randn(width, depth, device=args.device) / depth**0.5
        small = {bits: integer_weights.quantise_weight(made, bits) for bits in (8, 4)}
        matrix = made.to(dtype)
        for num_rows in TINY_ROWS if on_cpu else ROWS:
            x = torch.randn(num_rows, depth, device=args.device).to(dtype)
            wanted = functional.linear(x.double(), made.double())
            model = f"{depth} x {width}, {num_rows} rows"
            copies = [matrix.clone() for _ in range(_in_turns(matrix.nbytes, args))]
            calls = [partial(functional.linear, x, each) for each in copies]
            plain_ms = _each_ms(calls, args.device)
            yield Measured(model, "FP16 cuBLAS", plain_ms)
            del copies, calls
            for bits, weight in small.items():
                others = [
                    replace(weight, packed=weight.packed.clone())
                    for _ in range(_in_turns(weight.num_bytes, args))
                ]
                calls = [partial(integer_weights.multiply, x, each) for each in others]
                each_ms = _each_ms(calls, args.device)
                gap = float((calls[0]().double() - wanted).norm() / wanted.norm())
                rate = weight.num_bytes / each_ms / 1e6
                note = f"{plain_ms / each_ms:.2f}x FP16, {rate:,.0f} GB/s"
                yield Measured(model, f"INT{bits} weights", each_ms, error=gap, note=note)


def _in_turns(num_bytes: int, args: argparse.Namespace) -> int:
    return 2 if args.device == "cpu" else max(2, min(64, BYTES_IN_TURNS // num_bytes))


def _each_ms(calls: list[Callable[[], torch.Tensor]], device: str) -> float:
    for call in calls[:2]:
        call()
    if device == "cpu":
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) * 1e3 / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / NUM_REPLAYS / len(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu: tiny models, does everything run?")
    parser.add_argument("--seconds", type=float, default=1.0, help="per technique and load")
    parser.add_argument("--autotune", action="store_true", help="torch.compile max-autotune too")
    parser.add_argument("--only", choices=("vit", "bert", "weights"), help="one part")
    args = parser.parse_args()
    print(f"{'model':28} {'how':34} {'ms':>9} {'per second':>10} {'error':>8}  note", flush=True)
    with tempfile.TemporaryDirectory() as root:
        parts: dict[str, Callable[[Path], Iterator[Measured]]] = {
            "weights": lambda folder: weights(args),
            "vit": lambda folder: vit(folder, args),
            "bert": lambda folder: encoder(folder, args),
        }
        for name, part in parts.items():
            if args.only in (None, name):
                folder = Path(root) / name
                folder.mkdir()
                for row in part(folder):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
