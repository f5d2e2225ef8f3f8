"""Images as floats, as JPEG decoded by CPU threads, and as JPEG decoded on the GPU: the same photos
in front of ResNet-50 (FP16, fused, CUDA graphs), in one run.

    python benchmarks/gpu/images.py                      about six minutes on an H200
    python benchmarks/gpu/images.py --tiny --device cpu  does it run? no figures

Photos are 500 x 375 pixels in files of about 100 kB (baseline, 4:2:0); floats are 3 x 224 x 224 of
FP32, made of them beforehand.
  batches   whole batches from the host's memory through the runner, two in flight
  served    `penstock.bench` in process: requests of one image, as many at a time as `--clients`
  pixels    the model's input by the GPU beside that by the CPU, in steps of 255
"""

from __future__ import annotations

import argparse
import json
import mmap
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import models
import numpy as np
import presence
import repositories
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import penstock
from penstock.backends import Batch, Runner, backend
from penstock.backends.image import ImageStep, draw_sample
from penstock.backends.processing import apply, model_in
from penstock.backends.torch_cuda import Arena
from penstock.config import CPU, BatchPolicy, ModelConfig, Preprocess
from penstock.optimizer.passes import half
from penstock.repository import pbtxt
from penstock.serving import local
from penstock.serving.warmups import warm_up_all
from penstock.types import TensorSpec
from penstock.wire.frames import Proof, RequestPart

PHOTO, NUM_PHOTOS = (500, 375), 128
SETTINGS = "resize=shortest {}; mean=0.485,0.456,0.406; std=0.229,0.224,0.225"
WAYS = {"floats": None, "JPEG, CPU threads": "; decoder=cpu", "JPEG, GPU": ""}
FILE, NUM_CLASSES = TensorSpec("IMAGE", "BYTES", (1,)), 1000
NUM_WARM = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--clients", type=int, default=384)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    presence.require_gpu(args.device)
    found = run(args)
    show(found, Console())


