"""Memory of a client that a server on the same machine may use: a sealed memfd, and whether a
server is on this machine.

A memfd has no name in a file system, so the kernel frees it when the last process that has it ends:
also if this one is killed, because the server unregisters the memfds of processes that have exited.
Knows no protocol: `penstock.Client` and the load generator register it, each in its own way.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import weakref

from penstock.types import Buffer
from penstock.wire.region_keys import MemfdKey, memfd_name

ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemfd:
    """One memfd, empty at first. `name` is the name to register it under; no other memfd has it.
    Servers accept it once it is sealed."""

    def __init__(self) -> None:
        """OSError if the system has none left."""
        self._token = secrets.token_hex(16)
        self.name = f"penstock-client-{self._token[:16]}"
        self.nbytes = 0
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._fd = os.memfd_create(memfd_name(self._token), flags)
        self._close = weakref.finalize(self, os.close, self._fd)

    @property
    def key(self) -> str:
        """The key of this process's memfd, for the server."""
        return str(MemfdKey(os.getpid(), self._fd, self._token))

    def append(self, data: Buffer) -> int:
        """Write data behind what is there and return its offset; OSError without memory."""
        offset = self.nbytes
        view = memoryview(data)
        end = offset
        while len(view):
            num_written = os.pwrite(self._fd, view, end)
            end += num_written
            view = view[num_written:]
        self._resize(aligned(end))
        return offset

    def grow(self, nbytes: int) -> memoryview:
        """Extend it to this size and map it; the memory is unmapped with the last view of it."""
        self._resize(nbytes)
        return memoryview(mmap.mmap(self._fd, nbytes))

    def seal(self) -> None:
        """Fix the size for good."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        """Close the descriptor; mapped memory stays."""
        self._close()

    def _resize(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)
        self.nbytes = nbytes


def aligned(nbytes: int) -> int:
    """Round up to the next offset where a tensor may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def is_local(host: str, port: int) -> bool:
    """Whether an address is one of this machine: then packets to it come from the same address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:
        return False
