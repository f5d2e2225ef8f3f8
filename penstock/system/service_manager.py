"""Messages to a service manager, by systemd's protocol (sd_notify): ready, alive, stopping.

The manager names a socket in NOTIFY_SOCKET; without one nothing is told. Nothing here waits or
fails: a server must not depend on who started it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping

SOCKET = "NOTIFY_SOCKET"
READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"


class ServiceManager:
    """The other end of the socket. Any thread may tell it something. What it does not take at once
    is told again with the next state: a manager that never hears READY kills its service."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get(SOCKET, "")
        # A name that starts with @ is in the abstract namespace.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._untold: list[str] = []
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def tell(self, state: str) -> None:
        if self._socket is None:
            return
        with self._lock:
            self._untold = [*(each for each in self._untold if each != state), state]
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(self._untold).encode(), self._address)
                self._untold = []

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
