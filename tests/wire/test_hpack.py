"""HPACK: the examples of RFC 7541, appendix C, limits, and blocks that are malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.hpack import (
    STATIC_TABLE,
    TABLE_BYTES,
    Field,
    HeaderListTooLarge,
    HpackDecoder,
    HpackEncoder,
    HpackError,
    decode_integer,
    encode_integer,
    huffman_codes,
)

LIMIT = 1 << 16


def fields(text: str) -> list[Field]:
    """One field a line, as the RFC prints them."""
    made = []
    for line in text.strip().splitlines():
        name, _, value = line.strip().rpartition(": ")
        made.append((name.encode(), value.encode()))
    return made


def decode(block: bytes, **limits: int) -> list[Field]:
    return HpackDecoder(limits.pop("max_list_bytes", LIMIT), **limits).decode(block)


def huffman(text: bytes) -> bytes:
    """A string literal in the Huffman code."""
    codes, bits, num_bits = huffman_codes(), 0, 0
    for byte in text:
        code, length = codes[byte]
        bits, num_bits = bits << length | code, num_bits + length
    padding = -num_bits % 8
    data = (bits << padding | (1 << padding) - 1).to_bytes((num_bits + padding) // 8)
    return encode_integer(len(data), 7, 0x80) + data


def literal(name: bytes, value: bytes, flags: int = 0) -> bytes:
    strings = (encode_integer(len(text), 7) + text for text in (name, value))
    return bytes((flags,)) + b"".join(strings)


@pytest.mark.parametrize(
    ("value", "num_bits", "data"), [(10, 5, "0a"), (1337, 5, "1f9a0a"), (42, 8, "2a")]
)
def test_integers_of_appendix_c_1(value, num_bits, data):
    assert encode_integer(value, num_bits) == bytes.fromhex(data)
    assert decode_integer(bytes.fromhex(data), 0, num_bits) == (value, len(data) // 2)


@pytest.mark.parametrize(
    ("data", "expected", "is_added"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572",
         (b"custom-key", b"custom-header"), True),
        ("040c2f73616d706c652f70617468", (b":path", b"/sample/path"), False),
        ("100870617373776f726406736563726574", (b"password", b"secret"), False),
        ("82", (b":method", b"GET"), False),
    ],
)  # fmt: skip
def test_fields_of_appendix_c_2(data, expected, is_added):
    decoder = HpackDecoder(LIMIT)
    assert decoder.decode(bytes.fromhex(data)) == [expected]
    assert list(decoder.table) == ([expected] if is_added else [])
    assert decoder.num_changes == is_added


FIRST = """
:method: GET
:scheme: http
:path: /
:authority: www.example.com
"""
SECOND = FIRST + "cache-control: no-cache"
THIRD = """
:method: GET
:scheme: https
:path: /index.html
:authority: www.example.com
custom-key: custom-value
"""
TABLES = [
    (57, ":authority: www.example.com"),
    (110, "cache-control: no-cache\n:authority: www.example.com"),
    (164, "custom-key: custom-value\ncache-control: no-cache\n:authority: www.example.com"),
]
REQUESTS = {
    "c3": [
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ],
    "c4": [
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ],
}


@pytest.mark.parametrize("section", REQUESTS)
def test_requests_of_appendix_c_3_and_4(section):
    decoder = HpackDecoder(LIMIT)
    for block, text, (size, table) in zip(
        REQUESTS[section], (FIRST, SECOND, THIRD), TABLES, strict=True
    ):
        assert decoder.decode(bytes.fromhex(block)) == fields(text)
        assert list(decoder.table) == fields(table)
        assert decoder.table_bytes == size


ANSWERS = [
    """
    :status: 302
    cache-control: private
    date: Mon, 21 Oct 2013 20:13:21 GMT
    location: https://www.example.com
    """,
    """
    :status: 307
    cache-control: private
    date: Mon, 21 Oct 2013 20:13:21 GMT
    location: https://www.example.com
    """,
    """
    :status: 200
    cache-control: private
    date: Mon, 21 Oct 2013 20:13:22 GMT
    location: https://www.example.com
    content-encoding: gzip
    set-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1
    """,
]
# The bytes of the table, of 256, and its entries by their place in the answer, newest first.
ANSWER_TABLES = [(222, [3, 2, 1, 0]), (222, [0, 3, 2, 1]), (215, [5, 4, 2])]
BLOCKS = {
    "c5": [
        "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d54"
        "6e1768747470733a2f2f7777772e6578616d706c652e636f6d",
        "4803333037c1c0bf",
        "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f"
        "3d4153444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076"
        "657273696f6e3d31",
    ],
    "c6": [
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad1718"
        "63c78f0b97c8e9ae82ae43d3",
        "4883640effc1c0bf",
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7"
        "b335dfdfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
    ],
}


@pytest.mark.parametrize("section", BLOCKS)
def test_answers_of_appendix_c_5_and_6_evict(section):
    decoder = HpackDecoder(LIMIT, max_table_bytes=256)
    for block, text, (size, order) in zip(BLOCKS[section], ANSWERS, ANSWER_TABLES, strict=True):
        given = fields(text)
        assert decoder.decode(bytes.fromhex(block)) == given
        assert list(decoder.table) == [given[place] for place in order]
        assert decoder.table_bytes == size


names = st.binary(min_size=1, max_size=20)
values = st.binary(max_size=40)
lists = st.lists(
    st.tuples(names, values) | st.sampled_from(STATIC_TABLE) | st.just((b"grpc-status", b"0")),
    max_size=8,
)


@given(st.lists(st.tuples(lists, st.none() | st.sampled_from([0, 100, 4096, 10_000])), max_size=6))
def test_what_is_encoded_is_decoded(blocks):
    repeated = [(b"grpc-status", b"0"), *(blocks[0][0][:3] if blocks else [])]
    encoder, decoder = HpackEncoder(repeated), HpackDecoder(LIMIT)
    for given_fields, limit in blocks:
        if limit is not None:
            encoder.limit_table(limit)
        for _ in range(3):
            assert decoder.decode(encoder.encode(tuple(given_fields))) == given_fields


@given(values)
def test_huffman_strings_are_decoded(text):
    block = b"\x00" + huffman(b"name") + huffman(text)
    assert decode(block) == [(b"name", text)]


def test_a_repeated_field_takes_one_byte_once_it_is_known():
    encoder = HpackEncoder([(b"content-type", b"application/grpc")])
    head = ((b":status", b"200"), (b"content-type", b"application/grpc"))
    assert len(encoder.encode(head)) > 16
    assert encoder.encode(head) == b"\x88\xbe"
    assert encoder.encode(head) is encoder.encode(head), "made once"


def test_equal_blocks_mean_equal_fields_while_the_table_stays():
    decoder = HpackDecoder(LIMIT)
    decoder.decode(literal(b"a", b"1", 0x40))
    before = decoder.num_changes
    assert decoder.decode(b"\xbe") == decoder.decode(b"\xbe") == [(b"a", b"1")]
    assert decoder.num_changes == before
    decoder.decode(literal(b"b", b"2", 0x40))
    assert decoder.num_changes > before
    assert decoder.decode(b"\xbe") == [(b"b", b"2")]


def test_an_entry_larger_than_the_table_empties_it():
    decoder = HpackDecoder(LIMIT)
    decoder.decode(literal(b"a", b"1", 0x40))
    decoder.decode(literal(b"b", bytes(TABLE_BYTES), 0x40))
    assert decoder.table == () and decoder.table_bytes == 0


def test_the_peer_may_shrink_the_table_before_the_first_field():
    decoder = HpackDecoder(LIMIT)
    decoder.decode(literal(b"a", b"1", 0x40))
    assert decoder.decode(b"\x20" + encode_integer(100, 5, 0x20) + b"\x82") == [
        (b":method", b"GET")
    ]
    assert decoder.table == ()
    decoder.decode(literal(b"long name", bytes(60), 0x40))
    assert decoder.table == ()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (b"\x80", "no entry 0"),
        (b"\xbe", "no entry 62"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "integer exceeds"),
        (b"\xff\x80\x80\x80\x80\x80\x80\x80", "integer exceeds"),
        (b"\xff\x80", "ends within an integer"),
        (b"\x7f", "ends within an integer"),
        (b"\x00", "string was expected"),
        (b"\x00\x01a", "string was expected"),
        (b"\x00\x05a", "runs past the end"),
        (b"\x00\x01a\x7f\xff\xff\xff\x7f", "integer exceeds"),
        (b"\x7e\x01a", "no entry 62"),
        (b"\x3f\xe2\x1f", "a table of 4097 bytes; expected at most 4096"),
        (b"\x82\x20", "follows a field"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "end symbol"),
        (b"\x00\x01a\x81\x00", "not padded with ones"),
        (b"\x00\x01a\x82\x1f\xff", "not padded with ones"),
    ],
)
def test_malformed_blocks(block, words):
    with pytest.raises(HpackError, match=words):
        decode(block)


@given(st.binary(max_size=200))
def test_any_block_is_decoded_or_refused(block):
    try:
        decoded = decode(block)
    except HpackError as error:
        assert str(error)
    else:
        encoder, decoder = HpackEncoder(), HpackDecoder(LIMIT)
        assert decoder.decode(encoder.encode(tuple(decoded))) == decoded


def test_a_list_that_is_too_large_keeps_the_tables_in_step():
    decoder = HpackDecoder(1000, max_fields=3)
    large = literal(b"large", bytes(800), 0x40)
    with pytest.raises(HeaderListTooLarge, match="exceed 1000 bytes"):
        decoder.decode(large + b"\xbe" + literal(b"a", b"1", 0x40))
    assert decoder.decode(b"\xbe") == [(b"a", b"1")]
    with pytest.raises(HeaderListTooLarge, match="more than 3 headers"):
        decoder.decode(b"\xbe" * 4)
    assert decoder.decode(b"\xbe" * 3) == [(b"a", b"1")] * 3


def test_a_bomb_of_references_is_not_stored():
    """One large entry, named again and again: 4 kB on the wire, 16 MB as a list."""
    decoder = HpackDecoder(LIMIT)
    decoder.decode(literal(b"a", bytes(4000), 0x40))
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(b"\xbe" * 4096)
