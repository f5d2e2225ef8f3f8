"""Traces as Triton's file, as Chrome's events and as OTLP."""

import itertools
import json
from typing import Any

from penstock.wire.trace_records import TracedStep, TracedTensor, TraceRecord
from penstock.wire.trace_spans import (
    chrome_events,
    otlp_body,
    otlp_spans,
    spans_of,
    triton_entries,
)

WHOLE = TracedStep("m", 1.0, 2.0, (0.25, 0.5, 0.125), 3.0)
RECORD = TraceRecord("", "http", "m", "3", "seven", 0.5, WHOLE, 3.25, 3.5)
BEFORE = TracedStep("m:tokenize", 1.0, 1.5, (0.0, 0.25, 0.0), 1.75)
AFTER = TracedStep("m:model", 1.75, 2.0, (0.25, 0.5, 0.125), 3.0)
BOTH = TracedStep("m", 1.0, 2.0, (0.25, 0.5, 0.125), 3.0, steps=(BEFORE, AFTER))
STAGED = TraceRecord("", "grpc", "m", "1", "", 0.5, BOTH, 3.0, 3.5)
# An ensemble in an ensemble.
INNER = TracedStep("inner", 1.0, 1.0, (0.0, 0.0, 0.0), 2.0, "4", (
    TracedStep("first", 1.0, 1.25, (0.125, 0.25, 0.125), 2.0, "5"),
))  # fmt: skip
NESTED = TraceRecord("", "http", "outer", "2", "id", 0.5, TracedStep(
    "outer", 1.0, 1.0, (0.0, 0.0, 0.0), 3.0, "2",
    (INNER, TracedStep("last", 2.0, 2.5, (0.0, 0.5, 0.0), 3.0, "6")),
), 3.0, 3.5)  # fmt: skip
REFUSED = TraceRecord(
    "",
    "http",
    "m",
    "1",
    "",
    0.5,
    TracedStep("m", 0.0, 0.0, (0, 0, 0), 0.0),
    0.75,
    1.0,
    "Overloaded",
)


def entries(record: TraceRecord) -> list[dict[str, Any]]:
    return [json.loads(each) for each in triton_entries(record, itertools.count(1).__next__)]


