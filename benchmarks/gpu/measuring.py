"""How a loaded model is measured: with inputs that are on the device already, and with inputs in
the host's memory. Knows nothing of which model it is."""

from __future__ import annotations

import mmap
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import Technique

from penstock.backends import Batch

# Rows whose answers are compared.
NUM_COMPARED = 8
# The first is tuned and captured, the second replays it.
NUM_WARM = 3
# A rate is the median of NUM_PARTS parts, because a process that loads a model disturbs one of
# them; slow batches have FEW_PARTS.
NUM_PARTS, FEW_PARTS = 5, 3
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Load:
    """One batch, sent again and again."""

    name: str
    inputs: Arrays
    num_rows: int
    # What is counted, where that is not rows: sequences of the mean length.
    amount: float = 0.0
    num_tokens: int = 0
    # Answers are compared and nothing else.
    is_checked_only: bool = False

    @property
    def counted(self) -> float:
        return self.amount or self.num_rows


def measured(
    runners: Sequence[Any], load: Load, technique: Technique, seconds: float
) -> dict[str, float]:
    if load.is_checked_only:
        return {}
    found = on_device(runners[0], load, seconds) if technique.is_pinned else {}
    return {**found, **from_host(runners, load, technique, seconds)}


def answers(runner: Any, load: Load) -> Arrays:
    for _ in range(NUM_WARM):
        (outputs,) = runner.start(Batch(load.inputs, load.num_rows)).wait()
    return {name: array[:NUM_COMPARED].copy() for name, array in outputs.items()}


def error_of(found: Arrays, reference: Path) -> float | None:
    """The largest distance from what was kept there, of its norm. None: there is nothing."""
    if not found or not reference.is_file():
        return None
    with np.load(reference) as wanted:
        errors = [
            np.linalg.norm(found[name].astype(np.float64) - wanted[name])
            / np.linalg.norm(wanted[name])
            for name in found
        ]
    return float(max(errors))


def on_device(runner: Any, load: Load, seconds: float) -> dict[str, float]:
    """Inputs that are there already. Nothing on a CPU, where there is no way to it."""
    pipeline = runner.pipeline
    if pipeline is None:
        return {}
    # A packed model keeps where the sequences of the last batch begin.
    list(runner.start(Batch(load.inputs, load.num_rows)).wait())
    with torch.inference_mode():
        there = pipeline.resident(placed(pipeline, load), load.num_tokens)

        def waited() -> None:
            pipeline.run(there, load.num_tokens)
            pipeline.device.mark("compute").synchronize()

        waited_s = median_s(waited, seconds / 4)
        num_parts = NUM_PARTS if NUM_PARTS * waited_s < seconds else FEW_PARTS
        count = max(1, int(seconds / num_parts / waited_s))
        marks = [pipeline.device.mark("compute")]
        for _ in range(num_parts):
            for _ in range(count):
                pipeline.run(there, load.num_tokens)
            marks.append(pipeline.device.mark("compute"))
        marks[-1].synchronize()
        parts = [one.elapsed_time(other) for one, other in pairwise(marks)]
        each_s = statistics.median(parts) / 1e3 / count
    return {"waited_ms": waited_s * 1e3, **rates("device", load, each_s)}


def from_host(
    runners: Sequence[Any], load: Load, technique: Technique, seconds: float
) -> dict[str, float]:
    """Batches in memory that the device knows, as many on their way as there are slots; or, as it
    is done without further thought, in memory that it does not know, one after the other."""
    if not technique.is_pinned:
        return unpinned(runners[0], load, seconds)
    number = technique.num_slots * len(runners)
    ready = [
        (runner, Batch(pinned(runner, load.inputs), load.num_rows))
        for _ in range(technique.num_slots)
        for runner in runners
    ]
    runner, batch = ready[0]
    waited_s = median_s(lambda: list(runner.start(batch).wait()), seconds / 4)
    began = time.perf_counter()
    begun = deque(each.start(batch) for each, batch in ready)
    ends = [began]
    while begun:
        list(begun.popleft().wait())
        ends.append(time.perf_counter())
        if ends[-1] - began < seconds:
            runner, batch = ready[(len(ends) - 2) % number]
            begun.append(runner.start(batch))
    each_s = typical_s(ends, number)
    return {"host_waited_ms": waited_s * 1e3, **rates("host", load, each_s)}


def typical_s(ends: Sequence[float], number: int) -> float:
    """Seconds from one end to the next, of `number` on their way that may end together: the median
    of some parts, or the mean of few."""
    num_done = len(ends) - 1
    count = num_done // NUM_PARTS // number * number
    if not count:
        return (ends[-1] - ends[0]) / num_done
    marks = ends[::count]
    return statistics.median(other - one for one, other in pairwise(marks)) / count


def unpinned(runner: Any, load: Load, seconds: float) -> dict[str, float]:
    pipeline = runner.pipeline

    def run() -> None:
        if pipeline is None:
            list(runner.start(Batch(load.inputs, load.num_rows)).wait())
            return
        with torch.inference_mode():
            outputs = pipeline.run(placed(pipeline, load), load.num_tokens)
            with pipeline.device.lane("compute"):
                for each in outputs.values():
                    each.cpu()

    each_s = median_s(run, seconds)
    return {"host_waited_ms": each_s * 1e3, **rates("host", load, each_s)}


def placed(pipeline: Any, load: Load) -> dict[str, torch.Tensor]:
    """On the device, copied there and waited for as torch does it by itself."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    with pipeline.device.lane("compute"):
        return {name: torch.from_numpy(each).to(place) for name, each in load.inputs.items()}


def rates(where: str, load: Load, each_s: float) -> dict[str, float]:
    found = {f"{where}_ms": each_s * 1e3, f"{where}_per_s": load.counted / each_s}
    if load.num_tokens:
        found[f"{where}_tokens_per_s"] = load.num_tokens / each_s
    return found


# Memory that the device was told of stays where it is.
PINNED: list[mmap.mmap] = []


def pinned(runner: Any, inputs: Arrays) -> Arrays:
    arrays = {}
    for name, array in inputs.items():
        memory = mmap.mmap(-1, array.nbytes)
        runner.pin(memoryview(memory))
        PINNED.append(memory)
        arrays[name] = np.frombuffer(memory, array.dtype).reshape(array.shape)
        arrays[name][:] = array
    return arrays


def median_s(run: Callable[[], object], seconds: float) -> float:
    run()
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 3:
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
    return statistics.median(times)
