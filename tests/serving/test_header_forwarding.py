"""Headers that become parameters, by patterns that cannot take long."""

import pytest
from doubles import RecordingSink

from penstock.serving.header_forwarding import HeaderForwarding, pattern_problem
from penstock.types import Request


def forwarded(pattern: str, headers: dict[bytes, bytes], **own: str) -> dict[str, object] | None:
    request = Request(RecordingSink(), [], 0.0)
    request.parameters = dict(own) or None
    HeaderForwarding(pattern).add(request, headers)
    return None if request.parameters is None else dict(request.parameters)


def test_headers_that_match_become_parameters() -> None:
    headers = {b"my-user": b"ann", b"other": b"x", b"x-trace": "\u00fc".encode()}
    assert forwarded("(my-.*|X-.*)", headers) == {"my-user": "ann", "x-trace": "\u00fc"}
    assert forwarded("^er$", headers) is None


def test_a_parameter_of_the_request_goes_first() -> None:
    assert forwarded("a", {b"a": b"header"}, a="own", b="too") == {"a": "own", "b": "too"}


@pytest.mark.parametrize(
    "name", [b"authorization", b"x-api-key", b"cookie", b"triton_x", b"a" * 65]
)
def test_keys_and_reserved_names_are_never_forwarded(name: bytes) -> None:
    assert forwarded(".*", {name: b"secret"}) is None
    assert forwarded(".*", {b"a": b"x" * 5000}) is None


@pytest.mark.parametrize(
    "pattern", ["", ".*", "my_.*|x-.*", r"x-[a-z*+]+", r"a\*b\+c\)*", "(a|b)?", "(?i:x-.*)"]
)
def test_patterns_of_simple_form(pattern: str) -> None:
    assert pattern_problem(pattern) == ""


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "it is no regular expression"),
        ("(a+)+$", "it repeats a group"),
        ("(a|aa)*", "it repeats a group"),
        ("(a){5}", "it repeats a group"),
        ("a*a*a*a*b", "more than 3 repetitions"),
        (r"(a)\1", "it refers to a group"),
        ("(?P<x>a)(?P=x)", "it refers to a group"),
        ("a" * 501, "longer than 500"),
    ],
)
def test_patterns_that_may_take_long_are_refused(pattern: str, problem: str) -> None:
    assert problem in pattern_problem(pattern)
