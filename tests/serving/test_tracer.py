"""Sampling of requests, and what the record of one has."""

import numpy as np
import pytest
from doubles import FakeClock, RecordingSink

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import Overloaded
from penstock.serving.tracer import MAX_CHARACTERS, MAX_TENSORS, Tracer
from penstock.types import Array, Request, Response, Tensor, TensorSpec, from_array
from penstock.wire.trace_records import (
    TENSORS,
    TIMESTAMPS,
    TracedStep,
    TraceRecord,
    TraceSetting,
    TraceTable,
)

X = TensorSpec("x", "FP32", (2,))
CONFIG = ModelConfig("m", "3", "null", "", (X,), (X,), 4, BatchPolicy(4))
OTHER = ModelConfig("other", "1", "null", "", (X,), (X,), 4, BatchPolicy(4))
SPAN = "00f067aa0ba902b7"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def traced(table: TraceTable) -> tuple[Tracer, list[TraceRecord]]:
    records: list[TraceRecord] = []
    tracer = Tracer(records.append, FakeClock(20.0))
    tracer.use(table)
    return tracer, records


def ask(tracer: Tracer, config: ModelConfig = CONFIG, header: str = "") -> Request:
    """A request that is answered at once."""
    x = from_array("x", "FP32", np.array([[1, 2]], np.float32))
    request = Request(RecordingSink(), [x], 10.0, id="seven")
    if tracer.is_on:
        tracer.see(request, config, {b"traceparent": header.encode()} if header else {}, "http")
    request.timings.queued, request.timings.dispatched = 11.0, 12.0
    request.timings.compute_s, request.timings.completed = (0.1, 0.2, 0.3), 13.0
    request.respond(Response(config.name, config.version, [x]))
    return request


def test_one_in_rate_requests_is_traced() -> None:
    tracer, records = traced(TraceTable(TraceSetting((TIMESTAMPS,), 3)))
    for _ in range(7):
        ask(tracer)
    assert len(records) == 3


def test_a_model_has_its_own_rate() -> None:
    table = TraceTable(TraceSetting(), {"m": TraceSetting((TIMESTAMPS,), 2)})
    tracer, records = traced(table)
    for config in (CONFIG, OTHER, CONFIG, OTHER, CONFIG):
        ask(tracer, config)
    assert [each.scope for each in records] == ["m", "m"]


@pytest.mark.parametrize(
    "setting", [TraceSetting(), TraceSetting((TIMESTAMPS,), 0), TraceSetting((TIMESTAMPS,), 1, 0)]
)
def test_nothing_is_seen_while_tracing_is_off(setting: TraceSetting) -> None:
    tracer, records = traced(TraceTable(setting))
    assert not tracer.is_on
    request = ask(tracer)
    assert records == [] and request.steps is None


def test_the_same_rate_goes_on_counting() -> None:
    tracer, records = traced(TraceTable(TraceSetting((TIMESTAMPS,), 3)))
    ask(tracer)
    for count in (9, 8):
        tracer.use(TraceTable(TraceSetting((TIMESTAMPS,), 3, count)))
        ask(tracer)
    assert len(records) == 1
    tracer.use(TraceTable(TraceSetting((TIMESTAMPS,), 2)))
    ask(tracer)
    assert len(records) == 2


def test_a_record_has_the_timings_and_the_answer_arrives() -> None:
    tracer, [*records] = traced(TraceTable(TraceSetting((TIMESTAMPS,), 1)))
    found: list[TraceRecord] = []
    tracer.send = found.append
    request = ask(tracer)
    assert request.is_done and records == []
    whole = TracedStep("m", 11.0, 12.0, (0.1, 0.2, 0.3), 13.0, "3")
    assert found == [TraceRecord("", "http", "m", "3", "seven", 10.0, whole, 20.0, 20.0)]


def test_an_error_is_named() -> None:
    tracer, records = traced(TraceTable(TraceSetting((TIMESTAMPS,), 1)))
    sink = RecordingSink()
    request = Request(sink, [], 10.0)
    tracer.see(request, CONFIG, {}, "grpc")
    request.respond(Overloaded("too much"))
    assert records[0].error == "Overloaded" and sink.answers


def test_answers_of_a_stream_make_one_record() -> None:
    tracer, records = traced(TraceTable(TraceSetting((TIMESTAMPS,), 1)))
    request = Request(RecordingSink(), [], 10.0)
    tracer.see(request, CONFIG, {}, "grpc")
    for final in (False, False, True):
        request.respond(Response("m", "3", []), final)
    assert len(records) == 1


def test_tensors_are_texts_of_bounded_length() -> None:
    tracer, records = traced(TraceTable(TraceSetting((TENSORS,), 1)))
    values: Array = np.array([[b"x" * 10**6] * 1000], object)
    inputs = [from_array("x" * 10**6, "BYTES", values)] * 100
    request = Request(RecordingSink(), inputs, 10.0)
    tracer.see(request, CONFIG, {}, "http")
    y = from_array("y", "FP32", np.array([1.5, 2.5], np.float32))
    request.respond(Response("m", "3", [y]))
    [record] = records
    assert not record.has_timestamps
    *taken, output = record.tensors
    assert len(taken) == MAX_TENSORS
    assert all(len(each.data) == MAX_CHARACTERS and len(each.name) <= 200 for each in taken)
    assert (output.activity, output.data, output.shape) == (
        "TENSOR_BACKEND_OUTPUT",
        "1.5,2.5",
        (2,),
    )


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (3,), b"\0" * 7),
        Tensor("x", "FP33", (1,), b"\0" * 4),
        Tensor("x", "BYTES", (1,), b"\xff\xff\xff\xffab"),
        Tensor("x", "FP32", (2, 2), b"\0" * 8),
    ],
)
def test_tensors_that_no_model_takes_do_no_harm(tensor: Tensor) -> None:
    tracer, records = traced(TraceTable(TraceSetting((TENSORS,), 1)))
    request = Request(RecordingSink(), [tensor], 10.0)
    tracer.see(request, CONFIG, {}, "http")
    request.respond(Overloaded("no"))
    assert len(records) == 1


@pytest.mark.parametrize(("flags", "is_traced"), [("01", True), ("00", False)])
def test_the_clients_decision_holds(flags: str, is_traced: bool) -> None:
    table = TraceTable(TraceSetting((TIMESTAMPS,), 0), follows_clients=True)
    tracer, records = traced(table)
    ask(tracer, header=f"00-{TRACE}-{SPAN}-{flags}")
    ask(tracer)
    ask(tracer, header="nonsense")
    assert [(each.trace_id, each.parent_id) for each in records] == [(TRACE, SPAN)] * is_traced


def test_clients_cannot_trace_a_model_that_is_off() -> None:
    table = TraceTable(TraceSetting((TIMESTAMPS,), 1), {"m": TraceSetting()}, follows_clients=True)
    tracer, records = traced(table)
    ask(tracer, header=f"00-{TRACE}-{SPAN}-01")
    assert records == []