def run(args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Return figures by what is measured and by way."""
    photos = [draw_sample(*PHOTO, seed=seed) for seed in range(NUM_PHOTOS)]
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        configs = {name: write(Path(folder), name, args) for name in WAYS}
        floats = [row["image"] for row in as_floats(configs["JPEG, GPU"], photos)]
        folders = [config.folder for config in configs.values()]
        runners = {name: loaded(config, folders) for name, config in configs.items()}
        for name, runner in runners.items():
            print(name, {k: v for k, v in runner.built().items() if "image" in k}, flush=True)
        for size in args.batches:
            row = found.setdefault(f"batches of {size}", {})
            for name, runner in runners.items():
                row[name] = of_batches(runner, inputs(name, photos, floats, size), args.seconds)
                print(f"batches of {size}, {name}: {row[name]['images/s']:,.0f}/s", flush=True)
        found["pixels"] = {"JPEG, GPU": of_pixels(runners["JPEG, GPU"], photos)}
        for name, runner in runners.items():
            if (decoder := getattr(runner, "decoder", None)) is not None:
                counts = f"{decoder.num_on_gpu} by the GPU, {decoder.num_on_cpu} by threads"
                print(f"{name}: decoded {counts}", flush=True)
        for runner in runners.values():
            runner.close()
        row = found.setdefault("served", {})
        for name, config in configs.items():
            data = write_data(Path(folder) / "data" / name, name, photos, floats)
            row[name] = of_server(config, data, args)
            print(f"served, {name}: {row[name]['images/s']:,.0f}/s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return found


def write(root: Path, name: str, args: argparse.Namespace) -> ModelConfig:
    """Write a repository with one model; return its configuration."""
    folder = root / name.replace(", ", "-").replace(" ", "-") / "resnet50" / "1"
    folder.mkdir(parents=True)
    factory = "resnet_tiny" if args.tiny else "resnet50"
    side = 32 if args.tiny else 224
    (folder / "module.py").write_bytes(Path(models.__file__).read_bytes())
    torch.manual_seed(0)
    save_file(getattr(models, factory)().state_dict(), folder / "model.safetensors")
    pixels = TensorSpec("image", "FP32", (3, side, side))
    more = WAYS[name]
    step = None
    if more is not None:
        step = Preprocess("image", (pixels,), image=SETTINGS.format(side * 8 // 7) + more)
    config = ModelConfig(
        name="resnet50",
        version="1",
        backend="pytorch",
        artifact=str(folder / "module.py"),
        inputs=(pixels,) if step is None else (FILE,),
        outputs=(TensorSpec("scores", "FP32", (NUM_CLASSES,)),),
        max_batch_size=1,
        batching=BatchPolicy(1, is_dynamic=True),
        preprocess=step,
        tolerance=half.TOLERANCE,
        options={**models.FUSED, **models.GRAPHS, "penstock.factory": factory},
    )
    if args.tiny:
        config = replace(config, options={"penstock.factory": factory})
    config = repositories.served_as(config, max(args.batches), args.device)
    (folder.parent / "config.pbtxt").write_text(pbtxt.write(config))
    return config


def loaded(config: ModelConfig, folders: Sequence[Path]) -> Runner:
    """Load a model as a worker does, and keep the kernels that it chose in all folders."""
    (device, num_slots), *_ = local.place_here(config).workers
    config = config.of_worker(device, num_slots)
    runner = backend(config.backend)(config)
    warm_up_all(config, runner, Proof())
    for name, content in model_in(runner).compiled().items():
        for folder in folders:
            (folder / name).write_bytes(content)
    model_in(runner).settle()
    return runner


def as_floats(config: ModelConfig, photos: Sequence[bytes]) -> list[dict[str, np.ndarray]]:
    """Return what Pillow makes of photos."""
    return apply(replace(config, device=CPU), [{"IMAGE": one(photo)} for photo in photos])


def one(photo: bytes) -> np.ndarray:
    return np.array([photo], dtype=object)


def inputs(
    name: str, photos: Sequence[bytes], floats: Sequence[np.ndarray], size: int
) -> dict[str, np.ndarray]:
    if WAYS[name] is None:
        return {"image": np.stack([floats[n % len(floats)] for n in range(size)])}
    return {"IMAGE": np.stack([one(photos[n % len(photos)]) for n in range(size)])}


def of_batches(runner: Runner, given: dict[str, np.ndarray], seconds: float) -> dict[str, float]:
    ((name, values),) = given.items()
    size = len(values)
    given = {name: pinned(runner, values) if values.dtype != object else values}
    batch = Batch(given, size, [RequestPart("", 1) for _ in range(size)])
    flying = deque([runner.start(batch)])
    num_done, began = -NUM_WARM, time.perf_counter()
    while num_done <= 0 or time.perf_counter() - began < seconds:
        if num_done == 0:
            began = time.perf_counter()
        flying.append(runner.start(batch))
        list(flying.popleft().wait())
        num_done += 1
    took_s = time.perf_counter() - began
    list(flying.popleft().wait())
    num_bytes = sum(map(num_bytes_of, values)) / size
    rate = num_done * size / took_s
    return {"images/s": rate, "MB/s": rate * num_bytes / 1e6, "kB each": num_bytes / 1e3}


def pinned(runner: Runner, values: np.ndarray) -> np.ndarray:
    """Return a copy in memory that the GPU knows, as a worker's slabs are; mapped to the end."""
    memory = memoryview(mmap.mmap(-1, values.nbytes))
    runner.pin(memory)
    copy = np.frombuffer(memory, values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def num_bytes_of(row: np.ndarray) -> int:
    return len(row.item()) if row.dtype == object else row.nbytes


def of_pixels(runner: Runner, photos: Sequence[bytes]) -> dict[str, float]:
    """Return how far the input of the model is from Pillow's, in steps of 255; nothing on CPUs."""
    decoder = getattr(runner, "decoder", None)
    if decoder is None:
        return {}
    step: ImageStep = decoder.step
    sample = photos[:16]
    with decoder.device.lane("in"):
        made, errors = decoder.write(sample, Arena(decoder.device.empty), len(sample))
    torch.cuda.synchronize()
    assert not errors
    rows = step.tried_all([{"IMAGE": one(photo)} for photo in sample])
    expected = np.stack([row["image"] for row in rows])
    std = np.array(step.settings.std, np.float32)[:, None, None]
    gap = np.abs(made["image"].float().cpu().numpy() - expected) * std * 255
    return {"mean": float(gap.mean()), "p99": float(np.quantile(gap, 0.99)), "max": gap.max()}


def write_data(
    folder: Path, name: str, photos: Sequence[bytes], floats: Sequence[np.ndarray]
) -> Path:
    folder.mkdir(parents=True)
    if WAYS[name] is None:
        np.savez(folder / "rows.npz", image=np.stack(floats))
        return folder / "rows.npz"
    for number, photo in enumerate(photos):
        (folder / f"{number}.jpg").write_bytes(photo)
    return folder


def of_server(config: ModelConfig, data: Path, args: argparse.Namespace) -> dict[str, float]:
    folder = Path(config.artifact).parents[1]
    found = penstock.bench(
        folder, data=data, concurrency=str(args.clients), duration=2 * args.seconds, warm_up="5s"
    )
    (level,) = found.levels
    if data.is_file():
        with np.load(data) as rows:
            num_bytes = rows["image"][0].nbytes
    else:
        num_bytes = np.mean([path.stat().st_size for path in data.iterdir()])
    rate = level.throughput.value
    return {
        "images/s": rate,
        "MB/s": rate * float(num_bytes) / 1e6,
        "kB each": float(num_bytes) / 1e3,
        "p99 ms": level.latency["p99"].value * 1e3,
        "failed": float(level.num_failed),
    }


def show(found: dict[str, dict[str, dict[str, float]]], console: Console) -> None:
    table = Table(title="ResNet-50 FP16")
    for title in ("", "way", "images/s", "of floats", "MB/s", "kB each", "p99 ms"):
        table.add_column(title, justify="right" if title not in ("", "way") else "left")
    for what, ways in found.items():
        if what == "pixels":
            continue
        for name, each in ways.items():
            share = each["images/s"] / ways["floats"]["images/s"]
            cells = [f"{each['images/s']:,.0f}", f"{share:.2f}x", f"{each['MB/s']:,.0f}"]
            late = f"{each['p99 ms']:.1f}" if "p99 ms" in each else ""
            table.add_row(what, name, *cells, f"{each['kB each']:.0f}", late)
    console.print(table)
    for name, gaps in found["pixels"].items():
        told = ", ".join(f"{key} {value:.2f}" for key, value in gaps.items()) or "not measured"
        console.print(f"pixels of {name} beside the CPU's, in steps of 255: {told}")


if __name__ == "__main__":
    main()
