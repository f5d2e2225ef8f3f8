"""A thread beside the event loop of the core, for when the loop is stuck.

It asks the loop for a sign of life twice a second. After `STUCK_S` without one it logs where the
loop is and answers the metrics port itself, every path with 503, so that an orchestrator sees the
server as not live. It also receives signals and passes them to the loop; a loop that is still stuck
when the grace period of a signal that ends the server is over is ended with the process. A C
extension that holds the interpreter lock stops this thread too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.exit_codes import ExitCode
from penstock.wire.v2 import encode_error

log = logging.getLogger("penstock.watchdog")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# Without a sign of life for this long, the loop is stuck.
STUCK_S = 5.0
PING_S = 0.5
# A loop that is not stuck answers within this even on a busy machine.
LATE_S = 2.0
# A request that was sent is here within this; answers do not depend on it.
REQUEST_S = 0.05
REQUEST_BYTES = 1 << 16
# A TLS handshake may take this long; meanwhile other connections wait.
HANDSHAKE_S = 1.0
# After this many seconds of answering, signals and the grace period get their turn.
ANSWER_S = 1.0
# For a line of the log: the stuck loop may hold the lock of a handler.
LOG_S = 1.0


class Listener(Protocol):
    def fileno(self) -> int: ...


@dataclass(slots=True)
class Pulse:
    """When the loop was asked for a sign of life, and since when it owes one. Pure: times are
    told."""

    asked_at: float | None = None
    is_stuck: bool = False

    def ask(self, now: float) -> bool:
        """Whether to ask now: one question at a time."""
        if self.asked_at is not None:
            return False
        self.asked_at = now
        return True

    def answer(self) -> None:
        self.asked_at = None

    def silent_s(self, now: float) -> float:
        asked_at = self.asked_at
        return 0.0 if asked_at is None else now - asked_at


@dataclass(slots=True)
class Grace:
    """The time between the first signal and the end of the process. Pure."""

    grace_s: float
    signalled_at: float | None = None

    def is_over(self, now: float, silent_s: float) -> bool:
        """Whether a loop that says nothing is ended."""
        if self.signalled_at is None or silent_s < LATE_S:
            return False
        return now >= self.signalled_at + self.grace_s


class Watchdog:
    """Made, started and stopped by the thread of the loop. `on_signal` runs on the loop."""

    def __init__(
        self,
        grace_s: float,
        on_signal: Callable[[signal.Signals], None],
        stuck_s: float = STUCK_S,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._grace = Grace(grace_s)
        self._on_signal = on_signal
        self._stuck_s = stuck_s
        self._end = end
        self._pulse = Pulse()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._is_stopping = False
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._tls: Callable[[], ssl.SSLContext | None] = lambda: None
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Signals come here from now on."""
        self._theirs.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Python tells the descriptor below of signals that have a handler.
                before = signal.signal(number, lambda *_: None)
                self._undo.callback(signal.signal, number, before)
            fd = self._theirs.fileno()
            self._undo.callback(
                signal.set_wakeup_fd, signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
            )
        self._thread.start()

    def stop(self) -> None:
        self._undo.close()
        self._is_stopping = True
        with contextlib.suppress(BlockingIOError):
            self._theirs.send(b"\0")
        self._thread.join()
        self.release()
        self._ours.close()
        self._theirs.close()

    def cover(
        self, listeners: Sequence[Listener], tls: Callable[[], ssl.SSLContext | None] | None = None
    ) -> None:
        """Answer connections to these while the loop is stuck, with the TLS that they have then."""
        with self._lock:
            self._tls = tls or self._tls
            self._listeners += [socket.socket(fileno=os.dup(each.fileno())) for each in listeners]

    def release(self) -> None:
        """Before the listeners are closed: a copy would keep them open."""
        with self._lock:
            for each in self._listeners:
                each.close()
            self._listeners.clear()

    # In the thread.

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._ours, selectors.EVENT_READ)
            while not self._is_stopping:
                if selector.select(PING_S):
                    self._take_signals(self._ours.recv(REQUEST_BYTES))
                if not self._is_stopping:
                    self._look(time.monotonic())

    def _take_signals(self, data: bytes) -> None:
        for number in data:
            if number in SIGNALS:
                self._take_signal(signal.Signals(number))

    def _take_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            # Does not end a server, unless the loop says so.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._on_signal, number)
            return
        if self._grace.signalled_at is not None and self._pulse.silent_s(now) >= LATE_S:
            self._end_process(f"{number.name} came again")
        self._grace.signalled_at = self._grace.signalled_at or now
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._on_signal, number)

    def _look(self, now: float) -> None:
        pulse = self._pulse
        silent_s = pulse.silent_s(now)
        if pulse.is_stuck and not silent_s:
            pulse.is_stuck = False
            self._log(logging.WARNING, "the event loop runs again")
        if pulse.ask(now):
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(pulse.answer)
        if silent_s >= self._stuck_s and not pulse.is_stuck:
            pulse.is_stuck = True
            where = self._stack()
            self._log(logging.ERROR, f"the event loop is stuck for {silent_s:.1f} s at:\n{where}")
        if pulse.is_stuck:
            self._answer_all(silent_s)
        if self._grace.is_over(now, silent_s):
            self._end_process(f"the grace period of {self._grace.grace_s:g} s is over")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "an unknown place"

    def _answer_all(self, silent_s: float) -> None:
        """The connections that wait now; those that would take long wait for the next turn."""
        until = time.monotonic() + ANSWER_S
        with self._lock:
            for listener in self._listeners:
                while time.monotonic() < until and select.select([listener], [], [], 0)[0]:
                    try:
                        connection, _ = listener.accept()
                    except OSError:  # The loop was faster.
                        break
                    with contextlib.suppress(OSError):
                        _refuse(connection, silent_s, self._tls())

    def _end_process(self, reason: str) -> None:
        where = self._stack()
        self._log(logging.ERROR, f"{reason} and the event loop is stuck; ending at:\n{where}")
        self._end(ExitCode.FAILED)

    def _log(self, level: int, text: str) -> None:
        """In a thread that may be left behind."""
        writer = threading.Thread(target=log.log, args=(level, "%s", text), daemon=True)
        writer.start()
        writer.join(LOG_S)


def _refuse(connection: socket.socket, silent_s: float, tls: ssl.SSLContext | None) -> None:
    """Answer and close. OSError (such as a failed handshake) if the client does not play along."""
    with connection:
        connection.settimeout(HANDSHAKE_S)
        if tls is not None:
            # Takes the socket over; the `with` above then has nothing left to close.
            connection = tls.wrap_socket(connection, server_side=True)
        with connection:
            connection.settimeout(REQUEST_S)
            # Closing with unread data would reset the connection and lose the answer.
            with contextlib.suppress(TimeoutError):
                connection.recv(REQUEST_BYTES)
            body = encode_error(f"the event loop of the server is stuck for {silent_s:.1f} s")
            connection.sendall(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            connection.shutdown(socket.SHUT_WR)
