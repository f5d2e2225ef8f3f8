"""HPACK, the compression of HTTP/2 headers (RFC 7541): a decoder and a small encoder. Pure.

Each direction of a connection has one dynamic table, so every block must be decoded, in order, also
those of requests that are refused. The encoder indexes only the fields that it is told will repeat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

Field = tuple[bytes, bytes]

# Section 4.1: what each entry of a table counts beyond its text.
ENTRY_BYTES = 32
# SETTINGS_HEADER_TABLE_SIZE if nothing else is said (RFC 9113, section 6.5.2).
TABLE_BYTES = 4096
# No length or index of a valid block is larger.
MAX_INTEGER = 1 << 24

_INDEXED, _INCREMENTAL, _SIZE_UPDATE = 0x80, 0x40, 0x20


class HpackError(Exception):
    """The block is malformed. The connection must end: the tables of both sides differ from now."""


class HeaderListTooLarge(Exception):
    """The fields exceed the limit. The block was decoded to its end: the connection can go on."""


# Appendix A.
STATIC_TABLE: tuple[Field, ...] = (
    (b":authority", b""), (b":method", b"GET"), (b":method", b"POST"), (b":path", b"/"),
    (b":path", b"/index.html"), (b":scheme", b"http"), (b":scheme", b"https"),
    *((b":status", code) for code in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    (b"accept-charset", b""), (b"accept-encoding", b"gzip, deflate"),
    *((name, b"") for name in (
        b"accept-language", b"accept-ranges", b"accept", b"access-control-allow-origin", b"age",
        b"allow", b"authorization", b"cache-control", b"content-disposition", b"content-encoding",
        b"content-language", b"content-length", b"content-location", b"content-range",
        b"content-type", b"cookie", b"date", b"etag", b"expect", b"expires", b"from", b"host",
        b"if-match", b"if-modified-since", b"if-none-match", b"if-range", b"if-unmodified-since",
        b"last-modified", b"link", b"location", b"max-forwards", b"proxy-authenticate",
        b"proxy-authorization", b"range", b"referer", b"refresh", b"retry-after", b"server",
        b"set-cookie", b"strict-transport-security", b"transfer-encoding", b"user-agent", b"vary",
        b"via", b"www-authenticate",
    )),
)  # fmt: skip
_NUM_STATIC = len(STATIC_TABLE)
_STATIC_FIELDS = {field: index for index, field in reversed([*enumerate(STATIC_TABLE, 1)])}
_STATIC_NAMES = {field[0]: index for index, field in reversed([*enumerate(STATIC_TABLE, 1)])}

# Appendix B: the symbols of each code length. The code is canonical, so the codes follow from it.
# The code of 30 ones, which ends a string, is left out: it must not occur.
_SYMBOLS: dict[int, bytes] = {
    5: b"012aceiost",
    6: b" %-./3456789=A_bdfghlmnpru",
    7: b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: b"&*,;XZ",
    10: b'!"()?',
    11: b"'+|",
    12: b"#>",
    13: b"\x00$@[]~",
    14: b"^}",
    15: b"<`{",
    19: b"\\\xc3\xd0",
    20: bytes.fromhex("808283a2b8c2e0e2"),
    21: bytes.fromhex("99a1a7acb0b1b3d1d8d9e3e5e6"),
    22: bytes.fromhex("818485868892 9a9ca0a3a4a9aaadb2b5b9babbbdbec4c6e4e8e9"),
    23: bytes.fromhex("0187898a8b8c8d8f9395969798 9b9d9ea5a6a8aeafb4b6b7bcbfc5e7ef"),
    24: bytes.fromhex("098e9091949fabced7e1eced"),
    25: bytes.fromhex("c7cfeaeb"),
    26: bytes.fromhex("c0c1c8c9cacdd2d5dadbeef0f2f3ff"),
    27: bytes.fromhex("cbccd3d4d6dddedff1f4f5f6f7f8fafbfcfdfe"),
    28: bytes.fromhex("02030405060708 0b0c0e0f1011121314151718191a1b1c1d1e1f7fdcf9"),
    30: b"\n\r\x16",
}


def huffman_codes() -> dict[int, tuple[int, int]]:
    """Return the code of each symbol and its length in bits."""
    codes: dict[int, tuple[int, int]] = {}
    code = length = 0
    for num_bits, symbols in _SYMBOLS.items():
        code <<= num_bits - length
        length = num_bits
        for symbol in symbols:
            codes[symbol] = (code, length)
            code += 1
    return codes


class _Huffman:
    """A state machine that reads four bits at a time. A state is an inner node of the code tree; no
    code is shorter than five bits, so a step emits at most one symbol."""

    def __init__(self) -> None:
        nodes: list[list[int | None]] = [[None, None]]
        # Leaves are negative: -1 - symbol.
        for symbol, (code, length) in huffman_codes().items():
            node = 0
            for shift in range(length - 1, 0, -1):
                bit = code >> shift & 1
                child = nodes[node][bit]
                if child is None:
                    nodes.append([None, None])
                    nodes[node][bit] = child = len(nodes) - 1
                node = child
            nodes[node][code & 1] = -1 - symbol
        self._steps: list[tuple[int, int] | None] = [
            self._step(nodes, state, nibble) for state in range(len(nodes)) for nibble in range(16)
        ]
        # Section 5.2: a string is padded with up to seven ones.
        self._ends = {0}
        node = 0
        for _ in range(7):
            child = nodes[node][1]
            assert child is not None and child > 0
            self._ends.add(node := child)

    @staticmethod
    def _step(nodes: list[list[int | None]], state: int, nibble: int) -> tuple[int, int] | None:
        """Return the next state and the symbol that ended, or -1; None if there is no such code."""
        symbol = -1
        for shift in (3, 2, 1, 0):
            child = nodes[state][nibble >> shift & 1]
            if child is None:
                return None
            if child < 0:
                symbol, child = -1 - child, 0
            state = child
        return state, symbol

    def decode(self, data: bytes) -> bytes:
        text, state, steps = bytearray(), 0, self._steps
        for byte in data:
            for nibble in (byte >> 4, byte & 15):
                step = steps[state << 4 | nibble]
                if step is None:
                    raise HpackError("a Huffman string contains the end symbol")
                state, symbol = step
                if symbol >= 0:
                    text.append(symbol)
        if state not in self._ends:
            raise HpackError("a Huffman string is not padded with ones")
        return bytes(text)


_huffman = _Huffman()


def decode_integer(data: bytes, position: int, num_bits: int) -> tuple[int, int]:
    """Return the integer whose prefix is the low bits of the byte at `position` (section 5.1), and
    the position after it."""
    mask = (1 << num_bits) - 1
    try:
        value = data[position] & mask
        position += 1
        if value < mask:
            return value, position
        shift = 0
        while True:
            byte = data[position]
            position += 1
            value += (byte & 0x7F) << shift
            shift += 7
            if value > MAX_INTEGER or shift > 28:
                raise HpackError(f"an integer exceeds {MAX_INTEGER}")
            if byte < 0x80:
                return value, position
    except IndexError:
        raise HpackError("the block ends within an integer") from None


def encode_integer(value: int, num_bits: int, flags: int = 0) -> bytes:
    """Encode an integer; `flags` are the high bits of its first byte."""
    mask = (1 << num_bits) - 1
    if value < mask:
        return bytes((flags | value,))
    data = bytearray((flags | mask,))
    value -= mask
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _decode_string(data: bytes, position: int) -> tuple[bytes, int]:
    if position >= len(data):
        raise HpackError("the block ends where a string was expected")
    is_huffman = data[position] & 0x80
    length, position = decode_integer(data, position, 7)
    end = position + length
    if end > len(data):
        raise HpackError("a string runs past the end of the block")
    text = data[position:end]
    return _huffman.decode(text) if is_huffman else text, end


def _field_bytes(field: Field) -> int:
    return len(field[0]) + len(field[1]) + ENTRY_BYTES


class _DynamicTable:
    """A dynamic table (section 2.3.2), newest entry first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.entries: deque[Field] = deque()

    def add(self, field: Field) -> None:
        num_bytes = _field_bytes(field)
        self._shrink(self.max_bytes - num_bytes)
        if num_bytes <= self.max_bytes:
            self.entries.appendleft(field)
            self.num_bytes += num_bytes

    def resize(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._shrink(max_bytes)

    def _shrink(self, max_bytes: int) -> None:
        while self.entries and self.num_bytes > max_bytes:
            self.num_bytes -= _field_bytes(self.entries.pop())


class HpackDecoder:
    """Decodes the blocks of one direction. `num_changes` counts changes of the dynamic table: while
    it stays the same, equal blocks mean equal fields."""

    def __init__(
        self, max_list_bytes: int, max_fields: int = 100, max_table_bytes: int = TABLE_BYTES
    ) -> None:
        """`max_table_bytes` is what this side has announced as SETTINGS_HEADER_TABLE_SIZE;
        `max_list_bytes` counts as SETTINGS_MAX_HEADER_LIST_SIZE does."""
        self._max_list_bytes = max_list_bytes
        self._max_fields = max_fields
        self._max_table_bytes = max_table_bytes
        self._table = _DynamicTable(max_table_bytes)
        self.num_changes = 0

    @property
    def table(self) -> Sequence[Field]:
        return tuple(self._table.entries)

    @property
    def table_bytes(self) -> int:
        return self._table.num_bytes

    def decode(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        position, end, left = 0, len(block), self._max_list_bytes
        may_resize = True
        while position < end:
            byte = block[position]
            if byte & 0xE0 == _SIZE_UPDATE:
                if not may_resize:
                    raise HpackError("a change of the table's size follows a field")
                position = self._resize(block, position)
                continue
            may_resize = False
            if byte & _INDEXED:
                index, position = decode_integer(block, position, 7)
                field = self._entry(index)
            else:
                field, position = self._literal(block, position, bool(byte & _INCREMENTAL))
            left -= _field_bytes(field)
            if left >= 0 and len(fields) <= self._max_fields:
                fields.append(field)
        if left < 0:
            raise HeaderListTooLarge(f"the headers exceed {self._max_list_bytes} bytes")
        if len(fields) > self._max_fields:
            raise HeaderListTooLarge(f"there are more than {self._max_fields} headers")
        return fields

    def _resize(self, block: bytes, position: int) -> int:
        max_bytes, position = decode_integer(block, position, 5)
        if max_bytes > self._max_table_bytes:
            limit = self._max_table_bytes
            raise HpackError(f"a table of {max_bytes} bytes; expected at most {limit}")
        self._table.resize(max_bytes)
        self.num_changes += 1
        return position

    def _literal(self, block: bytes, position: int, is_added: bool) -> tuple[Field, int]:
        index, position = decode_integer(block, position, 6 if is_added else 4)
        if index:
            name = self._entry(index)[0]
        else:
            name, position = _decode_string(block, position)
        value, position = _decode_string(block, position)
        field = (name, value)
        if is_added:
            self._table.add(field)
            self.num_changes += 1
        return field, position

    def _entry(self, index: int) -> Field:
        if 0 < index <= _NUM_STATIC:
            return STATIC_TABLE[index - 1]
        entries = self._table.entries
        if not 0 < index <= _NUM_STATIC + len(entries):
            raise HpackError(f"there is no entry {index} in the tables")
        return entries[index - _NUM_STATIC - 1]


class HpackEncoder:
    """Encodes the blocks of one direction. Only the fields of `repeated` enter the dynamic table,
    and none ever leaves it, so a block is made once and then copied."""

    def __init__(self, repeated: Iterable[Field] = ()) -> None:
        self._repeated = frozenset(repeated)
        assert sum(map(_field_bytes, self._repeated)) <= TABLE_BYTES, "none may be evicted"
        self._table = _DynamicTable(TABLE_BYTES)
        self._blocks: dict[tuple[Field, ...], bytes] = {}
        # Sizes to announce with the next block.
        self._resizes: list[int] = []

    def limit_table(self, max_bytes: int) -> None:
        """Apply the peer's SETTINGS_HEADER_TABLE_SIZE. A table that is too small for all repeated
        fields is not used at all."""
        size = TABLE_BYTES if max_bytes >= TABLE_BYTES else 0
        if size != self._table.max_bytes:
            self._table.resize(size)
            self._blocks.clear()
            # Section 4.2: the smallest size since the last block, then the last.
            self._resizes = [0, size] if size else [0]

    def encode(self, fields: tuple[Field, ...]) -> bytes:
        block = self._blocks.get(fields)
        if block is None:
            num_entries = len(self._table.entries)
            block = b"".join([self._encode(field) for field in fields])
            if self._resizes:
                sizes = [encode_integer(size, 5, _SIZE_UPDATE) for size in self._resizes]
                self._resizes.clear()
                return b"".join((*sizes, block))
            if num_entries != len(self._table.entries):
                self._blocks.clear()
            elif all(field in self._repeated or field in _STATIC_FIELDS for field in fields):
                self._blocks[fields] = block
        return block

    def _encode(self, field: Field) -> bytes:
        if (index := _STATIC_FIELDS.get(field)) is not None:
            return encode_integer(index, 7, _INDEXED)
        name, value = field
        if field in self._repeated and self._table.max_bytes:
            entries = self._table.entries
            if field in entries:
                return encode_integer(_NUM_STATIC + 1 + entries.index(field), 7, _INDEXED)
            self._table.add(field)
            head = encode_integer(_STATIC_NAMES.get(name, 0), 6, _INCREMENTAL)
        else:
            head = encode_integer(_STATIC_NAMES.get(name, 0), 4)
        if name not in _STATIC_NAMES:
            head += encode_integer(len(name), 7) + name
        return b"".join((head, encode_integer(len(value), 7), value))
