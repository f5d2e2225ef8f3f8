"""gzip and deflate bodies, within a limit. Pure."""

from __future__ import annotations

import zlib

from penstock.errors import InvalidRequest, TooLarge
from penstock.types import Buffer

# zlib's window bits by encoding.
ENCODINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
LEVEL = 1
# Limit on the members of a gzip body: empty ones do not count towards the size limit, and each
# costs a copy of the remaining data.
MAX_MEMBERS = 1024


def inflate(data: Buffer, encoding: bytes, max_bytes: int) -> bytes:
    """Decompress a body. Refused if it is broken, truncated or exceeds `max_bytes`, which applies
    to all members of a gzip body together (RFC 1952, section 2.2)."""
    parts: list[bytes] = []
    left, rest = max_bytes, bytes(data)
    while True:
        inflater = zlib.decompressobj(ENCODINGS[encoding])
        try:
            parts.append(inflater.decompress(rest, left + 1))
        except zlib.error as error:
            name, text = encoding.decode(), f"the body is not {encoding.decode()}: {error}"
            if parts:
                text = f"{len(rest)} bytes follow the {name} body, and are not {name}"
            raise InvalidRequest(text) from None
        left -= len(parts[-1])
        if left < 0:
            text = f"the request body inflates to more than {max_bytes} bytes (--max-body-bytes)"
            raise TooLarge(text)
        if not inflater.eof:
            raise InvalidRequest(f"the {encoding.decode()} body is cut off")
        rest = inflater.unused_data
        if not rest:
            return b"".join(parts)
        if encoding != b"gzip" or len(parts) == MAX_MEMBERS:
            raise InvalidRequest(f"{len(rest)} bytes follow the {encoding.decode()} body")


def deflate(data: bytes, encoding: bytes) -> bytes:
    deflater = zlib.compressobj(LEVEL, wbits=ENCODINGS[encoding])
    return deflater.compress(data) + deflater.flush()
