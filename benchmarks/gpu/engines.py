"""Which engine is the fastest for which kind of network, and by how much?

    python benchmarks/gpu/engines.py --networks ViT-B/16,EfficientNet-B0
    python benchmarks/gpu/engines.py --autotune --limit-s 540    with torch.compile's max-autotune
    python benchmarks/gpu/engines.py --device cpu                does it run? tiny, no figures

All engines get the same network in FP16, channels-last, with inputs on the device: torch's
operators one by one; the same in a CUDA graph; torch.compile in a CUDA graph; Penstock's fusion
(`penstock.fuse: "on"`) in a CUDA graph; and for ViT linear layers in FP8 (`penstock.fp8`), too.
They are timed in turns, and their answers compared with FP32. No network is begun after the limit;
what was left out is said. Prints a table and writes engines.json to $OUT, or to the current folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import models  # noqa: E402
import presence  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from penstock.backends import torch_fusion, torch_linear  # noqa: E402
from penstock.backends.torch_tracing import TraceInputs  # noqa: E402
from penstock.kernels.convolution import GpuTimer, Tuner  # noqa: E402
from penstock.kernels.fp8_linear import fits  # noqa: E402
from penstock.kernels.gemm import open_multiplier  # noqa: E402

# Turns of each engine, and how long one takes.
NUM_TURNS, TURN_S = 5, 0.1
NUM_WARM = 3
EAGER, GRAPH, COMPILED, AUTOTUNED = "eager", "graph", "compile", "max-autotune"
FUSED, FP8 = "penstock", "penstock FP8"
OURS = (FUSED, FP8)
# Networks whose time is spent in linear layers.
WITH_FP8 = ("ViT-B/16",)
THEIRS = (COMPILED, AUTOTUNED)
Call = Callable[[], object]


@dataclass(frozen=True)
class Engine:
    """A way to run one batch, how long it took to build, and how far its answers are off."""

    call: Call
    build_s: float
    error: float
    notes: str = ""


class Place:
    """Where it runs; on a CPU there are no graphs, and FP32 is used."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"
        self.dtype = torch.float16 if self.is_gpu else torch.float32

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def captured(self, call: Call) -> Call:
        """Return the call in a CUDA graph; the result is always at the same address."""
        if not self.is_gpu:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            results.append(call())

        def replay() -> object:
            graph.replay()
            return results[0]

        return replay

    def tuner(self) -> Tuner | None:
        return Tuner(GpuTimer(self.device), self.device) if self.is_gpu else None


def first(answer: object) -> torch.Tensor:
    return next(iter(answer.values())) if isinstance(answer, Mapping) else answer


def error_of(answer: object, wanted: torch.Tensor) -> float:
    found = first(answer).double()
    return float((found - wanted).norm() / wanted.norm())


def seconds_of(call: Call, place: Place) -> float:
    """Return the time of one call, over at least TURN_S."""
    place.wait()
    began = time.perf_counter()
    call()
    place.wait()
    count = max(1, int(TURN_S / max(1e-6, time.perf_counter() - began)))
    began = time.perf_counter()
    for _ in range(count):
        call()
    place.wait()
    return (time.perf_counter() - began) / count


def in_turns(engines: Mapping[str, Engine], place: Place) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(NUM_TURNS if place.is_gpu else 1):
        for name, engine in engines.items():
            times[name].append(seconds_of(engine.call, place))
    return {name: statistics.median(each) for name, each in times.items()}


def plain(module: nn.Module, x: torch.Tensor, place: Place) -> Call:
    return lambda: module(x)


def in_graph(module: nn.Module, x: torch.Tensor, place: Place) -> Call:
    return place.captured(lambda: module(x))


def compiled(mode: str) -> Callable[[nn.Module, torch.Tensor, Place], Call]:
    def build(module: nn.Module, x: torch.Tensor, place: Place) -> Call:
        torch._dynamo.reset()
        options = torch._inductor.list_mode_options(mode)
        made = torch.compile(module, dynamic=False, options={**options, "triton.cudagraphs": False})
        made(x)
        return place.captured(lambda: made(x))

    return build


