"""The link between the core and a shard: a socket of frames, and bodies in parcels.

Each side writes to its own segment and reads the other's: `Outbox` writes, `unpack` reads, and
`Line` sends the frames. All of it belongs to one event loop. Also explains why a port is
unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from penstock.errors import ConfigError, TooLarge
from penstock.serving.parcels import headers_of, read_pieces
from penstock.serving.slab import Extents, Segment
from penstock.types import Tensor
from penstock.wire import frames

log = logging.getLogger("penstock.line")

# Fewer bytes travel in the frame, which saves managing the segment and a Release. CPU of both ends
# and a worker thread per request, inline and in shared memory (2 cores, 2026-11-15): 64 bytes 50
# and 72 us, 16 kB 63 and 79 us, 32 kB 106 and 77 us.
INLINE_BYTES = 16 * 1024
# Share of a socket buffer for one datagram.
MAX_SENT_BYTES = frames.MAX_FRAME_BYTES // 4
# Limit on a message without its body; with an inline body it still fits a frame.
MAX_HEAD_BYTES = MAX_SENT_BYTES - 2 * INLINE_BYTES

Received = TypeVar("Received")


def why_not_listen(host: str, port: int) -> str:
    """Return why the port cannot be bound; empty if it can. gRPC itself does not say."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return listen_problem(error)
    return ""


def cannot_listen(host: str, port: int, what: str, reason: str | OSError) -> ConfigError:
    if isinstance(reason, OSError):
        reason = listen_problem(reason)
    return ConfigError([f"cannot listen on {host}:{port} for {what}: {reason}"])


def reserve(host: str, port: int) -> socket.socket:
    """Bind a port (0: any free one) that only sockets with SO_REUSEPORT can share, for as long as
    this socket is open. It does not listen itself."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_problem(error: OSError) -> str:
    if (error.errno or 0) < 0:  # Codes of getaddrinfo.
        return "this name cannot be resolved to an address"
    return os.strerror(error.errno) if error.errno else str(error)


class Line:
    """Sends frames over a SOCK_SEQPACKET pair. All frames of one turn of the loop leave as one
    datagram: waking the other process is the most expensive part of sending."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._due: list[bytes] = []
        self._due_bytes = 0
        self.is_open = True

    def send(self, frame: frames.Frame) -> None:
        """Send at the end of this turn, or when the socket has room. TooLarge if it never will."""
        data = frames.encode(frame)
        if len(data) > MAX_SENT_BYTES:
            raise TooLarge("the names, the id and the parameters are too large")
        if self._due_bytes + len(data) > MAX_SENT_BYTES:
            self.flush()
        if not self._due:
            self._loop.call_soon(self.flush)
        self._due.append(data)
        self._due_bytes += len(data)

    def flush(self) -> None:
        if not self._due:
            return
        data = frames.join(self._due)
        self._due.clear()
        self._due_bytes = 0
        if self.is_open:
            self._send(data)

    def close(self) -> None:
        """Drop pending frames and later ones."""
        self.is_open = False


def handle_all(sent: Sequence[Received], handle: Callable[[Received], None]) -> None:
    """Handle the frames of a datagram, also if one of them cannot be handled."""
    for frame in sent:
        try:
            handle(frame)
        except Exception:
            log.exception("a frame could not be handled: %s", type(frame).__name__)


class Outbox:
    """The segment that this side writes to. Posts that find no room wait in FIFO order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._extents = Extents(segment.nbytes)
        self._waiting: dict[Hashable, tuple[Sequence[Tensor], Callable[[frames.Parcel], None]]] = {}

    @property
    def capacity(self) -> int:
        return self._extents.capacity

    @property
    def num_held(self) -> int:
        return self._extents.num_held

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def post(
        self, call: Hashable, tensors: Sequence[Tensor], send: Callable[[frames.Parcel], None]
    ) -> None:
        """Call `send` with the parcel, now or when there is room. TooLarge if it can never fit."""
        nbytes = sum(len(tensor.data) for tensor in tensors)
        if nbytes > self._extents.capacity:
            raise TooLarge(
                f"the tensors take {nbytes} bytes, more than the {self._extents.capacity} that "
                "there are for them"
            )
        has_to_wait = self._waiting and nbytes > INLINE_BYTES
        parcel = None if has_to_wait else self._pack(tensors)
        if parcel is not None:
            send(parcel)
            return
        kept = [Tensor(t.name, t.datatype, t.shape, bytes(t.data)) for t in tensors]
        self._waiting[call] = (kept, send)

    def withdraw(self, call: Hashable) -> bool:
        """Drop a waiting post; False if it has been sent."""
        return self._waiting.pop(call, None) is not None

    def release(self, offset: int) -> None:
        """Free memory that the other side has read, and send waiting posts."""
        self._extents.release(offset)
        while self._waiting:
            call, (tensors, send) = next(iter(self._waiting.items()))
            parcel = self._pack(tensors)
            if parcel is None:
                return
            del self._waiting[call]
            send(parcel)

    def _pack(self, tensors: Sequence[Tensor]) -> frames.Parcel | None:
        pieces = headers_of(tensors)
        nbytes = sum([piece.nbytes for piece in pieces])
        if nbytes <= INLINE_BYTES:
            return frames.Parcel(pieces, b"".join([tensor.data for tensor in tensors]))
        offset = self._extents.allocate(nbytes)
        if offset is None:
            return None
        view, start = self._segment.view, offset
        for tensor in tensors:
            end = start + len(tensor.data)
            view[start:end] = tensor.data
            start = end
        return frames.Parcel(pieces, offset=offset)


class ParcelLine:
    """Tensors to the other side, and from it (`serving.parcels.Parcels`)."""

    def __init__(self, outbox: Outbox, line: Line, theirs: Segment) -> None:
        self._outbox = outbox
        self._line = line
        self._theirs = theirs
        self.post = outbox.post
        self.max_parcel_bytes = outbox.capacity
        self.max_frame_bytes = MAX_HEAD_BYTES

    def read(self, parcel: frames.Parcel) -> list[Tensor]:
        return unpack(parcel, self._theirs)

    def free(self, parcel: frames.Parcel) -> None:
        if parcel.offset is not None:
            self._line.send(frames.Release((parcel.offset,)))

    def withdraw(self, parcel: frames.Parcel) -> None:
        if parcel.offset is not None:
            self._outbox.release(parcel.offset)


def unpack(parcel: frames.Parcel, segment: Segment) -> list[Tensor]:
    """Return the tensors of a parcel as views, valid until its memory is released."""
    return read_pieces(parcel, segment.view)
