"""The line that --log-requests writes."""

import json
import time

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.protocols import access_log
from penstock.types import CallbackSink, Request

CONFIG = ModelConfig("digits", "2", "null", "", (), (), 4, BatchPolicy(4))


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger="penstock.requests")
    return caplog


def make(id: str = "") -> Request:
    return Request(CallbackSink(lambda request, answer: None), (), 10.0, id=id)


def test_an_answer_tells_where_the_time_went(lines):
    request = make("seven")
    request.num_rows = 3
    timings = request.timings
    timings.queued, timings.dispatched, timings.completed = 10.001, 10.005, 10.020
    timings.instance_wait_s = 0.003
    timings.compute_s = (0.001, 0.010, 0.002)
    access_log.ended("http", 200, CONFIG, request, "")
    [line] = lines.records
    told = {key: value for key, value in vars(line).items() if key.endswith("_ms")}
    assert told == {
        "total_ms": 20.0,
        "decode_ms": 1.0,
        "queue_batch_ms": 1.0,
        "queue_instance_ms": 3.0,
        "compute_input_ms": 1.0,
        "compute_infer_ms": 10.0,
        "compute_output_ms": 2.0,
    }
    assert (line.status, line.model, line.version) == (200, "digits", "2")
    assert (line.request_id, line.rows, line.protocol) == ("seven", 3, "http")
    assert "http status=200 model=digits version=2 request_id=seven rows=3 " in line.getMessage()
    assert "error" not in line.getMessage()


def test_what_was_not_reached_is_left_out(lines):
    request = make()
    request.timings.received = time.monotonic()
    access_log.ended("grpc", "UNAVAILABLE", CONFIG, request, "Overloaded")
    [line] = lines.records
    assert line.error == "Overloaded" and not hasattr(line, "rows")
    assert not hasattr(line, "queue_batch_ms") and not hasattr(line, "compute_infer_ms")
    assert line.total_ms >= 0


def test_a_message_that_never_became_a_request(lines):
    access_log.refused("http", 404, {"model": "nobody"}, time.monotonic(), "NotFound")
    access_log.refused("http", 401, {"path": "/v2/a b"}, time.monotonic(), "NotAllowed")
    line, other = lines.records
    assert (line.status, line.model, line.error) == (404, "nobody", "NotFound")
    assert 'http status=401 path="/v2/a b" error=NotAllowed' in other.getMessage()


@pytest.mark.parametrize("id", ["a b", "x status=200", 'q"', "line\nbreak", "ü", "\x1b[2J"])
def test_a_clients_text_is_one_quoted_field(lines, id):
    request = make(id)
    request.timings.queued = 10.0
    access_log.ended("http", 200, CONFIG, request, "")
    text = lines.records[0].getMessage()
    assert f"request_id={json.dumps(id)} rows=1" in text
    assert text.isascii() and text.isprintable()


def test_texts_and_vectors_have_lines_of_their_own(lines):
    told = access_log.Generated("cmpl-1", time.monotonic() - 1.0)
    access_log.generated(200, CONFIG, told, "")
    told.num_prompt, told.num_generated, told.first_at = 5, 2, told.received + 0.25
    access_log.generated(499, CONFIG, told, "Cancelled")
    access_log.embedded(200, CONFIG, access_log.EmbeddedRows(7, time.monotonic()), "")
    none, left, vectors = lines.records
    assert not hasattr(none, "first_token_ms") and none.generation_tokens == 0
    assert (left.prompt_tokens, left.generation_tokens, left.error) == (5, 2, "Cancelled")
    assert left.first_token_ms == 250.0 and left.total_ms >= 1000.0
    assert (vectors.rows, vectors.model, vectors.version) == (7, "digits", "2")
