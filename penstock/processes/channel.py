"""Sockets between a process and its child: datagrams in order, with file descriptors.

One datagram is one frame. Knows nothing of their content.
"""

from __future__ import annotations

import array
import asyncio
import errno
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from penstock.wire.frames import MAX_FRAME_BYTES

SOCKET_BUFFER_BYTES = 4 << 20
# Datagrams read per turn of the loop, so that a busy process does not starve others.
MAX_TURN_DATAGRAMS = 16
# Limit on the descriptors of one datagram.
MAX_FDS = 3


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the core's end, which never blocks, and the worker's end, which does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    ours.setblocking(False)
    return ours, theirs


def make_buffer() -> memoryview:
    """Return room for one datagram. Mapped, not allocated: only touched pages cost memory."""
    return memoryview(mmap.mmap(-1, MAX_FRAME_BYTES))


class Datagrams:
    """One end of a socket pair on an event loop. `received` gets every datagram and returns whether
    the next one may wait for the next turn of the loop; `lost` is called when the other end has
    closed. Datagrams are sent in order, queued while the socket is full, dropped if it is lost."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        received: Callable[[memoryview], object],
        lost: Callable[[], None],
        takes_fds: bool = False,
        buffer: memoryview | None = None,
    ) -> None:
        """With `takes_fds`, `received` finds the descriptors of its datagram in `fds`, and closes
        them. `buffer` was made by `make_buffer` before."""
        self._loop = loop
        self._sock = sock
        self._received = received
        self._lost = lost
        self._takes_fds = takes_fds
        self.fds: list[int] = []
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._view = make_buffer() if buffer is None else buffer
        loop.add_reader(sock.fileno(), self.read)

    @property
    def num_waiting(self) -> int:
        """Datagrams that are queued because the socket is full."""
        return len(self._unsent)

    def read(self, reads_all: bool = False) -> None:
        """Handle pending datagrams: as many as one turn of the loop has time for, or all."""
        num_read = 0
        while True:
            try:
                size = self._receive()
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The other end closed without reading all. What it sent before is still here.
                continue
            if size == 0:
                self._loop.remove_reader(self._sock.fileno())
                self._lost()
                return
            num_read += 1
            may_wait = self._received(self._view[:size]) or num_read >= MAX_TURN_DATAGRAMS
            if may_wait and not reads_all:
                return

    def _receive(self) -> int:
        if not self._takes_fds:
            return self._sock.recv_into(self._view)
        space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        size, ancillary, _, _ = self._sock.recvmsg_into([self._view], space)
        self.fds = []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self.fds.extend(received)
        return size

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send now, or when the socket has room. The caller may close `fds` afterwards."""
        if self._unsent:
            self._unsent.append((data, _duplicate(fds)))
        elif not self._try(data, fds):
            self._unsent.append((data, _duplicate(fds)))
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def close(self) -> None:
        """Stop reading and drop queued datagrams. Call it before the socket is closed."""
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())

    def _flush(self) -> None:
        while self._unsent:
            if not self._try(*self._unsent[0]):
                return
            _close_all(self._unsent.popleft()[1])
        self._loop.remove_writer(self._sock.fileno())

    def _try(self, data: bytes, fds: tuple[int, ...]) -> bool:
        try:
            if fds:
                socket.send_fds(self._sock, [data], fds)
            else:
                self._sock.send(data)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            pass
        return True


class Channel:
    """One end of a socket pair in a process without an event loop: blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._view = make_buffer()
        self._fd_space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> tuple[memoryview, list[int]] | None:
        """Return the next datagram, valid until the one after it, and its descriptors; None when
        the other end has closed."""
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into([self._view], self._fd_space)
        except ConnectionResetError:
            # The other end closed without reading all. What it sent before is still here.
            return self.receive()
        if size == 0:
            return None
        fds: list[int] = []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                fds.extend(received)
        return self._view[:size], fds

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a datagram; OSError if it is too large or the other end has closed."""
        if len(data) > MAX_FRAME_BYTES:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if fds:
            socket.send_fds(self._sock, [data], fds)
        else:
            self._sock.send(data)

    def send_now(self, data: bytes) -> None:
        """Send a datagram if the socket has room; BlockingIOError if it has none."""
        self._sock.send(data, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self._sock.close()


def _duplicate(fds: Sequence[int]) -> tuple[int, ...]:
    return tuple(os.dup(fd) for fd in fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