class Ours:
    """Penstock's fusion; one network for all batches, as in a server."""

    def __init__(self) -> None:
        self._fusion: torch_fusion.Fusion | None = None

    def build(self, module: nn.Module, x: torch.Tensor, place: Place) -> Call:
        if self._fusion is None:
            # Folded in FP32, as the backend does it.
            given = TraceInputs([torch.zeros(2, *x.shape[1:])], {}, has_batch=True)
            self._fusion = torch_fusion.fuse(module, place.tuner(), given, torch_fusion.EVERYTHING)
            made = self._fusion.module.to(place.device, place.dtype)
            made.to(memory_format=torch.channels_last)
        fused = self._fusion
        fused.prepare({"x": x}, lambda: fused.module(x))
        return place.captured(lambda: fused.module(x))

    @property
    def facts(self) -> str:
        return "" if self._fusion is None else self._fusion.facts()["fusion"]


class Fp8:
    """Linear layers in FP8, each row by its own range; for all batches too."""

    def __init__(self) -> None:
        self._model: torch_linear.LinearModel | None = None
        self._fusion: torch_fusion.Fusion | None = None

    def build(self, module: nn.Module, x: torch.Tensor, place: Place) -> Call:
        if self._model is None or self._fusion is None:
            given = TraceInputs([torch.zeros(2, *x.shape[1:])], {}, has_batch=True)
            what = torch_fusion.EVERYTHING
            fusion = torch_fusion.fuse(module, place.tuner(), given, what, leaves_linear=True)
            module = fusion.module.to(place.device, place.dtype)
            layers = {n: each for n, each in torch_linear.find_layers(module).items() if fits(each)}
            multiplier = open_multiplier(place.device, ROOT / "benchmarks")
            ranges = dict.fromkeys(layers)
            self._model = torch_linear.to_fp8(module, ranges, multiplier=multiplier)
            self._fusion = fusion
        model = self._model
        for each in (self._fusion, model):
            each.prepare({"x": x}, lambda: model.module(x))
        return place.captured(lambda: model.module(x))


def compare(name: str, place: Place, modes: list[str], batches: str) -> list[dict[str, object]]:
    """Return a row for each batch of one network."""
    network = models.NETWORKS[name]
    factory, shape = network.factory, network.shape
    if not place.is_gpu:
        factory, shape = network.tiny, network.tiny_shape
    source = getattr(models, factory)()
    wide = getattr(models, factory)().to(place.device)
    module = getattr(models, factory)().to(place.device, place.dtype)
    module = module.to(memory_format=torch.channels_last)
    ours, fp8 = Ours(), Fp8()
    own = {FUSED: ours.build} | ({FP8: fp8.build} if name in WITH_FP8 and place.is_gpu else {})
    builds = {EAGER: plain, GRAPH: in_graph}
    builds |= {mode: compiled("default" if mode == COMPILED else mode) for mode in modes}
    rows = []
    sizes = {"small": network.batches[:1], "large": network.batches[1:]}.get(batches)
    for batch in sizes or network.batches:
        batch = batch if place.is_gpu else min(batch, 2)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn((batch, *shape), generator=generator).to(place.device)
        wanted = first(wide(inputs)).double()
        x = inputs.to(place.dtype).contiguous(memory_format=torch.channels_last)
        engines: dict[str, Engine] = {}
        for engine, build in (*builds.items(), *own.items()):
            given = copy.deepcopy(source) if engine in OURS else module
            with contextlib.suppress(torch.OutOfMemoryError):
                engines[engine] = built(build, given, x, place, wanted)
        rows.append(row_of(name, batch, engines, in_turns(engines, place), ours.facts))
        print_row(rows[-1])
        del engines
        if place.is_gpu:
            torch.cuda.empty_cache()
    return rows


def built(
    build: Callable[[nn.Module, torch.Tensor, Place], Call],
    module: nn.Module,
    x: torch.Tensor,
    place: Place,
    wanted: torch.Tensor,
) -> Engine:
    began = time.perf_counter()
    call = build(module, x, place)
    place.wait()
    build_s = time.perf_counter() - began
    return Engine(call, build_s, error_of(call(), wanted))


