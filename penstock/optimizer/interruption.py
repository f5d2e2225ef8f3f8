"""Ctrl-C or SIGTERM during a long run: acknowledged at once, however busy the main thread is.

Python runs signal handlers between two bytecodes of the main thread, so a handler that prints may
be late: a library call can last minutes. The interpreter writes the signal number to its wakeup
file descriptor at once; a thread waits for that and prints. KeyboardInterrupt still ends what runs:
the first one ends the search and keeps its best, the second ends everything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Self, TypeVar

from penstock.optimizer.findings import Findings
from penstock.system.exit_codes import ExitCode

# Time after the second Ctrl-C for closing children and files.
GRACE_S = 10.0
# Supervisors and `kill` send SIGTERM; it ends a run like Ctrl-C.
SIGNALS = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


class Interruption:
    """Calls `tell` with the count of Ctrl-C and SIGTERM so far, in a separate thread. `end` ends
    the process if it is still running `grace_s` after the second one, or at the third."""

    def __init__(
        self,
        tell: Callable[[int], None],
        end: Callable[[int], object] = os._exit,
        grace_s: float = GRACE_S,
    ) -> None:
        self.count = 0
        self._tell = tell
        self._end = end
        self._timer = threading.Timer(grace_s, self._end_now)
        self._timer.daemon, self._timer.name = True, "interruption grace"
        self._thread = threading.Thread(target=self._listen, daemon=True, name="interruption")
        self._is_on = False

    def __enter__(self) -> Self:
        # Only the main thread receives signals.
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)
            self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread.start()
            self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_on:
            return
        signal.set_wakeup_fd(self._before)
        signal.signal(signal.SIGTERM, self._on_term)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
        self._timer.cancel()

    def _listen(self) -> None:
        while numbers := os.read(self._reader, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._hear()

    def _hear(self) -> None:
        self.count += 1
        # Still end the process if the terminal is gone.
        with contextlib.suppress(OSError, ValueError):
            self._tell(self.count)
        if self.count == 2:
            self._timer.start()
        elif self.count > 2:
            self._end_now()

    def _end_now(self) -> None:
        self._end(ExitCode.INTERRUPTED)


def finish(findings: Findings, do: Callable[[], T]) -> T:
    """Call `do`, again after the first Ctrl-C, which is noted. The second one propagates."""
    try:
        return do()
    except KeyboardInterrupt:
        if findings.is_interrupted:
            raise
        findings.is_interrupted = True
        return do()
