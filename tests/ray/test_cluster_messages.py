"""Messages between ingress and replicas."""

import pytest

from penstock import errors
from penstock.errors import PenstockError
from penstock.ray import cluster_messages as messages
from penstock.ray.cluster_messages import ClusterAnswer, ClusterCall
from penstock.wire.statuses import STATUSES


def test_a_call_arrives_as_it_was_sent() -> None:
    sent = ClusterCall(
        "http", memoryview(b"\x00\xff body"), b"POST", b"/v2?x=1", {b"a": b"\xff"}, version="3"
    )
    got = messages.decode_call(messages.encode_call(sent))
    assert bytes(got.body) == b"\x00\xff body"
    assert (got.kind, got.method, got.target, got.version) == ("http", b"POST", b"/v2?x=1", "3")
    assert got.headers == {b"a": b"\xff"}


@pytest.mark.parametrize("kind", sorted(STATUSES, key=lambda kind: kind.__name__))
def test_errors_keep_their_kind_and_text(kind: type[PenstockError]) -> None:
    data = messages.encode_answer(messages.refusal(kind("it failed: ä")))
    with pytest.raises(kind, match="it failed: ä") as caught:
        messages.decode_answer(data).check()
    assert type(caught.value) is kind


def test_other_errors_become_the_nearest_kind() -> None:
    assert messages.refusal(errors.ConfigError("x")).error == "BackendFailed"
    assert messages.refusal(errors.QuotaExceeded("x")).error == "QuotaExceeded"


def test_an_answer_without_an_error_gives_its_body() -> None:
    data = messages.encode_answer(ClusterAnswer(memoryview(b"ok"), 201, b"A: b\r\n"))
    got = messages.decode_answer(data)
    assert (got.check(), got.status, got.headers) == (b"ok", 201, b"A: b\r\n")


def test_lengths_are_left_to_who_answers() -> None:
    pairs = [(b"content-type", b"x"), (b"content-length", b"3"), (b"retry-after", b"1")]
    assert messages.header_lines(pairs) == b"content-type: x\r\nretry-after: 1\r\n"
