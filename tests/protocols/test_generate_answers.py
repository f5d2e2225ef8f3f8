"""Generate for models of tensors: how answers become one reply, or a stream of events."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import BackendFailed, InvalidRequest, Overloaded, PenstockError
from penstock.protocols.generate_answers import generate
from penstock.types import Request, Response, TensorSpec, from_array

EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"


class Replies:
    """An exchange that notes what is sent."""

    def __init__(self, body: bytes) -> None:
        self.body, self.received, self.caller = body, 1.0, b"key"
        self.head = SimpleNamespace(path=b"/v2/models/m/generate")
        self.is_streaming = self.is_over = False
        self.abandon = None
        self.status, self.parts = 0, []

    def reply(self, status, headers, parts):
        assert not self.is_over
        self.is_over, self.status, self.parts = True, status, list(parts)

    def start_stream(self, status, headers):
        assert headers == EVENTS
        self.is_streaming, self.status = True, status

    def stream(self, part):
        self.parts += [part] if part and not self.is_over else []

    def end_stream(self):
        self.is_over = True

    @property
    def answers(self) -> list[object]:
        return [json.loads(part.removeprefix(b"data: ")) for part in self.parts]


class Model:
    config = ModelConfig(
        "m", "1", "null", "", (TensorSpec("x", "INT32", (1,)),), (), 0, BatchPolicy(1)
    )

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self.errors: list[PenstockError] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)

    def refused(self, error: PenstockError, received: float) -> None:
        self.errors.append(error)


def start(is_stream: bool, body: object = {"x": 1, "id": "a"}) -> tuple[Replies, Model]:
    exchange, model = Replies(json.dumps(body).encode()), Model()
    generate(exchange, model, None, is_stream, False)
    return exchange, model


def respond(model: Model, value: int | None, final: bool) -> None:
    outputs = [] if value is None else [from_array("y", "INT32", np.array([value], np.int32))]
    model.requests[0].respond(Response("m", "1", outputs, is_empty=value is None), final)


def test_a_request_has_what_its_message_says():
    _, model = start(False, {"x": 1, "id": "a", "timeout": 1000, "priority": 2, "p": "q"})
    (request,) = model.requests
    assert (request.id, request.caller, request.timings.received) == ("a", b"key", 1.0)
    assert (request.parameters, request.timeout_s, request.priority) == ({"p": "q"}, 0.001, 2)
    assert [each.name for each in request.inputs] == ["x"]


def test_what_cannot_be_read_is_raised_and_counted():
    exchange, model = Replies(b"{"), Model()
    with pytest.raises(InvalidRequest):
        generate(exchange, model, None, False, False)
    assert len(model.errors) == 1 and not model.requests


def test_one_answer_is_the_reply_with_its_end_or_before_it():
    for is_with in (True, False):
        exchange, model = start(False)
        respond(model, 5, final=is_with)
        if not is_with:
            assert not exchange.is_over
            respond(model, None, final=True)
        assert exchange.status == 200
        assert exchange.answers == [{"id": "a", "model_name": "m", "model_version": "1", "y": 5}]


def test_a_second_answer_ends_the_request_with_an_error():
    exchange, model = start(False)
    respond(model, 5, final=False)
    respond(model, 6, final=False)
    assert exchange.status == 500 and "exactly 1 response" in exchange.answers[0]["error"]
    assert model.cancelled == model.requests


def test_no_answer_is_an_error():
    exchange, model = start(False)
    respond(model, None, final=True)
    assert exchange.status == 500 and "exactly 1 response" in exchange.answers[0]["error"]


def test_a_stream_has_an_event_for_each_answer():
    exchange, model = start(True)
    respond(model, 5, final=False)
    assert exchange.is_streaming and [each["y"] for each in exchange.answers] == [5]
    respond(model, 6, final=True)
    assert [each["y"] for each in exchange.answers] == [5, 6] and exchange.is_over


def test_a_stream_may_be_empty():
    exchange, model = start(True)
    respond(model, None, final=True)
    assert (exchange.status, exchange.parts, exchange.is_over) == (200, [], True)


@pytest.mark.parametrize(
    ("error", "status", "is_event"),
    [(BackendFailed("why"), 500, True), (Overloaded("why"), 503, False)],
)
def test_the_first_error_of_a_stream_sets_the_status(error, status, is_event):
    exchange, model = start(True)
    model.requests[0].respond(error)
    assert (exchange.status, exchange.is_streaming) == (status, is_event)
    assert exchange.answers == [{"error": "why"}] and exchange.is_over


def test_a_later_error_is_an_event():
    exchange, model = start(True)
    respond(model, 5, final=False)
    model.requests[0].respond(Overloaded("why"))
    assert exchange.status == 200 and exchange.answers[1] == {"error": "why"}


def test_a_client_that_leaves_cancels():
    exchange, model = start(True)
    respond(model, 5, final=False)
    exchange.abandon()
    assert model.cancelled == model.requests
