"""A watchdog thread for the core's event loop.

Pings the loop twice a second. After `STUCK_S` without an answer it logs the loop's stack and
answers the metrics port itself, every path with 503, so that an orchestrator sees the server as not
live. Also receives signals and passes them to the loop; if the loop is still stuck at the end of a
stop signal's grace period, it kills the process. A C extension that holds the GIL blocks this
thread too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.protocols.http import refusal
from penstock.system.exit_codes import ExitCode

log = logging.getLogger("penstock.watchdog")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# A loop that has not answered for this long is stuck.
STUCK_S = 5.0
PING_S = 0.5
# A healthy loop answers within this time even on a busy machine.
LATE_S = 2.0
# How long to wait for a request's bytes; the answer does not depend on them.
REQUEST_S = 0.05
REQUEST_BYTES = 1 << 16
# Limit on a TLS handshake; meanwhile other connections wait.
HANDSHAKE_S = 1.0
# After answering for this long, check signals and the grace period again.
ANSWER_S = 1.0
# Limit on writing a log line: the stuck loop may hold the lock of a handler.
LOG_S = 1.0


@dataclass(slots=True)
class Pulse:
    """The unanswered ping to the loop, if any. Pure: times are arguments."""

    asked_at: float | None = None
    is_stuck: bool = False

    def ask(self, now: float) -> bool:
        """Whether to send a ping now: at most one is unanswered."""
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
        """Whether to kill a process whose loop is silent."""
        if self.signalled_at is None or silent_s < LATE_S:
            return False
        return now >= self.signalled_at + self.grace_s


class Watchdog:
    """Created, started and stopped by the loop's thread. `on_signal` runs on the loop."""

    def __init__(
        self,
        grace_s: float,
        on_signal: Callable[[signal.Signals], None],
        stuck_s: float = STUCK_S,
        end: Callable[[int], None] = os._exit,
        on_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_alive` runs in this thread after each look at a loop that is not stuck."""
        self._on_alive = on_alive
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
        self._theirs.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Python writes only signals that have a handler to the wake-up descriptor below.
                before = signal.signal(number, lambda *_: None)
                self._undo.callback(signal.signal, number, before)
            old = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            self._undo.callback(signal.set_wakeup_fd, old)
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
        self,
        listeners: Sequence[socket.socket],
        tls: Callable[[], ssl.SSLContext | None] | None = None,
    ) -> None:
        """Answer on these listeners while the loop is stuck; `tls` returns their TLS context."""
        with self._lock:
            self._tls = tls or self._tls
            self._listeners += [socket.socket(fileno=os.dup(each.fileno())) for each in listeners]

    def release(self) -> None:
        """Close the copies of the listeners, before those: a copy would keep their ports open."""
        with self._lock:
            for each in self._listeners:
                each.close()
            self._listeners.clear()

    # In the thread.

    def _watch(self) -> None:
        self._ours.settimeout(PING_S)
        while not self._is_stopping:
            with contextlib.suppress(TimeoutError):
                for number in self._ours.recv(REQUEST_BYTES):
                    if number in SIGNALS:
                        self._take_signal(signal.Signals(number))
            if not self._is_stopping:
                self._look(time.monotonic())

    def _take_signal(self, number: signal.Signals) -> None:
        # SIGHUP starts no grace period; the loop decides whether it stops the server.
        if number != signal.SIGHUP:
            now = time.monotonic()
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
        else:
            self._on_alive()
        if self._grace.is_over(now, silent_s):
            self._end_process(f"the grace period of {self._grace.grace_s:g} s is over")

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else "an unknown place"

    def _answer_all(self, silent_s: float) -> None:
        """Answer waiting connections, for at most ANSWER_S; the rest wait for the next turn."""
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
        """Log in a thread of its own, which is left behind if it blocks."""
        writer = threading.Thread(target=log.log, args=(level, "%s", text), daemon=True)
        writer.start()
        writer.join(LOG_S)


def _refuse(connection: socket.socket, silent_s: float, tls: ssl.SSLContext | None) -> None:
    """Answer 503 and close. OSError if the client misbehaves, for example in the handshake."""
    with connection:
        connection.settimeout(HANDSHAKE_S)
        if tls is not None:
            # Takes over the socket; the outer `with` then has nothing left to close.
            connection = tls.wrap_socket(connection, server_side=True)
        with connection:
            connection.settimeout(REQUEST_S)
            # Closing with unread data would reset the connection and lose the answer.
            with contextlib.suppress(TimeoutError):
                connection.recv(REQUEST_BYTES)
            text = f"the event loop of the server is stuck for {silent_s:.1f} s"
            connection.sendall(refusal(503, text))
            connection.shutdown(socket.SHUT_WR)
