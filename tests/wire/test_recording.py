"""Segments of a recording: what is written reads back, and damage ends a segment."""

import pytest

from penstock.types import Tensor
from penstock.wire.recording import (
    OK,
    RecordedRequest,
    SegmentHeader,
    decode_header,
    decode_records,
    describe,
    encode_description,
    encode_header,
    encode_record,
)

HEADER = SegmentHeader("m", 1, 0.5, 1000.0)


def record(number: int, data: bytes = b"abcd") -> bytes:
    tensor = describe(Tensor("x", "UINT8", (len(data),), data))
    made = RecordedRequest(1000.0 + number, str(number), "1", OK, 0.01, "", inputs=(tensor,))
    return b"".join(encode_record(encode_description(made), [data]))


def segment(*records: bytes) -> bytes:
    return b"".join((encode_header(HEADER), *records))


def read(data: bytes) -> list[tuple[str, bytes]]:
    view = memoryview(data)
    found = decode_header(view)
    assert found is not None and found[0] == HEADER
    records = decode_records(view, found[1])
    return [
        (each.id, bytes(view[place : place + each.inputs[0].nbytes])) for each, place in records
    ]


def test_records_read_back() -> None:
    data = segment(record(0), record(1, b""), record(2, b"z" * 1000))
    assert read(data) == [("0", b"abcd"), ("1", b""), ("2", b"z" * 1000)]


@pytest.mark.parametrize("num_missing", range(1, len(record(1)) + 1))
def test_a_record_that_is_cut_off_is_skipped(num_missing: int) -> None:
    assert read(segment(record(0), record(1))[:-num_missing]) == [("0", b"abcd")]


@pytest.mark.parametrize("place", range(len(record(1))))
def test_a_damaged_record_ends_the_segment(place: int) -> None:
    broken = bytearray(record(1))
    broken[place] ^= 1
    assert read(segment(record(0), bytes(broken), record(2))) == [("0", b"abcd")]


@pytest.mark.parametrize("size", range(len(encode_header(HEADER))))
def test_a_header_that_is_cut_off_is_none(size: int) -> None:
    assert decode_header(memoryview(encode_header(HEADER)[:size])) is None


def test_another_file_has_no_header() -> None:
    assert decode_header(memoryview(b"PK\x03\x04" + bytes(100))) is None


def test_a_redacted_tensor_has_no_bytes() -> None:
    tensor = Tensor("secret", "BYTES", (2,), b"\x03\x00\x00\x00abc\x00\x00\x00\x00")
    made = describe(tensor, is_redacted=True)
    assert (made.nbytes, made.is_redacted, made.shape) == (0, True, (2,))
