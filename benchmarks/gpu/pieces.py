"""Copies of a batch to the GPU: one piece of pinned memory beside several.

    python benchmarks/gpu/pieces.py

A batch that several shards fill comes in as many pieces. Each is copied to its rows on the device,
or all are joined in pinned memory first if they are small (`torch_cuda.MIN_PIECE_BYTES`). For each
size of piece this prints, as medians of batches in turns: the time until `start` returns, which is
the host's, and the time of the copies on the device. The figures of 8 pieces of 1.2 MB should be
within 5 % of one of 9.6 MB, and the threshold should be where `direct` is faster than `joined`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from penstock.backends import torch_cuda
from penstock.backends.torch_cuda import Cuda, Pipeline, alias
from penstock.serving.slab import Segment

NUM_PIECES = 8
ROWS_PER_PIECE = 8
ROW_BYTES = (128, 512, 2048, 8192, 32_768, 150_528)
NUM_BATCHES = 300
NUM_WARM = 20


def compute(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read everything once: as little as a model can do."""
    return {"y": inputs["x"].sum(dim=1, dtype=torch.int64)}


def segments(pipeline: Pipeline, count: int, nbytes: int) -> list[Segment]:
    """Return pinned slabs."""
    made = [Segment(nbytes) for _ in range(count)]
    for segment in made:
        pipeline.pin(segment.view)
    return made


def rows_of(segment: Segment, count: int, row_bytes: int) -> dict[str, torch.Tensor]:
    array = np.frombuffer(segment.view, np.uint8)[: count * row_bytes].reshape(count, row_bytes)
    return {"x": alias(array)}


def time_batch(pipeline: Pipeline, pieces: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
    """Return the microseconds until the start returned, of the copies, and until the end."""
    num_rows = sum(len(piece["x"]) for piece in pieces)
    began = time.perf_counter()
    running = pipeline.start(pieces, num_rows, num_rows)
    started_s = time.perf_counter() - began
    list(running.wait())
    ended_s = time.perf_counter() - began
    return [each * 1e6 for each in (started_s, running.prepare_s, ended_s)]


def measure(device: Cuda, row_bytes: int) -> dict[str, list[float]]:
    """Return the medians of each way, measured in turns."""
    num_rows = NUM_PIECES * ROWS_PER_PIECE
    found: dict[str, list[list[float]]] = {"one piece": [], "direct": [], "joined": []}
    pipelines = {name: Pipeline(device, compute, 1, False) for name in found}
    (whole,) = segments(pipelines["one piece"], 1, num_rows * row_bytes)
    batches = {"one piece": [rows_of(whole, num_rows, row_bytes)]}
    held = [whole]
    for name in ("direct", "joined"):
        slabs = segments(pipelines[name], NUM_PIECES, ROWS_PER_PIECE * row_bytes)
        batches[name] = [rows_of(each, ROWS_PER_PIECE, row_bytes) for each in slabs]
        held += slabs
    for number in range(NUM_WARM + NUM_BATCHES):
        for name, pipeline in pipelines.items():
            torch_cuda.MIN_PIECE_BYTES = 0 if name == "direct" else sys.maxsize
            times = time_batch(pipeline, batches[name])
            if number >= NUM_WARM:
                found[name].append(times)
    for name, pipeline in pipelines.items():
        own = held[:1] if name == "one piece" else held[1:]
        for segment in own:
            pipeline.unpin(segment.view)
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU")
    threshold = torch_cuda.MIN_PIECE_BYTES
    device = Cuda("cuda:0")
    print(f"{torch.cuda.get_device_name()}, {NUM_PIECES} pieces of {ROWS_PER_PIECE} rows")
    print(f"pieces of {threshold} bytes and more are copied directly")
    print(f"{'piece bytes':>11}  {'way':9}  {'start us':>8}  {'copy us':>8}  {'end us':>8}")
    with torch.inference_mode():
        for row_bytes in ROW_BYTES:
            for name, times in measure(device, row_bytes).items():
                figures = "  ".join(f"{each:8.1f}" for each in times)
                print(f"{ROWS_PER_PIECE * row_bytes:>11}  {name:9}  {figures}", flush=True)


if __name__ == "__main__":
    main()
