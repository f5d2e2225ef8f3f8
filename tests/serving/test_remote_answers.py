"""Answers as bytes that other servers read: whole, or not at all."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.answer_store import StoredAnswer, StoredTensor
from penstock.serving.remote_answers import FORMAT, decode, encode
from penstock.types import TensorSpec

DIGEST = b"d" * 32
OUTPUTS = (TensorSpec("y", "INT16", (-1,)), TensorSpec("t", "BYTES", (1,)))
TEXT = StoredTensor("t", "BYTES", (1, 1), b"\x02\0\0\0hi")


def answer(data: bytes = b"abcd", shape: tuple[int, ...] = (1, 2), **more) -> StoredAnswer:
    return StoredAnswer((StoredTensor("y", "INT16", shape, data), TEXT), **more)


@given(
    st.binary(max_size=20).filter(lambda data: len(data) % 2 == 0),
    st.none() | st.dictionaries(st.text(max_size=3), st.booleans() | st.integers(0, 9), max_size=2),
    st.booleans(),
)
def test_an_answer_is_read_as_it_was_written(data, parameters, has_form):
    made = answer(data, (1, len(data) // 2), parameters=parameters, has_form=has_form)
    assert decode(encode(DIGEST, made), DIGEST, OUTPUTS) == made


@given(st.binary(max_size=60))
def test_other_bytes_are_no_answer(data):
    assert decode(data, DIGEST, OUTPUTS) is None


@given(st.integers(0, 200), st.binary(min_size=1, max_size=1))
def test_changed_bytes_are_an_answer_to_this_request_or_none(place, byte):
    written = bytearray(encode(DIGEST, answer()))
    written[place % len(written)] = byte[0]
    found = decode(bytes(written), DIGEST, OUTPUTS)
    if found is not None:
        assert [each.name for each in found.tensors] == ["y", "t"]
        assert (
            len(found.tensors[0].data) == 2 * found.tensors[0].shape[0] * found.tensors[0].shape[1]
        )


def cut() -> bytes:
    return encode(DIGEST, answer())[:-1]


def of_another_request() -> bytes:
    return encode(b"e" * 32, answer())


def of_another_format() -> bytes:
    parts = msgspec.msgpack.decode(encode(DIGEST, answer()))
    return msgspec.msgpack.encode([FORMAT + 1, *parts[1:]])


def too_short() -> bytes:
    return encode(DIGEST, answer(b"ab"))


def negative() -> bytes:
    return encode(DIGEST, answer(b"", (-1, 0)))


def in_another_order() -> bytes:
    return encode(DIGEST, StoredAnswer(answer().tensors[::-1]))


def with_one_output() -> bytes:
    return encode(DIGEST, StoredAnswer(answer().tensors[:1]))


def with_a_broken_text() -> bytes:
    text = StoredTensor("t", "BYTES", (1, 1), b"\xff\0\0\0hi")
    return encode(DIGEST, StoredAnswer((answer().tensors[0], text)))


@pytest.mark.parametrize(
    "write",
    [
        cut, of_another_request, of_another_format, too_short, negative, in_another_order,
        with_one_output, with_a_broken_text,
    ],
)  # fmt: skip
def test_what_does_not_fit_the_request_is_no_answer(write):
    assert decode(write(), DIGEST, OUTPUTS) is None