def row_of(
    name: str, batch: int, engines: Mapping[str, Engine], times: Mapping[str, float], facts: str
) -> dict[str, object]:
    theirs = [times[each] for each in THEIRS if each in times]
    row: dict[str, object] = {"network": name, "batch": batch, "fused": facts}
    row["ms"] = {each: round(1e3 * seconds, 4) for each, seconds in times.items()}
    row["per_s"] = {each: round(batch / seconds, 1) for each, seconds in times.items()}
    row["error"] = {each: float(f"{engine.error:.2g}") for each, engine in engines.items()}
    row["build_s"] = {each: round(engine.build_s, 1) for each, engine in engines.items()}
    row["fastest"] = min(times, key=lambda each: times[each])
    row["over_eager"] = round(times[EAGER] / times[FUSED], 3)
    row["over_compile"] = round(min(theirs) / times[FUSED], 3) if theirs else None
    if theirs and FP8 in times:
        row["fp8_over_compile"] = round(min(theirs) / times[FP8], 3)
    return row


def print_row(row: Mapping[str, object]) -> None:
    per_s, build_s, error = row["per_s"], row["build_s"], row["error"]
    assert isinstance(per_s, dict) and isinstance(build_s, dict) and isinstance(error, dict)
    figures = "  ".join(f"{name} {rate:,.0f}/s" for name, rate in per_s.items())
    ratio = f", {row['over_compile']}x torch.compile" if row["over_compile"] else ""
    ratio += f", FP8 {row['fp8_over_compile']}x" if "fp8_over_compile" in row else ""
    print(f"{row['network']}, batch {row['batch']}: {figures}")
    print(f"    fastest: {row['fastest']}; penstock {row['over_eager']}x eager{ratio}")
    print(f"    built in {build_s} s; off by {error}\n    {row['fused']}", flush=True)


def print_table(rows: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["per_s"]))
    print("\n| network | batch | " + " | ".join(f"{name}, /s" for name in names) + " | fastest |"
          " over eager | over torch.compile |")  # fmt: skip
    print("|" + "---|" * (len(names) + 5))
    for row in rows:
        rates = [f"{row['per_s'].get(name, 0):,.0f}" for name in names]
        cells = [row["network"], row["batch"], *rates, row["fastest"], row["over_eager"]]
        print("| " + " | ".join(map(str, (*cells, row["over_compile"] or "-"))) + " |")


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", default=",".join(models.NETWORKS), help="names, by commas")
    parser.add_argument("--batches", choices=("small", "large", "both"), default="both")
    parser.add_argument("--device", default="cuda", help="cpu: tiny, to see whether it runs")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--autotune", action="store_true", help="max-autotune too: minutes each")
    parser.add_argument("--limit-s", type=float, default=240.0, help="begin no network after this")
    asked = parser.parse_args()
    names = [name for name in asked.networks.split(",") if name]
    unknown = [name for name in names if name not in models.NETWORKS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(models.NETWORKS)}")
    presence.require_gpu(asked.device)
    modes = [] if asked.no_compile else [COMPILED, *[AUTOTUNED] * asked.autotune]
    place = Place(asked.device)
    if place.is_gpu:
        torch.backends.cudnn.benchmark = True
    began, rows, left = time.perf_counter(), [], []
    for name in names:
        if time.perf_counter() - began > asked.limit_s:
            left.append(name)
            continue
        try:
            rows += compare(name, place, modes, asked.batches)
        except Exception as error:  # The others are still worth their time.
            print(f"{name}: failed: {type(error).__name__}: {error}", flush=True)
            left.append(name)
    if rows:
        print_table(rows)
    if rows and not place.is_gpu:
        print("on a CPU, at a tiny size: whether it runs, not how fast")
    if left:
        print(f"left out: {', '.join(left)}")
    device = torch.cuda.get_device_name(place.device) if place.is_gpu else "CPU"
    found = {"device": device, "torch": torch.__version__, "rows": rows, "left_out": left}
    if place.is_gpu or "OUT" in os.environ:
        path = Path(os.environ.get("OUT", ".")) / "engines.json"
        path.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if rows and not left else 1


if __name__ == "__main__":
    raise SystemExit(main())
