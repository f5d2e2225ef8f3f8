"""The words of gRPC in HTTP/2 headers."""

from urllib.parse import unquote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest
from penstock.wire.grpc_status import MAX_DETAILS, NUMBERS, prefix, read_timeout, trailers
from penstock.wire.statuses import NEEDS_KEY, STATUSES


def test_statuses_have_the_numbers_of_grpc():
    assert {name: int(number) for name, number in NUMBERS.items()} == {
        code.name: code.value[0] for code in grpc.StatusCode
    }
    assert {status.grpc for status in (*STATUSES.values(), NEEDS_KEY)} <= NUMBERS.keys()


@given(st.text(max_size=50))
def test_texts_survive_as_printable_ascii(text: str):
    (_, message) = trailers("INTERNAL", text.encode("utf-8", "replace").decode())[1]
    assert all(0x20 <= byte <= 0x7E for byte in message)
    assert unquote(message.decode()) == text.encode("utf-8", "replace").decode()


def test_long_texts_are_cut():
    (_, message) = trailers("INTERNAL", "x" * 10 * MAX_DETAILS)[1]
    assert message == b"x" * MAX_DETAILS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"4m", 4e-3), (b"5u", 5e-6), (b"99999999n", 0.1)],
)
def test_timeouts(text: bytes, seconds: float):
    assert read_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", [b"", b"S", b"1", b"1s", b"1.5S", b"-1S", b"123456789S", b"1S "])
def test_malformed_timeouts(text: bytes):
    with pytest.raises(InvalidRequest, match="expected up to 8 digits and one of HMSmun"):
        read_timeout(text)


def test_prefixes():
    assert prefix(258) == b"\0\0\0\1\2"
    assert prefix(1, is_compressed=True) == b"\1\0\0\0\1"
