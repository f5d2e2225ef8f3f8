"""Bodies come back as they were, and bombs do not go off."""

import contextlib
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequest, TooLarge
from penstock.wire.compression import MAX_MEMBERS, deflate, inflate


@given(st.binary(max_size=5000), st.sampled_from([b"gzip", b"deflate"]))
def test_round_trip(data, encoding):
    assert inflate(deflate(data, encoding), encoding, 5000) == data


def test_what_others_compress_is_understood():
    assert inflate(gzip.compress(b"hello"), b"gzip", 100) == b"hello"
    assert inflate(zlib.compress(b"hello"), b"deflate", 100) == b"hello"


def test_the_limit_is_on_what_comes_out():
    bomb = gzip.compress(bytes(1_000_000))
    assert len(bomb) < 2000
    with pytest.raises(TooLarge, match="more than 1000 bytes"):
        inflate(bomb, b"gzip", 1000)
    assert len(inflate(bomb, b"gzip", 1_000_000)) == 1_000_000


def test_all_members_of_a_gzip_body_count():
    members = [gzip.compress(bytes([index]) * 100) for index in range(5)]
    body = b"".join(members)
    expected = b"".join(bytes([index]) * 100 for index in range(5))
    assert inflate(memoryview(body), b"gzip", 500) == expected
    with pytest.raises(TooLarge, match="more than 499 bytes"):
        inflate(body, b"gzip", 499)
    for size in range(len(members[0]) + 1, len(body)):
        if size % len(members[0]):
            with pytest.raises(InvalidRequest, match="cut off|follow"):
                inflate(body[:size], b"gzip", 500)
    with pytest.raises(InvalidRequest, match="bytes follow"):
        inflate(gzip.compress(b"") * (MAX_MEMBERS + 1), b"gzip", 500)
    with pytest.raises(InvalidRequest, match="bytes follow"):
        inflate(deflate(b"a", b"deflate") * 2, b"deflate", 500)


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_broken_bodies_are_refused(encoding):
    whole = deflate(b"hello, world" * 10, encoding)
    for size in range(len(whole)):
        with pytest.raises(InvalidRequest):
            inflate(whole[:size], encoding, 1000)
    with pytest.raises(InvalidRequest, match="bytes follow"):
        inflate(whole + b"more", encoding, 1000)
    with pytest.raises(InvalidRequest):
        inflate(b"not compressed", encoding, 1000)


@given(st.binary(max_size=200), st.sampled_from([b"gzip", b"deflate"]))
def test_noise_never_raises_anything_else(data, encoding):
    with contextlib.suppress(InvalidRequest):
        inflate(data, encoding, 1000)
