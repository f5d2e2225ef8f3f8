"""Write a profile as a trace for Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.profiling.results import GpuSpan, RequestPhase
from penstock.profiling.work import Event

# Lanes below the operators and the request, which are the first two.
LANES = {"in": "GPU: copies in", "compute": "GPU: kernels", "out": "GPU: copies out"}
Span = dict[str, object]


def write(
    path: Path,
    model: str,
    events: Sequence[Event],
    buckets: Sequence[RequestPhase],
    gpu: Sequence[GpuSpan] = (),
) -> None:
    """Write one line of operators as they ran, one of a request's buckets in sequence, and one per
    GPU lane, starting at the GPU's first activity."""
    spans = [_named(1, "operators"), _named(2, "one request")]
    for event in events:
        spans.append(_span(1, event.name, event.kind, event.start_s, event.seconds))
        spans[-1]["args"] = {"type": event.kind, **event.details}
    start_s = 0.0
    for bucket in buckets:
        spans.append(_span(2, bucket.name, "bucket", start_s, bucket.seconds))
        start_s += bucket.seconds
    threads = {lane: number for number, lane in enumerate(LANES, 3)}
    used = {span.lane for span in gpu}
    spans += [_named(threads[lane], name) for lane, name in LANES.items() if lane in used]
    for each in gpu:
        thread = threads[each.lane]
        spans.append(_span(thread, each.name, each.lane, each.start_s, each.seconds))
        spans[-1]["args"] = {"stream": each.stream, "bytes": each.num_bytes}
    process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"penstock: {model}"}}
    whole = {"traceEvents": [process, *spans], "displayTimeUnit": "ms"}
    try:
        path.write_bytes(msgspec.json.encode(whole))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be written: {error.strerror}"]) from None


def _named(thread: int, name: str) -> Span:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": name}}


def _span(thread: int, name: str, kind: str, start_s: float, seconds: float) -> Span:
    times = {"ts": start_s * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": thread, **times}
