"""Tensors of calls between a worker's model and other models, on their way through a socket.

Small ones travel in the frame. Larger ones get a segment of their own, whose descriptor travels
with the frame: unlike memory that both ends share, nobody has to give it back, whichever end dies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import BackendFailed
from penstock.serving.parcels import headers_of, read_pieces
from penstock.serving.slab import Segment
from penstock.types import Tensor
from penstock.wire import frames

# Above this, a new segment costs less than two copies through the socket.
INLINE_BYTES = 64 * 1024


class Packed(NamedTuple):
    """A parcel, and the segment that it lies in, if any. Close it when the frame is sent."""

    parcel: frames.Parcel
    segment: Segment | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        return () if self.segment is None else (self.segment.fd,)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


def pack(tensors: Sequence[Tensor]) -> Packed:
    """Copy tensors into a parcel. BackendFailed if there is no memory for them."""
    pieces = headers_of(tensors)
    nbytes = sum(piece.nbytes for piece in pieces)
    if nbytes <= INLINE_BYTES:
        return Packed(frames.Parcel(pieces, b"".join([tensor.data for tensor in tensors])))
    try:
        segment = Segment(nbytes)
    except OSError as error:
        raise BackendFailed(f"no shared memory for {nbytes} bytes of tensors: {error}") from None
    start = 0
    for tensor in tensors:
        end = start + len(tensor.data)
        segment.view[start:end] = tensor.data
        start = end
    return Packed(frames.Parcel(pieces, offset=0), segment)


def unpack(parcel: frames.Parcel, fds: Sequence[int]) -> list[Tensor]:
    """Return the tensors of a parcel, which keep their memory alive. The descriptors are closed."""
    if parcel.offset is None or not fds:
        for fd in fds:
            os.close(fd)
        return read_pieces(parcel, memoryview(b""))
    (fd,) = fds
    try:
        segment = Segment(sum(piece.nbytes for piece in parcel.pieces), fd)
    except (OSError, ValueError) as error:
        raise BackendFailed(f"the tensors of a call cannot be mapped: {error}") from None
    tensors = read_pieces(parcel, segment.view)
    segment.close()
    return tensors
