"""The forms of a traced request: Triton's trace file, Chrome's trace events, OpenTelemetry's spans
in OTLP's JSON. Pure: identifiers and the offset to the wall clock are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

import penstock
from penstock.wire.json_errors import JsonObject
from penstock.wire.trace_records import TracedStep, TraceRecord

NS = 1_000_000_000
ROOT = "InferRequest"
# Values of OTLP's enumerations.
SERVER, INTERNAL, STATUS_ERROR = 2, 1, 2
_json = msgspec.json.encode
# Prefixes of timestamps at the front of the server.
FRONTS = {"http": ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")}
GRPC_FRONT = ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A named stretch of a request's time; `parent` is the index of the span around it."""

    name: str
    started: float
    ended: float
    parent: int | None


def spans_of(record: TraceRecord) -> list[TraceSpan]:
    """Return the spans of a request, parents first: the request, its model, and for the model, or
    each of its stages or members, queueing and computing."""
    found = [TraceSpan(ROOT, record.received, record.sent, None)]
    whole = record.whole
    if not whole.queued:
        return found
    _add_step(found, whole, whole.ended or record.sending, 0)
    return found


def _add_step(found: list[TraceSpan], step: TracedStep, ended: float, around: int) -> None:
    own = len(found)
    found.append(TraceSpan(step.name, step.queued, ended, around))
    if not step.steps:
        _add_phases(found, step, ended, own)
    for each in step.steps:
        _add_step(found, each, each.ended or ended, own)


def _add_phases(found: list[TraceSpan], step: TracedStep, ended: float, around: int) -> None:
    if not step.dispatched:
        found.append(TraceSpan("queue", step.queued, ended, around))
        return
    found.append(TraceSpan("queue", step.queued, step.dispatched, around))
    if not any(step.compute_s):
        return
    compute, start = len(found), step.dispatched
    found.append(TraceSpan("compute", start, start + sum(step.compute_s), around))
    for name, seconds in zip(("input", "infer", "output"), step.compute_s, strict=True):
        found.append(TraceSpan(f"compute_{name}", start, start + seconds, compute))
        start += seconds


# Triton's file.


def triton_entries(record: TraceRecord, new_id: Callable[[], int]) -> list[bytes]:
    """Return the entries of a request, one for each activity, as Triton's trace_summary.py reads
    them. Stages and members have identifiers of their own, and name their parent."""
    number = new_id()
    named = {"id": number, "model_name": record.model, "model_version": _number(record.version)}
    if record.request_id:
        named["request_id"] = record.request_id
    entries: list[JsonObject] = [named]
    if record.has_timestamps:
        front = FRONTS.get(record.protocol, GRPC_FRONT)
        whole, end = record.whole, record.whole.ended or record.sending
        moments = [(front[0], record.received), (front[1], record.received)]
        moments.append(("REQUEST_START", record.received))
        moments += _step_moments(whole)
        moments += [("INFER_RESPONSE_COMPLETE", end), ("REQUEST_END", end)]
        moments += [(front[2], record.sending), (front[3], record.sent)]
        entries += _timestamps(number, moments)
    entries += [
        {
            "id": number,
            "activity": tensor.activity,
            "tensor": {
                "name": tensor.name,
                "data": tensor.data,
                "shape": ",".join(map(str, tensor.shape)),
                "dtype": tensor.datatype,
            },
        }
        for tensor in record.tensors
    ]
    if record.has_timestamps:
        for step in record.whole.steps:
            entries += _step_entries(step, named, new_id)
    return [_json(each) for each in entries]


def _step_entries(
    step: TracedStep, parent: JsonObject, new_id: Callable[[], int]
) -> list[JsonObject]:
    """Return the entries of a stage or a member, and of the members of this one."""
    number = new_id()
    named = {**parent, "id": number, "model_name": step.name, "parent_id": parent["id"]}
    if step.version:
        named["model_version"] = _number(step.version)
    moments = [("REQUEST_START", step.queued), *_step_moments(step), ("REQUEST_END", step.ended)]
    inner = (_step_entries(each, named, new_id) for each in step.steps)
    return [named, *_timestamps(number, moments), *chain.from_iterable(inner)]


