"""Messages larger than a datagram: split into parts that are sent in order, and joined again.

Each part begins with a byte that marks the last one. Knows nothing of their content.
"""

from __future__ import annotations

from collections.abc import Iterator

# Payload bytes of a datagram: below the default limit of sockets.
PART_BYTES = 1 << 16
_MORE, _LAST = b"\x00", b"\x01"


def split(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PART_BYTES):
        end = start + PART_BYTES
        yield (_LAST if end >= len(data) else _MORE) + data[start:end]


class Joiner:
    """Reassembly of datagrams, in the order they were sent."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, datagram: bytes) -> bytes | None:
        """Return the whole message when its last part has arrived, else None."""
        self._parts.append(datagram[1:])
        if datagram[:1] == _MORE:
            return None
        data, self._parts = b"".join(self._parts), []
        return data
