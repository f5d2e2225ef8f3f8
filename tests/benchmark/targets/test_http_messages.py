"""Addresses, headers, and what errors say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.http_messages import (
    MAX_TEXT,
    MAX_TEXTS,
    Causes,
    check_headers,
    error_text,
    parse_url,
    request_bytes,
    server_timing,
)
from penstock.benchmark.targets.kinds import open_target
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    "text, host, port, is_tls, name, path",
    [
        ("http://a", "a", 80, False, "a", "/"),
        ("http://a:8000/v2?x=1", "a", 8000, False, "a:8000", "/v2?x=1"),
        ("https://a/b/c#part", "a", 443, True, "a", "/b/c"),
        ("http://[::1]:8000/v2", "::1", 8000, False, "[::1]:8000", "/v2"),
    ],
)
def test_an_address_is_taken_apart(text, host, port, is_tls, name, path):
    url = parse_url(text)
    assert url == (text, host, port, is_tls, name, path)
    assert url.origin == f"{'https' if is_tls else 'http'}://{name}"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("ftp://a/b", "expected http://host:port"),
        ("http:///path", "expected http://host:port"),
        ("http://a:99999/", "[Pp]ort"),
        ("http://a:b/", "[Pp]ort"),
        ("http://user:secret@a/", "no user or password"),
        ("http://a/b c", "expected plain characters"),
        ("http://a/\u00e9", "expected plain characters"),
        ("http://a/b\r\nX: 1", "expected plain characters"),
        ("http://[::1/", "invalid host"),
    ],
)
def test_what_is_no_address_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_url(text)


@pytest.mark.parametrize(
    "scheme", ["http://", "https://", "grpc://", "openai+http://", "ftp://", "://", "http:", ""]
)
@pytest.mark.parametrize(
    "rest",
    [
        "me:hunter2@host:8000/v2/models/m",
        "me:hunter2@host:99999/m",
        "me:hunter2@host:port/m",
        "me:hunt/er2:hunter2@host:8000/m",
        "me:hunter2?x@host:8000/m",
        "me:hunter2@[::1/m",
        "me:@hunter2@host:1/m",
        "me:hunter2\n@host:1/m",
    ],
)
def test_no_error_shows_a_password(scheme, rest):
    for options in ({}, {"model": "m"}, {"body": "{}"}):
        with pytest.raises(ConfigError) as caught:
            open_target(TargetSpec(f"{scheme}{rest}", **options))
        assert "hunt" not in str(caught.value)


@pytest.mark.parametrize(
    "method, body, expected",
    [
        ("GET", b"", b"GET /p HTTP/1.1\r\nHost: a:1\r\nX: y\r\n\r\n"),
        ("POST", b"", b"POST /p HTTP/1.1\r\nHost: a:1\r\nX: y\r\nContent-Length: 0\r\n\r\n"),
        ("GET", b"hi", b"GET /p HTTP/1.1\r\nHost: a:1\r\nX: y\r\nContent-Length: 2\r\n\r\nhi"),
    ],
)
def test_a_request_is_written(method, body, expected):
    assert request_bytes(parse_url("http://a:1/q"), method, "/p", {"X": "y"}, body) == expected


def test_headers_are_checked_all_at_once():
    check_headers({"X-A": "text, with: everything\t\u00e9", "Authorization": "Bearer x"})
    with pytest.raises(ConfigError) as caught:
        check_headers({"a b": "1", "": "2", "Host": "x", "X": "a\r\nY: b", "Z": "\u20ac"})
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(
    "body, text",
    [
        (b'{"error": "no such model"}', "no such model"),
        (b'{"error": {"message": "too many", "code": 429}}', "too many"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"object": "error", "message": "bad"}', "bad"),
        (b'{"detail": [{"msg": "x"}]}', "{'detail': [{'msg': 'x'}]}"),
        (b"plain words\nand more", "plain words"),
        (b"<html><body>Bad Gateway</body></html>", ""),
        (b"", ""),
        (b"{}", ""),
        (b'{"error": ""}', "{'error': ''}"),
        (b'{"error": "two\\n  lines"}', "two lines"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_an_error_is_told_on_one_line(body, text):
    assert error_text(body) == text


@given(
    st.one_of(st.binary(), st.recursive(st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
)
def test_any_error_has_a_short_text(body):
    text = error_text(body)
    assert len(text) <= MAX_TEXT
    assert "\n" not in text


def error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


def test_texts_that_differ_in_numbers_are_one_cause():
    causes = Causes()
    first = causes.of(503, error("queue of 8192 is full for request a1b2-77"))
    assert first == "status 503: queue of 8192 is full for request a1b2-77"
    assert causes.of(503, error("queue of 9 is full for request c3d4-12")) == first
    assert causes.of(503, error("shutting down")) == "status 503: shutting down"
    assert causes.of(500, error("queue of 9 is full for request x1")).startswith("status 500: ")
    assert causes.of(502, b"") == "status 502"


def test_the_number_of_causes_is_bounded():
    causes = Causes()
    words = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(1000)]
    assert len({causes.of(400, error(word)) for word in words}) == MAX_TEXTS + 1
    assert causes.of(400, error("another")) == "status 400"


@pytest.mark.parametrize(
    "header, phases",
    [
        (b"a;dur=1.5, b;dur=2", {"a": 0.0015, "b": 0.002}),
        (b'db;desc="x";dur="3", miss', {"db": 0.003}),
        (b"a;dur=", {}),
        (b"a;dur=abc, ;;, =", {}),
        (b"a ; DUR = 4", {"a": 0.004}),
        (b"", {}),
    ],
)
def test_server_timing_is_read_in_seconds(header, phases):
    assert server_timing(header) == pytest.approx(phases)