def _step_moments(step: TracedStep) -> list[tuple[str, float]]:
    """Return the moments of queueing and computing. As in Triton, an ensemble has none of its own,
    only its members; likewise a pipeline."""
    if step.steps or not step.queued:
        return []
    moments = [("QUEUE_START", step.queued)]
    if not step.dispatched:
        return moments
    input_s, infer_s, output_s = step.compute_s
    start = step.dispatched
    return [
        *moments,
        ("COMPUTE_START", start),
        ("COMPUTE_INPUT_END", start + input_s),
        ("COMPUTE_OUTPUT_START", start + input_s + infer_s),
        ("COMPUTE_END", start + input_s + infer_s + output_s),
    ]


def _timestamps(number: int, moments: Sequence[tuple[str, float]]) -> list[JsonObject]:
    return [
        {"id": number, "timestamps": [{"name": name, "ns": int(moment * NS)}]}
        for name, moment in moments
    ]


def _number(version: str) -> int | str:
    return int(version) if version.isdigit() else version


# Chrome's trace events, which Perfetto reads too.


def chrome_events(record: TraceRecord, new_id: Callable[[], int], pid: int) -> list[bytes]:
    """Return complete events; a request has a row of its own, so that overlapping ones show."""
    row = new_id()
    details = _attributes(record)
    return [
        _json(
            {
                "name": span.name,
                "cat": record.model,
                "ph": "X",
                "ts": span.started * 1e6,
                "dur": max(0.0, span.ended - span.started) * 1e6,
                "pid": pid,
                "tid": row,
                "args": details if span.parent is None else {},
            }
        )
        for span in spans_of(record)
    ]


def _attributes(record: TraceRecord) -> dict[str, str]:
    found = {
        "triton.model_name": record.model,
        "triton.model_version": record.version,
        "triton.request_id": record.request_id,
        "network.protocol.name": record.protocol,
        "error.type": record.error,
    }
    return {name: value for name, value in found.items() if value}


# OTLP.


def otlp_spans(
    record: TraceRecord, offset_s: float, new_hex: Callable[[int], str]
) -> list[JsonObject]:
    """Return the spans in OTLP's JSON. `offset_s` leads from the monotonic clock to the wall clock;
    `new_hex` returns random bytes as hexadecimal digits."""
    trace_id = record.trace_id or new_hex(16)
    spans, made = spans_of(record), list[JsonObject]()
    for span in spans:
        is_root = span.parent is None
        found: JsonObject = {
            "traceId": trace_id,
            "spanId": new_hex(8),
            "name": span.name,
            "kind": SERVER if is_root else INTERNAL,
            "startTimeUnixNano": str(int((span.started + offset_s) * NS)),
            "endTimeUnixNano": str(int((max(span.started, span.ended) + offset_s) * NS)),
        }
        if span.parent is not None:
            found["parentSpanId"] = made[span.parent]["spanId"]
        else:
            found["attributes"] = _key_values(_attributes(record))
            if record.parent_id:
                found["parentSpanId"] = record.parent_id
            if record.error:
                found["status"] = {"code": STATUS_ERROR, "message": record.error}
        made.append(found)
    return made


def otlp_body(spans: Sequence[JsonObject], resource: Mapping[str, str]) -> bytes:
    """Return an ExportTraceServiceRequest in OTLP's JSON."""
    scope = {"name": "penstock", "version": penstock.__version__}
    spans_of_scope = [{"scope": scope, "spans": spans}]
    described = {"attributes": _key_values(resource)}
    return _json({"resourceSpans": [{"resource": described, "scopeSpans": spans_of_scope}]})


def _key_values(values: Mapping[str, str]) -> list[JsonObject]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]
