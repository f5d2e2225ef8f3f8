"""Write a profile as a trace for Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError
from penstock.profiling.results import Bucket, GpuSpan
from penstock.profiling.times import Event

OPERATORS, REQUEST = 1, 2
# Thread id of the first GPU lane; each lane has its own.
GPU = 3
LANES = {"in": "GPU: copies in", "compute": "GPU: kernels", "out": "GPU: copies out"}


def to_trace(
    model: str, events: Sequence[Event], buckets: Sequence[Bucket], gpu: Sequence[GpuSpan] = ()
) -> dict[str, Any]:
    """Return one line of operators as they ran, one of a request's buckets in sequence, and one per
    GPU lane, starting at the GPU's first activity."""
    spans: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"penstock: {model}"}},
        _named(OPERATORS, "operators"),
        _named(REQUEST, "one request"),
    ]
    spans += [
        _span(OPERATORS, event.name, event.kind, event.start_s, event.seconds) | _args(event)
        for event in events
    ]
    start_s = 0.0
    for bucket in buckets:
        spans.append(_span(REQUEST, bucket.name, "bucket", start_s, bucket.seconds))
        start_s += bucket.seconds
    spans += _gpu_spans(gpu)
    return {"traceEvents": spans, "displayTimeUnit": "ms"}


def _gpu_spans(gpu: Sequence[GpuSpan]) -> list[dict[str, Any]]:
    threads = {lane: GPU + index for index, lane in enumerate(LANES)}
    used = {span.lane for span in gpu}
    named = [_named(threads[lane], name) for lane, name in LANES.items() if lane in used]
    return named + [
        _span(threads[each.lane], each.name, each.lane, each.start_s, each.seconds)
        | {"args": {"stream": each.stream, "bytes": each.num_bytes}}
        for each in gpu
    ]


def write(
    path: Path,
    model: str,
    events: Sequence[Event],
    buckets: Sequence[Bucket],
    gpu: Sequence[GpuSpan] = (),
) -> None:
    try:
        path.write_bytes(msgspec.json.encode(to_trace(model, events, buckets, gpu)))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from None


def _named(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}


def _span(thread: int, name: str, kind: str, start_s: float, seconds: float) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": thread, **times}


def _args(event: Event) -> dict[str, Any]:
    return {"args": {"type": event.kind, **event.details}}