def moments(found: list[dict[str, Any]], number: int) -> list[tuple[str, int]]:
    return [
        (each["timestamps"][0]["name"], each["timestamps"][0]["ns"] // 10**6)
        for each in found
        if "timestamps" in each and each["id"] == number
    ]


def test_a_file_of_triton_has_every_moment() -> None:
    found = entries(RECORD)
    named = {"id": 1, "model_name": "m", "model_version": 3, "request_id": "seven"}
    assert found[0] == named
    assert moments(found, 1) == [
        ("HTTP_RECV_START", 500),
        ("HTTP_RECV_END", 500),
        ("REQUEST_START", 500),
        ("QUEUE_START", 1000),
        ("COMPUTE_START", 2000),
        ("COMPUTE_INPUT_END", 2250),
        ("COMPUTE_OUTPUT_START", 2750),
        ("COMPUTE_END", 2875),
        ("INFER_RESPONSE_COMPLETE", 3000),
        ("REQUEST_END", 3000),
        ("HTTP_SEND_START", 3250),
        ("HTTP_SEND_END", 3500),
    ]


def test_stages_are_children_as_those_of_ensembles() -> None:
    found = entries(STAGED)
    children = [each for each in found if "parent_id" in each]
    assert [(each["id"], each["model_name"]) for each in children] == [
        (2, "m:tokenize"),
        (3, "m:model"),
    ]
    assert not {"QUEUE_START", "COMPUTE_START"} & {name for name, _ in moments(found, 1)}
    assert moments(found, 1)[0][0] == "GRPC_WAITREAD_START"
    assert moments(found, 2)[0] == ("REQUEST_START", 1000)
    assert moments(found, 3)[-1] == ("REQUEST_END", 3000)


def test_members_of_ensembles_are_children_with_their_parents_identifier() -> None:
    found = entries(NESTED)
    named = [each for each in found if "model_name" in each]
    keys = ("id", "parent_id", "model_name", "model_version", "request_id")
    assert [tuple(each.get(key) for key in keys) for each in named] == [
        (1, None, "outer", 2, "id"),
        (2, 1, "inner", 4, "id"),
        (3, 2, "first", 5, "id"),
        (4, 1, "last", 6, "id"),
    ]
    assert [name for name, _ in moments(found, 2)] == ["REQUEST_START", "REQUEST_END"]
    assert dict(moments(found, 3)) == {
        "REQUEST_START": 1000,
        "QUEUE_START": 1000,
        "COMPUTE_START": 1250,
        "COMPUTE_INPUT_END": 1375,
        "COMPUTE_OUTPUT_START": 1625,
        "COMPUTE_END": 1750,
        "REQUEST_END": 2000,
    }


def test_tensors_are_activities() -> None:
    tensor = TracedTensor("TENSOR_QUEUE_INPUT", "x", "FP32", (1, 2), "1.0,2.0")
    record = TraceRecord(
        "", "http", "m", "1", "", 0.5, WHOLE, 3.0, 3.5, tensors=(tensor,), has_timestamps=False
    )
    [_, found] = entries(record)
    shown = {"name": "x", "data": "1.0,2.0", "shape": "1,2", "dtype": "FP32"}
    assert found == {"id": 1, "activity": "TENSOR_QUEUE_INPUT", "tensor": shown}


def test_spans_lie_within_their_parents() -> None:
    for record in (RECORD, STAGED, NESTED, REFUSED):
        spans = spans_of(record)
        for span in spans:
            assert span.started <= span.ended
            if span.parent is not None:
                around = spans[span.parent]
                assert around.started <= span.started and span.ended <= around.ended + 1e-9
    assert [span.name for span in spans_of(REFUSED)] == ["InferRequest"]
    names = [span.name for span in spans_of(STAGED)]
    assert names[:4] == ["InferRequest", "m", "m:tokenize", "queue"]
    assert names.count("compute") == 2
    found = spans_of(NESTED)
    models = [(s.name, found[s.parent].name) for s in found[1:] if "compute" not in s.name]
    assert models == [
        ("outer", "InferRequest"),
        ("inner", "outer"),
        ("first", "inner"),
        ("queue", "first"),
        ("last", "outer"),
        ("queue", "last"),
    ]


def test_chrome_shows_each_request_in_a_row() -> None:
    number = itertools.count(1).__next__
    found = [json.loads(each) for each in chrome_events(RECORD, number, 7)]
    assert [(e["name"], e["ph"], e["ts"], e["dur"], e["pid"], e["tid"]) for e in found][:2] == [
        ("InferRequest", "X", 0.5e6, 3e6, 7, 1),
        ("m", "X", 1e6, 2e6, 7, 1),
    ]
    assert found[0]["args"]["triton.request_id"] == "seven"
    assert json.loads(chrome_events(RECORD, number, 7)[0])["tid"] == 2


def test_otlp_links_spans_and_continues_the_trace_of_the_client() -> None:
    numbers = itertools.count(1)
    record = TraceRecord("", "http", "m", "3", "", 0.5, WHOLE, 3.25, 3.5, "BackendFailed")
    record.trace_id, record.parent_id = "ab" * 16, "cd" * 8
    spans = otlp_spans(record, 1000.0, lambda size: f"{next(numbers):0{2 * size}x}")
    assert {each["traceId"] for each in spans} == {"ab" * 16}
    assert spans[0]["parentSpanId"] == "cd" * 8
    assert spans[0]["status"]["message"] == "BackendFailed"
    assert spans[0]["startTimeUnixNano"] == str(1000_500_000_000)
    assert spans[1]["parentSpanId"] == spans[0]["spanId"]
    compute = next(each for each in spans if each["name"] == "compute")
    assert [each["name"] for each in spans if each["parentSpanId"] == compute["spanId"]] == [
        "compute_input",
        "compute_infer",
        "compute_output",
    ]
    body = json.loads(otlp_body(spans, {"service.name": "penstock"}))
    [resource] = body["resourceSpans"]
    assert resource["resource"]["attributes"][0]["value"] == {"stringValue": "penstock"}
    assert resource["scopeSpans"][0]["spans"] == spans


def test_a_trace_of_its_own_gets_an_identifier() -> None:
    spans = otlp_spans(REFUSED, 0.0, lambda size: "1" * 2 * size)
    assert spans[0]["traceId"] == "1" * 32 and "parentSpanId" not in spans[0]
