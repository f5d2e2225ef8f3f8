"""The line that --log-requests writes."""

import json
import time

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import NotAllowed, NotFound, Overloaded
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
    access_log.ended("http", CONFIG, request, None)
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
    access_log.ended("grpc", CONFIG, request, Overloaded("full"))
    [line] = lines.records
    assert (line.status, line.error) == ("UNAVAILABLE", "Overloaded")
    assert not hasattr(line, "rows")
    assert not hasattr(line, "queue_batch_ms") and not hasattr(line, "compute_infer_ms")
    assert line.total_ms >= 0


def test_a_message_that_never_became_a_request(lines):
    access_log.refused("http", {"model": "nobody"}, time.monotonic(), NotFound("no"))
    wrong_key = NotAllowed("no", needs_key=True)
    access_log.refused("http", {"path": "/v2/a b"}, time.monotonic(), wrong_key)
    line, other = lines.records
    assert (line.status, line.model, line.error) == (404, "nobody", "NotFound")
    assert 'http status=401 path="/v2/a b" error=NotAllowed' in other.getMessage()


@pytest.mark.parametrize("id", ["a b", "x status=200", 'q"', "line\nbreak", "ü", "\x1b[2J"])
def test_a_clients_text_is_one_quoted_field(lines, id):
    request = make(id)
    request.timings.queued = 10.0
    access_log.ended("http", CONFIG, request, None)
    text = lines.records[0].getMessage()
    assert f"request_id={json.dumps(id)} rows=1" in text
    assert text.isascii() and text.isprintable()


def test_the_status_is_that_of_the_paths_protocol(lines):
    error, sizes, spans = Overloaded("full"), {"generation_tokens": 0}, {"first_token": 0.25}
    access_log.record("http", sizes, spans, error, b"/v1/completions")
    access_log.record("http", sizes, spans, error, b"/v2/models/m/generate")
    access_log.record("http", sizes, spans, None, b"/v1/completions")
    assert [line.status for line in lines.records] == [429, 503, 200]
    assert lines.records[0].first_token_ms == 250.0 and lines.records[0].generation_tokens == 0
