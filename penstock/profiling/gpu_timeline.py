"""GPU activity from torch.profiler's trace: kernels, gaps, and copies with their overlap. Pure.

The trace is Chrome's: `traceEvents` with `cat`, `name`, `ts` and `dur` in microseconds, and the
stream among `args`. Device activity has the categories below. A run of the model is our annotation
on the host's lane; device work that starts within it belongs to that run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from penstock.profiling.results import GpuSpan, GpuTime, Kernel, StepTime
from penstock.profiling.work import OperatorTime

# The annotation around a run.
RUN = "penstock: one batch"
KERNEL, COPY, SET = "kernel", "gpu_memcpy", "gpu_memset"
COMPUTE, IN, OUT = "compute", "in", "out"
DIRECTIONS = {"HtoD": IN, "DtoH": OUT}
# Limit for the plot: more would be a grey block.
MAX_SPANS = 1500
# A smaller share of a kernel's time that no operator accounts for is rounding.
MIN_LEFT = 0.02
# Kernel families by name; the first match counts.
FAMILIES: Sequence[tuple[str, str]] = (
    (r"flash|fmha|attention", "attention kernel"),
    (r"conv|implicit|wgrad|dgrad|fprop", "convolution kernel"),
    (r"gemm|gemv|cutlass|cublas|nvjet|_mm_", "matrix kernel"),
    (r"^triton_", "fused kernel"),
    (r"^Memcpy|^Memset", "copy on the GPU"),
)


@dataclass(frozen=True, slots=True)
class GpuTrace:
    spans: Sequence[GpuSpan]
    # Start and end of each run.
    runs: Sequence[tuple[float, float]]


def read(trace: Mapping[str, Any]) -> GpuTrace:
    """Read a Chrome trace; times are in seconds from the first span or run."""
    whole = [each for each in trace.get("traceEvents", ()) if each.get("ph") == "X"]
    device = [each for each in whole if each.get("cat") in (KERNEL, COPY, SET)]
    runs = [each for each in whole if each["name"] == RUN and each.get("cat") == "user_annotation"]
    start_us = min((each["ts"] for each in (*device, *runs)), default=0.0)
    spans = [_span(each, start_us) for each in device]
    spans.sort(key=lambda span: span.start_s)
    ends = [((each["ts"] - start_us) / 1e6, each["dur"] / 1e6) for each in runs]
    return GpuTrace(spans, sorted((begin, begin + seconds) for begin, seconds in ends))


def _span(event: Mapping[str, Any], start_us: float) -> GpuSpan:
    arguments = event.get("args", {})
    lane = COMPUTE
    if event["cat"] == COPY:
        # Copies within the device occupy it as kernels do.
        lane = next((to for key, to in DIRECTIONS.items() if key in event["name"]), COMPUTE)
    return GpuSpan(
        name=event["name"],
        lane=lane,
        stream=int(arguments.get("stream", 0)),
        start_s=(event["ts"] - start_us) / 1e6,
        seconds=event["dur"] / 1e6,
        num_bytes=int(arguments.get("bytes", 0)),
    )


def summary(
    alone: GpuTrace, together: GpuTrace | None = None, num_slots: int = 1
) -> GpuTime | None:
    """Summarise sequential runs (`alone`), and concurrent ones with one batch per instance
    (`together`); None if the trace has no kernel."""
    runs = [
        [span for span in alone.spans if begin_s <= span.start_s < end_s]
        for begin_s, end_s in alone.runs
    ]
    runs = [spans for spans in runs if _of(spans, COMPUTE)]
    if not runs:
        return None
    computed = [_of(spans, COMPUTE) for spans in runs]
    shown = (together or alone).spans
    return GpuTime(
        kernels=_kernels(computed),
        num_kernels=round(median(map(len, computed))),
        busy_s=median(map(covered_s, computed)),
        gap_s=median(map(gaps_s, computed)),
        copy_in_s=median(_total_s(_of(spans, IN)) for spans in runs),
        copy_out_s=median(_total_s(_of(spans, OUT)) for spans in runs),
        num_slots=num_slots,
        hidden=hidden_share(shown),
        timeline=list(shown[:MAX_SPANS]),
    )


def step_time(gpu: GpuTime, num_rows: int) -> StepTime:
    """Sum up kernels by kind of layer."""
    layers: dict[str, float] = {}
    for kernel in gpu.kernels:
        kind = family_of(kernel.name)
        layers[kind] = layers.get(kind, 0.0) + kernel.seconds
    ordered = dict(sorted(layers.items(), key=lambda item: -item[1]))
    times = gpu.busy_s, gpu.gap_s, gpu.copy_in_s, gpu.copy_out_s
    return StepTime(num_rows, ordered, gpu.num_kernels, *times)


def _of(spans: Sequence[GpuSpan], lane: str) -> list[GpuSpan]:
    return [span for span in spans if span.lane == lane]


def _total_s(spans: Iterable[GpuSpan]) -> float:
    return sum(span.seconds for span in spans)


def _kernels(runs: Sequence[Sequence[GpuSpan]]) -> list[Kernel]:
    """Return the kernels by name, mean over runs, longest first."""
    found: dict[str, Kernel] = {}
    for span in chain.from_iterable(runs):
        kernel = found.setdefault(span.name, Kernel(span.name, 0.0, 0.0))
        kernel.seconds += span.seconds / len(runs)
        kernel.num_calls += 1 / len(runs)
    return sorted(found.values(), key=lambda kernel: -kernel.seconds)


def covered_s(spans: Sequence[GpuSpan]) -> float:
    """Return the time in which at least one span ran."""
    return sum(end - begin for begin, end in _merged(spans))


def gaps_s(spans: Sequence[GpuSpan]) -> float:
    """Return the time between the first start and the last end in which no span ran."""
    merged = _merged(spans)
    return merged[-1][1] - merged[0][0] - covered_s(spans) if merged else 0.0


def hidden_share(spans: Sequence[GpuSpan]) -> float | None:
    """Return the share of host-device copy time in which kernels ran too; None without copies."""
    busy = _merged(_of(spans, COMPUTE))
    copies = [*_of(spans, IN), *_of(spans, OUT)]
    whole = _total_s(copies)
    if not whole:
        return None
    hidden = sum(
        max(0.0, min(end, copy.start_s + copy.seconds) - max(begin, copy.start_s))
        for copy in copies
        for begin, end in busy
    )
    return hidden / whole


def _merged(spans: Sequence[GpuSpan]) -> list[tuple[float, float]]:
    """Merge overlapping spans."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        end_s = span.start_s + span.seconds
        if merged and span.start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((span.start_s, end_s))
    return merged


def left_over(
    kernels: Iterable[Kernel], told_s: Mapping[str, float], datatype: str
) -> list[OperatorTime]:
    """Return kernels that no operator launched, such as those of a CUDA graph or a compiler.
    `told_s`: seconds per run that operators account for, by kernel name."""
    found: list[OperatorTime] = []
    for kernel in kernels:
        left_s = kernel.seconds - told_s.get(kernel.name, 0.0)
        if left_s > MIN_LEFT * kernel.seconds:
            name, kind = kernel.name, family_of(kernel.name)
            calls = max(1, round(kernel.num_calls * left_s / kernel.seconds))
            found.append(OperatorTime(name, kind, left_s, num_calls=calls, datatype=datatype))
    return found


def family_of(name: str) -> str:
    matching = (kind for pattern, kind in FAMILIES if re.search(pattern, name, re.IGNORECASE))
    return next(matching, "other kernel")
