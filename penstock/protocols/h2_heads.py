"""The heads of an HTTP/2 connection's requests: header blocks, their limits, and what they mean.

Blocks are decoded in the order in which they came, and equal blocks only once: clients send the
same head again and again, in a few bytes.
"""

from __future__ import annotations

import contextlib
import re

from penstock.config import HttpLimits
from penstock.protocols.http_reader import CREDENTIALS, MessageHead
from penstock.wire import h2_frames as h2
from penstock.wire.h2_frames import H2Error, StreamViolation, Violation
from penstock.wire.hpack import ENTRY_BYTES, Field, HeaderListTooLarge, HpackDecoder, HpackError

MAX_CONTINUATIONS = 32
# Header blocks whose parse is remembered.
MAX_KNOWN_BLOCKS = 64
MAX_KNOWN_BLOCK_BYTES = 1024
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]$")
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
# Section 8.2.2.
_CONNECTION_FIELDS = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class HeadReader:
    """Decodes blocks; `number` is the stream whose block is incomplete, 0 if none is."""

    def __init__(self, limits: HttpLimits) -> None:
        self._max_block_bytes = 2 * limits.max_header_bytes
        max_list_bytes = limits.max_header_bytes + ENTRY_BYTES * limits.max_headers
        self._decoder = HpackDecoder(max_list_bytes, limits.max_headers)
        # Heads by their block, while the decoder's table is as `_known_at` says.
        self._known: dict[bytes, MessageHead] = {}
        self._known_at = 0
        self.number = 0
        self._flags = 0
        self._fragments: list[bytes] = []
        self._num_bytes = 0

    def check_length(self, length: int) -> None:
        """Refuse a fragment before it is stored. A valid list of headers is hardly longer as a
        block."""
        if self._num_bytes + length > self._max_block_bytes:
            raise Violation(H2Error.ENHANCE_YOUR_CALM, "the block of headers is too long")

    def begin(self, number: int, flags: int, fragment: bytes) -> None:
        """Keep the start of a block, without END_HEADERS."""
        self.number, self._flags = number, flags
        self._fragments, self._num_bytes = [fragment], len(fragment)

    def go_on(self, flags: int, fragment: bytes) -> tuple[int, bytes] | None:
        """Add a fragment; return the flags of HEADERS and the block when it is complete."""
        if not self.number:
            raise Violation(H2Error.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        if len(self._fragments) > MAX_CONTINUATIONS:
            raise Violation(H2Error.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        self._fragments.append(fragment)
        self._num_bytes += len(fragment)
        if not flags & h2.END_HEADERS:
            return None
        block = b"".join(self._fragments)
        self._fragments, self._num_bytes, self.number = [], 0, 0
        return self._flags, block

    def read(self, block: bytes) -> MessageHead:
        """Return the head of a request. One that is too large has the error as its `note`."""
        head = self._known.get(block)
        if head is not None and self._known_at == self._decoder.num_changes:
            return head
        before = self._decoder.num_changes
        try:
            head = make_head(self._decode(block))
        except HeaderListTooLarge as error:
            head = MessageHead(b"", b"", {})
            head.note = error
        if before == self._decoder.num_changes and len(block) <= MAX_KNOWN_BLOCK_BYTES:
            if before != self._known_at or len(self._known) >= MAX_KNOWN_BLOCKS:
                self._known.clear()
                self._known_at = before
            self._known[block] = head
        return head

    def skip(self, block: bytes) -> None:
        """Decode a block whose fields nobody wants."""
        with contextlib.suppress(HeaderListTooLarge):
            self._decode(block)

    def _decode(self, block: bytes) -> list[Field]:
        try:
            return self._decoder.decode(block)
        except HpackError as error:
            raise Violation(H2Error.COMPRESSION_ERROR, str(error)) from None


def make_head(fields: list[Field]) -> MessageHead:
    """Return the head of a request; StreamViolation if it is malformed (section 8.1.1)."""
    pseudo: dict[bytes, bytes] = {}
    headers: dict[bytes, bytes] = {}
    for name, value in fields:
        if name.startswith(b":"):
            if headers or name not in _PSEUDO or name in pseudo:
                raise _malformed(f"the pseudo-header {name.decode('latin-1')} is misplaced")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name) or _BAD_VALUE.search(value):
            raise _malformed("a header contains characters that are not allowed")
        if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            raise _malformed(f"the header {name.decode()} is not allowed in HTTP/2")
        if name in headers and name in CREDENTIALS:
            # For the gate, which refuses them; no value of a header holds a line feed.
            value = headers[name] + b"\n" + value
        headers[name] = value
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    if method is None or not path or b":scheme" not in pseudo:
        raise _malformed("a request needs :method, :scheme and :path")
    if b":authority" in pseudo:
        headers.setdefault(b"host", pseudo[b":authority"])
    head = MessageHead(method, b"", headers)
    # As it came: the methods of gRPC have one spelling.
    head.path = path
    return head


def _malformed(text: str) -> StreamViolation:
    return StreamViolation(H2Error.PROTOCOL_ERROR, text)
