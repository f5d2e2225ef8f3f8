"""gzip and deflate bodies, within a limit. Pure."""

from __future__ import annotations

import zlib

from penstock.errors import InvalidRequest, TooLarge
from penstock.types import Buffer

# zlib's window bits by encoding.
ENCODINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
LEVEL = 1


def inflate(data: Buffer, encoding: bytes, max_bytes: int) -> bytes:
    """Decompress a body; refuse one that is invalid, truncated or larger than the limit."""
    inflater = zlib.decompressobj(ENCODINGS[encoding])
    try:
        body = inflater.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding.decode()}: {error}") from None
    if len(body) > max_bytes:
        raise TooLarge(
            f"the request body inflates to more than {max_bytes} bytes (--max-body-bytes)"
        )
    if not inflater.eof:
        raise InvalidRequest(f"the {encoding.decode()} body is cut off")
    if inflater.unused_data:
        raise InvalidRequest(
            f"{len(inflater.unused_data)} bytes follow the {encoding.decode()} body"
        )
    return body


def deflate(data: bytes, encoding: bytes) -> bytes:
    deflater = zlib.compressobj(LEVEL, wbits=ENCODINGS[encoding])
    return deflater.compress(data) + deflater.flush()
