"""Sockets between a process and its child: datagrams in order, with file descriptors.

One datagram is one frame. Knows nothing of their content.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence

SOCKET_BUFFER_BYTES = 4 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the core's end, which never blocks, and the worker's end, which does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    ours.setblocking(False)
    return ours, theirs


class Sender:
    """Sends datagrams in order; queues them while the socket is full. Datagrams to a dead worker
    are dropped: the reader is about to notice its death."""

    __slots__ = ("_loop", "_sock", "_unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Datagrams that are queued because the socket is full."""
        return len(self._unsent)

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send now, or when the socket has room. The caller may close `fds` afterwards."""
        if self._unsent:
            self._unsent.append((data, _duplicate(fds)))
        elif not self._try(data, fds):
            self._unsent.append((data, _duplicate(fds)))
            self._loop.add_writer(self._sock.fileno(), self._flush)

    def close(self) -> None:
        """Drop queued datagrams. Call it before the socket is closed."""
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
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


def _duplicate(fds: Sequence[int]) -> tuple[int, ...]:
    return tuple(os.dup(fd) for fd in fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
